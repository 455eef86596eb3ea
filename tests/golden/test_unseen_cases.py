"""Cases the runner has never seen: other sizes, schedules, shard counts, several runs, missing optional tensors.

The expected values are the model's own, so only acceptance and discrimination are shown, not the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvist.config import VisionConfig, replace
from kvist.conformance import Run, run_case
from kvist.conformance.check import PASS
from kvist.presets import preset

from .synthetic import build_case, edit_json, edit_tensors

CaseDir = Callable[[str], Path]
TINY = replace(preset("tiny"), vocab_size=512, engram_compressed_vocab_size=418)
NO_ENGRAM = {"engram_layer_ids": (), "engram_num_embeddings": ()}
NO_DRAFTS = {"n_mtp_layers": 0, "dspark_target_layer_ids": ()}
WINDOW_ONLY = replace(
    TINY,
    **NO_ENGRAM,
    **NO_DRAFTS,
    n_layers=2,
    compress_ratios=(0, 0),
    kv_source_layers=(),
    index_source_layers=(),
    candidate_source_layers=(),
)
ODD_RATIOS = replace(
    TINY,
    n_layers=9,
    compress_ratios=(0, 3, 3, 4, 4, 1, 1, 1, 1, 0, 0),
    n_mtp_layers=2,
    kv_source_layers=(1, 3, 5),
    index_source_layers=(1, 3, 4, 5, 6, 7),
    candidate_source_layers=(3, 5),
    dspark_block_size=3,
    dspark_target_layer_ids=(0, 8),
    window_size=5,
    hc_mult=3,
    engram_max_ngram_size=3,
    engram_num_embeddings=(424, 480),
)
SEEING = replace(
    TINY,
    **NO_DRAFTS,
    compress_ratios=TINY.compress_ratios[:8],
    image_token_id=10,
    vision=VisionConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=32,
        patch_size=7,
        downsample_ratio=2,
        max_image_tokens=20,
        min_pixels=100,
    ),
)


def run(name: str, prompt_len: int, decode_steps: int = 0, **flags) -> Run:
    return Run(
        **({"images": 0, "drafts": False, "layerwise": False} | flags),
        name=name,
        prompt_len=prompt_len,
        decode_steps=decode_steps,
    )


def table_sizes(config):
    """The number of table rows follows from the primes; the configuration has to say the same."""
    from kvist.model.engram import hash_plan

    return replace(config, engram_num_embeddings=tuple(int(n) for n in hash_plan(config).primes.sum((1, 2))))


def passes(folder: Path) -> list[str]:
    checks = run_case(folder)
    assert [f"{c.quantity}: {c.detail}" for c in checks if c.failed] == []
    return [check.quantity for check in checks if check.verdict == PASS]


@pytest.fixture
def tokenizer(case_dir: CaseDir) -> Path:
    return case_dir("text-fp32") / "tokenizer.json"


def test_window_layers_only(tmp_path: Path, tokenizer: Path):
    names = passes(build_case(tmp_path / "window", tokenizer, WINDOW_ONLY, [run("only", 11, layerwise=True)]))
    assert "layerwise" in names
    assert not any("topk" in name or "latent" in name or "engram" in name for name in names)


def test_other_ratios_pools_streams_drafts_and_shards(tmp_path: Path, tokenizer: Path):
    runs = [run("a", 1, 6, drafts=True), run("b", 23, 9, drafts=True, layerwise=True), run("c", 4, layerwise=True), run("d", 1)]
    folder = build_case(tmp_path / "odd", tokenizer, table_sizes(ODD_RATIOS), runs, shard_bytes=100_000, seed=4)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    names = passes(folder)
    wanted = {"strict draft_logits", "strict candidates", "strict latents", "all draft_window_kv_max_rel_l2", "layerwise"}
    assert wanted <= set(names)


def test_images_in_bfloat16(tmp_path: Path, tokenizer: Path):
    generator = torch.Generator().manual_seed(1)
    pictures = [torch.randint(0, 256, size, generator=generator, dtype=torch.uint8) for size in ((9, 30, 3), (20, 12, 3))]
    runs = [run("r", 40, 3, images=2, layerwise=True), run("t", 6, 2)]
    folder = build_case(tmp_path / "seeing", tokenizer, table_sizes(SEEING), runs, dtype="bfloat16", images=pictures)
    names = passes(folder)
    assert {"exact patches", "exact token_types", "all vit_max_rel_l2", "all aligner_max_rel_l2"} <= set(names)


def test_released_semantics_of_another_schedule(tmp_path: Path, tokenizer: Path):
    config = table_sizes(ODD_RATIOS)
    folder = build_case(tmp_path / "quirk", tokenizer, config, [run("r", 14, 12)], semantics="released", seed=2)
    assert "strict topk" in passes(folder)
    edit_json(folder / "case.json", lambda meta: meta.update(semantics="fixed"))
    assert any(check.failed for check in run_case(folder))


def test_optional_tensors_may_be_missing(tmp_path: Path, tokenizer: Path):
    def keep(name: str) -> bool:
        return not any(
            part in name for part in ("positions", "token_map", "topk", "latent", "experts", "engram_rows", "index_key")
        )

    names = passes(build_case(tmp_path / "few", tokenizer, table_sizes(TINY), [run("r", 9, 3)], keep=keep))
    assert "strict logits" in names
    assert not any("topk" in name or "latent" in name for name in names)


def test_long_prompt_with_few_recorded_positions(tmp_path: Path, tokenizer: Path):
    config = table_sizes(TINY)
    folder = build_case(tmp_path / "long", tokenizer, config, [run("r", 150, 4, drafts=True)], logits_every=7)
    assert {"strict logits", "strict streams", "strict draft_logits"} <= set(passes(folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, case_dir: CaseDir) -> Path:
    tokenizer = case_dir("text-fp32") / "tokenizer.json"
    runs = [run("r", 12, 4, drafts=True, layerwise=True)]
    return build_case(tmp_path_factory.mktemp("small") / "small", tokenizer, table_sizes(TINY), runs)


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    """The small case with links instead of copies; editing replaces a link."""
    folder = tmp_path / "case"
    folder.mkdir()
    for file in small.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def shifted(name: str, by: float):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][-1] += by

    return lambda folder: edit_tensors(folder / "expected.safetensors", change)


def poisoned(folder: Path) -> None:
    edit_tensors(folder / "expected.safetensors", lambda t: t["r/logits"].fill_(float("nan")))


def swapped_ids(folder: Path) -> None:
    """Rows that were not selected, with a margin that explains nothing."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["r/topk.6"][-1] = torch.tensor([0, 1, 2, -1])

    edit_tensors(folder / "expected.safetensors", change)


def limits(change) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "case.json", lambda meta: change(meta["tolerances"]))


WRONG = {
    "logits": (shifted("r/logits", 5.0), "all logits_max_abs"),
    "nan": (poisoned, "strict logits"),
    "token map": (shifted("token_map", 1), "exact token_map"),
    "engram rows": (shifted("r/engram_rows", 1), "exact engram_rows"),
    "stream": (shifted("r/residual.3", 0.01), "layerwise"),
    "latent": (shifted("r/latent.2", 0.01), "strict latents"),
    "drafts": (shifted("r/draft_base_logits", 0.01), "strict draft_base_logits"),
    "confidence": (shifted("r/draft_confidence", 0.01), "strict draft_confidence"),
    "selection": (swapped_ids, "strict topk"),
    "unknown limit": (limits(lambda t: t["all"].update(logits_entropy=1.0)), "all logits_entropy"),
    "unknown strict limit": (limits(lambda t: t["strict"].update(entropy=1.0)), "strict entropy"),
    "unknown exact name": (limits(lambda t: t["exact"].append("weather")), "exact weather"),
    "unknown quantile": (limits(lambda t: t["layerwise_rel_l2"].update(p42=1.0)), "layerwise"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_fails_its_line(copy: Path, name: str):
    spoil, quantity = WRONG[name]
    spoil(copy)
    failed = [check.quantity for check in run_case(copy) if check.failed]
    assert quantity in failed
    assert "case" not in failed


def test_a_margin_explains_a_selection(copy: Path):
    swapped_ids(copy)
    edit_tensors(copy / "expected.safetensors", lambda t: t.update({"r/topk_margin.6": torch.zeros(16)}))
    assert "strict topk" not in [check.quantity for check in run_case(copy) if check.failed]

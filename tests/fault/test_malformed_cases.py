"""Malformed golden cases: each is one failed line that names what is wrong; nothing raises, other cases go on.

Starts from a shipped case and breaks one thing. Must not test wrong values (those fail a line of the comparison).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvist.conformance import conformance, run_case
from tests.golden.conftest import case_dir
from tests.golden.synthetic import edit_json, edit_tensors

Break = Callable[[Path], None]


def linked(name: str, target: Path) -> Path:
    target.mkdir()
    for file in case_dir(name).iterdir():
        (target / file.name).symlink_to(file)
    return target


def meta(**changes: object) -> Break:
    return lambda folder: edit_json(folder / "case.json", lambda data: data.update(changes))


def first_run(**changes: object) -> Break:
    return lambda folder: edit_json(folder / "case.json", lambda data: data["runs"][0].update(changes))


def without(key: str) -> Break:
    return lambda folder: edit_json(folder / "case.json", lambda data: data.pop(key))


def text(file: str, content: str) -> Break:
    def write(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).write_text(content)

    return write


def gone(file: str) -> Break:
    return lambda folder: (folder / file).unlink()


def cut(file: str) -> Break:
    def truncate(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).unlink()
        (folder / file).write_bytes(data[: len(data) // 2])

    return truncate


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    return lambda folder: edit_tensors(folder / f"{file}.safetensors", change)


def set_to(name: str, at: int, value: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda t: t[name].__setitem__(at, value)


MODEL: dict[str, tuple[Break, str]] = {
    "no description": (gone("case.json"), "case.json is missing"),
    "not JSON": (text("case.json", "{"), "is not JSON"),
    "deep JSON": (text("case.json", "[" * 100_000), "is not JSON"),
    "a list": (text("case.json", "[]"), "must hold an object"),
    "other format": (meta(format=2), "format 2 is unknown"),
    "other kind": (meta(kind="poem"), "kind 'poem' is unknown"),
    "other dtype": (meta(dtype="float16"), "dtype 'float16' is unknown"),
    "mixed model": (meta(dtype="mixed"), "a model case runs in one of"),
    "other semantics": (meta(semantics="dreamt"), "semantics 'dreamt' is unknown"),
    "no limits": (without("tolerances"), "tolerances must be an object"),
    "limit not a number": (meta(tolerances={"all": {"logits_max_abs": "small"}}), "must be a finite number, got 'small'"),
    "limit not finite": (
        text(
            "case.json",
            '{"format": 1, "kind": "model", "dtype": "float32", "runs": '
            '[{"name": "r0", "prompt_len": 41, "decode_steps": 20}], '
            '"tolerances": {"all": {"logits_max_abs": NaN}}}',
        ),
        "must be a finite number, got nan",
    ),
    "limits of another shape": (meta(tolerances={"all": [1]}), "tolerances.all must be an object"),
    "exact of another shape": (meta(tolerances={"exact": "all"}), "tolerances.exact must be a list"),
    "unknown group": (meta(tolerances={"mood": {}}), "unknown groups mood"),
    "strict without a share": (meta(tolerances={"strict": {"logits_abs": 1e-4}}), "min_fraction_of_positions"),
    "name that paints": (meta(name="\x1b[31mred"), "name must be 1 to 100 printable characters"),
    "nameless": (meta(name=""), "name must be 1 to 100 printable characters"),
    "run name of two lines": (first_run(name="a\nb"), "the name of a run must be 1 to 100 printable"),
    "no runs": (meta(runs=[]), "non-empty list of runs"),
    "nameless run": (meta(runs=[{"prompt_len": 3}]), "an object with a name"),
    "run twice": (meta(runs=[{"name": "r0", "prompt_len": 3}] * 2), "listed twice"),
    "empty prompt": (first_run(prompt_len=0), "prompt_len must be an integer of at least 1, got 0"),
    "negative steps": (first_run(decode_steps=-1), "decode_steps must be an integer of at least 0"),
    "half a token": (first_run(prompt_len=1.5), "prompt_len must be an integer"),
    "drafts maybe": (first_run(drafts="maybe"), "must be true or false"),
    "file elsewhere": (meta(files={"inputs": "../inputs.safetensors"}), "must be the plain name"),
    "file not named": (meta(files={"expected": 7}), "must be the plain name"),
    "no inputs": (gone("inputs.safetensors"), "inputs.safetensors is missing"),
    "cut inputs": (cut("inputs.safetensors"), "not a readable safetensors file"),
    "cut expected": (cut("expected.safetensors"), "not a readable safetensors file"),
    "cut shard": (cut("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
    "no shard": (gone("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
    "no configuration": (gone("config.json"), "config.json"),
    "broken configuration": (text("config.json", "{}"), "config.json"),
    "no tokenizer": (gone("tokenizer.json"), "tokenizer.json is missing"),
    "other length": (first_run(prompt_len=40), "'input_ids' must be integers of shape [40]"),
    "float ids": (tensors("inputs", lambda t: t.update({"r0/input_ids": t["r0/input_ids"].float()})), "must be integers"),
    "large id": (tensors("inputs", set_to("r0/input_ids", 3, 512)), "token id 512 is outside the vocabulary"),
    "negative id": (tensors("inputs", set_to("r0/decode_ids", 0, -1)), "token id -1 is outside the vocabulary"),
    "no decode ids": (tensors("inputs", lambda t: t.pop("r0/decode_ids")), "lacks the tensor 'r0/decode_ids'"),
    "draft before the end": (tensors("inputs", set_to("r0/draft_positions", 0, 3)), "draft_positions must be ascending"),
    "images in a text model": (first_run(images=1), "no vision_config"),
    "no logits": (tensors("expected", lambda t: t.pop("r0/logits")), "lacks the tensor 'r0/logits'"),
    "logits too short": (tensors("expected", lambda t: t.update({"r0/logits": t["r0/logits"][:5]})), "must name 5 positions"),
    "logits too narrow": (tensors("expected", lambda t: t.update({"r0/logits": t["r0/logits"][:, :9]})), "has shape [61, 9]"),
    "position outside": (tensors("expected", set_to("r0/logit_positions", 0, 99)), "positions below 61"),
    "layer that is not there": (
        tensors("expected", lambda t: t.update({"r0/latent.3": t["r0/latent.2"].clone()})),
        "'latent.3' is recorded, but a model of this config.json has no such tensor",
    ),
    "layerwise without streams": (first_run(layerwise=True), "'residual.0' must have shape"),
}
VISION: dict[str, tuple[Break, str]] = {
    "image of floats": (tensors("inputs", lambda t: t.update({"r0/image.0": t["r0/image.0"].float()})), "must be uint8"),
    "image outside": (tensors("inputs", set_to("r0/image_starts", 1, 46)), "starts at 46"),
    "no image": (tensors("inputs", lambda t: t.pop("r0/image.1")), "lacks the tensor 'r0/image.1'"),
    "drafts without a draft": (first_run(drafts=True), "num_nextn_predict_layers 0"),
}
FUNCTIONS: dict[str, tuple[Break, str]] = {
    "no parameters": (without("parameters"), "parameters.sinkhorn must be an object"),
    "no iterations": (
        lambda folder: edit_json(folder / "case.json", lambda d: d["parameters"]["sinkhorn"].pop("iterations")),
        "sinkhorn do not fit together",
    ),
    "other streams": (
        lambda folder: edit_json(folder / "case.json", lambda d: d["parameters"]["sinkhorn"].update(hc_mult=3)),
        "sinkhorn do not fit together",
    ),
    "endless iterations": (
        lambda folder: edit_json(folder / "case.json", lambda d: d["parameters"]["sinkhorn"].update(iterations=[10**12])),
        "sinkhorn iterations must lie in 1..1000",
    ),
    "odd mask name": (
        tensors("expected", lambda t: t.update({"candidates.3by4/mask": t["candidates.3x4/mask"].clone()})),
        "must read candidates.<blocks>x<size>/mask",
    ),
    "no rows": (tensors("inputs", lambda t: t.pop("attention/rows")), "lacks the tensor 'attention/rows'"),
    "no mask for classes": (tensors("inputs", lambda t: t.pop("engram/text_mask")), "lacks the tensor 'engram/text_mask'"),
}
QUANTISERS: dict[str, tuple[Break, str]] = {
    "other input dtype": (
        tensors("inputs", lambda t: t.update({"fp8.bf16/x": t["fp8.bf16/x"].float()})),
        "its name says torch.bfloat16",
    ),
    "no codes": (tensors("expected", lambda t: t.pop("fp8.f32/codes")), "lacks the tensor 'fp8.f32/codes'"),
    "no weight scale": (tensors("inputs", lambda t: t.pop("weight_fp8/scale")), "lacks the tensor 'weight_fp8/scale'"),
    "width of half a group": (
        tensors("inputs", lambda t: t.update({"fp8.f32/x": t["fp8.f32/x"][:, :48].clone()})),
        "48",
    ),
}
ALL = [
    pytest.param(case, *rest, id=f"{case}: {name}")
    for case, table in (
        ("dspark", MODEL),
        ("vision-two-images", VISION),
        ("pure-functions", FUNCTIONS),
        ("quantisers", QUANTISERS),
    )
    for name, rest in table.items()
]


@pytest.mark.parametrize("case, spoil, message", ALL)
def test_malformed_case_is_one_named_failure(case: str, spoil: Break, message: str, tmp_path: Path):
    folder = linked(case, tmp_path / "broken")
    spoil(folder)
    checks = run_case(folder)
    assert [check.quantity for check in checks if check.failed] == ["case"]
    assert message in checks[-1].detail
    assert not checks[-1].detail.startswith(("RuntimeError", "TypeError", "KeyError", "AssertionError", "IndexError"))


def test_unknown_tensors_of_small_kinds_fail_a_line(tmp_path: Path):
    for case in ("quantisers", "pure-functions"):
        folder = linked(case, tmp_path / case)
        edit_tensors(folder / "expected.safetensors", lambda t: t.update({"weather": torch.zeros(1)}))
        failed = [check for check in run_case(folder) if check.failed]
        assert [check.quantity for check in failed] == ["recorded tensors"]
        assert "weather" in failed[0].detail


def test_markup_in_a_name_is_printed_as_it_is(tmp_path: Path):
    folder = linked("quantisers", tmp_path / "case")
    meta(name="[/red] [bold")(folder)
    console = Console(record=True, width=200)
    assert conformance([folder], console=console) == 0
    assert "[/red] [bold (" in console.export_text()


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("no case")
    (check,) = run_case(tmp_path / "file")
    assert check.failed
    assert "case.json is missing" in check.detail

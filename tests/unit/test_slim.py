"""What `kvist bench v41-flash-slim` says before it measures: bytes, rows, which cases fit, refusals. No GPU, no kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.slim import LABEL, PARTS, Case, Wanted, cases_of, needed_bytes, prefill_flops
from benchmarks.slim_models import label_of, measured
from kvist.cli import app
from kvist.engine.card import cost
from kvist.inventory import Storage, parameters, part_of
from kvist.presets import preset

H200_BYTES = 139e9 * 1.073741824
SLIM = preset("v41-flash-slim")


def test_bytes_of_a_step_are_the_published_sum() -> None:
    """The release reads 13.033 GB a token at batch 1; a router of 128 is 105 MB smaller than one of 384. Cache rows are extra."""
    weights = cost.step_bytes(preset("v41-flash"), 1, 0)
    assert weights == pytest.approx(13.033e9, rel=2e-3)
    assert weights - cost.step_bytes(SLIM, 1, 0) == pytest.approx(40 * 256 * 5120 * 2)
    parts = {part.name: part.nbytes for part in cost.step_parts(SLIM, 1, 131072)}
    assert parts["window and selected rows"] == 40 * 128 * 528 + 38 * 512 * 288
    # three sources of ratio 2, one of ratio 1, four that score 16,384 candidates each
    assert parts["index keys"] == 68 * (3 * 65536 + 131072 + 4 * 16384)


def test_experts_hit_by_a_batch() -> None:
    assert cost.distinct(128, 6, 1) == pytest.approx(6)
    assert 67 < cost.distinct(128, 6, 16) < 70
    assert cost.distinct(128, 6, 1000) == pytest.approx(128)


def test_weights_in_memory_are_the_inventorys() -> None:
    """Every backbone tensor but Engram's tables, as stored."""
    stored = sum(
        parameter.nbytes
        for parameter in parameters(SLIM)
        if part_of(parameter.kind) in ("backbone", "engram") and parameter.storage is not Storage.TABLE
    )
    assert cost.weight_bytes(SLIM) == pytest.approx(stored, rel=2e-3)


def test_draft_blocks_in_memory_are_the_inventorys() -> None:
    stored = sum(parameter.nbytes for parameter in parameters(SLIM) if part_of(parameter.kind) == "drafts")
    assert cost.draft_bytes(SLIM) == pytest.approx(stored, rel=2e-3)


def test_rows_of_a_replay() -> None:
    """The window again in both halves, however short what is new; with stored windows only what is new."""
    assert cost.replay_rows(SLIM, 8, 16) == ((8 * 144, 8 * 128), (8 * 16, 8 * 16))
    assert cost.replay_rows(SLIM, 8, 1024) == ((8 * 1152, 8 * 128), (8 * 1024, 8 * 128))


def test_operations_of_a_prompt() -> None:
    """20 layers of each token and what the last 128 cost; index scores are the rest, and grow with the context."""
    a_row = sum(cost.row_flops(SLIM).values()) * 20 + 2 * 2 * 6144 * 25600  # two Engram projections
    short, long = (prefill_flops(SLIM, tokens) / tokens for tokens in (131072, 1048576))
    scores = 3 * 8192 * 131072 / 4  # three sources of half as many rows, of which a token sees half on average
    assert short == pytest.approx(a_row + scores, rel=0.02)
    assert long - short == pytest.approx(7 * scores, rel=0.06)


def test_a_pass_is_bounded_by_its_rows() -> None:
    assert cost.pass_bytes(SLIM, 8192) == 2 * cost.pass_bytes(SLIM, 4096)
    assert 1e9 < cost.pass_bytes(SLIM, 4096) < 2e9


def test_cases_that_do_not_fit_share_contexts_and_say_so() -> None:
    cases = cases_of(SLIM, Wanted(every=True, only="decode"), H200_BYTES)
    assert len(cases) == 16
    shared = [case for case in cases if case.distinct < case.batch]
    assert [(case.batch, case.context) for case in shared] == [(64, 1048576)]
    assert all(LABEL in case.name for case in cases)
    assert "8 distinct contexts shared" in shared[0].name
    assert needed_bytes(SLIM, shared[0]) < H200_BYTES
    assert needed_bytes(SLIM, Case(batch=1, context=8192, distinct=1)) > 106e9


def test_all_parts_the_most_telling_cases_first() -> None:
    cases = cases_of(SLIM, Wanted(every=True), H200_BYTES)
    assert {case.part for case in cases} == set(PARTS)
    assert len({case.name for case in cases}) == len(cases)
    assert all(LABEL in case.name for case in cases)
    first = [(case.part, case.batch, case.context) for case in cases][:6]
    assert first == [*(("decode", n, 131072) for n in (1, 16, 64)), ("decode", 1, 8192), ("decode", 1, 1048576),
                     ("prefill", 1, 131072)]  # fmt: skip
    verified = [case for case in cases if case.part == "verify" and case.distinct < case.batch]
    assert [(case.batch, case.context) for case in verified] == [(64, 1048576)]


def test_one_part_alone() -> None:
    hits = cases_of(SLIM, Wanted(only="replay"), H200_BYTES)
    assert [(case.batch, case.suffix) for case in hits] == [(8, 16), (8, 512), (8, 1024)]
    assert "8 hits of 131,072 tokens + 512 new ones" in hits[1].name
    # a prompt is no longer than a context
    longest = cases_of(SLIM, Wanted(only="replay", context=SLIM.max_seq_len), H200_BYTES)
    assert {case.context + case.suffix for case in longest} == {SLIM.max_seq_len}
    moved = [case.name for case in cases_of(SLIM, Wanted(only="restore"), H200_BYTES)]
    assert [name.split("; ")[0] for name in moved] == [
        f"pages of 131,072 tokens {place}"
        for place in (
            "from host memory", "to host memory", "from disk", "from host memory through the engine to the first token",
        )
    ]  # fmt: skip
    two = cases_of(SLIM, Wanted(only="restore,prefill"), H200_BYTES)
    assert [case.part for case in two] == ["restore"] * 4 + ["prefill"] * 2
    prompts = cases_of(SLIM, Wanted(only="prefill", every=True, batch=4), H200_BYTES)
    assert [(case.batch, case.context) for case in prompts] == [(1, 131072), (1, 1048576), (1, 8192), (1, 524288)]


def test_other_models_say_what_they_are() -> None:
    whole = measured(384, 16)
    assert label_of(whole) == "384 of 384 experts, 16 of 40 layers, random weights, one card"
    assert label_of(measured(None, None)) == label_of(measured(128, 40)) == LABEL
    assert (measured(None, None), measured(None, None).n_routed_experts) == (SLIM, 128)
    wanted = Wanted(only="replay", experts=384, layers=16)
    for case in cases_of(whole, wanted, H200_BYTES):
        assert case.label in case.name
        assert needed_bytes(whole, case) < H200_BYTES
    assert needed_bytes(measured(384, None), Case(batch=1, context=8192, distinct=1)) > 2 * H200_BYTES
    for layers in range(6, 40, 2):
        plan = measured(None, layers).plan
        assert plan.decoder_start == layers // 2
        assert {spec.mode.value for spec in plan.layers[plan.decoder_start :]} >= {"full", "reuse"}
        assert sum(spec.engram is not None for spec in plan.layers) == 2
        assert not plan.drafts
    with pytest.raises(ValueError, match="speculation, verify: fewer layers leave no draft blocks"):
        cases_of(whole, Wanted(only="verify,speculation"), H200_BYTES)
    for experts, layers, reason in (
        (385, None, "--experts is 385; from 6 to 384"), (3, 16, "--experts is 3"),
        (None, 7, "--layers is 7; an even number from 6 to 40"), (None, 42, "--layers is 42"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            measured(experts, layers)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Wanted(only="training"), "there is no part 'training'; parts: decode, verify"),
        (Wanted(only="decode,"), "there is no part ''"),
        (Wanted(context=10), "--context is 10; from 104"),
        (Wanted(context=1 << 30), "--context is 1073741824"),
        (Wanted(batch=65), "--batch is 65; from 1 to 64"),
        (Wanted(chunk=64), "--chunk is 64; from 128 to 32768"),
    ],
)
def test_refusals(wanted: Wanted, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        cases_of(SLIM, wanted, H200_BYTES)


def test_the_default_is_8k_and_128k_of_one_request() -> None:
    assert [(case.batch, case.context) for case in cases_of(SLIM, Wanted(), H200_BYTES)] == [(1, 8192), (1, 131072)]


@pytest.mark.skipif(
    torch.cuda.is_available() and importlib.util.find_spec("triton") is not None, reason="measures where there is a GPU"
)
def test_without_a_card_it_says_what_is_needed() -> None:
    result = CliRunner().invoke(app, ["bench", "v41-flash-slim"])
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "GpuUnavailable"
    assert "needs one CUDA card of compute capability 9.0 or newer with 118 GB" in str(result.exception)
    assert "impl 'ref'" not in str(result.exception), "nothing else measures this"
    unknown = CliRunner().invoke(app, ["bench", "v42"])
    assert "no workload named 'v42'" in str(unknown.exception)

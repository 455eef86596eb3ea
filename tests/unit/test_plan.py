"""`kvist plan` as data: published totals, the cache waterfall, operation counts against direct sums, figures."""

from __future__ import annotations

import io
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvist.config import ConfigError, replace
from kvist.page_layout import PLANE_ALIGNMENT, PageLayout
from kvist.plan import PlanReport, print_report, report, write_figures
from kvist.plan.flops import FlopModel, mean_clipped
from kvist.presets import PRESETS, preset


def printed(plan: PlanReport) -> str:
    target = io.StringIO()
    print_report(plan, Console(file=target, width=160))
    return target.getvalue()


@pytest.fixture(scope="module")
def release():
    return report(preset("v41-flash"))


def test_release_totals(release):
    assert release.tensors == 96_085
    assert release.nbytes == 510_286_023_000
    assert release.counts.total == 763_205_315_794
    assert round(release.active_prefill / 1e9) == 8
    assert round(release.active_decode / 1e9) == 16


def test_release_cache(release):
    assert release.cache_bytes_per_token == 890
    assert release.layout.page_tokens == 128
    assert release.layout.page_bytes == 113_920
    assert release.layout.padding_bytes == 0
    assert release.window_bytes == 40 * 128 * 528
    assert release.draft_window_bytes == 3 * 128 * 528


def test_waterfall_of_the_release(release):
    values = [step.bytes_per_token for step in release.waterfall]
    assert values == [Fraction(14057, 4), 3423, 652, 1630, 890]
    assert float(values[0]) == 3514.25
    assert release.waterfall[-1].formula == "3 x (288+68)/2 + (288+68)"


def test_the_rows_of_the_layer_table_add_up(release):
    assert sum(row.cache_bytes for row in release.layers) == release.cache_bytes_per_token
    assert [row.index for row in release.layers if row.cache_bytes] == ["2", "8", "14", "20"]
    modes = [row.mode for row in release.layers]
    assert [modes.count(mode) for mode in ("window", "full", "reindex", "reuse", "draft")] == [2, 4, 4, 30, 3]


def test_nano_is_what_the_issue_asks_for():
    plan = report(preset("nano"))
    assert 22e6 <= plan.counts.total <= 26e6
    assert 8e6 <= plan.active_decode <= 11e6
    assert 4.5e6 <= plan.active_prefill <= 5.5e6
    assert plan.nbytes <= 23_400_000


@pytest.mark.parametrize("name", PRESETS)
def test_pages(name):
    config = preset(name)
    for tokens in (None, config.plan.alignment, 16 * config.plan.alignment):
        layout = PageLayout.of(config, tokens)
        ends = [plane.offset + plane.nbytes for plane in layout.planes]
        starts = [plane.offset for plane in layout.planes]
        assert all(start % PLANE_ALIGNMENT == 0 for start in starts)
        assert all(end <= start for end, start in zip(ends, [*starts[1:], layout.page_bytes], strict=True))
        assert layout.bytes_per_token * layout.page_tokens == layout.payload_bytes
        assert 0 <= layout.padding_bytes < len(layout.planes) * PLANE_ALIGNMENT


@pytest.mark.parametrize("tokens", [0, -2, 127])
def test_a_page_holds_whole_groups(tokens):
    with pytest.raises(ConfigError, match="multiple of 2"):
        PageLayout.of(preset("v41-flash"), tokens)


def test_a_model_without_global_cache_has_empty_pages():
    config = replace(
        preset("tiny"),
        compress_ratios=(0,) * 11,
        kv_source_layers=(),
        index_source_layers=(),
        candidate_source_layers=(),
    )
    plan = report(config)
    assert plan.cache_bytes_per_token == 0
    assert plan.waterfall == ()
    assert plan.active_decode > plan.active_prefill > 0
    assert "Page of 128 tokens: 0 bytes" in printed(plan)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 5), st.none() | st.integers(1, 80))
def test_closed_form_means(first, count, ratio, limit):
    values = [n // ratio for n in range(first, first + count)]
    clipped = [value if limit is None else min(value, limit) for value in values]
    assert mean_clipped(first, first + count - 1, ratio, limit) == pytest.approx(sum(clipped) / count)


def test_prefill_without_ced_is_the_mean_of_decode_steps():
    config = preset("nano")
    model = FlopModel(config)
    n = 1500
    steps = sum(model.decode(t, hsi=False).total - model.ends.total for t in range(1, n + 1)) / n
    whole = model.prefill(n, ced=False, hsi=False).total - model.ends.total / n
    assert whole == pytest.approx(steps, rel=1e-9)


def test_decode_counts_every_active_weight_twice_and_the_context_beside():
    config = preset("v41-flash")
    model = FlopModel(config)
    row = model.decode(1)
    active = report(config).active_decode
    # One visible key for each of 40 windows, one row for each ratio-1 layer; the rest is weights.
    keys = 40 + 20
    attention = 4 * keys * 64 * 512
    scores = 5 * (2 * 32 * 128 + 3 * 32)
    streams = 40 * 4 * 4 * 6 * 5120
    looked_up = 5120 + 2 * 24 * 256
    index_keys = 3 * (128 * 512 + 128)
    assert row.total == pytest.approx(2 * (active - looked_up) - index_keys + attention + scores + streams, rel=1e-12)


def test_what_ced_and_hsi_save(release):
    by_context = {row.context: row for row in release.flops}
    longest = by_context[1 << 20]
    assert longest.prefill.total < 0.55 * longest.prefill_without_ced.total
    assert longest.prefill_without_ced.total < longest.full_prefill.total
    assert longest.decode.total < longest.full_decode.total
    # The pool covers 16,384 rows: below that HSI changes nothing (facts section 5).
    assert by_context[16384].decode.total == by_context[16384].full_decode.total
    # The report: decode grows by about a quarter from 4K to 1M in BF16 equivalents.
    assert longest.decode.weighted / by_context[4096].decode.weighted == pytest.approx(1.25, abs=0.05)


def test_a_prompt_within_the_window_saves_nothing():
    model = FlopModel(preset("v41-flash"))
    assert model.prefill(100).total == pytest.approx(model.prefill(100, ced=False).total)


@pytest.mark.parametrize("name", PRESETS)
def test_report_prints(name):
    text = printed(report(preset(name)))
    for title in ("Layers", "Parameters", "Tensor classes", "Page of", "Global cache", "FLOPs a token"):
        assert title in text
    if name == "v41-flash":
        for number in ("551,566,180,464", "510,286,023,000", "96,085", "3,514.25", "113,920"):
            assert number in text


def test_figures_are_written(tmp_path):
    files = write_figures(report(preset("tiny")), tmp_path / "figures")
    assert [file.name for file in files] == ["layers.png", "bytes.png", "cache.png", "flops.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_plan_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys; from kvist.plan import report; from kvist.presets import preset; report(preset('tiny'))\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

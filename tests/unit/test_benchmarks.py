"""The measuring harness: the gate before the clock, interleaving, the row schema, README's generated table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import registry, rows, tables, targets
from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase, WrongResult, percent_of_floor
from benchmarks.runner import interleave, measure

MACHINE = rows.Machine(key="cpu2", device="test", versions={"torch": "0"}, commit="abc")


def accept() -> None:
    """A check that has nothing against the result."""


def reject() -> None:
    raise WrongResult("max abs error 3 at [0, 1]")


def timed(check=accept, log: list[str] | None = None, **changes) -> TimedCase:
    log = [] if log is None else log
    settings = {
        "name": "4k",
        "variants": {"fast": lambda: log.append("fast"), "ref": lambda: log.append("ref")},
        "subject": "fast",
        "check": check,
        "work": 10.0,
        "unit": "tokens/s",
        "floor": 1e12,
    }
    return TimedCase(**(settings | changes))


def bench(*cases: Case) -> Benchmark:
    def build(options: Options) -> Iterator[Case]:
        yield from cases

    return Benchmark(name="b", summary="s", build=build)


def test_a_red_check_reports_nothing_and_runs_nothing() -> None:
    log: list[str] = []
    with pytest.raises(WrongResult, match="max abs error 3"):
        measure(bench(timed(reject, log)), Options(), MACHINE, "cmd")
    assert log == []


def test_variants_are_interleaved_and_take_turns_at_the_start() -> None:
    log: list[str] = []
    interleave({n: (lambda n=n: log.append(n)) for n in "abc"}, rounds=3)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"


def test_rows_carry_value_floor_and_peers() -> None:
    counted = CountedCase(name="kernels", count=lambda: 40, check=accept, unit="kernels/token", better="lower", floor=10)
    lines, made = measure(bench(timed(), counted), Options(rounds=2), MACHINE, "cmd")
    assert [(r.case, r.better, r.correct, list(r.peers)) for r in made] == [
        ("4k", "higher", True, ["ref"]),
        ("kernels", "lower", True, []),
    ]
    assert made[1].percent_of_floor == 25.0
    assert [line.variant for line in lines] == ["fast", "ref", ""]
    assert rows.parse(made[0].to_json(), "here") == made[0]


def test_percent_is_100_at_the_limit_in_both_directions() -> None:
    assert percent_of_floor(50, 100, "higher") == 50
    assert percent_of_floor(200, 100, "lower") == 50
    assert percent_of_floor(1, None, "lower") is None


@pytest.mark.parametrize("changes", [{"subject": "other"}, {"unit": "us"}, {"work": None}])
def test_inconsistent_cases_are_refused(changes) -> None:
    with pytest.raises(ValueError, match="case 4k"):
        timed(**changes)


def test_kept_rows_come_back_and_broken_lines_name_themselves(tmp_path: Path) -> None:
    _, made = measure(bench(timed()), Options(rounds=1), MACHINE, "cmd")
    path = rows.append(made, "cpu2", tmp_path)
    rows.append(made, "cpu2", tmp_path)
    assert [row for _, row in rows.load(tmp_path)] == made * 2
    record = json.loads(made[0].to_json())
    del record["floor"]
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    with pytest.raises(rows.BadRow, match=r"cpu2\.jsonl:3: missing fields \['floor'\]"):
        list(rows.load(tmp_path))


@pytest.mark.parametrize(("better", "left"), [("lower", [1.0, 3.0]), ("higher", [9.0, 3.0])])
def test_thinning_leaves_the_best_and_the_newest_row(tmp_path: Path, better, left) -> None:
    _, made = measure(bench(timed()), Options(rounds=1), MACHINE, "cmd")
    several = [dataclasses.replace(made[0], better=better, value=value) for value in (5.0, 9.0, 1.0, 4.0, 3.0)]
    other = dataclasses.replace(made[0], case="other")
    path = rows.append([several[0], other, *several[1:]], "cpu2", tmp_path)
    assert rows.thin(path) == 3
    assert [row.value for _, row in rows.load(tmp_path) if row.case != "other"] == left
    assert [row for _, row in rows.load(tmp_path) if row.case == "other"] == [other]
    assert rows.thin(path) == 0


def test_a_row_with_nan_is_refused() -> None:
    _, made = measure(bench(timed()), Options(rounds=1), MACHINE, "cmd")
    with pytest.raises(rows.BadRow, match="value is nan"):
        dataclasses.replace(made[0], value=float("nan")).to_json()


def test_readme_table_holds_the_newest_row_and_is_stable(tmp_path: Path) -> None:
    _, made = measure(bench(timed()), Options(rounds=1), MACHINE, "cmd")
    newer = dataclasses.replace(made[0], value=77.0)
    rows.append([*made, newer], "cpu2", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    assert not tables.update(readme, check=True, results=tmp_path)
    assert "old" in readme.read_text()
    tables.update(readme, results=tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("| b | 4k |") == 1
    assert "77 tokens/s" in text
    assert tables.update(readme, check=True, results=tmp_path)


def h200_row(bench: str, case: str, **changes: object) -> rows.Row:
    _, made = measure(Benchmark(name="b", summary="s", build=lambda _: iter([timed()])), Options(rounds=1), MACHINE, "cmd")
    return dataclasses.replace(made[0], bench=bench, case=case, unit="us", better="lower", peers={}, **changes)


def test_the_state_page_holds_the_newest_rows_by_section(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("a\n<!-- rows: experts -->\nold\n<!-- rows end -->\nb\n<!-- rows: targets -->\n<!-- rows end -->\n")
    case = "1 rows of 128 experts"
    kept = [h200_row("gpu-experts", case, value=value, floor=20.0, percent_of_floor=50.0) for value in (50.0, 40.0)]
    rows.append(kept, "h200", tmp_path)
    rows.append([dataclasses.replace(kept[0], value=1.0)], "cpu2", tmp_path)
    assert not tables.update_sections(page, check=True, results=tmp_path)
    tables.update_sections(page, results=tmp_path)
    text = page.read_text()
    assert text.count(f"| {case} | 40.0 us | 20.0 | 50 |") == 1
    assert "old" not in text
    assert f"| experts: {case} | 42 us | 40.0 us | yes | 50 |" in text
    assert "| model: prefill, 1 x 131,072 tokens | 6 s | not measured |" in text
    assert tables.update_sections(page, check=True, results=tmp_path)


@pytest.mark.parametrize("text", ["nothing", "<!-- rows: experts -->\nleft open", "<!-- rows: poetry -->\n<!-- rows end -->"])
def test_a_state_page_with_wrong_markers_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "performance.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"rows|known: attention"):
        tables.update_sections(page, results=tmp_path)


@pytest.mark.parametrize(
    ("by", "bound", "changes", "reached", "words"),
    [
        ("value", 10.0, {"value": 10.0}, True, "10.0 us (0.500 GB/s)"),
        ("value", 10.0, {"value": 10.1}, False, "10.1 us (0.495 GB/s)"),
        ("percent", 55.0, {"value": 2.0, "percent_of_floor": 54.9}, False, "2.00 us (2.50 GB/s)"),
        ("percent", 55.0, {"value": 2.0, "percent_of_floor": 55.0}, True, "2.00 us (2.50 GB/s)"),
        ("plain", 1.3, {"value": 13.0}, True, "13.0 us (0.385 GB/s), 1.30x"),
        ("plain", 1.3, {"value": 14.0}, False, "14.0 us (0.357 GB/s), 1.40x"),
    ],
)
def test_a_target_bounds_the_value_its_share_of_the_floor_or_a_multiple_of_a_peer(by, bound, changes, reached, words) -> None:
    target = targets.Target(what="w", bench="b", case="c", bound=bound, asked="a", by=by, work=5.0, rate="GB/s")
    row = dataclasses.replace(h200_row("b", "c", **changes), peers={"plain": 10.0})
    assert target.reached(row) == (reached, words)


def test_a_table_of_chosen_rows_keeps_their_order() -> None:
    _, made = measure(bench(timed()), Options(rounds=1), MACHINE, "cmd")
    kept = [("cpu2", dataclasses.replace(made[0], case=case)) for case in ("one", "two", "three")]
    lines = tables.markdown(kept, (("b", "three"), ("b", "one"), ("b", "absent"))).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["three", "one"]
    assert tables.markdown(kept, ()) == "No row is kept yet."


def test_tables_leave_out_other_cuts_of_the_same_kernel() -> None:
    row = dataclasses.replace(h200_row("b", "c", value=2.0), peers={"(8, 2, 4)": 3.0, "cuBLAS": 4.0})
    assert tables.markdown([("h200", row)]).splitlines()[-1].split(" | ")[5] == "cuBLAS 4"


def test_pages_of_this_repository_have_the_markers_and_valid_rows() -> None:
    for page in (tables.README, tables.ALL):
        text = page.read_text()
        assert text.count(tables.BEGIN) == text.count(tables.END) == 1
    kept = rows.load()
    cases = set()
    for key, row in kept:
        assert row.correct, (key, row.bench, row.case)
        cases.add((row.bench, row.case))
    assert cases.issuperset(tables.HIGHLIGHTS)
    wanted = {(target.bench, target.case) for target in targets.TARGETS}
    assert {bench for bench, _ in wanted} <= {bench for bench, _ in cases}
    assert wanted <= cases, wanted - cases
    for name in targets.SECTIONS:
        assert f"<!-- rows: {name} -->" in tables.STATE.read_text()


def test_registered_benchmarks_exist() -> None:
    for name in registry.MODULES:
        assert registry.find(name).summary
    with pytest.raises(ValueError, match="no benchmark named 'nothing'"):
        registry.find("nothing")


def test_exit_status_tells_wrong_results_from_mistakes(monkeypatch, capsys) -> None:
    monkeypatch.setattr(registry, "find", lambda name: bench(timed(reject)))
    assert command.main(["b"]) == 1
    monkeypatch.setattr(registry, "find", lambda name: bench(timed()))
    assert command.main(["b", "--rounds", "1", "--no-keep"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert json.loads(last)["rows"][0]["correct"] is True
    assert command.main(["b", "--rounds", "0"]) == 2


def test_a_run_that_is_cut_keeps_what_it_measured(monkeypatch) -> None:
    def cut() -> None:
        raise KeyboardInterrupt

    kept: list[rows.Row] = []
    monkeypatch.setattr(registry, "find", lambda name: bench(timed(), timed(cut)))
    monkeypatch.setattr(command, "append", lambda made, _key: kept.extend(made))
    with pytest.raises(KeyboardInterrupt):
        command.main(["b", "--rounds", "1"])
    assert [row.case for row in kept] == ["4k"]


def test_rows_that_no_file_takes_are_printed_all_the_same(monkeypatch, capsys) -> None:
    """A read-only checkout: one line says so, after the rows."""

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system", "cpu2.jsonl")

    monkeypatch.setattr(registry, "find", lambda name: bench(timed()))
    monkeypatch.setattr(command, "append", refuse)
    assert command.main(["b", "--rounds", "1"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out.strip().splitlines()[-1])["rows"][0]["correct"] is True
    assert "Read-only file system" in said.err


def test_a_copied_tree_is_told_its_commit(monkeypatch) -> None:
    monkeypatch.setenv("KVIST_COMMIT", "0123456789ab")
    assert rows.Machine.here().commit == "0123456789ab"
    monkeypatch.setenv("KVIST_COMMIT", "HEAD")
    with pytest.raises(ValueError, match="KVIST_COMMIT is 'HEAD'"):
        rows.Machine.here()

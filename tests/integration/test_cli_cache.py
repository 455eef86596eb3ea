"""`kvist cache ...` as a user meets it: figures, exit status, and one message for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fault.page_writer import MODEL, key, open_store, page, payload
from tests.integration.test_cli import kvist


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "store")
    store.put([page(n) for n in range(30)])
    store.close()
    return tmp_path / "store"


def damage(folder: Path) -> None:
    path = folder / "pages.kv"
    data = bytearray(path.read_bytes())
    data[4096 + 9 * 2048 + 300] ^= 1
    path.write_bytes(data)


def test_stat(folder: Path) -> None:
    result = kvist("cache", "stat", folder)
    assert result.returncode == 0, result.stderr
    for figure in ("30", "1,500", "2,048", "65,536", MODEL.hex()):
        assert figure in result.stdout, figure


def test_verify_tells_and_drop_mends(folder: Path) -> None:
    assert kvist("cache", "verify", folder).stdout == f"{folder}: 30 good pages, 45,000 bytes\n"
    damage(folder)
    told = kvist("cache", "verify", folder)
    assert told.returncode == 1 and "1 bad pages: checksum" in told.stdout and "--drop" in told.stdout
    assert kvist("cache", "verify", folder, "--drop").returncode == 1
    assert kvist("cache", "verify", folder).stdout == f"{folder}: 29 good pages, 43,500 bytes\n"


def test_verify_makes_a_lost_index_again(folder: Path) -> None:
    (folder / "index.sqlite").unlink()
    told = kvist("cache", "verify", folder)
    assert told.returncode == 2 and "kvist cache verify --drop" in " ".join(told.stderr.split())
    assert "30 good pages" in kvist("cache", "verify", folder, "--drop").stdout


def test_prune(folder: Path) -> None:
    result = kvist("cache", "prune", folder, "--keep-bytes", "30000")
    assert result.stdout == f"{folder}: 19 pages removed, 11 kept\n", result.stderr
    assert (folder / "pages.kv").stat().st_size == 4096 + 11 * 2048
    result = kvist("cache", "prune", folder, "--keep-bytes", "100")
    assert result.returncode == 2 and "100 bytes holds no page: one needs 6,304 bytes" in result.stderr
    writer = open_store(folder)
    result = kvist("cache", "prune", folder, "--keep-bytes", "10000")
    assert result.returncode == 2 and "is being written by process" in result.stderr
    assert "30" not in kvist("cache", "stat", folder).stdout and writer.stat().pages == 11
    writer.close()


def test_export(folder: Path, tmp_path: Path) -> None:
    damage(folder)
    assert kvist("cache", "export", folder, tmp_path / "out").stdout == f"29 pages in {tmp_path / 'out'}\n"
    rows = [json.loads(line) for line in (tmp_path / "out" / "pages.jsonl").read_text().splitlines()]
    by_key = {row["key"]: row for row in rows}
    for number in (0, 1, 2, 29):
        row = by_key[key(number).hex()]
        assert (tmp_path / "out" / row["file"]).read_bytes() == payload(number)
        assert row["provenance"] == ["exact", "bounded(1)", "bounded(2)"][number % 3]
    assert kvist("cache", "export", folder, tmp_path / "out").returncode == 2


@pytest.mark.parametrize("command", [("stat",), ("verify",), ("verify", "--drop"), ("prune", "--keep-bytes", "9999")])
def test_a_directory_without_a_store(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = kvist("cache", command[0], tmp_path, *command[1:])
    assert result.returncode == 2 and "holds no store (pages.kv is missing)" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir()), "a mistyped directory is left alone"


def test_a_directory_of_stores_names_them(folder: Path) -> None:
    result = kvist("cache", "stat", folder.parent)
    assert result.returncode == 2
    said = "".join(result.stderr.split())
    assert f"thereisonein{folder}" in said.replace("|", "").replace("│", ""), said

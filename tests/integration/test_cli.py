"""The command line as a user meets it: exit status, what goes to which stream, and one message for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text

from kvist.checkpoint import save_checkpoint
from kvist.cli_errors import is_users, message
from kvist.inventory import parameters
from kvist.presets import tiny

ROOT = Path(__file__).resolve().parents[2]


def kvist(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvist", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **env}
    environment.pop("COLUMNS", None)  # set by parallel test runs; it would cut the tables
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the toy configuration with small random weights."""
    config, generator = tiny(), torch.Generator().manual_seed(0)
    state = {p.name: 0.05 * torch.randn(p.shape, generator=generator) for p in parameters(config)}
    out = tmp_path_factory.mktemp("model") / "toy"
    save_checkpoint(config, state, None, out)
    return out


def test_help_names_every_command_and_is_quick() -> None:
    result = kvist("--help")
    assert result.returncode == 0
    for name in ("plan", "conformance", "checkpoint"):
        assert name in result.stdout


def test_no_help_text_is_taken_for_markup() -> None:
    """`kvist[serve]` in a help text is a tag to rich, which leaves it out."""
    from kvist.cli import app

    command = typer.main.get_group(app)
    pending, texts = [command], list[str]()
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        texts += [command.help or "", command.epilog or "", *(getattr(one, "help", None) or "" for one in command.params)]
    assert any("extra serve" in text for text in texts)
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def test_version() -> None:
    result = kvist("--version")
    assert result.stdout.startswith("kvist ")


def test_plan_of_the_release_prints_derived_numbers() -> None:
    result = kvist("plan", "v41-flash")
    assert result.returncode == 0, result.stderr
    for number in ("551,566,180,464", "510,286,023,000", "96,085", "890", "3,514.25"):
        assert number in result.stdout, number


def test_plan_reads_a_config_and_writes_figures(folder: Path, tmp_path: Path) -> None:
    result = kvist("plan", folder / "config.json", "--plot", tmp_path / "figures")
    assert result.returncode == 0, result.stderr
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png"}


def test_plan_fit_of_every_preset_without_further_options(tmp_path: Path) -> None:
    """The toy's whole context is shorter than the context that is assumed of the others."""
    for name in ("tiny", "nano"):
        assert kvist("plan", name, "--fit").returncode == 0
    both = kvist("plan", "tiny", "--fit", "--plot", tmp_path / "figures")
    assert both.returncode == 2
    assert "leave one of them out" in both.stderr
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("target", ["setup", "test"])
def test_make_names_a_python_that_is_too_old(tmp_path: Path, target: str) -> None:
    """An interpreter that says it is 3.9 is asked nothing more, and nothing is installed."""
    old = tmp_path / "python3"
    told = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{told}' \"$@\"\n")
    old.chmod(0o755)
    result = subprocess.run(
        ["make", target, f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 2
    assert "kvist needs Python 3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_an_unknown_model_says_where_it_was_looked_for(tmp_path: Path) -> None:
    result = kvist("plan", "no-such-model", cwd=tmp_path)
    assert result.returncode == 2
    assert str(tmp_path / "no-such-model") in result.stderr
    assert "v41-flash" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_empty_model_name_is_named() -> None:
    result = kvist("plan", "")
    assert result.returncode == 2
    assert "the model's name is empty" in result.stderr


def test_an_unreachable_hub_id_names_hub_and_cache(tmp_path: Path) -> None:
    result = kvist("checkpoint", "inspect", "someone/some-model", cwd=tmp_path, HF_HOME=str(tmp_path / "hub"))
    assert result.returncode == 2
    assert "hub repository someone/some-model" in result.stderr
    assert "Traceback" not in result.stderr


def test_traceback_on_request(tmp_path: Path) -> None:
    result = kvist("plan", "no-such-model", cwd=tmp_path, KVIST_TRACEBACK="1")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"vocab_size": -1}', "\x00"])
def test_a_hostile_config_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    result = kvist("plan", tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip()
    assert "Traceback" not in result.stderr


def test_too_little_memory_is_one_message() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50, dtype=torch.uint8)  # beyond any address space
    assert is_users(refused.value)
    assert message(refused.value).startswith("out of memory: 1125899906842624 bytes more are not to be had. ")
    on_a_card = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB")
    assert message(on_a_card).startswith("out of memory: 2.00 GiB more")
    assert is_users(MemoryError("a call needs 5 bytes"))
    assert message(MemoryError("a call needs 5 bytes")) == "a call needs 5 bytes"
    assert not is_users(RuntimeError("expected a tensor on the host"))


def test_unknown_options_and_values_are_usage_errors() -> None:
    assert kvist("plan").returncode == 2
    assert kvist("plan", "tiny", "--nonsense").returncode == 2
    assert kvist("checkpoint", "convert", "a", "b", "--weights", "int3").returncode == 2


def test_checkpoint_inspect_verify_convert(folder: Path, tmp_path: Path) -> None:
    result = kvist("checkpoint", "inspect", folder, "--tensors", "layers.2.attn.compressor.*")
    assert result.returncode == 0, result.stderr
    assert "layers.2.attn.compressor.wkv.weight" in result.stdout
    result = kvist("checkpoint", "verify", folder)
    assert result.returncode == 0, result.stdout
    assert result.stdout.rstrip().endswith("good")
    wide = tmp_path / "wide"
    result = kvist("checkpoint", "convert", folder, wide, "--weights", "bf16", "--experts", "bf16")
    assert result.returncode == 0, result.stderr
    assert kvist("checkpoint", "verify", wide).returncode == 0
    again = kvist("checkpoint", "convert", folder, wide)
    assert again.returncode == 2
    assert str(wide) in again.stderr


def test_a_truncated_shard_fails_with_its_name(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    result = kvist("checkpoint", "verify", tmp_path)
    assert result.returncode == 1
    assert shard.name in result.stdout
    assert kvist("checkpoint", "inspect", tmp_path).returncode == 2


def test_conformance_reports_a_case_that_is_none(tmp_path: Path) -> None:
    result = kvist("conformance", tmp_path)
    assert result.returncode == 1
    assert result.stdout.rstrip().splitlines()[-1] == "0 passed, 1 failed"


def test_conformance_of_a_shipped_case() -> None:
    case = ROOT / "tests" / "golden" / "cases" / "quantisers"
    assert json.loads((case / "case.json").read_text())["kind"] == "quantisers"
    result = kvist("conformance", case)
    assert result.returncode == 0, result.stdout
    assert result.stdout.rstrip().endswith(", 0 failed")


def shell(script: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A line of shell in which `$K` is the command."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "K": f"{sys.executable} -m kvist", **env}
    return subprocess.run(["bash", "-c", script], capture_output=True, timeout=300, check=False, env=environment)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_crash(closed: str) -> None:
    """As under a supervisor that opens none: Python then has None where a stream would be."""
    good = shell(f"$K plan tiny {closed}")
    assert good.returncode == 0, good.stderr
    assert shell(f"$K plan no-such-model {closed}").returncode == 2


def test_a_closed_input_is_an_empty_one() -> None:
    result = shell("$K generate nano --max-tokens 2 <&-")
    assert result.returncode == 0, result.stderr
    assert result.stdout == shell("$K generate nano --max-tokens 2 </dev/null").stdout


def test_a_reader_that_leaves_is_no_crash() -> None:
    result = shell("$K generate nano --prompt 'It was' --max-tokens 40 --temperature 1 | head -c 1; echo ${PIPESTATUS[0]} >&2")
    assert result.stderr.split() == [b"1"]


def test_standard_input_that_is_no_text() -> None:
    result = shell(r"printf 'abc\xff' | $K generate nano --max-tokens 2")
    assert result.returncode == 2
    assert result.stderr.strip() == b"not UTF-8 text (invalid start byte at byte 3); convert it first"


def test_an_output_that_lacks_a_character_gets_another() -> None:
    """Greedy nano closes this quotation with a character that ASCII does not have."""
    result = shell(r"printf '\u201cI am sorry' | $K generate nano --max-tokens 8", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert result.returncode == 0, result.stderr
    assert b"?" in result.stdout

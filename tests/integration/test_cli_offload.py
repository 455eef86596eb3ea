"""`kvist plan --fit` and `kvist generate --expert-budget` as a user meets them."""

from __future__ import annotations

import pytest

from kvist.engine.terminal import parse_bytes
from tests.integration.test_cli import kvist

PROMPT = ("--prompt", "It was a dark night", "--max-tokens", "12")


def test_a_budget_changes_no_character() -> None:
    resident = kvist("generate", "nano", *PROMPT)
    assert resident.returncode == 0, resident.stderr
    assert "experts:" not in resident.stderr
    banked = kvist("generate", "nano", *PROMPT, "--expert-budget", "1MB")
    assert banked.returncode == 0, banked.stderr
    assert banked.stdout == resident.stdout
    assert "at most 0.001 GB held" in banked.stderr
    assert "Engram rows:" in banked.stderr


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "'0' is no size"),
        ("1KB", "an expert budget of 1,000 bytes holds no expert"),
    ],
)
def test_budgets_that_cannot_be(size: str, message: str) -> None:
    result = kvist("generate", "nano", *PROMPT, f"--expert-budget={size}")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("500MB", 500_000_000), ("8 GB", 8 * 10**9), ("1.5GiB", 3 << 29), ("2k", 2000), ("3TiB", 3 << 40), ("7b", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1e9", "1iB", "0.0GB", "1 2", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_plan_fit_of_the_release() -> None:
    result = kvist("plan", "v41-flash", "--fit", "--disk-gbps", "7", "--ram-gb", "128", "--gpu-gb", "24")
    assert result.returncode == 0, result.stderr
    for words in ("42.9% RAM", "18,800,640", "4.512 GB", "tokens/s, nothing overlaps", "over the link"):
        assert words in result.stdout, words
    assert "Layers" not in result.stdout


def test_plan_fit_says_what_is_lacking_and_what_cannot_be() -> None:
    result = kvist("plan", "v41-flash", "--fit", "--ram-gb", "8")
    assert result.returncode == 0
    assert "does not fit" in result.stdout
    result = kvist("plan", "v41-flash", "--fit", "--disk-gbps", "0")
    assert result.returncode == 2
    assert "disk_gbps is 0.0; give a number above 0" in result.stderr

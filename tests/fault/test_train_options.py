"""What a training run can be asked wrongly: each gets a named error before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.train.loop import Recipe
from kvist.train.run import run
from kvist.train.sampling import Mixture


@pytest.mark.parametrize("wish", [{"steps": 0}, {"steps": -1}, {"steps": "x"}, {"length": 1e30}, {"clip": float("nan")}])
def test_recipe_fields(wish: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"recipe field {next(iter(wish))} must be"):
        Recipe(**wish)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-1, "a", float("nan"), True])
def test_mixture_shares(share: object) -> None:
    with pytest.raises(ValueError, match="mixture share prose must lie in"):
        Mixture(prose=share)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"device": "foo"}, "device 'foo' is unknown"),
        ({"device": "meta"}, "no device 'meta' here"),
        ({"device": "cuda:99"}, "no device 'cuda:99' here"),
        ({"draft_steps": -1}, "draft_steps -1"),
        ({"stop_after": -1.0}, "stop_after -1.0"),
        ({"tokenizer": True}, "cannot be read as a tokenizer"),
    ],
)
def test_run_options(wish: dict[str, object], message: str, tmp_path: Path) -> None:
    if "tokenizer" in wish:
        file = tmp_path / "tokenizer.json"
        file.write_bytes(bytes([255, 254]))
        wish = {"tokenizer": file, "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        run("nano", tmp_path, tmp_path / "out", **wish)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()

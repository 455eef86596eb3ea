"""What a training run can be asked wrongly: each gets a named error before a file is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvist.presets import nano, tiny
from kvist.train.loop import Recipe, Run, _read_state
from kvist.train.run import TrainingError, run
from kvist.train.sampling import Corpus, Mixture


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


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A token folder: three tiers of two documents."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for tier in ("prose", "docs", "code"):
        (np.arange(600) % 200).astype("<u2").tofile(folder / f"{tier}.train.u16")
        np.save(folder / f"{tier}.train.offsets.npy", np.array([0, 250, 600]))
        np.save(folder / f"{tier}.train.bytes.npy", np.array([750, 1050]))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("docs.train.u16", b"", "docs.train.u16 has 0 bytes"),
        ("docs.train.u16", b"abc", "docs.train.u16 has 3 bytes"),
        ("docs.train.u16", b"ab", "docs.train.u16, its offsets and its bytes do not belong together"),
        ("docs.train.offsets.npy", b"x", "docs.train.offsets.npy is damaged"),
        ("docs.train.offsets.npy", b"", "docs.train.offsets.npy is damaged"),
        ("docs.train.offsets.npy", np.array([0, 700, 600]), "do not belong together"),
        ("docs.train.offsets.npy", np.array([0.0, 250.0, 600.0]), r"holds float64 \[3\]"),
        ("docs.train.offsets.npy", np.zeros((0,), np.int64), r"holds int64 \[0\]"),
        ("docs.train.bytes.npy", np.array([750]), "do not belong together"),
    ],
)
def test_damaged_tokens(tokens: Path, file: str, content: bytes | np.ndarray, message: str) -> None:
    Corpus(tokens, "train")
    if isinstance(content, bytes):
        (tokens / file).write_bytes(content)
    else:
        np.save(tokens / file, content)
    with pytest.raises(ValueError, match=message + ".*tokenise"):
        Corpus(tokens, "train")


def test_tokens_of_another_vocabulary(tokens: Path, tmp_path: Path) -> None:
    (np.arange(600) % 200 + 7000).astype("<u2").tofile(tokens / "code.train.u16")
    with pytest.raises(ValueError, match="tier code holds token 7199, the model's vocabulary ends at 7167"):
        run("nano", tokens, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", ["evaluate", "baseline"])
def test_held_out_tokens_are_looked_at_before_training(tokens: Path, tmp_path: Path, stage: str) -> None:
    with pytest.raises(ValueError, match=r"no .*prose\.heldout\.u16"):
        run("nano", tokens, tmp_path / "out", device="cpu", stages=("train", stage))
    for file in tokens.glob("*.train.*"):
        file.with_name(file.name.replace(".train.", ".heldout.")).write_bytes(file.read_bytes())
    (np.arange(600) % 200 + 7000).astype("<u2").tofile(tokens / "code.heldout.u16")
    with pytest.raises(ValueError, match="tier code holds token 7199"):
        run("nano", tokens, tmp_path / "out", device="cpu", stages=("train", stage))
    if stage == "evaluate":
        (tokens / "code.heldout.u16").write_bytes((tokens / "code.train.u16").read_bytes())
        with pytest.raises(TrainingError, match="prose has 600 tokens, judging at 16384 positions"):
            run("nano", tokens, tmp_path / "out", device="cpu", stages=("train", stage))
    assert not (tmp_path / "out").exists()


def test_a_state_that_is_none_or_another_models(tmp_path: Path) -> None:
    state, cpu = tmp_path / "state.pt", torch.device("cpu")
    fresh = Run.start(tiny(), Recipe(), cpu)
    fresh.save(state)
    Run.start(tiny(), Recipe(), cpu).load(state)
    good = state.read_bytes()
    for content in (b"", b"x", good[:-100], good[: len(good) // 2]):
        state.write_bytes(content)
        with pytest.raises(ValueError, match=r"state\.pt is damaged"):
            fresh.load(state)
    for other in ([1], {"weights": {}}):
        torch.save(other, state)
        with pytest.raises(ValueError, match=r"state\.pt is no state of a training run"):
            fresh.load(state)
    state.write_bytes(good)
    with pytest.raises(ValueError, match=r"state\.pt belongs to another configuration"):
        Run.start(nano(), Recipe(), cpu).load(state)


@pytest.mark.parametrize(
    "words", ["CUDA out of memory. Tried to allocate 2.00 GiB.", "can't allocate memory: you tried to allocate 9 bytes."]
)
def test_too_little_memory_for_a_state_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Whoever reads "delete it" would lose a run that a smaller step continues."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(RuntimeError, match="allocate"):
        _read_state(tmp_path / "state.pt", torch.device("cpu"))

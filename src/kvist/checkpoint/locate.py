"""Where a model is: a folder, a shipped name, or a hub id. Owns the search and the message when nothing is found.

Must not read weights. `huggingface_hub` is optional and imported only when a hub id is asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvist.checkpoint.about import ABOUT_NAME

HUB_FILES = ["config.json", "tokenizer.json", ABOUT_NAME, "*.safetensors", "model.safetensors.index.json"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHIPPED_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class ModelNotFound(ValueError):
    """No such model; the message lists every place that was searched."""


def shipped_folders() -> list[Path]:
    """Folders searched for shipped models: the installed package's, the repository's, the working directory's."""
    package = Path(__file__).parents[1]
    places = [package / "models", package.parents[1] / "models", Path.cwd() / "models"]
    return list(dict.fromkeys(places))


def locate(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a model. Raises `ModelNotFound` if it is no folder with a `config.json`, shipped name or hub id."""
    if not str(model):
        raise ModelNotFound("the model's name is empty; give a folder, a shipped name or a hub id")
    given = Path(model)
    if given.is_dir():
        if not (given / "config.json").is_file():
            raise ModelNotFound(f"{given} is a folder without config.json, so no model")
        return given
    if given.exists():
        raise ModelNotFound(f"{given} is a file; a model is the folder that holds config.json and the weights")
    name = str(model)
    searched = [f"folder {given.absolute()}"]
    if _SHIPPED_NAME.fullmatch(name):
        candidates = [place / name for place in shipped_folders()]
        for folder in candidates:
            if (folder / "config.json").is_file():
                return folder
        searched += [f"shipped model {folder}" for folder in candidates]
        searched.append(f"shipped names found: {', '.join(_shipped_names()) or 'none'}")
    elif isinstance(model, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name, revision, searched)
    raise ModelNotFound(f"no model {name!r}. Looked for: " + "; ".join(searched))


def _shipped_names() -> list[str]:
    return sorted({file.parent.name for place in shipped_folders() for file in place.glob("*/config.json")})


def _from_hub(name: str, revision: str | None, searched: list[str]) -> Path:
    places = "; ".join([*searched, f"hub repository {name}"])
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ModelNotFound(
            f"no model {name!r}. Looked for: {places} (not tried: no huggingface_hub; pip install '.[hub]' in the checkout)"
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelNotFound(
            f"no model {name!r}. Looked for: {places} at {constants.ENDPOINT} and in its cache {constants.HF_HUB_CACHE}. "
            f"The hub said: {error}"
        ) from error

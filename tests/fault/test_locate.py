"""Names that lead to no model: each message says what was looked for, where, and what would help."""

from __future__ import annotations

import sys

import pytest

from kvist.checkpoint import ModelNotFound, locate
from kvist.config_json import save_config
from kvist.presets import preset


@pytest.mark.parametrize("name", ["no-such-model", "no/such/folder/here"])
def test_an_unknown_model_says_where_it_looked(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as error:
        locate(name)
    assert str(tmp_path) in str(error.value)
    if name == "no-such-model":
        assert "shipped model" in str(error.value)


def test_an_empty_name():
    with pytest.raises(ModelNotFound, match="empty"):
        locate("")


def test_a_hub_id_without_network_says_what_was_looked_for(monkeypatch, tmp_path):
    from huggingface_hub import constants, errors

    def offline(*_: object, **__: object) -> str:
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as error:
        locate("owner/model")
    for part in ("folder", "owner/model", constants.ENDPOINT, "no connection"):
        assert part in str(error.value)


def test_a_hub_id_without_the_library_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match=r"\.\[hub\]"):
        locate("owner/model")


def test_a_file_or_an_empty_folder_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is a file"):
        locate(tmp_path / "weights.bin")
    with pytest.raises(ModelNotFound, match=r"without config\.json"):
        locate(tmp_path)


def test_a_shipped_name_is_found(tmp_path, monkeypatch):
    place = tmp_path / "models" / "pocket"
    place.mkdir(parents=True)
    save_config(preset("tiny"), place / "config.json")
    monkeypatch.chdir(tmp_path)
    assert locate("pocket") == place
    with pytest.raises(ModelNotFound, match=r"shipped names found: .*pocket"):
        locate("pockets")

"""Settings: order of sources, refusals that name the setting and never a key, and the documented tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.server.errors import CODES, TYPES, ApiError, errors_table
from kvist.server.settings import ServerSettings, read_settings, settings_table, unknown_variables

DOCS = Path(__file__).resolve().parents[2] / "docs" / "server.md"


def test_flags_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax_choices = 2\nretry_after_s = 3\napi_keys = ["from-file"]\n')
    monkeypatch.setenv("KVIST_SERVE_PORT", "11")
    monkeypatch.setenv("KVIST_SERVE_MAX_CHOICES", "12")
    settings = read_settings(["--port", "111", "--no-thinking"], config=file)
    assert (settings.port, settings.max_choices, settings.retry_after_s) == (111, 12, 3)
    assert settings.thinking is False
    assert [key.get_secret_value() for key in settings.api_keys] == ["from-file"]
    assert "from-file" not in repr(settings)
    monkeypatch.setenv("KVIST_SERVE_CONFIG", str(file))
    assert read_settings([]).retry_after_s == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "0.0.0.0"}, "reachable from outside"),
        ({"port": 70000}, "port"),
        ({"api_keys": [" "]}, "API key is empty"),
        ({"max_body_bytes": 5}, "max_body_bytes"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_refusals(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_settings(**values)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert read_settings(host="0.0.0.0", api_keys=["k"]).host == "0.0.0.0"
    assert read_settings(host="0.0.0.0", open_to_all=True).port == 8000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_s_own_addresses_need_no_key(host: str) -> None:
    assert read_settings(host=host).host == host


@pytest.mark.parametrize("host", ["127.example.com", "localhost.example.com", "::", "::ffff:10.0.0.1", "0.0.0.0", "10.0.0.1"])
def test_all_other_addresses_need_one(host: str) -> None:
    """A name that only begins like a loopback address is somebody's name."""
    with pytest.raises(ValueError, match="reachable from outside"):
        read_settings(host=host)


def test_a_bad_setting_s_value_is_not_shown() -> None:
    with pytest.raises(ValueError, match="api_keys") as caught:
        read_settings(api_keys="secretsecret")  # type: ignore[arg-type]
    assert "secretsecret" not in str(caught.value)
    with pytest.raises(ValueError, match="api_key") as caught:
        read_settings(api_key="secretsecret")
    assert "secretsecret" not in str(caught.value)


def test_other_bad_values_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"setting port: .*65535, got 70000"):
        read_settings(port=70000)
    with pytest.raises(ValueError, match=r"setting deadline_s: .*, got 'nan'"):
        read_settings(["--deadline-s", "nan"])
    monkeypatch.setenv("KVIST_SERVE_API_KEYS", "secretsecret")
    with pytest.raises(ValueError, match=r"api_keys.*written as JSON") as caught:
        read_settings([])
    assert "secretsecret" not in str(caught.value)


def test_variables_that_are_no_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVIST_SERVE_API_KEY", "KVIST_SERVE_PORT", "kvist_serve_host", "KVIST_SERVE_CONFIG", "KVIST_THREADS"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == ["KVIST_SERVE_API_KEY"]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file"):
        read_settings([], config=tmp_path / "none.toml")
    for content in (b"port = = 3", b"\xff\x00"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.toml is no TOML"):
            read_settings([], config=tmp_path / "bad.toml")


def test_the_documented_tables_are_the_code_s() -> None:
    """docs/server.md repeats settings and errors; `python tools/server_tables.py` writes them anew."""
    text = DOCS.read_text(encoding="utf-8")
    assert settings_table() in text
    assert errors_table() in text
    assert len(ServerSettings.model_fields) == settings_table().count("\n") - 1
    assert len(CODES) == errors_table().count("\n") - 1


def test_every_code_has_a_type_and_both_spellings() -> None:
    for code, (status, _) in CODES.items():
        error = ApiError(code, "why", param="field", retry_after_s=3)
        assert TYPES[status] == error.type == error.openai_body()["error"]["type"]
        assert error.anthropic_body() == {"type": "error", "error": {"type": error.type, "message": "why"}}
        assert error.headers() == {"retry-after": "3"}

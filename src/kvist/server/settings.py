"""Every setting of a server, from flags, environment (`KVIST_SERVE_...`) and a TOML file: the first that has one counts.

Owns names, limits and their words; docs/server.md's table is made from here. Must not know what uses them.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

CONFIG_VARIABLE = "KVIST_SERVE_CONFIG"
PREFIX = "KVIST_SERVE_"


class ServerSettings(BaseSettings):
    """Settings of `kvist serve`. A name in the file is the field's; a flag is `--max-body-bytes 1000000`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True)

    host: str = Field("127.0.0.1", description="address to bind; another than loopback needs api_keys or open_to_all")
    port: int = Field(8000, ge=0, le=65535, description="port; 0 takes a free one and logs it")
    model_name: str | None = Field(None, description="name that clients give; none: the name of the model's folder")
    model_aliases: list[str] = Field(default_factory=list, description="further names for the same model")
    api_keys: list[SecretStr] = Field(default_factory=list, description="keys that may use the server; none: no key is needed")
    admin_keys: list[SecretStr] = Field(default_factory=list, description="keys that may use /kvist/pins; none: nobody may")
    open_to_all: bool = Field(False, description="allow an address that is not loopback without keys")
    allowed_hosts: list[str] = Field(default_factory=list, description="names in Host besides the loopback ones; * allows all")
    allowed_origins: list[str] = Field(default_factory=list, description="origins of browser pages that may use the server")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="largest request body")
    max_file_bytes: int = Field(20 << 20, ge=1024, description="largest picture sent to /v1/files")
    max_files: int = Field(64, ge=0, description="uploaded files that a key may hold; 0: none")
    files_memory: int = Field(128 << 20, ge=0, description="bytes of memory for a key's uploaded files")
    file_keep_s: int = Field(3600, ge=1, description="seconds that an uploaded file is kept")
    image_hosts: list[str] = Field(
        default_factory=list, description="hosts whose pictures are fetched by URL; * any public one; none: nothing is fetched"
    )
    image_timeout_s: float = Field(10, gt=0, description="seconds that fetching a picture may take")
    head_timeout_s: float = Field(10, gt=0, description="seconds that a request's line and headers may take to arrive")
    body_timeout_s: float = Field(30, gt=0, description="seconds that a body may take to arrive")
    max_concurrency: int = Field(64, ge=1, description="requests at a time; more get 429")
    retry_after_s: int = Field(1, ge=1, description="Retry-After of a 429")
    requests_per_minute: int = Field(0, ge=0, description="requests a minute and key; 0: no limit")
    tokens_per_minute: int = Field(0, ge=0, description="prompt and reply tokens a minute and key; 0: no limit")
    max_choices: int = Field(16, ge=1, le=128, description="replies that one request may ask for (n, and n a prompt)")
    history_requests: int = Field(64, ge=0, description="ended requests a key whose tokens stay in memory for /kvist; 0: none")
    history_bytes: int = Field(16 << 20, ge=0, description="bytes of memory for them, a key")
    microscope_context: int = Field(32768, ge=0, description="most positions that /kvist/microscope runs again; 0: off")
    captures_per_minute: int = Field(30, ge=0, description="looks through the microscope a minute and key; 0: no limit")
    default_max_tokens: int = Field(4096, ge=1, description="new tokens where the request does not say")
    default_temperature: float = Field(1.0, ge=0, le=100, description="temperature where the request does not say")
    thinking: bool = Field(True, description="reason where the request does not say")
    isolate_keys: bool = Field(True, description="keys do not share cached prefixes")
    deadline_s: float = Field(600, gt=0, description="seconds after which a request ends with 504")
    keepalive_s: float = Field(5, gt=0, description="seconds of silence after which a stream gets a comment")
    headers_after_s: float = Field(0.5, ge=0, description="seconds that a stream waits for its first token before its headers go")
    send_timeout_s: float = Field(60, gt=0, description="seconds that a client may leave a stream unread")
    drain_s: float = Field(30, ge=0, description="seconds that running requests get after SIGTERM")
    drain_delay_s: float = Field(0, ge=0, description="seconds not ready but still listening after SIGTERM, for load balancers")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level of log lines")
    log_format: Literal["json", "text"] = Field("json", description="one JSON object a line, or words")
    tracing: bool = Field(False, description="spans to an OpenTelemetry collector (kvist[otel]); OTEL_ variables say where")
    memory: str = Field("1GB", description="memory for cache, slots and workspace")
    context: int | None = Field(None, ge=1, description="longest request that is promised; none: what fits")
    max_running: int = Field(16, ge=1, description="requests in a step")
    max_waiting: int = Field(256, ge=1, description="requests that wait in the engine")
    step_cost: int = Field(512, ge=1, description="encoder rows a step")
    mixed_cost: int = Field(128, ge=1, description="encoder rows a step beside decoding requests")
    replay: str = Field("bounded", description="bounded (as published), exact, or a number of positions")
    speculation: str = Field("adaptive", description="adaptive, off, or drafts to verify")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number type of the weights in memory")
    impl: Literal["cpu", "ref", "gpu"] = Field("cpu", description="operators: fused C, reference, or a Hopper card's (bfloat16)")
    device: str = Field("auto", description="where the model runs: cpu, cuda, cuda:1; auto: a card for impl gpu, else the CPU")
    deterministic: bool = Field(False, description="bits independent of batch and chunk")
    expert_budget: str | None = Field(None, description="leave experts and tables in the files; hold at most so much")
    host_cache: str = Field("0", description="host memory for pages that left the device's; 0: none (pinned beside a card)")
    pins: list[str] = Field(default_factory=list, description="prefixes that stay in memory: texts, or @FILE")
    pin_share: float = Field(0.25, ge=0, lt=1, description="share of the cache's pages that pins may hold")
    cache_dir: Path | None = Field(None, description="pages on disk; none: the user's cache directory")
    cache_budget: str = Field("4GB", description="bytes on disk for pages; 0 keeps none")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (put in front by pydantic-settings), arguments, environment; no dotenv, no secrets folder."""
        del settings_cls, dotenv_settings, file_secret_settings
        return init_settings, env_settings

    @model_validator(mode="after")
    def _guard(self) -> ServerSettings:
        if not is_loopback(self.host) and not self.api_keys and not self.open_to_all:
            raise ValueError(f"host {self.host} is reachable from outside: set api_keys, or open_to_all to serve without keys")
        if any(not key.get_secret_value().strip() for key in (*self.api_keys, *self.admin_keys)):
            raise ValueError("an API key is empty; leave it out or give a long random text")
        return self


def is_loopback(host: str) -> bool:
    """Whether an address to bind is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_file(file: Path) -> type[ServerSettings]:
    """The settings with a TOML file behind all other sources."""

    class FileSettings(ServerSettings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            before = super().settings_customise_sources(settings_cls, *sources, **named)
            return (*before, TomlConfigSettingsSource(settings_cls, file))

    return FileSettings


def read_settings(arguments: list[str] | None = None, *, config: Path | None = None, **values: Any) -> ServerSettings:
    """Settings from flags, environment and a file (`config`, else what KVIST_SERVE_CONFIG names).

    Raises ValueError that names the setting and what it was given, but for what may be a key.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    file = config or (Path(named) if named else None)
    if file is not None and not file.is_file():
        raise ValueError(f"the configuration {file} is no file; give a TOML file of settings")
    kind = ServerSettings if file is None else _with_file(file)
    flags: dict[str, Any] = {} if arguments is None else {"_cli_parse_args": arguments, "_cli_prog_name": "kvist serve MODEL"}
    try:
        return kind(**flags, **values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        # A name that is none may be a misspelt `api_keys`.
        got = f", got {first['input']!r:.60}" if name in ServerSettings.model_fields and not name.endswith("_keys") else ""
        raise ValueError(f"setting {name or 'host'}: {first['msg'].removeprefix('Value error, ')}{got}") from None
    except SettingsError as error:
        raise ValueError(f'{error}; a list is written as JSON: ["one", "two"]') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from None


def unknown_variables() -> list[str]:
    """Variables of the environment that look like settings and are none. No error: others set variables too, such as a cluster
    for a service named kvist-serve; but whoever misspells `KVIST_SERVE_API_KEYS` should hear of it."""
    known = {CONFIG_VARIABLE, *(f"{PREFIX}{name.upper()}" for name in ServerSettings.model_fields)}
    return sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)


def settings_table() -> str:
    """All settings as a Markdown table."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in ServerSettings.model_fields.items():
        default = [] if field.default_factory is not None else field.default
        rows.append(f"| `{name}` | `{default}` | {field.description} |")
    return "\n".join(rows)

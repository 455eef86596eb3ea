"""`/kvist/pins`: what is to be pinned, from a request or from the settings.

Owns its fields. A pin is spelled as `/tokenize` is: plain text as `/v1/completions` would encode it, or messages as a chat. Must
not know how pages are held.
"""

from __future__ import annotations

from pathlib import Path

from kvist.server.body import parse
from kvist.server.errors import ApiError
from kvist.server.protocol.completions import TokenizeRequest

MAX_FILE_BYTES = 64 << 20


class PinRequest(TokenizeRequest):
    """A named prefix."""

    name: str


def setting_pin(setting: str, number: int) -> PinRequest:
    """A pin of the settings: a text, or `@FILE` with a text, or (FILE.json) with the body of a pin without its name.

    Raises ValueError for a file that cannot be read.
    """
    if not setting.startswith("@"):
        return PinRequest(name=f"setting-{number}", prompt=setting)
    file = Path(setting[1:]).expanduser()
    data = file.read_bytes()
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{file} has {len(data)} bytes, a pin at most {MAX_FILE_BYTES}")
    name = "".join(character if character.isascii() and character.isalnum() else "-" for character in file.stem)[:60]
    if file.suffix != ".json":
        try:
            return PinRequest(name=f"{name}-{number}", prompt=data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        body = parse(data, TokenizeRequest)
    except ApiError as error:
        raise ValueError(f"{file}: {error.message}") from error
    return PinRequest(name=f"{name}-{number}", **{key: getattr(body, key) for key in body.model_fields_set})

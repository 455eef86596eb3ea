"""Uploaded pictures: official clients send, list, name and delete them; limits, owners, expiry and hostile uploads get a 4xx."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest

from kvist.engine.launch import SpanImage
from kvist.images import decode_image
from kvist.server.errors import ApiError
from kvist.server.files import FileShelf
from kvist.server.served import Served
from tests.integration.test_server_guards import wait_until
from tests.integration.test_server_images import bomb, png
from tests.server_fakes import TOKENIZER, Live, says, scripted, serving

ONE, OTHER = "kv-key-one-0123456789", "kv-key-other-0123456789"
IMAGE_ID = TOKENIZER.special_id("<｜deepseek_image｜>")


def seeing(**fields: object) -> Served:
    """A scripted model with eyes: a picture's span is 4 tokens; decoding is the real one."""

    def read(data: bytes) -> SpanImage:
        pixels = decode_image(data)
        return SpanImage(4, bytes(pixels.flat[:32]).ljust(32, b"\0"), lambda: None)  # type: ignore[arg-type,return-value]

    return replace(scripted(says("hi")), image_token_id=IMAGE_ID, read_image=read, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(seeing(), api_keys=[ONE, OTHER], max_files=3, max_file_bytes=20_000, files_memory=30_000) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(live: Live) -> Iterator[None]:
    yield
    for owner in list(live.service.files._owners):
        for file in live.service.files.list(owner):
            live.service.files.delete(owner, file.id)


def upload(live: Live, data: bytes, key: str = ONE, name: str = "cat.png") -> str:
    return live.openai(key).files.create(file=(name, data), purpose="vision").id


def test_openai_s_file_client(live: Live) -> None:
    client, data = live.openai(ONE), png(1)
    file = client.files.create(file=("../../cat.png", data), purpose="vision")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(data), "cat.png", "vision")
    assert [entry.id for entry in client.files.list()] == [file.id]
    assert client.files.retrieve(file.id).id == file.id
    assert client.files.content(file.id).read() == data
    short = client.files.create(file=data, purpose="vision", expires_after={"anchor": "created_at", "seconds": 3600 - 1})
    assert short.expires_at is not None
    assert file.expires_at is not None
    assert short.expires_at - short.created_at in (3599, 3600)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


def test_anthropic_s_file_client(live: Live) -> None:
    client, data = live.anthropic(ONE), png(2)
    file = client.beta.files.upload(file=("dog.png", data, "image/png"))
    assert (file.type, file.size_bytes, file.filename) == ("file", len(data), "dog.png")
    assert [entry.id for entry in client.beta.files.list()] == [file.id]
    assert client.beta.files.download(file.id).read() == data
    source = {"type": "file", "file_id": file.id}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    client.messages.create(model="nano", max_tokens=5, messages=[{"role": "user", "content": content}])
    assert len(live.engine.requests[-1].images) == 1
    assert client.beta.files.delete(file.id).type == "file_deleted"


def test_a_file_s_id_is_the_same_as_its_bytes(live: Live) -> None:
    """In all APIs the prompt with the id is the prompt with the data URL; a file named twice is two spans."""
    client, data = live.openai(ONE), png(3)
    number, url = upload(live, data), f"data:image/png;base64,{base64.b64encode(data).decode()}"
    prompts = []
    for part in (
        {"type": "file", "file": {"file_id": number}},
        {"type": "image_url", "image_url": {"url": url}},
    ):
        text = {"type": "text", "text": "see"}
        client.chat.completions.create(model="nano", messages=[{"role": "user", "content": [text, part]}])
        prompts.append(live.engine.requests[-1])
    for part in ({"type": "input_image", "file_id": number}, {"type": "input_image", "image_url": url}):
        text = {"type": "input_text", "text": "see"}
        client.responses.create(model="nano", input=[{"role": "user", "content": [text, part]}])
        prompts.append(live.engine.requests[-1])
    assert len({tuple(request.prompt) for request in prompts}) == 1
    assert len({request.images[0].content for request in prompts}) == 1
    twice = [{"type": "file", "file": {"file_id": number}}] * 2
    client.chat.completions.create(model="nano", messages=[{"role": "user", "content": twice}])
    assert len(live.engine.requests[-1].images) == 2


def test_data_urls_as_clients_write_them(live: Live) -> None:
    """VIS-06: letter case, parameters, line breaks, the other alphabet, no padding: the same picture in each API."""
    data = next(png(seed) for seed in range(50) if {"+", "/", "="} <= set(base64.b64encode(png(seed)).decode()))
    plain = base64.b64encode(data).decode()
    spellings = [
        f"data:image/png;base64,{plain}",
        f"DATA:IMAGE/PNG;BASE64,{plain}",
        f"data:image/png;charset=utf-8;base64,{plain}",
        "data:image/png;base64," + "\r\n".join(plain[at : at + 76] for at in range(0, len(plain), 76)),
        f"data:image/png;base64,{base64.urlsafe_b64encode(data).decode()}",
        f"data:image/png;base64,{plain.rstrip('=')}",
    ]
    for url in spellings:
        part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        live.openai(ONE).chat.completions.create(model="nano", messages=[{"role": "user", "content": [part]}])
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        block = {"type": "image", "source": source}
        live.anthropic(ONE).messages.create(model="nano", max_tokens=5, messages=[{"role": "user", "content": [block]}])
    assert len({request.images[0].content for request in live.engine.requests[-2 * len(spellings) :]}) == 1


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"image_url": {"url": "data:image/png;base64,AAAA"}}, "type"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,not!!!base64!!!"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=A"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,iVBORw0KGgo"}}, "must begin with"),
        ({"type": "image_url", "image_url": {"url": "ftp://x"}}, "is not fetched"),
        ({"type": "image_url", "image_url": {"url": ""}}, "is not fetched"),
    ],
)
def test_parts_that_are_no_picture_are_named(live: Live, part: dict[str, object], words: str) -> None:
    """VIS-06, VIS-08: refused with the reason, never answered as if nothing had been sent."""
    before = len(live.engine.requests)
    with pytest.raises(openai.BadRequestError, match=words):
        live.openai(ONE).chat.completions.create(model="nano", messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item]
    assert len(live.engine.requests) == before


def test_a_file_belongs_to_its_key(live: Live) -> None:
    """Another key neither sees, reads, uses nor deletes it, and learns no more than of an id that never was."""
    number, other = upload(live, png(4)), live.openai(OTHER)
    assert other.files.list().data == []
    part = {"type": "file", "file": {"file_id": number}}
    for attempt in (
        lambda: other.files.retrieve(number),
        lambda: other.files.content(number),
        lambda: other.files.delete(number),
        lambda: other.chat.completions.create(model="nano", messages=[{"role": "user", "content": [part]}]),
        lambda: other.responses.create(
            model="nano", input=[{"role": "user", "content": [{"type": "input_image", "file_id": number}]}]
        ),
    ):
        with pytest.raises(openai.NotFoundError, match="upload it again"):
            attempt()
    assert live.openai(ONE).files.retrieve(number).id == number
    with live.http() as http:
        assert http.get("/v1/files").status_code == 401


def test_limits_of_a_key(live: Live) -> None:
    """Size, count and memory; what is deleted makes room; the other key has a share of its own."""
    client = live.openai(ONE)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(live, b"x" * 20_001)
    assert caught.value.status_code == 413
    first = upload(live, png(5))
    for seed in (6, 7):
        upload(live, png(seed))
    with pytest.raises(openai.RateLimitError) as full:
        upload(live, png(8))
    assert full.value.code == "files_full"
    assert 0 < int(full.value.response.headers["retry-after"]) <= 3601
    upload(live, png(8), OTHER)
    client.files.delete(first)
    upload(live, png(8))
    big = png(9, 80, 70)
    assert 15_000 < len(big) <= 20_000
    upload(live, big, OTHER)
    with pytest.raises(openai.RateLimitError, match="do not fit"):
        upload(live, big, OTHER)
    assert live.service.files.held[1] <= 2 * 30_000


def hostile() -> list[tuple[str, bytes, str, int]]:
    """Name, body, content type, status."""
    kind = "multipart/form-data; boundary=xx"
    head = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    good = head + png(1) + b"\r\n--xx--\r\n"

    def field(name: str, value: str) -> bytes:
        return f'--xx\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()

    return [
        ("no image", head + b"no image at all\r\n--xx--\r\n", kind, 400),
        ("truncated image", head + png(1)[:80] + b"\r\n--xx--\r\n", kind, 400),
        ("bomb", head + bomb() + b"\r\n--xx--\r\n", kind, 400),
        ("svg", head + b"<svg xmlns='http://www.w3.org/2000/svg'/>\r\n--xx--\r\n", kind, 400),
        ("empty file", head + b"\r\n--xx--\r\n", kind, 400),
        ("empty body", b"", kind, 400),
        ("no boundary", good, "multipart/form-data", 400),
        ("another boundary", good, "multipart/form-data; boundary=yy", 400),
        ("never ends", head + png(1), kind, 400),
        ("JSON", b"{}", "application/json", 400),
        ("no type", b"x", "", 400),
        ("not a file", field("file", "text") + b"--xx--\r\n", kind, 400),
        ("two files", head + png(1) + b"\r\n" + good, kind, 400),
        ("many fields", field("purpose", "vision") * 50 + good, kind, 400),
        ("long field", field("purpose", "v" * 10_000) + good, kind, 400),
        ("unknown field", field("owner", "root") + good, kind, 400),
        ("purpose", field("purpose", "fine-tune") + good, kind, 400),
        ("seconds", field("expires_after[seconds]", "-5") + good, kind, 400),
        ("anchor", field("expires_after[anchor]", "never") + good, kind, 400),
        ("odd charset", good, kind + "; charset=hex", 200),
        ("bytes for a name", good.replace(b"a.png", b"\xff\xfe\x00.png"), kind, 200),
        ("header lines", b"--xx\r\n" + b"A: b\r\n" * 3000 + b"\r\n\r\n--xx--\r\n", kind, 400),
        ("too large", head + b"x" * 200_000, kind, 413),
    ]


@pytest.mark.parametrize(("name", "body", "kind", "status"), hostile(), ids=[case[0] for case in hostile()])
def test_hostile_uploads(live: Live, name: str, body: bytes, kind: str, status: int) -> None:
    """400 or 413 with a reason; nothing is kept of it, and a chunked body meets the same limits."""
    headers = {"x-api-key": ONE, "content-type": kind}
    for content in (body, iter([body[:1000], body[1000:]])):
        answer = httpx.post(f"{live.url}/v1/files", content=content, headers=headers, timeout=20)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert answer.json()["error"]["message"]
            assert live.service.files.held == (0, 0)
    wait_until(lambda: live.service.admission.running == 0)


def test_ids_that_are_paths(live: Live) -> None:
    with live.http() as http:
        for number in ("..%2f..%2fetc%2fpasswd", "%00", "file-" + "0" * 5000, "'; drop", "file-é"):
            for call in (http.get, http.delete):
                answer = call(f"/v1/files/{number}", headers={"x-api-key": ONE})
                assert answer.status_code == 404, number
                assert len(answer.text) < 400
    part = {"type": "input_image", "file_id": "a", "image_url": "data:image/png;base64,"}
    with pytest.raises(openai.BadRequestError, match="one of the two"):
        live.openai(ONE).responses.create(model="nano", input=[{"role": "user", "content": [part]}])


def test_many_pictures_end_at_the_context(live: Live) -> None:
    """One upload named thousands of times is decoded once and refused by name as soon as it is too long."""
    part = {"type": "file", "file": {"file_id": upload(live, png(1))}}
    with pytest.raises(openai.BadRequestError, match="beyond the context") as caught:
        live.openai(ONE).chat.completions.create(model="nano", messages=[{"role": "user", "content": [part] * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_model_without_vision_takes_no_files() -> None:
    with serving(says("hi")) as blind, pytest.raises(openai.BadRequestError) as caught:
        blind.openai().files.create(file=io.BytesIO(png(1)), purpose="vision")
    assert caught.value.code == "image_unsupported"


def test_expiry() -> None:
    """Files go when their time is up, whoever looks next; a client may shorten the time, never lengthen it."""
    now = [1000.0]
    shelf = FileShelf(max_files=2, max_bytes=10, memory_bytes=15, keep_s=100, clock=lambda: now[0])
    first, second = shelf.put("a", "x", b"12345"), shelf.put("a", "x", b"12345", keep_s=10**9)
    assert second.expires == first.expires == 1100
    short = shelf.put("b", "x", b"12345", keep_s=5)
    now[0] = 1005.0
    with pytest.raises(ApiError, match="upload it again"):
        shelf.get("b", short.id)
    with pytest.raises(ApiError, match="do not fit") as caught:
        shelf.put("a", "x", b"1")
    assert caught.value.retry_after_s == 95
    assert shelf.held == (2, 10)
    now[0] = 1100.0
    assert shelf.held == (0, 0)
    assert not shelf._owners, "an owner without files is forgotten"
    shelf.put("a", "x", b"1234567890")
    with pytest.raises(ApiError, match="do not fit"):
        shelf.put("a", "x", b"123456")
    with pytest.raises(ApiError, match="at most 10"):
        shelf.put("a", "x", b"12345678901")

"""Images through the server: a small random model with a vision tower reads data URLs; what is no image is refused by name."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from kvist.config import VisionConfig
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.launch import image_reader
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.server.served import Served
from tests.server_fakes import END_ID, TOKENIZER, Live, serving

IMAGE_ID = TOKENIZER.special_id("<｜deepseek_image｜>")
VISION = VisionConfig(
    num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, min_pixels=0, max_image_tokens=64
)


def tiny_vision() -> Served:
    """A small random model with a vision tower behind a real engine."""
    config = replace(preset("tiny"), vision=VISION, image_token_id=IMAGE_ID, vocab_size=len(TOKENIZER))
    model = random_model(config, Numerics(deterministic=True), 0)
    engine = AsyncEngine(Engine(model, EngineConfig(pages=64, max_running=2, replay="exact"), tokenizer=TOKENIZER))
    return Served(
        name="tiny-vision",
        engine=engine,
        tokenizer=TOKENIZER,
        context=engine.engine.plan.context,
        vocab_size=config.vocab_size,
        bos_id=config.bos_token_id,
        eos_id=END_ID,
        created=0,
        image_token_id=IMAGE_ID,
        read_image=image_reader(model),
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(tiny_vision()) as server:
        yield server


def png(seed: int, width: int = 40, height: int = 30) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def chat(live: Live, *images: bytes) -> dict[str, object]:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": "tiny-vision",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "reasoning_effort": "none",
    }
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    whole: dict[str, object] = answer.json()
    return whole


def first_logprob(answer: dict[str, object]) -> float:
    return answer["choices"][0]["logprobs"]["content"][0]["logprob"]  # type: ignore[index,no-any-return]


def test_images_change_what_is_said_and_are_cached_by_content(live: Live) -> None:
    one, same, other, two = chat(live, png(1)), chat(live, png(1)), chat(live, png(2)), chat(live, png(1), png(2))
    assert first_logprob(one) == first_logprob(same), "the second finds the first's pages, exactly replayed"
    assert abs(first_logprob(one) - first_logprob(other)) > 1e-4, "another picture, another reply"
    usages = [answer["usage"] for answer in (one, same, two)]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0  # type: ignore[index]
    spans = usages[2]["prompt_tokens"] - usages[0]["prompt_tokens"]  # type: ignore[index]
    assert spans > 4, "the second picture has a span of its own"


def test_uploaded_images_are_the_same(live: Live) -> None:
    """A real model sees in an uploaded file what it sees in the data URL, and finds its pages."""
    inline = chat(live, png(7))
    number = live.openai().files.create(file=("a.png", png(7)), purpose="vision").id
    parts = [{"type": "text", "text": "see"}, {"type": "file", "file": {"file_id": number}}]
    answer = live.openai().chat.completions.create(
        model="tiny-vision",
        messages=[{"role": "user", "content": parts}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        reasoning_effort="none",
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].logprob == first_logprob(inline)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


def test_anthropic_images(live: Live) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    message = live.anthropic().messages.create(model="tiny-vision", max_tokens=3, messages=[{"role": "user", "content": content}])
    assert message.usage.output_tokens <= 3


def bomb() -> bytes:
    """A PNG that states 60,000 x 60,000 pixels and holds almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("data:image/png;base64," + base64.b64encode(b"no image at all").decode(), "image 0"),
        ("data:image/png;base64," + base64.b64encode(png(1)[:60]).decode(), "image 0"),
        ("data:image/png;base64," + base64.b64encode(bomb()).decode(), "pixels"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:text/html;base64,aGk=", "data:image"),
        ("http://localhost:8000/x.png", "data URL"),
        ("https://169.254.169.254/latest/meta-data", "data URL"),
        ("file:///etc/passwd", "data URL"),
        ("", "data URL"),
    ],
)
def test_what_is_no_image(live: Live, url: str, match: str) -> None:
    """Truncated and foreign files, decompression bombs, and every URL that would have to be fetched (SSRF)."""
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError, match=match) as caught:
        live.openai().chat.completions.create(model="tiny-vision", messages=[{"role": "user", "content": [part]}])
    assert caught.value.code == "invalid_image"

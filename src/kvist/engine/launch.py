"""From a model's name and budgets in words to a running `AsyncEngine` with its page store and image reader.

Owns the order of putting them together and of taking them down. Must not know HTTP: whoever serves, chats or embeds starts here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.checkpoint import build_model, fingerprint, is_base, locate
from kvist.config import VisionConfig
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine, store_model
from kvist.engine.replay import Replay
from kvist.engine.terminal import DTYPES, device_for, parse_bytes
from kvist.images import decode_image, preprocess
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout
from kvist.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a page may take to come from the disk before it is computed again: one that hangs must not stop the engine."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Budgets as text ("1GB"; "0" for none), and how to run. `cache_dir` None: the user's cache directory."""

    memory: str = "1GB"
    context: int | None = None
    max_running: int = 16
    max_waiting: int = 256
    step_cost: int = 512
    mixed_cost: int = 128
    replay: str = "bounded"
    speculation: str = "adaptive"
    dtype: str = "float32"
    impl: str = "cpu"
    device: str = "auto"
    deterministic: bool = False
    expert_budget: str | None = None
    host_cache: str = "0"
    cache_dir: Path | None = None
    cache_budget: str = "4GB"


@dataclass(frozen=True)
class SpanImage:
    """A picture for a prompt: tokens of its span, 32 bytes that name its content, its embeddings [tokens, D] on demand."""

    tokens: int
    content: bytes
    embed: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A running engine with what belongs to it. `base`: the model was not tuned to chat. `close` it: what is in host memory only
    is written then."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    folder: Path
    fingerprint: bytes
    created: int
    base: bool
    tiers: Tiers | None

    @property
    def list_folder(self) -> Path | None:
        """Where lists about the stored pages may be kept: the store's folder, if this process may write there."""
        store = None if self.tiers is None else self.tiers.store
        return None if store is None or store.read_only else store.folder

    async def close(self) -> None:
        """End all requests, then write and close the store."""
        await self.engine.close()
        if self.tiers is not None:
            self.tiers.close()


def launch(name: str, options: LaunchOptions) -> Launched:
    """Load a model (folder, shipped name or hub id), start its engine. Raises named errors for what is missing or too small."""
    numerics = Numerics(
        dtype=DTYPES[options.dtype],
        deterministic=options.deterministic,
        impl=options.impl,
    )
    device = device_for(numerics, options.device)
    folder = locate(name)
    base = is_base(folder)
    digest = fingerprint(folder)
    if options.expert_budget is None:
        model = build_model(folder, numerics=numerics, device=device)
    else:
        budget = parse_bytes(options.expert_budget)
        model = build_model(folder, numerics=numerics, device=device, access="read", engram="read", expert_budget_bytes=budget)
    config = EngineConfig(
        memory_bytes=parse_bytes(options.memory),
        context=options.context,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        step_cost=options.step_cost,
        mixed_cost=options.mixed_cost,
        replay=_number_or_word(options.replay),
        speculation=_number_or_word(options.speculation),
    )
    tokenizer = Tokenizer(folder)
    tiers = _tiers(model, digest, options)
    try:
        engine = Engine(model, config, tokenizer=tokenizer, fingerprint=digest, tiers=tiers)
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    for line in engine.plan.render(_tier_bytes(tiers, engine.plan.layout.page_bytes)).splitlines():
        LOG.info("memory plan: %s", line)
    if tiers is not None and tiers.store is not None:
        waiting = f"{tiers.queue_bytes:,} B to be written, {tiers.stage_bytes:,} B read ahead"
        LOG.info("memory plan: on top, pages that wait for the disk: at most %s", waiting)
    return Launched(
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        folder=folder,
        fingerprint=digest,
        created=int(time.time()),
        base=base,
        tiers=tiers,
    )


def _number_or_word(text: str) -> Replay:
    return int(text) if text.isdecimal() else text


def _optional_bytes(text: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text)


def _tiers(model: Transformer, digest: bytes, options: LaunchOptions) -> Tiers | None:
    host, disk = _optional_bytes(options.host_cache), _optional_bytes(options.cache_budget)
    layout = PageLayout.of(model.config)
    store = None
    if disk:
        root = store_model(model.numerics, digest, layout.page_tokens)
        store = PageStore.open(
            (options.cache_dir or user_cache()) / root.hex(),
            model=root,
            page_bytes=layout.page_bytes,
            page_tokens=layout.page_tokens,
            budget_bytes=disk,
        )
    return Tiers(host_bytes=host, store=store, read_timeout_s=PATIENCE_S) if host or store is not None else None


def _tier_bytes(tiers: Tiers | None, page_bytes: int) -> dict[str, int]:
    """Bytes of pages that each lower tier may hold, by name."""
    if tiers is None:
        return {}
    found = {"host": tiers.host.budget_bytes} if tiers.host.budget_bytes else {}
    capacity = None if tiers.store is None else tiers.store.stat().capacity
    return found if capacity is None else {**found, "disk": capacity * page_bytes}


def user_cache() -> Path:
    """Where pages are kept unless told otherwise: a folder a model, in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvist" / "pages"


def image_reader(model: Transformer) -> Callable[[bytes], SpanImage] | None:
    """Encoded bytes to a picture for a prompt; None for a model without vision. The reader raises ImageError."""
    vision = model.config.vision
    if vision is None or model.config.image_token_id is None:
        return None
    return lambda data: read_image(model, vision, data)


def read_image(model: Transformer, vision: VisionConfig, data: bytes) -> SpanImage:
    """Decode and cut a picture now; its embeddings are computed when the engine wants them. Raises ImageError."""
    processed = preprocess(decode_image(data), vision)

    def embed() -> torch.Tensor:
        with torch.inference_mode():
            device = model.embed.weight.device
            patches = torch.from_numpy(processed.patches).to(device, model.numerics.dtype)
            return model.encode_image(patches, processed.plan.patch_rows, processed.plan.patch_cols)

    return SpanImage(processed.plan.span_tokens, bytes.fromhex(processed.content_hash), embed)

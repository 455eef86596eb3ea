"""Whole layers in one native call against the same operators called one by one: the same bits, and who decides which one runs.

Toy model over pages: prompts in ragged chunks, several requests' rows at once, drafts, experts in their file's format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.checkpoint.tables import EngramTable
from kvist.engine.session import Sequence, Session
from kvist.kernels.experts import PackedBank
from kvist.kernels.native import native_or_none, pack_fp4
from kvist.model.block import Block
from kvist.model.engram import hash_rows
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset
from kvist.quant import pack_fp8, quantise_fp4_weight, unpack_fp8

pytestmark = pytest.mark.skipif(native_or_none() is None, reason="no C compiler: there is no native code to test")
LENGTHS = (1, 7, 30)


def toy(seed: int = 3) -> Transformer:
    return random_model(preset("tiny"), Numerics(impl="cpu"), seed)


def paged(model: Transformer, slots: int = 3, *, whole: bool = True) -> PagedMemory:
    memory = PagedMemory(model.config, model.numerics, pages=16 * slots, slots=slots, verify_rows=6, page_tokens=8)
    for slot in range(slots):
        memory.open(slot, range(16 * slot, 16 * slot + 16), 0)
    if not whole:
        memory.places = lambda rows, *, block=False: None  # type: ignore[method-assign]
    return memory


def prompts() -> list[Sequence]:
    random = torch.Generator().manual_seed(5)
    return [Sequence(slot, torch.randint(4, 256, (n,), generator=random)) for slot, n in enumerate(LENGTHS)]


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """How often a native function is called."""
    native = native_or_none()
    function, calls = getattr(native, name), [0]

    def call(*arguments: object) -> object:
        calls[0] += 1
        return function(*arguments)

    setattr(native, name, call)
    try:
        yield calls
    finally:
        setattr(native, name, function)


def transcript(model: Transformer, memory: PagedMemory, chunk: int) -> list[Tensor]:
    """Logits of prompts, of six decoded tokens a request, of a run of known tokens, and drafts; then every byte that is kept."""
    session, sequences = Session(model, memory=memory, chunk=chunk), prompts()
    found = [session.prefill(sequences)]
    for step in range(6):
        for sequence in sequences:
            sequence.append(9 + step)
        found.append(session.decode(sequences))
    found.append(session.extend(sequences[1], torch.tensor([4, 5, 6])))
    draft = session.draft(sequences, [7, 8, 9])
    return [*found, draft.logits_RBV, draft.confidence_RB, memory.bytes_PB, memory.rings.values, memory.rings.state]


@pytest.mark.parametrize("chunk", [5, 64])
def test_whole_layers_have_the_bits_of_their_operators(chunk: int) -> None:
    model = toy()
    with counted("kvist_layers") as whole, counted("kvist_linear") as few:
        one = transcript(model, paged(model), chunk)
        assert whole[0]
    with counted("kvist_layers") as whole, counted("kvist_linear") as many:
        other = transcript(model, paged(model, whole=False), chunk)
        assert not whole[0] and many[0] > 5 * few[0]
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), index


def test_experts_packed_once_serve_whole_layers() -> None:
    model = toy()
    with torch.no_grad():
        for block in [*model.layers, *(model.mtp or ())]:
            assert isinstance(block, Block)
            triples = []
            for w1, w2, w3 in block.ffn.bank.layers:  # type: ignore[attr-defined]
                packs = [pack_fp4(*quantise_fp4_weight(layer.weight)) for layer in (w1, w2, w3)]
                triples.append((packs[0], packs[1], packs[2]))
            block.ffn.attach(PackedBank(triples))
    with counted("kvist_layers") as whole:
        one = transcript(model, paged(model), 16)
        assert whole[0]
    other = transcript(model, paged(model, whole=False), 16)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def decoded(model: Transformer, memory: PagedMemory) -> Tensor:
    """Logits after a prompt and one token."""
    session, sequence = Session(model, memory=memory), Sequence(0, torch.arange(4, 24))
    session.prefill([sequence])
    sequence.append(30)
    return session.decode([sequence])


@pytest.mark.parametrize(
    "name", ["attn.wq_b.weight", "ffn.experts.1.w2.weight", "hc_ffn_base", "attn.attn_sink", "attn_norm.weight"]
)
@pytest.mark.parametrize("way", ["written", "exchanged", "moved"])
def test_another_weight_is_seen(name: str, way: str) -> None:
    model = toy()
    before = decoded(model, paged(model))
    path, _, leaf = f"layers.2.{name}".rpartition(".")
    module = model.get_submodule(path)
    weight = getattr(module, leaf)
    with torch.no_grad():
        if way == "written":
            weight.mul_(1.5)
        elif way == "exchanged":
            setattr(module, leaf, torch.nn.Parameter(weight * 1.5, requires_grad=weight.requires_grad))
        else:
            weight.data = weight.data * 1.5
    after = decoded(model, paged(model))
    assert not torch.equal(before, after)
    assert torch.equal(after, decoded(model, paged(model, whole=False)))


def test_a_weight_written_between_two_tokens_is_seen() -> None:
    model = toy()
    steps = []
    sessions = [Session(model, memory=paged(model, whole=whole)) for whole in (True, False)]
    sequences = [Sequence(0, torch.arange(4, 24)) for _ in sessions]
    for session, sequence in zip(sessions, sequences, strict=True):
        session.prefill([sequence])
    for factor in (1.0, 1.0, 0.5):
        with torch.no_grad():
            model.layers[2].attn.wkv.weight.mul_(factor)  # type: ignore[union-attr, operator]
        for sequence in sequences:
            sequence.append(30)
        steps.append([session.decode([sequence]) for session, sequence in zip(sessions, sequences, strict=True)])
    assert all(torch.equal(one, other) for one, other in steps)


def test_who_listens_to_a_module_hears_it() -> None:
    model = toy()
    expected = decoded(model, paged(model))
    heard = []
    layer = model.layers[1]
    assert isinstance(layer, Block)
    handle = layer.ffn.gate.register_forward_hook(lambda module, inputs, output: heard.append(len(inputs[0])))
    assert torch.equal(decoded(model, paged(model)), expected)
    assert heard[-1] == 1
    handle.remove()
    count = len(heard)
    assert torch.equal(decoded(model, paged(model)), expected) and len(heard) == count


def test_a_copied_model_packs_its_own_weights() -> None:
    model = toy()
    expected = decoded(model, paged(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[0].attn.wq_a.weight.zero_()  # type: ignore[union-attr, operator]
    assert not torch.equal(decoded(twin, paged(twin)), expected)
    assert torch.equal(decoded(model, paged(model)), expected)


def test_ngram_rows_are_those_of_the_definition() -> None:
    model = random_model(preset("nano"), Numerics(impl="cpu"), 1)
    random = torch.Generator().manual_seed(2)
    for tokens in (1, 2, 3, 40):
        ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=random)
        text = torch.rand(tokens, generator=random) < 0.8
        for start in (0, tokens // 2, tokens - 1, tokens):
            with counted("kvist_ngram_rows") as calls:
                found = model.engram_ids(ids, text, start)
                assert calls[0] == 1
            assert model.token_classes_V is not None and found is not None
            classes = model.token_classes_V[ids]
            assert torch.equal(found, hash_rows(model.config, classes, text, model.pad_class, start))
    for bad in (-1, model.config.vocab_size):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary"):
            model.engram_ids(torch.tensor([5, bad]), torch.ones(2, dtype=torch.bool))


def test_table_rows_are_those_of_the_format() -> None:
    random = torch.Generator().manual_seed(3)
    codes, scales = pack_fp8(
        torch.randn(50, 64, generator=random) * torch.exp2(torch.randint(-40, 40, (50, 1), generator=random))
    )
    codes = codes.view(torch.uint8).clone()
    scales = scales.view(torch.uint8).clone()
    codes[3, 5], scales[4, 1], scales[5, 0] = 0x7F, 255, 0
    table = EngramTable(codes, scales, torch.float32)
    ids = torch.randint(0, 50, (4, 7), generator=random)
    ids[0, :3] = torch.tensor([3, 4, 5])
    with counted("kvist_table_rows") as calls:
        found = table.rows(ids)
        assert calls[0] == 1
    expected = unpack_fp8(codes[ids.flatten()], scales[ids.flatten()], torch.float32).view(4, 7, 64)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(table.rows(ids[:, ::2]).nan_to_num(), expected[:, ::2].nan_to_num())
    with pytest.raises(ValueError, match=r"leave the table's 0\.\.49"):
        table.rows(torch.tensor([1, 50]))

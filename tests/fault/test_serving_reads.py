"""Weight files that fail while a model runs: an error of the request that needs the bytes, named; the others go on.

Truncation, a vanished shard, I/O errors and slow reads, for routed experts and for Engram rows (CKP-02 and CKP-04 after the
start, ENG-04 inside a batch). No case may end the process, which a memory map would (SIGBUS).
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.checkpoint import (
    CheckpointMismatch,
    EngramStore,
    ExpertStore,
    FileReads,
    ReadFailed,
    build_model,
    convert,
    expert_store,
    fetch_counters,
    open_files,
    save_checkpoint,
)
from kvist.checkpoint.formats import Entry
from kvist.engine.session import Sequence, Session
from kvist.inventory import parameters
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset
from kvist.testing import bit_equal

CONFIG = preset("tiny")
CLASSES = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
PROMPT = torch.randint(4, 256, (30,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "toy"
    generator = torch.Generator().manual_seed(5)
    state = {p.name: torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5 for p in parameters(CONFIG)}
    save_checkpoint(CONFIG, state, None, out, shard_bytes=400_000)
    return out


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture(scope="module")
def expected(pristine) -> Tensor:
    return answer(Session(build_model(pristine, classes=CLASSES)))


def answer(session: Session) -> Tensor:
    """One request: the logits after a prompt and after three generated tokens."""
    with session.slot() as slot:
        sequence = Sequence(slot, PROMPT)
        logits = [session.prefill([sequence])]
        for _ in range(3):
            sequence.append(int(logits[-1].argmax()))
            logits.append(session.decode([sequence]))
        return torch.cat(logits)


def served(folder: Path, impl: str = "ref") -> Session:
    """A model that has read nothing but what it keeps: every expert and row is still to be fetched."""
    model = build_model(
        folder,
        numerics=Numerics(impl=impl),
        classes=CLASSES,
        access="read",
        engram="read",
        expert_budget_bytes=30_000,
        engram_cache_bytes=0,
    )
    return Session(model, chunk=8)


class Disk:
    """The file system as `FileReads` sees it, with faults."""

    def __init__(self) -> None:
        self.code = 0
        self.delay_s = 0.0
        self.piece = 1 << 30
        self.lost: Entry | None = None

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        time.sleep(self.delay_s)
        lost = self.lost
        if lost is not None and os.path.samestat(os.fstat(descriptor), lost.file.stat()):
            meets = offset < lost.offset + lost.nbytes and lost.offset < offset + len(target)
            self.code = errno.EIO if meets else 0
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return os.preadv(descriptor, [target[: self.piece]], offset)


def on_disk(folder: Path, disk: Disk, numerics: Numerics | None = None) -> Session:
    """A model that reads experts and rows through `disk`."""
    _, config, files = open_files(folder, "read")
    model = build_model(folder, numerics=numerics, classes=CLASSES, access="read", expert_budget_bytes=30_000)
    model.attach_experts(ExpertStore(files, config, model.numerics, 30_000, reads=FileReads(pread=disk.pread)).banks)
    rows = FileReads(pread=disk.pread, random_access=True)
    model.attach_engram(CLASSES, EngramStore(files, config, torch.float32, cache_bytes=0, reads=rows).tables)
    return Session(model, chunk=8)


def shard_of(model: Transformer, folder: Path, name: str) -> Path:
    _, _, files = open_files(folder, "read")
    return files.entry(name).file


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_a_shard_that_is_cut_short_fails_the_request_and_only_until_it_is_whole_again(folder, expected, impl) -> None:
    session = served(folder, impl)
    good = answer(session)
    assert bit_equal(good, expected) or impl == "cpu"
    shard = shard_of(session.model, folder, "layers.0.ffn.experts.0.w1.weight")
    whole = shard.read_bytes()
    os.truncate(shard, 4096)
    with pytest.raises(ReadFailed) as error:
        answer(session)
    message = str(error.value)
    assert str(shard) in message
    assert "of layer 0)" in message
    assert "has 4096 bytes now" in message
    assert "restart with a complete checkpoint" in message
    # The same file made whole: the next request is answered as if nothing had been.
    with shard.open("r+b") as handle:
        handle.write(whole)
    assert bit_equal(answer(session), good)
    counters = fetch_counters(session.model).experts
    assert counters is not None
    assert counters.failures >= 1
    assert not session.memory.slots, "the failed request left its slot behind"


def test_a_table_that_is_cut_short(folder, expected) -> None:
    session = served(folder)
    assert bit_equal(answer(session), expected)
    shard = shard_of(session.model, folder, "layers.1.engram.embed.weight")
    whole = shard.read_bytes()
    _, _, files = open_files(folder, "read")
    os.truncate(shard, files.entry("layers.1.engram.embed.weight").offset + 64)
    with pytest.raises(ReadFailed, match=r"row \d+ of table 'layers.1.engram.embed.\w+'|of layer \d+\)"):
        answer(session)
    with shard.open("r+b") as handle:
        handle.write(whole)
    assert bit_equal(answer(session), expected)


def test_a_table_read_beyond_the_end_names_its_row(folder) -> None:
    for pread in (None, Disk().pread):
        _, config, files = open_files(folder, "read")
        entry = files.entry("layers.1.engram.embed.weight")
        table = EngramStore(files, config, torch.float32, reads=FileReads(pread=pread)).tables[1]
        whole = entry.file.read_bytes()
        os.truncate(entry.file, entry.offset + 100 * 32 + 5)
        with pytest.raises(ReadFailed, match=rf"row 100 of table .*has {entry.offset + 3205} bytes now"):
            table.rows(torch.tensor([[7, 100], [200, 3]]))
        assert table.counters.failures == 1
        entry.file.write_bytes(whole)
        table.rows(torch.tensor([[7, 100], [200, 3]]))


def test_a_shard_that_is_gone_before_it_is_opened(folder) -> None:
    """CKP-02 after the start: the index was right when the model was built."""
    session = served(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ReadFailed, match=r"model-0000\d-of-0000\d.safetensors: .* cannot be read.*No such file"):
        answer(session)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_an_io_error_is_named_and_the_next_request_is_answered(folder, expected, code) -> None:
    disk = Disk()
    session = on_disk(folder, disk)
    assert bit_equal(answer(session), expected)
    disk.code = code
    with pytest.raises(ReadFailed, match=os.strerror(code)):
        answer(session)
    disk.code = 0
    assert bit_equal(answer(session), expected)


def test_slow_and_partial_reads_change_no_bit(folder, expected) -> None:
    disk = Disk()
    disk.delay_s, disk.piece = 0.0005, 1000
    session = on_disk(folder, disk)
    assert bit_equal(answer(session), expected)
    counters = fetch_counters(session.model)
    assert counters.experts is not None
    assert counters.engram is not None
    assert counters.experts.stall_s > 0.01
    assert counters.engram.stall_s > 0.01
    assert counters.experts.failures == counters.engram.failures == 0


def picture_request(slot: int) -> Sequence:
    """The prompt as if it were one image span: its tokens are routed by the image bias."""
    sequence = Sequence(slot, PROMPT)
    sequence.text_T[:] = False
    return sequence


def test_a_request_that_does_not_need_the_bytes_is_not_disturbed(folder) -> None:
    """Text goes to experts 0 and 1 of the first layer, pictures to 6 and 7; a bad sector lies under expert 7."""
    disk = Disk()
    session = on_disk(folder, disk)
    router = session.model.layers[0].ffn.gate
    router.bias.data[:] = torch.tensor([50.0, 50.0, 0, 0, 0, 0, 0, 0])
    router.bias_vl.data[:] = torch.tensor([0.0, 0, 0, 0, 0, 0, 50.0, 50.0])
    alone = answer(session)
    disk.lost = open_files(folder, "read")[2].entry("layers.0.ffn.experts.7.w2.weight")
    for _ in range(2):
        assert bit_equal(answer(session), alone)
        with pytest.raises(ReadFailed, match=r"experts\.7\.w1.* \(expert 7 of layer 0\).*Input/output"):
            session.prefill([picture_request(0)])
        session.memory.release(0)


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("experts", ["fp4", "fp8", "bf16"])
def test_in_a_batch_only_the_rows_that_chose_the_lost_expert_are_lost(pristine, tmp_path, impl, experts) -> None:
    """`isolate`: their logits are NaN, which ends their request; the neighbours' bits are what they are without them."""
    folder, disk = pristine, Disk()
    if experts != "fp4":
        folder = tmp_path / "other"
        convert(pristine, folder, experts=experts)
    session = on_disk(folder, disk, Numerics(impl=impl))
    router = session.model.layers[0].ffn.gate
    router.bias.data[:] = torch.tensor([50.0, 50.0, 0, 0, 0, 0, 0, 0])
    router.bias_vl.data[:] = torch.tensor([0.0, 0, 0, 0, 0, 0, 50.0, 50.0])

    def batch() -> Tensor:
        session.memory.slots.clear()
        return session.prefill([Sequence(0, PROMPT), picture_request(1), Sequence(2, PROMPT[:9])])

    good = batch()
    store = expert_store(session.model)
    assert store is not None
    store.isolate = True
    disk.lost = open_files(folder, "read")[2].entry("layers.0.ffn.experts.7.w2.weight")
    for _ in range(2):
        rows = batch()
        assert bool(rows[1].isnan().all())
        assert bit_equal(rows[[0, 2]], good[[0, 2]])
        failures = store.take_failures()
        assert failures
        assert all("(expert 7 of layer 0)" in str(error) for error in failures)
    disk.lost, disk.code = None, 0
    assert bit_equal(batch(), good)
    assert store.take_failures() == []


def test_ckp_02_and_04_are_still_decided_at_the_start(folder) -> None:
    """Banks change nothing about what is refused before the first request."""
    shard = sorted(folder.glob("*.safetensors"))[1]
    with shard.open("ab") as handle:
        handle.write(b"\0" * 8)
    with pytest.raises(CheckpointMismatch, match="8 bytes follow"):
        build_model(folder, classes=CLASSES, expert_budget_bytes=1 << 20)
    shard.unlink()
    with pytest.raises(CheckpointMismatch, match="missing shard"):
        build_model(folder, classes=CLASSES, expert_budget_bytes=1 << 20)

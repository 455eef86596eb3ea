"""Training: the fast forward equals the model, normalisation, expert loads, separation of gradients, exact resumption.

Everything runs on the toy configuration in float32 on the CPU. Named cases: TRN-01, TRN-03, TRN-05.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvist import quant
from kvist.checkpoint import build_model, is_base
from kvist.engine.session import Session
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, consecutive_rows
from kvist.presets import tiny
from kvist.train import draft, quantisers, sinkhorn
from kvist.train.drafting import train_draft
from kvist.train.evaluate import documents, windows
from kvist.train.export import checkpoint_values, export
from kvist.train.loop import Recipe, Run, Team, leaves, train, train_step
from kvist.train.loss import Share, contribute, sequence_balance
from kvist.train.network import Mode, Network
from kvist.train.optimiser import Loads, Optimiser, clip, orthogonalise
from kvist.train.sampling import Corpus, Mixture, Recall, Sampler, copy_row
from kvist.train.shapes import Batch, Geometry
from kvist.train.weights import Weights, released, stacked, start_values, storages, working_weights

CONFIG = tiny()
CLASSES = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
CPU = torch.device("cpu")
RECALL = Recall(lead=(10, 11), middle=(12,), end=(13,), names=tuple(range(100, 150)), digits=tuple(range(20, 30)))
RECIPE = Recipe(
    steps=8, step_tokens=256, micro_tokens=128, short_length=32, length=64, long_length=128, log_every=2, dense_until=0.2,
    quantise_from=0.5, long_from=0.8, warmup_steps=2,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiers of a language in which a token mostly follows its predecessor by a small step."""
    at, rng = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for tier in ("prose", "docs", "code"):
        for split in ("train", "heldout"):
            ids = np.cumsum(rng.integers(1, 4, 6000)) % 180 + 20
            ids.astype("<u2").tofile(at / f"{tier}.{split}.u16")
            np.save(at / f"{tier}.{split}.offsets.npy", np.array([0, 2500, 6000]))
            np.save(at / f"{tier}.{split}.bytes.npy", np.array([7500, 10500]))
    return at


@pytest.fixture
def sampler(folder: Path) -> Sampler:
    return Sampler(Corpus(folder, "train"), Mixture(), RECALL, 1)


def a_batch(rows: int, length: int, seed: int = 0, text: Tensor | None = None) -> Batch:
    ids = torch.randint(0, CONFIG.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(
        tokens=ids[:, :-1], targets=ids[:, 1:], counted=torch.ones(rows, length, dtype=torch.bool),
        tier=torch.zeros(rows, dtype=torch.int64), text=text,
    )  # fmt: skip


def geometry(batch: int, length: int) -> Geometry:
    return Geometry(config=CONFIG, batch=batch, length=length, device=CPU)


def backbone_leaves(seed: int = 3) -> Weights:
    return leaves(start_values(CONFIG, seed), CPU, trained="layers.")


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("image", [False, True])
def test_forward_equals_the_model(quantise: bool, image: bool) -> None:
    """The uniform, fused forward with selection equals `Transformer` over `DenseMemory`, in losses and in targets."""
    numerics = Numerics(quantise=quantise)
    model, batch = random_model(CONFIG, numerics), a_batch(2, 46)
    text = torch.ones(2, 46, dtype=torch.bool)
    if image:
        text[1, 7:19] = False
    ids_N, positions_N, segments = consecutive_rows([(b, 0, batch.tokens[b]) for b in range(2)])
    engram = [model.engram_ids(batch.tokens[b], text[b]) for b in range(2)]
    rows = Rows(
        token_ids_N=ids_N, positions_N=positions_N, text_N=text.flatten(), segments=segments,
        engram_LNX=torch.cat([e for e in engram if e is not None], 1),
    )  # fmt: skip
    flow = model(rows, DenseMemory(CONFIG, numerics))
    wanted = torch.nn.functional.cross_entropy(model.logits(flow), batch.targets.flatten(), reduction="none")
    network = Network(CONFIG, weights_of(model), geometry(2, 46), Mode(select=True, quantise=quantise))
    network.wants_targets = True
    assert model.token_classes_V is not None
    out = network.run(dataclasses.replace(batch, text=text), model.token_classes_V)
    assert out.losses_N is not None
    torch.testing.assert_close(out.losses_N, wanted, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(out.targets, flow.targets, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def weights_of(model: torch.nn.Module) -> Weights:
    state = dict(model.state_dict())
    for layer in CONFIG.engram_layer_ids:
        state[f"layers.{layer}.engram.embed.weight"] = model.layers[layer].engram.reader.values_RX  # type: ignore[union-attr, index]
    return stacked(state)


def test_dense_stage_attends_every_visible_row() -> None:
    """Without selection a pass equals one whose k exceeds the number of rows."""
    everything = dataclasses.replace(CONFIG, index_topk=64, candidate_topk_blocks=64)
    weights, batch = start_values(CONFIG, 1), a_batch(1, 32)
    free = Network(CONFIG, weights, geometry(1, 32), Mode(select=False, quantise=False)).run(batch, CLASSES)
    wide = Network(everything, weights, geometry(1, 32), Mode(select=True, quantise=False)).run(batch, CLASSES)
    torch.testing.assert_close(free.losses_N, wide.losses_N)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(quantisers.fp8, quant.fake_fp8), (quantisers.mxfp4, quant.fake_mxfp4), (quantisers.main_fp4, quant.fake_main_fp4)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_quantisers_equal_the_released_ones(mine: object, theirs: object, dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 64).unsqueeze(1)
    x = x.to(dtype).requires_grad_()
    assert callable(mine)
    assert callable(theirs)
    y = mine(x)
    torch.testing.assert_close(y, theirs(x), rtol=1e-6, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_quantised_weights_are_what_the_export_stores(tmp_path: Path) -> None:
    """Quantisation-aware training sees the very values that a saved checkpoint gives back."""
    config = dataclasses.replace(CONFIG, engram_compressed_vocab_size=CONFIG.engram_compressed_vocab_size)
    weights = start_values(config, 5)
    export(config, weights, None, tmp_path / "model", shard_bytes=1 << 20)
    model = build_model(tmp_path / "model", classes=CLASSES)
    seen = released(working_weights(weights, storages(config), torch.float32, quantise=True), config)
    for name, value in model.state_dict().items():
        if name.endswith(("wq_b.weight", "w1.weight", "w2.weight", "wo_a.weight")):
            assert torch.equal(value, seen[name]), name


def test_sinkhorn_gradient() -> None:
    """The gradient of the limit equals that of the iterations once they have converged."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, 4, generator=generator).double().requires_grad_()
    weight = torch.randn(50, 4, 4, generator=generator).double()
    (sinkhorn._forward(logits, 60, 0.0) * weight).sum().backward()
    mine = logits.detach().clone().requires_grad_()
    (sinkhorn.balance(mine, 60, 0.0) * weight).sum().backward()
    torch.testing.assert_close(mine.grad, logits.grad, rtol=1e-6, atol=1e-9)


def test_indexer_and_backbone_gradients_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distillation loss moves indexers only; token losses move everything else."""
    batch, shape = a_batch(2, 32), geometry(2, 32)
    queries = torch.tensor([3, 17, 31])

    def gradients(of_index: bool) -> set[str]:
        weights = backbone_leaves()
        out = Network(CONFIG, weights, shape, Mode(select=True, quantise=False), queries).run(batch, CLASSES)
        assert out.losses_N is not None
        (torch.stack(list(out.index_losses.values())).sum() if of_index else out.losses_N.mean()).backward()
        return {name for name, w in weights.items() if w.grad is not None and bool((w.grad != 0).any())}

    index, tokens = gradients(True), gradients(False)
    assert index == {name for name in backbone_leaves() if ".indexer." in name}
    assert not any(".indexer." in name for name in tokens)
    assert {"embed.weight", "head.weight", "layers.2.attn.compressor.wgate.weight", "layers.1.engram.embed.weight"} <= tokens


def gradients_in_parts(batch: Batch, parts: int) -> tuple[float, Weights, Loads]:
    weights, loads, loss = backbone_leaves(), Loads(), 0.0
    size = len(batch.tokens) // parts
    share = Share(count=float(batch.counted.sum()), parts=parts)
    for part in range(parts):
        piece = batch.rows(slice(part * size, (part + 1) * size))
        figures = contribute(
            CONFIG,
            weights,
            storages(CONFIG),
            geometry(size, batch.tokens.shape[1]),
            Mode(select=True, quantise=False),
            piece,
            CLASSES,
            share,
            loads,
            queries_n=torch.tensor([5, 20, 39]),
        )
        loss += float(figures.by_tier[0].sum()) / share.count
    return loss, {name: w.grad for name, w in weights.items() if w.grad is not None}, loads


@pytest.mark.parametrize("parts", [2, 4])
def test_trn_01_loss_does_not_depend_on_micro_batches(parts: int) -> None:
    """TRN-01: sequences with 3, 5, 11 and 40 counted tokens give the same loss and gradients however they are split."""
    batch = a_batch(4, 40)
    counted = torch.arange(40) < torch.tensor([[3], [5], [11], [40]])
    batch = dataclasses.replace(batch, counted=counted)
    loss, grads, loads = gradients_in_parts(batch, 1)
    assert int(counted.sum()) == 59
    split_loss, split_grads, split_loads = gradients_in_parts(batch, parts)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(split_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    for prefix, counts in loads.counts.items():
        assert torch.equal(split_loads.counts[prefix], counts)
        assert float(counts.sum()) == 59 * CONFIG.n_activated_experts


def test_trn_03_draft_gradient_does_not_depend_on_micro_batches() -> None:
    """TRN-03: the draft loss over 4 equal parts, each divided by 4, gives the gradient of the whole."""
    values, batch = start_values(CONFIG, 2), a_batch(4, 32)
    mode, anchors = Mode(select=True, quantise=False), torch.tensor([0, 7, 20])

    def gradient(parts: int) -> Tensor:
        weights = leaves(values, CPU, trained="mtp.")
        for part in range(parts):
            size = 4 // parts
            piece, shape = batch.rows(slice(part * size, (part + 1) * size)), geometry(size, 32)
            frozen = draft.backbone(CONFIG, weights, shape, mode, piece, CLASSES)
            loss, _ = draft.draft_loss(CONFIG, weights, shape, mode, piece, frozen, anchors, Loads())
            (loss / parts).backward()
        assert all(w.grad is None for name, w in weights.items() if not name.startswith("mtp."))
        grad = weights["mtp.0.main_proj.weight"].grad
        assert grad is not None
        return grad

    torch.testing.assert_close(gradient(4), gradient(1), rtol=1e-4, atol=1e-7)


def test_trn_05_loads_and_bias() -> None:
    """TRN-05: padding is not counted, text and image loads move their own biases once, parts add up."""
    text = torch.ones(4, 40, dtype=torch.bool)
    text[1, 5:30] = False
    counted = torch.ones(4, 40, dtype=torch.bool)
    counted[:, 20:] = False
    batch = dataclasses.replace(a_batch(4, 40, text=text), counted=counted)
    _, _, whole = gradients_in_parts(batch, 1)
    _, _, parts = gradients_in_parts(batch, 4)
    for prefix, counts in whole.counts.items():
        assert torch.equal(parts.counts[prefix], counts)
        assert counts.sum(1).tolist() == [65 * CONFIG.n_activated_experts, 15 * CONFIG.n_activated_experts]
    weights = backbone_leaves()
    name = "layers.0.ffn.gate.bias"
    counts = whole.counts["layers.0"].clone()
    whole.update(weights, 0.01)
    assert torch.equal(weights[name], 0.01 * torch.sign(counts[0].mean() - counts[0]))
    assert torch.equal(weights[f"{name}_vl"], 0.01 * torch.sign(counts[1].mean() - counts[1]))
    assert whole.counts == {}


def test_router_bias_of_a_modality_without_tokens_stays() -> None:
    weights, loads = backbone_leaves(), Loads()
    loads.add("layers.0", torch.tensor([[True, False, False, False, False, False, False, False]]), torch.tensor([True]), None)
    loads.update(weights, 0.01)
    assert float(weights["layers.0.ffn.gate.bias"][0]) == pytest.approx(-0.01)
    assert not bool(weights["layers.0.ffn.gate.bias_vl"].any())


def test_muon_orthogonalises_each_matrix() -> None:
    x = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(x))
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.4


def test_balance_of_two_sequences() -> None:
    """Mean over sequences of sum_e (E / K) f_e P_e: 1 where all is even, E / K where all goes to the same K experts."""
    even = torch.tensor([[True, False], [False, True]])
    assert sequence_balance(even, torch.ones(2, 2), 1).item() == pytest.approx(1.0)
    alone = torch.tensor([[True, False], [True, False]])
    assert sequence_balance(alone, torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1).item() == pytest.approx(2.0)
    both = torch.cat([even, alone]), torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 3.0], [3.0, 1.0]])
    assert sequence_balance(*both, 2).item() == pytest.approx((1.0 + 1.0) / 2)
    assert sequence_balance(*both, 1).item() == pytest.approx(1.5 * 0.5 + 0.5 * 0.5)


def test_gradients_are_clipped_by_their_joint_norm() -> None:
    weights = {name: torch.zeros(2, requires_grad=True) for name in "ab"}
    for limit, left in ((1.3, 0.1), (13.1, 1.0)):
        weights["a"].grad, weights["b"].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])
        assert clip(weights, limit).item() == pytest.approx(13)
        torch.testing.assert_close(weights["a"].grad, left * torch.tensor([3.0, 4.0]))
        torch.testing.assert_close(weights["b"].grad, left * torch.tensor([0.0, 12.0]))


def test_adamw_is_torchs_with_a_rate_and_a_decay_a_weight() -> None:
    draw = torch.Generator().manual_seed(0)
    ours = {
        name: torch.randn(6, generator=draw, requires_grad=True) for name in ("norm.weight", "hc_head_base", "layers.0.x_scale")
    }
    theirs = {name: w.detach().clone().requires_grad_() for name, w in ours.items()}
    optimiser = Optimiser(CONFIG, ours)
    assert sorted(optimiser.adam_names) == sorted(ours)
    groups = [
        {"params": [theirs[name]], "lr": 0.01 * scale, "weight_decay": decay}
        for name, scale, decay in (("norm.weight", 1.0, 0.1), ("hc_head_base", 1.0, 0.0), ("layers.0.x_scale", 0.3, 0.0))
    ]
    peer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-12)
    for _ in range(3):
        for name in ours:
            theirs[name].grad = torch.randn(6, generator=draw)
            ours[name].grad = theirs[name].grad.clone()
        optimiser.step(0.01)
        peer.step()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name])


def test_muon_moves_by_nesterov_momentum_and_decays() -> None:
    """W - rate * (0.18 sqrt(max(out, in)) orth(0.05 g + 0.95 m) + 0.1 W) with m a running mean of 0.05 g."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(4, 6, generator=draw, requires_grad=True)
    others = {"norm.weight": torch.ones(6, requires_grad=True)}
    optimiser = Optimiser(CONFIG, {"layers.0.attn.wq_a.weight": weight, **others}, muon_ratio=2.0)
    expected, momentum = weight.detach().clone(), torch.zeros(4, 6)
    for _ in range(3):
        weight.grad = torch.randn(4, 6, generator=draw)
        momentum = 0.95 * momentum + 0.05 * weight.grad
        update = orthogonalise((0.05 * weight.grad + 0.95 * momentum)[None])[0]
        expected = expected - 0.02 * (0.18 * 6**0.5 * update + 0.1 * expected)
        optimiser.step(0.01)
        torch.testing.assert_close(weight.detach(), expected)


def test_every_weight_has_one_rule() -> None:
    weights = backbone_leaves()
    optimiser = Optimiser(CONFIG, weights)
    assert sorted([*optimiser.shapes, *optimiser.adam_names]) == sorted(n for n, w in weights.items() if w.requires_grad)
    heads = {name.partition(".attn.")[2] or name: shape[0] for name, shape in optimiser.shapes.items() if ".experts." not in name}
    assert heads["wq_b.weight"] == CONFIG.n_heads
    assert heads["indexer.wq_b.weight"] == CONFIG.index_n_heads
    assert heads["wo_a.weight"] == CONFIG.o_groups
    assert heads["layers.1.engram.wkv.weight"] == CONFIG.hc_mult + 1
    assert heads["wo_b.weight"] == 1
    assert {"embed.weight", "head.weight", "layers.1.engram.embed.weight"} <= set(optimiser.adam_names)
    assert not any(name.endswith(("gate.bias", "gate.bias_vl")) for name in optimiser.weights)


def test_a_few_steps_learn(sampler: Sampler, tmp_path: Path) -> None:
    """All stages run, the loss falls, and the metrics say so."""
    run = Run.start(CONFIG, dataclasses.replace(RECIPE, steps=20), CPU)
    assert train(run, sampler, tmp_path, CLASSES, dtype=torch.float32, report=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, last = (float(line.split('"loss": ')[1].split(",")[0]) for line in (lines[0], lines[-1]))
    assert last < first - 0.7
    assert '"length": 128' in lines[-1]


def test_resume_is_exact(sampler: Sampler, tmp_path: Path) -> None:
    """Stopping between two steps changes no bit of the weights, the optimiser or the next batch."""
    straight = Run.start(CONFIG, RECIPE, CPU)
    for _ in range(4):
        train_step(straight, sampler, Team(), CLASSES, torch.float32, None)
    halves = Run.start(CONFIG, RECIPE, CPU)
    for _ in range(2):
        train_step(halves, sampler, Team(), CLASSES, torch.float32, None)
    halves.save(tmp_path / "state.pt")
    again = Run.start(CONFIG, dataclasses.replace(RECIPE), CPU)
    again.load(tmp_path / "state.pt")
    fresh = Sampler(sampler.corpus, Mixture(), RECALL, 1)
    for _ in range(2):
        train_step(again, fresh, Team(), CLASSES, torch.float32, None)
    assert (again.step, again.positions) == (straight.step, straight.positions)
    for name, weight in straight.weights.items():
        assert torch.equal(weight, again.weights[name]), name
    for name, value in straight.optimiser.momentum.items():
        assert torch.equal(value, again.optimiser.momentum[name])


def test_state_is_saved_while_running(sampler: Sampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies between two log lines has lost at most what came after the last saved one."""
    run = Run.start(CONFIG, RECIPE, CPU)

    def step(*arguments: object) -> object:
        if run.step == 5:
            raise KeyboardInterrupt
        return train_step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("kvist.train.loop.train_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(run, sampler, tmp_path, CLASSES, dtype=torch.float32, report=False, save_every=0.0)
    again = Run.start(CONFIG, RECIPE, CPU)
    again.load(tmp_path / "state.pt")
    assert again.step == 4
    assert sum(again.tokens.values()) == 4 * RECIPE.step_tokens


def test_draft_stage_export_and_reload(sampler: Sampler, tmp_path: Path) -> None:
    """The draft stage leaves the backbone alone; what it trained can be saved, loaded and drafted with."""
    run = Run.start(CONFIG, RECIPE, CPU)
    before = {name: w.detach().clone() for name, w in run.weights.items()}
    line = train_draft(
        run, sampler, tmp_path, CLASSES, dtype=torch.float32, steps=12, length=64, micro_tokens=128, anchors=16
    )  # fmt: skip
    changed = {name for name, w in run.weights.items() if not torch.equal(w, before[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)
    assert line["loss"] < 1.05
    files = export(CONFIG, run.weights, None, tmp_path / "model", shard_bytes=300_000)
    assert len(files) > 1
    assert is_base(tmp_path / "model"), "what is trained here was not tuned to chat"
    values = checkpoint_values(CONFIG, tmp_path / "model")
    export(CONFIG, values, None, tmp_path / "again", shard_bytes=300_000)
    assert values.keys() == run.weights.keys()
    for name, value in checkpoint_values(CONFIG, tmp_path / "again").items():
        assert torch.equal(value, values[name]), name
    session = Session(build_model(tmp_path / "model", classes=CLASSES))
    assert session.score(torch.arange(20, 60)).shape == (40, CONFIG.vocab_size)


def test_draft_pass_equals_the_model() -> None:
    """The vectorised block pass proposes what `DraftBlocks` proposes at the same positions."""
    numerics = Numerics(quantise=False)
    model, batch, anchors = random_model(CONFIG, numerics), a_batch(1, 40), torch.tensor([1, 12, 30])
    weights, shape, mode = weights_of(model), geometry(1, 40), Mode(select=True, quantise=False)
    assert model.token_classes_V is not None
    frozen = draft.backbone(CONFIG, weights, shape, mode, batch, model.token_classes_V)
    slots = anchors.unsqueeze(1) + 1 + torch.arange(CONFIG.dspark_block_size)
    x_RD, _ = draft._blocks(CONFIG, weights, shape, mode, batch, frozen, anchors, slots, slots.flatten(), Loads())
    assert model.mtp is not None
    for row, anchor in enumerate(anchors.tolist()):
        session = Session(model, ced=False)
        with session.slot() as slot:
            ids_N, positions_N, segments = consecutive_rows([(slot, 0, batch.tokens[0, : anchor + 1])])
            engram = model.engram_ids(ids_N, torch.ones_like(ids_N, dtype=torch.bool))
            rows = Rows(
                token_ids_N=ids_N, positions_N=positions_N, text_N=torch.ones_like(ids_N, dtype=torch.bool), segments=segments,
                engram_LNX=engram,
            )  # fmt: skip
            flow = model(rows, session.memory)
            model.mtp.observe(flow.targets, rows, session.memory)
            found = model.mtp.forward(
                batch.tokens[0, anchor + 1 : anchor + 2], torch.tensor([anchor]), [slot], session.memory, model.embed, model.head
            )
        size = CONFIG.dspark_block_size
        norm = weights[f"mtp.{CONFIG.n_mtp_layers - 1}.norm.weight"]
        h = draft.pieces.norm(x_RD[row * size : (row + 1) * size], norm, CONFIG.norm_eps)
        torch.testing.assert_close(h @ weights["head.weight"].T, found.base_RBV[0], rtol=1e-3, atol=1e-3)


def test_sampler_is_a_function_of_the_number(sampler: Sampler, folder: Path) -> None:
    other = Sampler(Corpus(folder, "train"), Mixture(), RECALL, 1)
    other.batch(range(50, 60), 64)
    a, b = sampler.batch(range(3, 9), 64), other.batch(range(3, 9), 64)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.tokens[:, 1:], a.targets[:, :-1])


def test_an_epoch_visits_every_cell_once(sampler: Sampler) -> None:
    cells = len(sampler.corpus.ids["prose"]) // 64 - 1
    starts = {tuple(sampler._slice("prose", order, 65)[:8].tolist()) for order in range(cells)}
    assert len(starts) == cells


def test_mixture_shares_are_checked(folder: Path) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Sampler(Corpus(folder, "train"), Mixture(prose=0.9), RECALL, 1)


def test_synthetic_rows_repeat_what_they_say() -> None:
    rng = np.random.default_rng(0)
    row = RECALL.row(rng.integers(150, 250, 600).astype(np.uint16), rng)
    asked = [i for i in range(len(row) - 12) if row[i] == 10 and row[i + 1] == 11 and row[i + 5] == 12]
    statements = [tuple(row[i : i + 12].tolist()) for i in asked]
    assert len(statements) == 12
    assert all(statements.count(s) == 2 for s in statements)
    copied = copy_row(np.arange(1000).astype(np.uint16), rng)
    assert 1000 // 16 <= 1000 - len(set(copied.tolist())) <= 1000 // 3


def test_windows_count_every_target_once(folder: Path) -> None:
    ids, size = documents(Corpus(folder, "heldout"), "prose", 10**6)
    assert (len(ids), size) == (6000, 18000)
    batches = list(windows(ids, geometry(4, 64), 2))
    assert sum(int(b.counted.sum()) for b in batches) == len(ids) - 1

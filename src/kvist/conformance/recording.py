"""Runs one sequence through the model and records what the golden cases record, under the same names.

The model is observed through forward hooks, so that nothing in it exists for this purpose. Must not know expected values.
Shapes: N positions of a run, S streams, D model width, K picked ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvist.conformance.case import Case, Run
from kvist.conformance.errors import CaseError
from kvist.conformance.prompt import Prompt, integers
from kvist.conformance.quirk import ReleasedQuirkMemory
from kvist.model.block import Block
from kvist.model.dspark import Draft
from kvist.model.memory import DenseMemory
from kvist.model.transformer import Flow, Transformer

PER_PROMPT = ("residual", "pre_mix", "engram_out")


@dataclass
class Recording:
    """Tensors of one run by the names of the goldens README (`residual.3`, `topk.8`, ...), parts joined over the passes.

    Per-layer stream tensors cover the prompt only, all of its positions; everything else covers the whole run.
    """

    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the rows of one pass; they are kept on the host."""
        self.parts.setdefault(name, []).append(tensor.detach().cpu())

    def get(self, name: str) -> Tensor | None:
        """All rows recorded under a name, or None."""
        return torch.cat(self.parts[name]) if name in self.parts else None


def new_memory(case: Case, model: Transformer) -> DenseMemory:
    """The memory that follows the semantics the case was recorded with."""
    kind = ReleasedQuirkMemory if case.semantics == "released" else DenseMemory
    return kind(model.config, model.numerics)


def record(case: Case, run: Run, model: Transformer, prompt: Prompt) -> Recording:
    """Prefill in one chunk, decode one token at a time, drafts where the run asks for them."""
    recording, memory = Recording(), new_memory(case, model)
    calls = _draft_calls(case, run, model) if run.drafts else {}
    passes = [(0, run.prompt_len), *((at, at + 1) for at in range(run.prompt_len, run.length))]
    with observed(model, recording) as stop_streams:
        for start, stop in passes:
            rows = prompt.rows(start, stop)
            flow = model(rows, memory)
            stop_streams()
            recording.add("logits", model.logits(flow))
            if model.mtp is not None and run.drafts:
                model.mtp.observe(flow.targets, rows, memory)
                if stop - 1 in calls:
                    _record_draft(recording, _draft(model, memory, stop - 1, calls[stop - 1]))
    slot = memory.slot(0)
    for spec in model.plan.kv_sources:
        recording.add(f"main_kv.{spec.index}", slot.main[spec.index].read())
        recording.add(f"index_key.{spec.index}", slot.keys[spec.index].read())
    if run.drafts:
        for block, spec in enumerate(model.plan.drafts):
            recording.add(f"draft_window_kv.{block}", slot.windows[spec.index])
    return recording


@contextmanager
def observed(model: Transformer, recording: Recording) -> Iterator[Callable[[], None]]:
    """Hooks on every layer while the block runs. Yields a function that ends the recording of streams (after prefill)."""
    live = list(PER_PROMPT)

    def keep(name: str, tensor: Tensor) -> None:
        if name.split(".")[0] not in PER_PROMPT or live:
            recording.add(name, tensor)

    handles = []
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        for module, hook in _hooks(index, block, keep):
            handles.append(module.register_forward_hook(hook))
    try:
        yield live.clear
    finally:
        for handle in handles:
            handle.remove()


def _hooks(index: int, block: Block, keep: Callable[[str, Tensor], None]) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    def after_block(_module: nn.Module, _args: Any, out: Any) -> None:
        keep(f"residual.{index}", out[0])
        keep(f"pre_mix.{index}", out[1])

    def after_gate(_module: nn.Module, _args: Any, out: Any) -> None:
        keep(f"experts.{index}", out[0])
        keep(f"expert_weights.{index}", out[1])

    def after_attention(_module: nn.Module, _args: Any, out: Any) -> None:
        keep(f"topk.{index}", out[1].topk_NK)
        if block.spec.publishes_candidates:
            keep(f"candidates.{index}", out[1].candidates_NB)

    def after_engram(_module: nn.Module, _args: Any, out: Tensor) -> None:
        keep(f"engram_out.{index}", out)

    def after_latent(_module: nn.Module, _args: Any, out: Tensor) -> None:
        keep(f"latent.{index}", out)

    yield block, after_block
    yield block.ffn.gate, after_gate
    if block.spec.selects:
        yield block.attn, after_attention
    if block.engram is not None:
        yield block.engram, after_engram
    if block.attn.compressor is not None:
        yield block.attn.compressor.norm, after_latent


def _draft_calls(case: Case, run: Run, model: Transformer) -> dict[int, Tensor]:
    """Accepted position -> the token taken as accepted after it."""
    if model.mtp is None:
        raise CaseError(f"{case.folder}: run {run.name!r} has drafts, but config.json has num_nextn_predict_layers 0")
    shape = tuple(case.given(run, "draft_positions").shape)
    positions = integers(case, run, "draft_positions", shape).flatten().tolist()
    firsts = model.check_ids(integers(case, run, "draft_first_ids", shape)).flatten()
    allowed = range(run.prompt_len - 1, run.length)
    if sorted(set(positions)) != positions or any(at not in allowed for at in positions):
        raise CaseError(
            f"{case.folder}: run {run.name!r}: draft_positions must be ascending within "
            f"{allowed.start}..{allowed.stop - 1}, got {positions}"
        )
    return {at: firsts[i : i + 1] for i, at in enumerate(positions)}


def _draft(model: Transformer, memory: DenseMemory, position: int, first_1: Tensor) -> Draft:
    assert model.mtp is not None
    first_1 = first_1.to(model.embed.weight.device)
    draft = model.mtp(first_1, torch.tensor([position]), [0], memory, model.embed, model.head)
    assert isinstance(draft, Draft)
    return draft


def _record_draft(recording: Recording, draft: Draft) -> None:
    recording.add("draft_base_logits", draft.base_RBV)
    recording.add("draft_logits", draft.logits_RBV)
    recording.add("draft_tokens", draft.tokens_RB)
    recording.add("draft_confidence", draft.confidence_RB)


def layer_by_layer(case: Case, run: Run, model: Transformer, prompt: Prompt) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, output, recorded output) of every block and Engram, each fed with its recorded input; prefill only. On the host.

    Source layers fill the memory from these inputs. `released` cases differ in decode only, so their prefill is the same.
    """
    memory, rows, device = DenseMemory(model.config, model.numerics), prompt.rows(0, run.prompt_len), prompt.device
    flow = model.begin(rows)
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        if index:
            x_NSD = whole(case, run, f"residual.{index - 1}", model).to(device)
            flow = Flow(x_NSD, whole(case, run, f"pre_mix.{index - 1}", model).to(device), flow.shared)
        if block.engram is not None:
            want_NSD = whole(case, run, f"engram_out.{index}", model)
            yield f"engram_out.{index}", block.remember(flow.x_NSD, rows).cpu(), want_NSD
            flow = flow._replace(x_NSD=want_NSD.to(device))
        x_NSD, pre_NS, shared = block(flow.x_NSD, flow.pre_NS, rows, memory, flow.shared)
        yield f"residual.{index}", x_NSD.cpu(), whole(case, run, f"residual.{index}", model)
        yield f"pre_mix.{index}", pre_NS.cpu(), whole(case, run, f"pre_mix.{index}", model)
        flow = Flow(x_NSD, pre_NS, shared)


def whole(case: Case, run: Run, name: str, model: Transformer) -> Tensor:
    """A recorded stream tensor of all prompt positions, in the model's dtype (coefficients stay float32)."""
    config, tensor = model.config, case.must(run, name)
    tail = (config.hc_mult,) if name.startswith("pre_mix") else (config.hc_mult, config.dim)
    if tuple(tensor.shape) != (run.prompt_len, *tail):
        raise CaseError(
            f"{case.folder}: run {run.name!r} is layerwise, so {name!r} must have shape {[run.prompt_len, *tail]}, "
            f"got {list(tensor.shape)}"
        )
    return tensor.float() if name.startswith("pre_mix") else tensor.to(model.numerics.dtype)

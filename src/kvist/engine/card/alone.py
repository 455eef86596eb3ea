"""One request alone on a card: prefill in passes, captured steps, logits out; what a `Session` gives on its own memory.

Must not know text, sampling or other requests: those are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvist.engine.budget import EngineConfig, plan_memory
from kvist.engine.card.device_model import Batch
from kvist.engine.card.passes import Pass, Prompt, cut, plan_pass
from kvist.engine.card.serving import CardExecutor
from kvist.engine.executor import device_needs, executor
from kvist.engine.replay import Replay, replay_span
from kvist.engine.session import Progress, Sequence
from kvist.model.transformer import Transformer


class CardSession:
    """A model packed for its card with room for one request, slot 0, whose steps `runner` runs."""

    def __init__(self, model: Transformer, runner: CardExecutor, replay: Replay) -> None:
        self.model, self.runner, self.replay = model, runner, replay

    @staticmethod
    def of(model: Transformer, tokens: int, *, replay: Replay, chunk: int) -> CardSession | None:
        """For a request of at most `tokens` tokens; None, said with the reason, where the card's runner does not take the model.

        Raises what `executor` raises: BudgetTooSmall, GpuUnavailable, NotReleasedFormat.
        """
        pages = -(-tokens // model.plan.page_tokens)
        config = EngineConfig(pages=pages, context=tokens, max_running=1, speculation="off")
        needs = device_needs(model, config, tiers=False)
        plan = plan_memory(model.config, config, dtype_bytes=model.numerics.dtype.itemsize, more=needs)
        memory, runner = executor(model, config, plan)
        if not isinstance(runner, CardExecutor):
            return None
        runner.prefill.chunk = chunk
        memory.open(0, range(pages), 0)
        return CardSession(model, runner, replay)

    def prefill(self, sequences: list[Sequence], progress: Callable[[Progress], None] | None = None) -> Tensor:
        """Run one prompt; logits [1,V] after its last token."""
        (sequence,) = sequences
        total, prefill = len(sequence), self.runner.prefill
        span = replay_span(self.runner.state.plan, total, 0, self.replay)
        prompts = [Prompt.replayed(0, sequence.ids_T.numpy(), span)]
        prefill.check(prompts)
        with self.runner.guard(), torch.inference_mode():
            for planned, ended_RV in self._passes(prompts):
                logits_RV, sequence.computed = ended_RV, planned.pieces[-1].stop
                if progress is not None:
                    progress(Progress(done=sequence.computed, total=total))
        return logits_RV

    def _passes(self, prompts: list[Prompt]) -> Iterator[tuple[Pass, Tensor]]:
        """One pass as an engine runs it, more of them one behind the other."""
        prefill = self.runner.prefill
        first, *more = cut(prompts, prefill.chunk)
        if more:
            yield from prefill.passes(prompts)
        else:
            planned = plan_pass(first, prefill.bringer.sizes)
            yield planned, self.runner.passes.run(planned)[0]

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """Run the one token beyond what is computed; logits [1,V], valid until the next step."""
        (sequence,) = sequences
        batch = Batch(tokens=(int(sequence.ids_T[-1]),), positions=(len(sequence) - 1,), slots=(0,))
        with self.runner.guard(), torch.inference_mode():
            logits_NV, _ = self.runner.model.decode(batch)
        sequence.computed += 1
        return logits_NV

"""The end-to-end comparison: `strict` where logits agree, `all` at every position, each against its limit in the case.

Owns which positions count and which differences a margin explains. Must not run the model. Goldens README, 'Comparing' 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvist.conformance.case import Case, limit
from kvist.conformance.check import (
    Check,
    ids_found,
    judged,
    quantile,
    rel_l2,
    row_cosine,
    row_max_abs,
    row_rel_l2,
    same_sets,
)
from kvist.conformance.results import Pair, RunResult

MARGIN = 1e-4  # the README's: below it a selection may differ
STRICT_LIMITS = (
    "logits_abs",
    "min_fraction_of_positions",
    "residual_rel_l2",
    "latent_rel_l2",
    "draft_logits_abs",
    "draft_confidence_abs",
)
MARGINS = {"topk": "topk_margin", "candidates": "candidates_margin", "experts": "expert_margin"}


def end_to_end(case: Case, results: Sequence[RunResult]) -> Iterator[Check]:
    """All checks of `tolerances.strict` (if the case has it) and `tolerances.all`."""
    if case.limits("strict"):
        yield from Strict(case, results).checks()
    yield from Everywhere(case, results).checks()


class Strict:
    """Agreement up to float32 noise at the positions whose logits agree, which must be the given share of all."""

    def __init__(self, case: Case, results: Sequence[RunResult]) -> None:
        self.case, self.results, self.limits = case, results, case.limits("strict")
        self.bound = limit(self.limits.get("logits_abs"), "strict.logits_abs")
        self.good = {result.run.name: self._good(result) for result in results}
        self.bad = {result.run.name: self._bad(result) for result in results}

    def checks(self) -> Iterator[Check]:
        """One line a quantity that the case records and limits."""
        yield self._logits()
        for quantity in MARGINS:
            yield from self._selection(quantity)
        yield from self._streams("strict streams", ("residual", "engram_out"), "residual_rel_l2", self._rows_good)
        yield from self._streams("strict collapse weights", ("pre_mix",), None, self._rows_good)
        yield from self._streams("strict routing weights", ("expert_weights",), None, self._experts_good)
        yield from self._streams("strict latents", ("latent",), "latent_rel_l2", self._latent_good)
        yield from self._drafts()
        for name in self.limits:
            if name not in STRICT_LIMITS and not isinstance(self.limits[name], str):
                yield judged(f"strict {name}", False, f"this runner knows no limit of this name ({self.limits[name]!r})")

    def _good(self, result: RunResult) -> Tensor:
        """bool [N]: logits recorded and within the bound."""
        pair = result.pair("logits")
        good = torch.zeros(result.run.length, dtype=torch.bool)
        good[pair.at] = row_max_abs(pair.got, pair.want) <= self.bound
        return good

    def _bad(self, result: RunResult) -> Tensor:
        """bool [N]: logits recorded and beyond the bound."""
        recorded = torch.zeros(result.run.length, dtype=torch.bool)
        recorded[result.pair("logits").at] = True
        return recorded & ~self.good[result.run.name]

    def _logits(self) -> Check:
        pairs = [result.pair("logits") for result in self.results]
        good = torch.cat([self.good[r.run.name][p.at] for r, p in zip(self.results, pairs, strict=True)])
        got, want = torch.cat([p.got for p in pairs])[good], torch.cat([p.want for p in pairs])[good]
        need = limit(self.limits.get("min_fraction_of_positions"), "strict.min_fraction_of_positions")
        share = good.double().mean().item()
        return judged(
            "strict logits",
            share >= need,
            f"{int(good.sum())} of {len(good)} positions within {self.bound:g} (need {need:.0%})" + self._first_bad(),
            **_row_numbers(got, want),
        )

    def _first_bad(self) -> str:
        for result in self.results:
            pair = result.pair("logits")
            bad = pair.at[~self.good[result.run.name][pair.at]]
            if len(bad):
                at = int(bad[0])
                return f"; first other: {result.run.name} position {at}" + self._first_layer(result, at)
        return ""

    def _first_layer(self, result: RunResult, position: int) -> str:
        """Where to look: the first layer whose streams leave the bound at a position, if its streams are recorded."""
        bound = self.limits.get("residual_rel_l2", self.bound)
        for pair in result.pairs("residual"):
            here = pair.at == position
            if bool(here.any()) and row_rel_l2(pair.got[here], pair.want[here]).item() > limit(bound, "strict.residual_rel_l2"):
                return f" from layer {pair.layer} on"
        return ""

    def _selection(self, quantity: str) -> Iterator[Check]:
        wrong, explained, found, ids, first = 0, 0, 0, 0, ""
        for result in self.results:
            pool_differs = self._pool_differs(result)
            for pair in result.pairs(quantity):
                good = self.good[result.run.name]
                margin = result.case.recorded(result.run, f"{MARGINS[quantity]}.{pair.layer}")
                differs = ~same_sets(pair.got, pair.want) & good
                tiny = torch.zeros_like(differs) if margin is None else margin < MARGIN
                if quantity == "topk":
                    tiny = tiny | pool_differs.get(pair.layer, torch.zeros_like(differs))
                bad = (differs & ~tiny).nonzero().flatten()
                if len(bad) and not first:
                    first = f"; first: {result.run.name} layer {pair.layer} position {int(bad[0])}"
                wrong, explained = wrong + len(bad), explained + int((differs & tiny).sum())
                hit, real = ids_found(pair.got[good], pair.want[good])
                found, ids = found + hit, ids + real
        if ids:
            detail = f"{wrong} sets differ without a margin below {MARGIN:g}, {explained} with one{first}"
            yield judged(f"strict {quantity}", wrong == 0, detail, topk=found / ids)

    def _pool_differs(self, result: RunResult) -> dict[int, Tensor]:
        """Reindex layer -> positions whose candidate pool differs by a tiny margin, so that its own choice may too."""
        found = {}
        for pair in result.pairs("candidates"):
            margin = result.case.recorded(result.run, f"candidates_margin.{pair.layer}")
            if margin is not None:
                found[pair.layer] = ~same_sets(pair.got, pair.want) & (margin < MARGIN)
        readers = result.model_plan.layers
        return {spec.index: found[spec.candidate_source] for spec in readers if spec.candidate_source in found}

    def _streams(
        self, title: str, quantities: tuple[str, ...], key: str | None, keep: Callable[[RunResult, Pair], Tensor]
    ) -> Iterator[Check]:
        """Rows at good positions; without a limit of name `key` in the case the line is a note."""
        bound = limit(self.limits[key], f"strict.{key}") if key is not None and key in self.limits else None
        worst, rows, largest, cosine, place = 0.0, 0, 0.0, 1.0, ""
        for result in self.results:
            for pair in (pair for quantity in quantities for pair in result.pairs(quantity)):
                here = keep(result, pair)
                if not bool(here.any()):
                    continue
                errors = row_rel_l2(pair.got[here], pair.want[here])
                rows += int(here.sum())
                if errors.max().item() > worst:
                    worst = errors.max().item()
                    place = f" at {result.run.name}/{pair.name} row {int(pair.at[here][errors.argmax()])}"
                largest = max(largest, row_max_abs(pair.got[here], pair.want[here]).max().item())
                cosine = min(cosine, row_cosine(pair.got[here], pair.want[here]).min().item())
        if rows:
            ok = None if bound is None else worst <= bound
            detail = f"relative L2 at most {worst:.2g}{place}; {rows} rows" + ("" if bound is None else f"; limit {bound:g}")
            yield judged(title, ok, detail, max_abs=largest, cosine=cosine)

    def _rows_good(self, result: RunResult, pair: Pair) -> Tensor:
        return self.good[result.run.name][pair.at]

    def _experts_good(self, result: RunResult, pair: Pair) -> Tensor:
        """Good positions that chose the recorded experts; none where those are not recorded."""
        chosen = [ids for ids in result.pairs("experts") if ids.layer == pair.layer]
        same = same_sets(chosen[0].got, chosen[0].want) if chosen else torch.tensor(False)
        return self.good[result.run.name][pair.at] & same

    def _latent_good(self, result: RunResult, pair: Pair) -> Tensor:
        """Rows all of whose tokens stand at good positions."""
        rows, ratio = len(pair.got), result.model_plan.layers[pair.layer].ratio
        return self.good[result.run.name][: rows * ratio].view(rows, ratio).all(1)

    def _drafts(self) -> Iterator[Check]:
        kinds = (("draft_base_logits", "draft_logits_abs"), ("draft_logits", "draft_logits_abs"))
        for quantity, key in (*kinds, ("draft_confidence", "draft_confidence_abs")):
            if key not in self.limits or not any(result.names(quantity) for result in self.results):
                continue
            bound, gots, wants, calls = limit(self.limits[key], f"strict.{key}"), [], [], 0
            for result in self.results:
                for pair in result.pairs(quantity):
                    use = self._slots_good(result, pair, after_drafts=quantity != "draft_base_logits")
                    calls += int(use.any(1).sum())
                    gots.append(pair.got[use])
                    wants.append(pair.want[use])
            got, want = torch.cat(gots), torch.cat(wants)
            numbers = _row_numbers(got, want) if got.dim() > 1 else {"max_abs": _largest(got, want)}
            largest = numbers["max_abs"] or 0.0
            yield judged(f"strict {quantity}", largest <= bound, f"limit {bound:g}; {calls} calls, {len(got)} slots", **numbers)

    def _slots_good(self, result: RunResult, pair: Pair, *, after_drafts: bool) -> Tensor:
        """bool [calls, slots]: the position is good, none in the draft's window is bad, earlier slots drafted the same."""
        good, bad, window = self.good[result.run.name], self.bad[result.run.name], result.model_plan.window
        calls = good[pair.at] & ~torch.stack([bad[max(0, p - window + 1) : p + 1].any() for p in pair.at.tolist()])
        use = calls.unsqueeze(1).expand(-1, pair.want.shape[1]).clone()
        if after_drafts and result.names("draft_tokens"):
            tokens = result.pair("draft_tokens")
            same = (tokens.got.long() == tokens.want.long()).int().cumprod(1).bool()
            use[:, 1:] &= same[:, :-1]
        return use


class Everywhere:
    """The limits of `tolerances.all`, over all positions, layers and runs of the case."""

    def __init__(self, case: Case, results: Sequence[RunResult]) -> None:
        self.case, self.results, self.limits = case, results, case.limits("all")

    def checks(self) -> Iterator[Check]:
        """A line a limit. A limit for something the case does not record is noted; an unknown one fails."""
        for name, value in self.limits.items():
            yield self._one(name, limit(value, f"all.{name}"))

    def _one(self, name: str, bound: float) -> Check:
        title = f"all {name}"
        for suffix, measure in ROW_MEASURES.items():
            quantity = name.removesuffix(suffix)
            if name.endswith(suffix) and quantity in ROW_QUANTITIES:
                rows = self._rows(quantity)
                return _absent(title) if rows is None else self._judge(title, measure(*rows), bound, name, _row_numbers(*rows))
        if name in IDS_LIMITS:
            return self._ids(title, IDS_LIMITS[name], bound)
        if name in ("argmax_min_agreement", "draft_token_min_agreement"):
            return self._agreement(title, name, bound)
        if name.endswith("_max_rel_l2"):
            return self._tensors(title, name.removesuffix("_max_rel_l2"), bound)
        return judged(title, False, f"this runner knows no limit of this name (value {bound:g})")

    def _judge(self, title: str, value: float, bound: float, name: str, numbers: dict[str, float | None]) -> Check:
        ok = value >= bound if "_min_" in name else value <= bound
        return judged(title, ok, f"{value:.4g}; limit {bound:g}", **numbers)

    def _rows(self, quantity: str) -> tuple[Tensor, Tensor] | None:
        pairs = [pair for result in self.results for pair in result.pairs(quantity)]
        if not pairs or not sum(pair.want.numel() for pair in pairs):
            return None
        flat = [(p.got.flatten(0, -2), p.want.flatten(0, -2)) for p in pairs]
        return torch.cat([got for got, _ in flat]), torch.cat([want for _, want in flat])

    def _ids(self, title: str, quantity: str, bound: float) -> Check:
        counts = [ids_found(pair.got, pair.want) for result in self.results for pair in result.pairs(quantity)]
        found, ids = sum(hit for hit, _ in counts), sum(real for _, real in counts)
        if not ids:
            return _absent(title)
        return judged(title, found / ids >= bound, f"{found} of {ids} ids; limit {bound:g}", topk=found / ids)

    def _agreement(self, title: str, name: str, bound: float) -> Check:
        if name == "argmax_min_agreement":
            rows = self._rows("logits")
            same = None if rows is None else rows[0].argmax(1) == rows[1].argmax(1)
        else:
            pairs = [pair for result in self.results for pair in result.pairs("draft_tokens")]
            same = torch.cat([(p.got.long() == p.want.long()).flatten() for p in pairs]) if pairs else None
        if same is None or not len(same):
            return _absent(title)
        share = same.double().mean().item()
        return judged(title, share >= bound, f"{int(same.sum())} of {len(same)}; limit {bound:g}", argmax=share)

    def _tensors(self, title: str, quantity: str, bound: float) -> Check:
        pairs = [(result, pair) for result in self.results for pair in _tensor_pairs(result, quantity)]
        if not pairs:
            known = TENSOR_QUANTITIES
            return _absent(title) if quantity in known else judged(title, False, f"no tensor is called {quantity!r}")
        errors = [rel_l2(pair.got, pair.want) for _, pair in pairs]
        worst = max(range(len(errors)), key=errors.__getitem__)
        result, pair = pairs[worst]
        largest = max(_largest(p.got, p.want) for _, p in pairs)
        cosine = min(row_cosine(p.got.reshape(1, -1), p.want.reshape(1, -1)).item() for _, p in pairs)
        detail = f"{errors[worst]:.2g} at {result.run.name}/{pair.name}; limit {bound:g}; {len(pairs)} tensors"
        return judged(title, errors[worst] <= bound, detail, max_abs=largest, cosine=cosine)


ROW_QUANTITIES = ("logits", "draft_base_logits", "draft_logits", "draft_confidence")
ROW_MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "_max_abs": lambda got, want: row_max_abs(got, want).max().item(),
    "_median_abs": lambda got, want: quantile(row_max_abs(got, want), 0.5),
    "_p90_abs": lambda got, want: quantile(row_max_abs(got, want), 0.9),
    "_min_cosine": lambda got, want: row_cosine(got, want).min().item(),
}
IDS_LIMITS = {
    "topk_ids_min_agreement": "topk",
    "candidate_ids_min_agreement": "candidates",
    "expert_ids_min_agreement": "experts",
}
TENSOR_QUANTITIES = (
    "residual",
    "pre_mix",
    "engram_out",
    "latent",
    "main_kv",
    "index_key",
    "expert_weights",
    "draft_window_kv",
    "vit",
    "aligner",
)


def _tensor_pairs(result: RunResult, quantity: str) -> Iterator[Pair]:
    if quantity in TENSOR_QUANTITIES:
        yield from (pair for pair in result.pairs(quantity) if pair.want.numel())


def _absent(title: str) -> Check:
    return judged(title, None, "the case records nothing of this kind")


def _largest(got: Tensor, want: Tensor) -> float:
    return row_max_abs(got.reshape(1, -1), want.reshape(1, -1)).item() if want.numel() else 0.0


def _row_numbers(got: Tensor, want: Tensor) -> dict[str, float | None]:
    """What the table shows of rows of logits."""
    if not want.numel():
        return {"max_abs": 0.0}
    numbers: dict[str, float | None] = {"max_abs": row_max_abs(got, want).max().item()}
    if want.shape[-1] > 8:
        numbers["cosine"] = row_cosine(got, want).min().item()
        numbers["argmax"] = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
    return numbers

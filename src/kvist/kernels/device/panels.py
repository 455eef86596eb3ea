"""Stored weights laid out for the GPU: panels of 64 outputs, chunks of inputs, each chunk of a panel contiguous.

A chunk is 32 words of 16 bits an output. A word holds four FP4 codes, of inputs j, 32 + j, 64 + j and 96 + j, or two FP8
codes, of inputs j and 32 + j: each run of 32 inputs has one scale, and two words side by side decode to two bfloat16 side by
side, as matrix units want them. The bits of FP4 codes lie where few instructions turn them into bfloat16 (`FP4_BITS`).
Only bits move: every value stays what the file says. Must not know experts or layers.

Shapes: E experts, R outputs, K inputs, P panels, C chunks; both are padded with zero codes to whole panels and chunks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvist.quant import decode_e2m1_pairs, decode_e4m3, decode_e8m0, pack_nibbles, unpack_nibbles

PANEL = 64
RUN = 32
RUNS = {"fp4": 4, "fp8": 2}
FP4_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14))
"""Where a word keeps the sign, two exponent bits and mantissa bit of its four codes. bfloat16 wants them at 15, 8, 7, 6: three
runs come there by shifts; the last by a shift down by 8 and a product with 1 + 2^5 + 2^10, whose terms do not meet."""
# A scale and the power of two that turns shifted code bits into values must be one bfloat16 together.
MOST_SCALE = {"fp4": 128, "fp8": 134}
NAN_CODE = 0x7F

Form = Literal["fp4", "fp8"]


class PanelWeight(NamedTuple):
    """One weight, or the equal weights of many experts along the first dimension.

    `codes` int16 [E,P,C,64,32]. `scales` int32, four E8M0 bytes each, lowest first: FP4 [E,P,C,64], an output's four runs; FP8
    [E,P,C,1], both runs of the first 32 outputs, then of the second (with `paired`: of gate, then of up). `paired`: outputs
    2i and 2i + 1 are gate i and up i.
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    inputs: int
    form: Form
    paired: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def experts(self) -> int:
        """How many weights are stacked."""
        return self.codes.shape[0]


def _check_scales(scales: Tensor, form: Form) -> None:
    highest, most = int(scales.max()) if scales.numel() else 0, MOST_SCALE[form]
    if highest > most:
        raise ValueError(
            f"a weight scale is 2^{highest - 127}{' (NaN)' if highest == 255 else ''}; impl 'gpu' takes {form} scales up "
            f"to 2^{most - 127}; use impl 'ref'"
        )


def _pair(first: Tensor, second: Tensor) -> Tensor:
    """Rows of two equal matrices, one after the other in turn."""
    if first.shape != second.shape:
        raise ValueError(f"gate has shape {list(first.shape)}, up {list(second.shape)}; they must be equal")
    return torch.stack((first, second), 1).flatten(0, 1)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def _words(parts: Tensor) -> Tensor:
    """Bytes [..., 4], lowest first -> int32 [...]."""
    return parts.contiguous().view(torch.int32).squeeze(-1)


def stack_panels(weights: list[PanelWeight]) -> PanelWeight:
    """Equal weights of many experts as one. Raises ValueError if they differ in anything but values."""
    kinds = {weight[2:] for weight in weights}
    if len(kinds) != 1:
        raise ValueError(f"experts of different kinds cannot be stacked: {sorted(kinds)}")
    codes, scales = torch.cat([w.codes for w in weights]), torch.cat([w.scales for w in weights])
    return weights[0]._replace(codes=codes, scales=scales)


def pack_fp4_panels(codes: Tensor, scales: Tensor, up: tuple[Tensor, Tensor] | None = None) -> PanelWeight:
    """Released FP4 (codes [R,K/2] of any one-byte dtype, E8M0 scales [R,K/32]) as one panel weight.

    `up` (codes, scales) of the second half of a SwiGLU makes a paired weight of 2R outputs. Raises ValueError for a shape
    that does not fit or a scale above 2^1.
    """
    code, scale = codes.view(torch.uint8), scales.view(torch.uint8)
    if up is not None:
        code, scale = _pair(code, up[0].view(torch.uint8)), _pair(scale, up[1].view(torch.uint8))
    outputs, inputs = code.shape[0], 2 * code.shape[1]
    if scale.shape != (outputs, -(-inputs // RUN)):
        raise ValueError(
            f"FP4 codes for {outputs} x {inputs} need scales {[outputs, -(-inputs // RUN)]}, got {list(scale.shape)}"
        )
    _check_scales(scale, "fp4")
    runs = _pad(unpack_nibbles(code), PANEL, 4 * RUN).unflatten(1, (-1, 4, RUN)).to(torch.int32)
    words = torch.zeros_like(runs[:, :, 0])
    for run, places in enumerate(FP4_BITS):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            words |= ((runs[:, :, run] >> bit) & 1) << place
    laid = words.to(torch.int16).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    factors = _words(_pad(scale, PANEL, 4).unflatten(1, (-1, 4))).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return PanelWeight(laid[None], factors[None], outputs, inputs, "fp4", up is not None)


def pack_fp8_panels(codes: Tensor, scales: Tensor, up: tuple[Tensor, Tensor] | None = None) -> PanelWeight:
    """Released FP8 (codes [R,K], E8M0 scales [ceil(R/32),ceil(K/32)]); `up` and errors as `pack_fp4_panels`, scales to 2^7.

    With `up`, R must be a multiple of 32. A NaN code is refused: it would become a number.
    """
    code, scale = codes.view(torch.uint8), scales.view(torch.uint8)
    rows, inputs = code.shape
    if scale.shape != (-(-rows // RUN), -(-inputs // RUN)):
        raise ValueError(f"FP8 codes {list(code.shape)} need a scale for every 32 x 32 block, got {list(scale.shape)}")
    if up is not None:
        if rows % RUN:
            raise ValueError(f"a gate of {rows} outputs; impl 'gpu' pairs FP8 gates and ups of a multiple of 32 outputs")
        code, scale = _pair(code, up[0].view(torch.uint8)), _pair(scale, up[1].view(torch.uint8))
    _check_scales(scale, "fp8")
    if bool(((code & NAN_CODE) == NAN_CODE).any()):
        raise ValueError("an FP8 weight holds a NaN code; the checkpoint is damaged")
    pairs = _pad(code, PANEL, 2 * RUN).unflatten(1, (-1, 2, RUN)).transpose(2, 3).contiguous()
    laid = pairs.view(torch.int16).squeeze(-1).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    blocks = _pad(scale, 2, 2).unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2).flatten(2)
    return PanelWeight(laid[None], _words(blocks)[None, :, :, None], code.shape[0], inputs, "fp8", up is not None)


def fp4_code(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """One of a word's four codes, int32: the bits at `places`, highest first."""
    code = torch.zeros_like(words)
    for place in places:
        code = (code << 1) | ((words >> place) & 1)
    return code


def unpack_panels(weight: PanelWeight, expert: int = 0) -> Tensor:
    """Values float32 [R,K] of one weight; a paired one gives its rows in turn. The inverse of packing, for checks."""
    words, scales = weight.codes[expert], weight.scales[expert]
    factors = decode_e8m0(scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)))
    if weight.form == "fp4":
        wide = words.to(torch.int32)
        codes = torch.cat([fp4_code(wide, places) for places in FP4_BITS], -1)
        values = decode_e2m1_pairs(pack_nibbles(codes.to(torch.uint8)))
    else:
        values = decode_e4m3(torch.cat([words.contiguous().view(torch.uint8)[..., part::2] for part in (0, 1)], -1))
        halves = factors.squeeze(2).unflatten(-1, (2, 2))
        factors = halves.repeat(1, 1, RUN, 1) if weight.paired else halves.repeat_interleave(RUN, 2)
    whole = values * factors.repeat_interleave(RUN, -1)
    return whole.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: weight.outputs, : weight.inputs]

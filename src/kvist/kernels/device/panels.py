"""Stored weights laid out for the GPU: panels of 64 outputs, chunks of 64 inputs, each chunk of a panel contiguous.

A chunk of FP4 is 32 bytes an output: byte k holds input k in its low and input 32 + k in its high nibble, so that both
halves are runs of 32 inputs under one scale each, and no instruction ever has to interleave nibbles. A chunk of FP8 is
64 bytes an output. Only bytes move: every value stays what the file says. Must not know experts or layers.

Shapes: R outputs, K inputs, P panels, C chunks; both are padded with zero codes to whole panels and chunks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvist.quant import decode_e2m1_pairs, decode_e4m3, decode_e8m0, pack_nibbles, unpack_nibbles

PANEL = 64
CHUNK = 64
HALF = 32
# A scale and the power of two that turns shifted code bits into values must be one bfloat16 together.
MOST_SCALE = {"fp4": 128, "fp8": 134}
NAN_CODE = 0x7F


class PanelWeight(NamedTuple):
    """One weight, or the equal weights of many experts along the first dimension.

    `codes` uint8: FP4 [E,P,C,64,32], FP8 [E,P,C,64,64]. `scales` uint8 E8M0: FP4 [E,P,C,2,64] (half, output), FP8
    [E,P,C,2,2] (half, block of 32 outputs; with `paired`, gate or up). `paired`: outputs 2i and 2i + 1 are gate i and up i.
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    inputs: int
    form: Literal["fp4", "fp8"]
    paired: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def experts(self) -> int:
        """How many weights are stacked."""
        return self.codes.shape[0]


def _check_scales(scales: Tensor, form: Literal["fp4", "fp8"]) -> None:
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


def pack_fp4_panels(codes: Tensor, scales: Tensor, up: tuple[Tensor, Tensor] | None = None) -> PanelWeight:
    """Released FP4 (codes [R,K/2] of any one-byte dtype, E8M0 scales [R,K/32]) as one panel weight.

    `up` (codes, scales) of the second half of a SwiGLU makes a paired weight of 2R outputs. Raises ValueError for a shape
    that does not fit or a scale above 2^1.
    """
    code, scale = codes.view(torch.uint8), scales.view(torch.uint8)
    if up is not None:
        code, scale = _pair(code, up[0].view(torch.uint8)), _pair(scale, up[1].view(torch.uint8))
    outputs, inputs = code.shape[0], 2 * code.shape[1]
    if scale.shape != (outputs, -(-inputs // HALF)):
        raise ValueError(f"FP4 codes for {outputs} x {inputs} need scales {[outputs, -(-inputs // HALF)]}, got {list(scale.shape)}")
    _check_scales(scale, "fp4")
    halves = _pad(unpack_nibbles(code), PANEL, CHUNK).unflatten(1, (-1, 2, HALF))
    packed = halves[:, :, 0] | (halves[:, :, 1] << 4)
    factors = _pad(scale, PANEL, 2).unflatten(1, (-1, 2)).unflatten(0, (-1, PANEL))
    laid = packed.unflatten(0, (-1, PANEL)).permute(0, 2, 1, 3).contiguous()
    return PanelWeight(laid[None], factors.permute(0, 2, 3, 1).contiguous()[None], outputs, inputs, "fp4", up is not None)


def pack_fp8_panels(codes: Tensor, scales: Tensor, up: tuple[Tensor, Tensor] | None = None) -> PanelWeight:
    """Released FP8 (codes [R,K], E8M0 scales [ceil(R/32),ceil(K/32)]); `up` and errors as `pack_fp4_panels`, scales to 2^7.

    With `up`, R must be a multiple of 32. A NaN code is refused: it would become a number.
    """
    code, scale = codes.view(torch.uint8), scales.view(torch.uint8)
    rows, inputs = code.shape
    if scale.shape != (-(-rows // HALF), -(-inputs // HALF)):
        raise ValueError(f"FP8 codes {list(code.shape)} need a scale for every 32 x 32 block, got {list(scale.shape)}")
    if up is not None:
        if rows % HALF:
            raise ValueError(f"a gate of {rows} outputs; impl 'gpu' pairs FP8 gates and ups of a multiple of 32 outputs")
        code, scale = _pair(code, up[0].view(torch.uint8)), _pair(scale, up[1].view(torch.uint8))
    _check_scales(scale, "fp8")
    if bool(((code & NAN_CODE) == NAN_CODE).any()):
        raise ValueError("an FP8 weight holds a NaN code; the checkpoint is damaged")
    laid = _pad(code, PANEL, CHUNK).unflatten(0, (-1, PANEL)).unflatten(2, (-1, CHUNK)).permute(0, 2, 1, 3).contiguous()
    factors = _pad(scale, 2, 2).unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 3, 1).contiguous()
    return PanelWeight(laid[None], factors[None], code.shape[0], inputs, "fp8", up is not None)


def unpack_panels(weight: PanelWeight, expert: int = 0) -> Tensor:
    """Values float32 [R,K] of one weight; a paired one gives its rows in turn. The inverse of packing, for checks."""
    codes, scales = weight.codes[expert], weight.scales[expert]
    if weight.form == "fp4":
        halves = torch.cat((codes & 15, codes >> 4), -1)
        values = decode_e2m1_pairs(pack_nibbles(halves))
        factors = decode_e8m0(scales).permute(0, 1, 3, 2).repeat_interleave(HALF, -1)
    else:
        values = decode_e4m3(codes)
        blocks = decode_e8m0(scales).permute(0, 1, 3, 2)
        rows = blocks.repeat(1, 1, HALF, 1) if weight.paired else blocks.repeat_interleave(HALF, 2)
        factors = rows.repeat_interleave(HALF, -1)
    return (values * factors).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: weight.outputs, : weight.inputs]

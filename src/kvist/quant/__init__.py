"""Number formats, byte for byte: cache and activation quantisers, stored weights, cache rows.

Other packages import from here. Must not know layers, pages, files or devices.
"""

from kvist.quant.cache_formats import (
    FP8_GROUP,
    MAIN_FP4_GROUP,
    MXFP4_GROUP,
    fake_fp8,
    fake_main_fp4,
    fake_mxfp4,
    pack_fp8,
    pack_main_fp4,
    pack_mxfp4,
    unpack_fp8,
    unpack_main_fp4,
    unpack_mxfp4,
)
from kvist.quant.elements import (
    decode_e2m1_pairs,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    round_e2m1,
    unpack_nibbles,
)
from kvist.quant.gradient import straight_through
from kvist.quant.rows import INDEX_KEY, MAIN_ENTRY, WINDOW_ENTRY, RowFormat
from kvist.quant.weights import (
    WEIGHT_BLOCK,
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    quantise_fp4_weight,
    quantise_fp8_rows,
    quantise_fp8_weight,
)

__all__ = [
    "FP8_GROUP",
    "INDEX_KEY",
    "MAIN_ENTRY",
    "MAIN_FP4_GROUP",
    "MXFP4_GROUP",
    "WEIGHT_BLOCK",
    "WINDOW_ENTRY",
    "RowFormat",
    "decode_e2m1_pairs",
    "decode_e4m3",
    "decode_e8m0",
    "dequantise_fp4_weight",
    "dequantise_fp8_weight",
    "encode_e2m1",
    "encode_e4m3",
    "fake_fp8",
    "fake_main_fp4",
    "fake_mxfp4",
    "pack_fp8",
    "pack_main_fp4",
    "pack_mxfp4",
    "pack_nibbles",
    "quantise_fp4_weight",
    "quantise_fp8_rows",
    "quantise_fp8_weight",
    "round_e2m1",
    "straight_through",
    "unpack_fp8",
    "unpack_main_fp4",
    "unpack_mxfp4",
    "unpack_nibbles",
]

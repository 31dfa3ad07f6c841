"""The table in docs/convert.md matches what the fixtures show."""

from pathlib import Path

import pytest
import torch
from expected import LOSSLESS
from test_convert_random import LAYER, attempt

from bitline import types
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

TEXT = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()

ROWS = {
    "4 bits, symmetric": ["gq_w4g128_sym_v1", "gq_awq_gemm", "ct_w4a16_g128_sym", "ar_w4g32_sym_autoround", "quark_int4_order"],
    "4 bits, zero points": ["gq_w4g32_asym_v1", "autoawq_gemm", "autoawq_gemv", "ct_w4a16_channel_asym", "quark_uint4_reorder"],
    "2 and 3 bits, symmetric": ["gq_w2g32_sym_v1", "ct_w3a16_g128_sym", "ctold_w3_g32_sym_padded"],
    "2 bits, zero points": ["ar_w2g32_asym_autoround"],
    "5 and 8 bits, symmetric": ["gq_w5g32_planar", "ar_w8g128_sym_autogptq"],
    "act-order": ["gq_w4g32_sym_descact_v1", "gq_w3g32_asym_descact_v1", "ctold_w4_g32_sym_actorder_group"],
    "AWQ gemv_fast": ["autoawq_gemv_fast"],
    "HQQ": ["hqq_2bit", "hqq_3bit", "hqq_4bit", "hqq_8bit"],
    "bitsandbytes NF4, FP4": ["bnb_nf4", "bnb_nf4_nested", "bnb_fp4"],
    "bitsandbytes int8": ["bnb_int8"],
    "FP8, per row": ["ct_fp8_dynamic", "quark_fp8_channel"],
    "FP8, one static scale": ["ct_fp8_static", "mo_fp8", "quark_fp8"],
    "FP8, blocks": ["ct_fp8_block", "ar_fp8block_autoround", "ct_smol2L_fp8_block"],
    "FP8, weight-only": ["torchao_fp8"],
    "W8A8, W4A8, W4AFP8": ["ct_w8a8_int8_dynamic", "ct_w8a8_int8_static_azp", "ct_w4a8_int", "ct_w4afp8", "quark_int8"],
    "MXFP8": ["ct_mxfp8", "mo_mxfp8", "ar_mxfp8_llmc"],
    "MXFP4 with MXFP4 activations": ["ar_mxfp4_autoround", "quark_mxfp4"],
    "MXFP4, weight-only": ["ct_mxfp4a16"],
    "NVFP4, compressed-tensors": ["ct_nvfp4", "ct_nvfp4a16", "ar_nvfp4_autoround"],
    "NVFP4, ModelOpt and Quark": ["mo_nvfp4", "quark_nvfp4"],
    "ModelOpt INT4 AWQ": ["mo_w4a16_awq"],
}

_F16, _U8 = torch.float16, torch.uint8
GGUF = {
    "GGUF Q4_0": [LinearSpec(32, 256, types.uint4b8, (1, 32), scale_dtype=_F16)],
    "GGUF Q5_0, Q8_0": [LinearSpec(32, 256, types.uint5b16, (1, 32), scale_dtype=_F16),
                        LinearSpec(32, 256, types.int8, (1, 32), scale_dtype=_F16)],
    "GGUF Q4_1, Q5_1, Q4_K, Q5_K": [
        LinearSpec(32, 256, types.uint4, (1, 32), scale_dtype=_F16, zero="float"),
        LinearSpec(32, 256, types.uint5, (1, 32), scale_dtype=_F16, zero="float"),
        LinearSpec(32, 512, types.uint4, (1, 32), scale_dtype=_U8, zero="float", scale2_block=(1, 256)),
        LinearSpec(32, 512, types.uint5, (1, 32), scale_dtype=_U8, zero="float", scale2_block=(1, 256)),
    ],
    "GGUF Q6_K": [LinearSpec(32, 512, types.uint6b32, (1, 16), scale_dtype=torch.int8, scale2_block=(1, 256))],
}  # fmt: skip


def table():
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head = next(i for i, row in enumerate(rows) if row[0] == "from")
    body = rows[head + 2 : next(i for i, row in enumerate(rows) if row[0] == "format")]
    return {row[0]: dict(zip(rows[head][1:], row[1:], strict=True)) for row in body}


def test_every_row_is_tested():
    assert table().keys() == ROWS.keys() | GGUF.keys()


@pytest.mark.parametrize("row", ROWS)
def test_rows_with_fixtures(row):
    documented = {to for to, cell in table()[row].items() if cell == "="}
    for name in ROWS[row]:
        assert set(LOSSLESS[name].split()) == documented, name


@pytest.mark.parametrize("row", GGUF)
def test_rows_of_gguf_types(row):
    """Random weights in the specs that the GGUF reader produces."""
    for spec in GGUF[row]:
        for to, cell in table()[row].items():
            if cell == "a copy":
                continue
            found = attempt({LAYER: random_weight(spec, 1)}, to)
            assert isinstance(found, dict) == (cell != "="), (spec, to, found)

"""Which format represents which fixture exactly. All others refuse it, with a reason for every layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"

_INT4_SYM = "compressed-tensors gptq awq gguf modelopt"
_INT4_ASYM = "compressed-tensors gptq awq gguf"
_INT_SYM = "compressed-tensors gptq gguf"
_CT = "compressed-tensors"

LOSSLESS: dict[str, str] = {
    "ar_fp8block_autoround": "compressed-tensors fp8", "ar_fp8static_autoround": "compressed-tensors fp8",
    "ar_mxfp4_autoround": _CT, "ar_mxfp8_llmc": "compressed-tensors modelopt", "ar_nvfp4_autoround": _CT,
    "ar_w2g32_asym_autoround": _INT4_ASYM, "ar_w3g32_sym_autogptq": _INT4_SYM, "ar_w4g128_sym_autoawq": _INT4_SYM,
    "ar_w4g32_asym_autoround": _INT4_ASYM, "ar_w4g32_mixed_autoround": _INT_SYM, "ar_w4g32_sym_autoround": _INT4_SYM,
    "ar_w8g128_sym_autogptq": _INT_SYM, "autoawq_gemm": _INT4_ASYM, "autoawq_gemv": _INT4_ASYM, "autoawq_gemv_fast": "gguf",
    "bnb_fp4": "", "bnb_fp4_nested_bf16_storage": "", "bnb_int8": _CT, "bnb_nf4": "", "bnb_nf4_nested": "",
    "ct_fp8_block": "compressed-tensors fp8", "ct_fp8_dynamic": "compressed-tensors fp8 modelopt",
    "ct_fp8_static": "compressed-tensors fp8 modelopt", "ct_mixed_w4a16_fp8": "compressed-tensors modelopt",
    "ct_mxfp4a16": "compressed-tensors modelopt", "ct_mxfp8": "compressed-tensors modelopt", "ct_nvfp4": _CT, "ct_nvfp4a16": _CT,
    "ct_smol2L_fp8_block": "compressed-tensors fp8", "ct_w3a16_g128_sym": _INT4_SYM, "ct_w4a16_channel_asym": _INT4_ASYM,
    "ct_w4a16_g128_asym": _INT4_ASYM, "ct_w4a16_g128_sym": _INT4_SYM, "ct_w4a16_g128_sym_gptq_actorder_weight": _INT4_SYM,
    "ct_w4a8_int": _CT, "ct_w4afp8": _CT, "ct_w8a8_int8_dynamic": _CT, "ct_w8a8_int8_static_azp": _CT,
    "ctold_w3_g32_sym_padded": _INT4_SYM, "ctold_w4_g32_sym_actorder_group": "gptq", "gq_awq_gemm": _INT4_SYM,
    "gq_smol2L_w4g128_asym_v2": _INT4_ASYM, "gq_w2g32_sym_v1": _INT4_SYM, "gq_w3g32_asym_descact_v1": "gptq",
    "gq_w4g128_sym_v1": _INT4_SYM, "gq_w4g32_asym_v1": _INT4_ASYM, "gq_w4g32_asym_v2": _INT4_ASYM,
    "gq_w4g32_dynamic_v1": _INT4_SYM, "gq_w4g32_sym_descact_v1": "gptq", "gq_w4gm1_descact_v1": _INT4_SYM,
    "gq_w5g32_planar": _INT_SYM, "hqq_2bit": "", "hqq_3bit": "", "hqq_3bit_over_rows": "", "hqq_4bit": "",
    "hqq_4bit_bf16_view": "", "hqq_8bit": "", "mo_fp8": "compressed-tensors fp8 modelopt",
    "mo_mxfp8": "compressed-tensors modelopt",
    "mo_nvfp4": "modelopt", "mo_w4a16_awq": "modelopt", "quark_fp8": "compressed-tensors fp8 modelopt",
    "quark_fp8_channel": "compressed-tensors fp8 modelopt", "quark_int4_order": _INT4_SYM, "quark_int4_reorder": _INT4_SYM,
    "quark_int8": _CT, "quark_mxfp4": _CT, "quark_nvfp4": "modelopt", "quark_uint4_order": _INT4_ASYM,
    "quark_uint4_reorder": _INT4_ASYM, "torchao_fp8": _CT, "torchao_int8": _INT_SYM,
    "torchao_int8_dynamic": _CT, "torchao_intx3_asym": _CT, "torchao_intx4_group": _INT4_SYM,
}  # fmt: skip

FIXTURES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 100, "rms_norm_eps": 1e-6, "head_dim": 32,
}  # fmt: skip


def fixture_with_config(name: str, folder: Path) -> Path:
    """The fixture, with a Llama's config where it has none: a GGUF header describes the model."""
    path = CHECKPOINTS / name
    config = json.loads((path / "config.json").read_text())
    if "num_hidden_layers" in config:
        return path
    shutil.copytree(path, folder)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return folder

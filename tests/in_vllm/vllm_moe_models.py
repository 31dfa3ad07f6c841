"""Tiny mixture-of-experts checkpoints that the tests serve: those of tests/moe, where need be in shapes that vLLM runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_files
from engine import noisy
from forms import BF16, FORMS, everything
from moe_models import make as make_model

# Latent attention on a CPU has one shape; with rope_type "default" vLLM 0.32 rotates its strided keys wrongly there.
DEEPSEEK = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
# Blocks of 128 x 128 in every matrix.
IN_BLOCKS = {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 256}
_FP8 = everything("FP8_BLOCK", dtype=BF16)


def _write(
    kind: str, target: str, plan: moe_files.Plan, settings: dict[str, Any] | None = None, **changes: Any
) -> Callable[[Path], Path]:  # fmt: skip
    """What writes a checkpoint. settings: of config.json, which files of the model's makers have and transformers drops."""

    def build(folder: Path) -> Path:
        moe_files.write(folder, kind, make_model(kind, **changes), target, plan)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | (settings or {})))
        return folder

    return build


def _form(name: str) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        return FORMS[name](folder)[0]

    return build


AS_THEY_ARE = (
    "qwen3 gptq", "qwen3 gptq act-order of gate and up", "qwen3 awq", "qwen3 pack-quantized", "qwen3 int8",
    "qwen3 modelopt nvfp4", "qwen3 stacked fp8", "qwen3 mixed stack", "qwen3 layer unquantized", "qwen3 up unquantized",
    "qwen3 router quantized", "qwen3 gguf mixed", "mixtral gptq", "mixtral awq", "gpt-oss mxfp4",
)  # fmt: skip
W4, W4_BF16 = everything("W4A16", 32), everything("W4A16", 32, BF16)
OF_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
BY_NAME: dict[str, Callable[[Path], Path]] = {name: _form(name) for name in AS_THEY_ARE} | {
    "qwen3 fp8 blocks": _write("qwen3_moe", "fp8", _FP8, moe_intermediate_size=256, **IN_BLOCKS),
    "mixtral fp8 blocks": _write("mixtral", "fp8", _FP8, **IN_BLOCKS),
    "mixtral pack-quantized": _write("mixtral", "compressed-tensors", W4_BF16),
    "mixtral router quantized": _write("mixtral", "compressed-tensors", everything("W4A16", 32, BF16, routers=True)),
    "deepseek gptq": _write("deepseek_v3", "gptq", W4, OF_DEEPSEEK, **DEEPSEEK),
    "deepseek gptq q_lora": _write("deepseek_v3", "gptq", W4, OF_DEEPSEEK, q_lora_rank=64, **DEEPSEEK),
    "qwen3 gptq act-order": _form("qwen3 gptq act-order"),
}


def write_noisy(folder: Path) -> Path:
    """The model of "qwen3 gptq" with noise on its weights."""
    return moe_files.write(folder, "qwen3_moe", noisy(make_model("qwen3_moe")), "gptq", W4)


def make(name: str, root: Path) -> Path:
    """The checkpoint of this name below a folder."""
    folder = root / name.replace(" ", "-")
    folder.mkdir(parents=True)
    return BY_NAME[name](folder)

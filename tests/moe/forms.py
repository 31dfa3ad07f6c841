"""The forms of mixture-of-experts checkpoints: a name to what writes one and makes its model the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from moe_files import Plan, Scheme, write, write_autoround, write_gpt_oss, write_stacked_fp8
from moe_gguf import write_gguf
from moe_models import Matrix, make

_GGUF_KINDS = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q8_0"}
BF16 = torch.bfloat16


def everything(preset: str, group: int | None = None, dtype: torch.dtype = torch.float16, routers: bool = False) -> Plan:
    """One scheme for all matrices, routers aside."""
    return lambda m: None if m.router and not routers else Scheme(preset, group, dtype)


def experts_only(plan: Plan) -> Plan:
    """The plan for experts; attention, shared experts and dense layers stay unquantized."""
    return lambda m: plan(m) if m.expert is not None else None


def down_in_other_groups(m: Matrix) -> Scheme | None:
    """Groups of 32, but for down projections: 64 for expert 1 and 16 for the others of layer 1; expert 0's up is asymmetric."""
    if m.router:
        return None
    if m.expert == 0 and m.part == 1:
        return Scheme("W4A16_ASYM", 32)
    group = 32 if m.part != 2 or "layers.0." in m.name else 64 if m.expert == 1 else 16
    return Scheme("W4A16", group)


def all_but_layer_1(plan: Plan) -> Plan:
    """The plan, but for the experts of layer 1, which stay unquantized, one tensor for each."""
    return lambda m: None if m.expert is not None and "layers.1." in m.name else plan(m)


def up_unquantized(plan: Plan) -> Plan:
    """The plan for down projections, attention and dense layers; gate and up of all experts stay unquantized."""
    return lambda m: None if m.expert is not None and m.part < 2 else plan(m)


def some_joint(preset: str, joint: int) -> Plan:
    """One scheme; gate and up share a global scale in this expert, or in all but this one (-1 - joint)."""
    shared = lambda m: m.expert == joint if joint >= 0 else m.expert != -1 - joint
    return lambda m: None if m.router else Scheme(preset, joint=shared(m))


def with_changes(plan: Plan, **changes: Any) -> Plan:
    """The plan with changes to its schemes."""
    return lambda m: None if (scheme := plan(m)) is None else scheme._replace(**changes)


def _form(kind: str, target: str, plan: Plan, **changes: Any) -> Callable[[Path], tuple[Path, Any]]:
    def build(folder: Path) -> tuple[Path, Any]:
        model = make(kind, **changes)
        return write(folder, kind, model, target, plan), model

    return build


def _own(kind: str, writer: Callable[..., Path], **changes: Any) -> Callable[[Path], tuple[Path, Any]]:
    def build(folder: Path) -> tuple[Path, Any]:
        model = make(kind, **changes)
        return writer(folder, model), model

    return build


def _gguf(kind: Callable[[str], str], **changes: Any) -> Callable[[Path], tuple[Path, Any]]:
    return _own("qwen3_moe", lambda folder, model: write_gguf(folder / "model.gguf", model, kind), **changes)


_A3B = {"num_experts": 4, "moe_intermediate_size": 768}  # the width of Qwen3-30B-A3B's experts
_K_QUANTS = _A3B | {"hidden_size": 256}
_W4, _FP8 = everything("W4A16", 32), everything("FP8_BLOCK", dtype=BF16)
FORMS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "qwen3 gptq": _form("qwen3_moe", "gptq", _W4),
    "qwen3 gptq asymmetric": _form("qwen3_moe", "gptq", everything("W4A16_ASYM", 32)),
    "qwen3 gptq act-order": _form("qwen3_moe", "gptq", with_changes(_W4, act_order="shared")),
    "qwen3 gptq act-order of gate and up": _form("qwen3_moe", "gptq", with_changes(_W4, act_order="own")),
    "mixtral gptq act-order": _form("mixtral", "gptq", with_changes(_W4, act_order="own")),
    "qwen3 modelopt fp8 input scales of gate and up": _form("qwen3_moe", "modelopt",
                                                             with_changes(everything("FP8"), scales="own")),
    "qwen3 modelopt nvfp4 input scales of gate and up": _form("qwen3_moe", "modelopt",
                                                              with_changes(everything("NVFP4"), scales="own")),
    "qwen3 awq": _form("qwen3_moe", "awq", everything("W4A16_ASYM", 32)),
    "qwen3 pack-quantized": _form("qwen3_moe", "compressed-tensors", everything("W4A16", 32, BF16)),
    "qwen3 experts only": _form("qwen3_moe", "compressed-tensors", experts_only(_W4)),
    "qwen3 int8": _form("qwen3_moe", "compressed-tensors", everything("W8A8", dtype=torch.float32)),
    "qwen3 autoround": _own("qwen3_moe", lambda f, m: write_autoround(f, "qwen3_moe", m)),
    "qwen3 mixed stack": _form("qwen3_moe", "compressed-tensors", down_in_other_groups),
    "qwen3 layer unquantized": _form("qwen3_moe", "gptq", all_but_layer_1(_W4)),
    "qwen3 up unquantized": _form("qwen3_moe", "gptq", up_unquantized(_W4)),
    "qwen3 router quantized": _form("qwen3_moe", "compressed-tensors", everything("W4A16", 32, routers=True)),
    "qwen3 gptq router quantized": _form("qwen3_moe", "gptq", everything("W4A16", 32, routers=True), num_experts=8),
    "deepseek router quantized": _form("deepseek_v3", "gptq", everything("W4A16", 32, routers=True)),
    "qwen3 one expert": _form("qwen3_moe", "awq", everything("W4A16_ASYM", 32), num_experts=1, num_experts_per_tok=1),
    "qwen3 all experts": _form("qwen3_moe", "gptq", _W4, num_experts_per_tok=6),
    "mixtral awq": _form("mixtral", "awq", everything("W4A16_ASYM", 32)),
    "mixtral gptq": _form("mixtral", "gptq", _W4),
    "deepseek fp8 blocks": _form("deepseek_v3", "fp8", _FP8),
    "deepseek fp8 cut blocks": _form("deepseek_v3", "fp8", _FP8, moe_intermediate_size=192),
    "qwen3 stacked fp8": _own("qwen3_moe", lambda f, m: write_stacked_fp8(f, "qwen3_moe", m)),
    "qwen3 modelopt nvfp4": _form("qwen3_moe", "modelopt", everything("NVFP4")),
    "qwen3 modelopt nvfp4 joint": _form("qwen3_moe", "modelopt", some_joint("NVFP4", -100)),
    "qwen3 modelopt nvfp4 expert 0 joint": _form("qwen3_moe", "modelopt", some_joint("NVFP4", 0)),
    "qwen3 modelopt nvfp4 expert 0 apart": _form("qwen3_moe", "modelopt", some_joint("NVFP4", -1)),
    "qwen3 modelopt fp8 expert 0 joint": _form("qwen3_moe", "modelopt", some_joint("FP8", 0)),
    "qwen3 modelopt fp8 expert 0 apart": _form("qwen3_moe", "modelopt", some_joint("FP8", -1)),
    "qwen3 modelopt fp8": _form("qwen3_moe", "modelopt", everything("FP8")),
    "qwen3 mxfp4": _form("qwen3_moe", "compressed-tensors", everything("MXFP4A16")),
    "qwen3 gguf q4_0": _gguf(lambda _name: "Q4_0", **_A3B),
    "qwen3 gguf mixed": _gguf(lambda name: _GGUF_KINDS.get(name.split(".")[-1], "Q8_0"), **_A3B),
    "qwen3 gguf other width": _gguf(lambda name: _GGUF_KINDS.get(name.split(".")[-1], "Q8_0")),
    "qwen3 gguf q4_k": _gguf(lambda name: "Q4_K" if "_exps" in name else "Q8_0", **_K_QUANTS),
    "gpt-oss mxfp4": _own("gpt_oss", write_gpt_oss),
}  # fmt: skip

"""Attacks on the rarer variants of each family. Importing this file adds them to the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bases import DTYPES, LAYER, K, N, random_int32, random_scales, write
from corpus import attack

DTYPES |= {torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e5m2: "F8_E5M2"}
NAN = float("nan")
U8, F8, E8M0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
Parts = dict[str, Any]


def codes(*shape: int) -> torch.Tensor:
    return random_int32(*shape).to(U8)


def f8(*shape: int) -> torch.Tensor:
    return random_scales(*shape).to(F8)


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


# ---- the bases: a config, the tensors of one layer, and torchao's description of it --------------------------------------

TORCHAO = {"quant_method": "torchao"}
QUARK = {"dtype": "int3", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": False}


def quark(**spec: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": QUARK | spec}, "export": {"pack_method": "order"}}


def auto_round(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "sym": True, **keys}


BASES: dict[str, Callable[[], tuple[dict[str, Any], Parts, dict[str, Any]]]] = {
    "ao_mx": lambda: (TORCHAO, {"_weight_qdata": codes(N, K // 2), "_weight_scale": codes(N, K // 32).view(E8M0)},
                      {"_type": "MXTensor", "elem_dtype": dtype("float4_e2m1fn_x2"), "block_size": 32}),
    "ao_mx6": lambda: (TORCHAO, {"_weight_qdata": codes(N, K) & 63, "_weight_scale": codes(N, K // 32).view(E8M0)},
                       {"_type": "MXTensor", "elem_dtype": "fp6_e2m3", "block_size": 32}),
    "ao_nvfp4": lambda: (TORCHAO, {"_weight_qdata": codes(N, K // 2), "_weight_scale": f8(N, K // 16),
                                   "_weight_per_tensor_scale": torch.tensor(0.01),
                                   "_weight_act_per_tensor_scale": torch.tensor(0.02)},
                         {"_type": "NVFP4Tensor", "block_size": 16, "act_quant_kwargs": {"_data": {"block_size": 16}}}),
    "ao_int4": lambda: (TORCHAO, {"_weight_qdata": codes(N, K // 2), "_weight_scale": random_scales(K // 32, N),
                                  "_weight_zero_point": random_scales(K // 32, N)},
                        {"_type": "Int4Tensor", "block_size": [1, 32], "shape": [N, K]}),
    "ao_static": lambda: (TORCHAO, {"_weight_qdata": codes(N, K).view(torch.int8), "_weight_scale": random_scales(N, 1),
                                    "_weight_act_quant_scale": torch.tensor([[0.1]])},
                          {"_type": "Int8Tensor", "block_size": [1, K], "act_quant_kwargs": {"_data": {
                              "granularity": {"_type": "PerTensor"}, "mapping_type": {"_data": "SYMMETRIC"}}}}),
    "quark_int3": lambda: (quark(zero_point_type="float32"), {
        "weight": codes(N, K * 3 // 8), "weight_scale": random_scales(K // 32, N),
        "weight_zero_point": torch.ones(K // 32, N, dtype=torch.int32)}, {}),
    "quark_mx": lambda: (quark(dtype="mx", mx_element_dtype="fp6_e2m3", qscheme=None),
                         {"weight": codes(N, K * 3 // 4), "weight_scale": codes(N, K // 32)}, {}),
    "quark_rows": lambda: (quark(dtype="uint4", qscheme="per_channel", ch_axis=0), {
        "weight": random_int32(N, K // 8), "weight_scale": random_scales(N), "weight_zero_point": random_int32(N // 8)}, {}),
    "quark_e5m3": lambda: (quark(dtype="fp4", group_size=16, scale_format="e5m3"),
                           {"weight": codes(N, K // 2), "weight_scale": codes(N, K // 16) & 127}, {}),
    "fbgemm": lambda: ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
                       {"weight": f8(N, K), "weight_scale": random_scales(N, 1, dtype=torch.float32)}, {}),
    "divided": lambda: ({"quant_method": "fp8", "weight_scale_semantics": "inverse"},
                        {"weight": f8(N, K), "weight_scale_inv": random_scales(N, dtype=torch.float32) + 1}, {}),
    "mxfp8": lambda: ({"quant_method": "mxfp8"}, {"weight": f8(N, K), "weight_scale_inv": codes(N, K // 32)}, {}),
    "mxint4": lambda: (auto_round(data_type="mx_int", group_size=32, packing_format="auto_round"),
                       {"weight_packed": codes(N, K // 2), "weight_scale": codes(N, K // 32) & 127}, {}),
    "e5m3": lambda: (auto_round(data_type="nvfp4_v2", group_size=16, packing_format="auto_round:llm_compressor_nvfp4_e5m3"),
                     {"weight_packed": codes(N, K // 2), "weight_scale": codes(N, K // 16) & 127}, {}),
    "stack": lambda: ({"quant_method": "fp8", "weight_block_size": [16, 32]},
                      {"weight": f8(3, N, K), "weight_scale_inv": random_scales(3, N // 16, K // 32, dtype=torch.float32)}, {}),
    "awq8": lambda: ({"quant_method": "awq", "bits": 8, "group_size": 32, "zero_point": True},
                     {"qweight": random_int32(K, N // 4), "qzeros": random_int32(K // 32, N // 4),
                     "scales": random_scales(K // 32, N)}, {}),
    "padded": lambda: ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, {
        "qweight": torch.cat((random_int32(12, N), random_int32(1, N) & 0xFFFF)), "scales": random_scales(4, N),
        "g_idx": (torch.arange(100) // 32).int()}, {}),
    "hqq_across": lambda: ({"quant_method": "hqq"}, {
        "W_q": codes(16, N * K // 32), "scale": random_scales(1, N * K // 32), "zero": random_scales(1, N * K // 32),
        "shape": torch.tensor([N, K]), "axis": torch.tensor(0, dtype=torch.int32),
        "group_size": torch.tensor(32, dtype=torch.int32), "packing": torch.tensor(list(b"4bit_u8"), dtype=U8)}, {}),
}  # fmt: skip


def build(folder: Path, base: str, parts: Parts, config: dict[str, Any], said: dict[str, Any]) -> Path:
    settings, tensors, described = BASES[base]()
    tensors = {f"{LAYER}.{suffix}": t for suffix, t in (tensors | parts).items() if t is not None}
    if described:
        described = described | said
        text = json.dumps({"_type": described.pop("_type"), "_data": described})
        return write(folder, tensors, settings | config, header=lambda h: h.update(__metadata__={f"{LAYER}.weight": text}))
    return write(folder, tensors, settings | config)


def variant(
    base: str, name: str, says: str, suffix: str | None = None, *, config: Any = None, said: Any = None, harmless: Any = False,
    **parts: Any,
) -> None:  # fmt: skip
    """An attack on a layer's tensors, its config or torchao's description. suffix: of the tensor that the error names."""
    tensor = None if suffix is None else f"{LAYER}.{suffix}"

    @attack(f"{base}-{name}", says=says, tensor=tensor, harmless=harmless)
    def _(folder: Path) -> Path:
        return build(folder, base, parts, config or {}, said or {})


# ---- torchao -------------------------------------------------------------------------------------------------------------

Q, S = "_weight_qdata", "_weight_scale"
for what, value in {"narrow": codes(N, 1), "tall": codes(N + 1, 2), "flat": codes(2 * N)}.items():
    variant("ao_mx", f"scales-{what}", "scales do not fit", S, **{S: value.view(E8M0)})
variant("ao_mx", "scales-floats", "another dtype", S, **{S: torch.ones(N, 2)})
variant("ao_mx", "tiles-short", "scales do not fit", S, said={"is_swizzled_scales": True})
for what, value in {"unknown": dtype("float3"), "none": None, "number": 7, "list": ["fp6_e2m3"]}.items():
    variant("ao_mx", f"element-{what}", "elements of an MX tensor", Q, said={"elem_dtype": value})
for what, value in {"zero": 0, "huge": 1 << 62, "text": "32", "none": None, "list": [1, 32]}.items():
    variant("ao_mx", f"block-{what}", "not valid|do not fit", said={"block_size": value})
variant("ao_mx", "element-wider", "another dtype", Q, said={"elem_dtype": dtype("float8_e4m3fn")})
variant("ao_mx", "inputs-six-bits", "inputs quantized this way", Q,
        said={"act_quant_kwargs": {"_data": {"elem_dtype": "fp6_e2m3"}}})  # fmt: skip
variant("ao_mx", "inputs-empty", "act_quant_kwargs of a weight is not valid", Q, said={"act_quant_kwargs": {}})
variant("ao_mx6", "codes-wider", "do not fit 6 bits", Q, **{Q: torch.full((N, K), 64, dtype=U8)})
variant("ao_nvfp4", "dynamic-global", "inputs quantized this way", Q,
        said={"act_quant_kwargs": {"_data": {"block_size": 16, "use_dynamic_per_tensor_scale": True}}})  # fmt: skip
variant(
    "ao_nvfp4",
    "global-of-experts",
    "not a single number",
    "_weight_per_tensor_scale",
    _weight_per_tensor_scale=torch.ones(3, 1, 1),
)
variant("ao_nvfp4", "global-nan", "NaN", "_weight_per_tensor_scale", _weight_per_tensor_scale=torch.tensor(NAN))
variant(
    "ao_nvfp4",
    "inputs-zero",
    "without a float32 reciprocal",
    "_weight_act_per_tensor_scale",
    _weight_act_per_tensor_scale=torch.tensor(0.0),
)
variant("ao_nvfp4", "scales-missing", "lacks a tensor", S, **{S: None})
variant("ao_int4", "shape-contradicts", "not the weight's", Q, said={"shape": [N, K + 2]})
variant("ao_int4", "zeros-short", "does not fit", "_weight_zero_point", _weight_zero_point=random_scales(1, N))
variant("ao_int4", "zeros-integers", "another dtype", "_weight_zero_point", _weight_zero_point=random_int32(K // 32, N))
variant("ao_int4", "scales-rows", "does not fit", S, **{S: random_scales(N, K // 32)})
variant("ao_int4", "zeros-of-symmetric", "not 0", "_weight_zero_point", said={"activation_dtype": dtype("float8_e4m3fn")})
variant("ao_int4", "blocks-of-rows", "groups of a row's columns", Q, said={"block_size": [2, 32]})
variant("ao_int4", "tiles-of-a-kernel", "of this kind are not supported yet", Q, said={"_type": "Int4TilePackedTo4dTensor"})
variant("ao_static", "scale-of-rows", "not a single number", "_weight_act_quant_scale", _weight_act_quant_scale=torch.ones(N, 1))
variant(
    "ao_static", "scale-negative", "positive number", "_weight_act_quant_scale", _weight_act_quant_scale=torch.tensor([[-1.0]])
)
variant("ao_static", "scale-unasked", "without act_quant_kwargs", "_weight_act_quant_scale", said={"act_quant_kwargs": None})
variant(
    "ao_static", "zeros-fractions", "fractional zero points", "_weight_zero_point", _weight_zero_point=torch.full((N, 1), 0.5)
)
variant("ao_static", "reduced", "inputs quantized this way", Q, said={"act_quant_kwargs": {"_data": {
    "granularity": {"_type": "PerRow"}, "reduce_range": True}}})  # fmt: skip


# ---- Quark ---------------------------------------------------------------------------------------------------------------

variant("quark_int3", "codes-not-whole", "whole codes", "weight", weight=codes(N, 25))
variant("quark_int3", "rows-contradict", "do not fit", "weight", weight=codes(N + 1, K * 3 // 8))
variant("quark_int3", "zeros-packed", "does not fit", "weight_zero_point", weight_zero_point=codes(N, 3))
variant("quark_int3", "zeros-nan", "NaN|no float32", weight_zero_point=torch.full((K // 32, N), NAN))
variant("quark_mx", "element-unknown", "not supported yet", "weight", config=quark(dtype="mx", mx_element_dtype="int8"))
variant(
    "quark_mx", "groups-of-16", "not supported yet", "weight", config=quark(dtype="mx", mx_element_dtype="fp4", group_size=16)
)
variant("quark_mx", "scales-floats", "another dtype", "weight_scale", weight_scale=torch.ones(N, 2))
variant("quark_mx", "scales-narrow", "does not fit", "weight_scale", weight_scale=codes(N, 1))
variant("quark_mx", "two-levels", "not supported yet", "weight", config=quark(dtype="mx9"))
variant("quark_rows", "zeros-missing", "lacks a tensor", "weight_zero_point", weight_zero_point=None)
variant("quark_rows", "zeros-many", "does not fit", "weight_zero_point", weight_zero_point=random_int32(N))
variant("quark_rows", "scale-short", "does not fit", "weight_scale", weight_scale=random_scales(N - 1))
variant("quark_e5m3", "scales-nan", "NaN", "weight_scale", weight_scale=torch.full((N, K // 16), 255, dtype=U8))
variant("quark_e5m3", "scales-floats", "another dtype", "weight_scale", weight_scale=torch.ones(N, K // 16))
variant("quark_rows", "exclude-a-text", "not a list", config={"exclude": "lm_head"})


# ---- FP8, MX and compressed-tensors ----------------------------------------------------------------------------------------

for what, value in {"negative": -1.0, "zero": 0.0, "text": "1200", "nan": NAN, "infinite": float("inf")}.items():
    variant("fbgemm", f"bound-{what}", "not valid", config={"activation_scale_ub": value})
variant("fbgemm", "scale-short", "scales do not fit", "weight_scale", weight_scale=torch.ones(N - 1, 1))
variant("divided", "scale-zero", "without a float32 reciprocal", "weight_scale_inv", weight_scale_inv=torch.zeros(N))
variant("divided", "scale-half", "another dtype", "weight_scale_inv", weight_scale_inv=torch.ones(N).half())
variant("divided", "semantics-unknown", "not valid", config={"weight_scale_semantics": "forward"})
variant("divided", "zero-points", "zero points", "weight_zp", weight_zp=torch.ones(N))
variant("mxfp8", "scales-wide", "scales do not fit", "weight_scale_inv", weight_scale_inv=codes(N, 3))
variant("mxint4", "bits-contradict", "do not fit", config={"bits": 2})
variant("mxint4", "scales-floats", "another dtype", "weight_scale", weight_scale=torch.ones(N, 2))
variant("mxint4", "scales-nan", "NaN", "weight_scale", weight_scale=torch.full((N, 2), 255, dtype=U8))
variant("mxint4", "rotated", "rotated", config={"rotation_config": {"R1": True}})
variant("e5m3", "scales-nan", "NaN", "weight_scale", weight_scale=torch.full((N, K // 16), 255, dtype=U8))
variant("e5m3", "scales-narrow", "scales do not fit", "weight_scale", weight_scale=codes(N, 3))
variant("stack", "scales-of-one", "matrix", "weight", weight_scale_inv=torch.ones(2, 2))
variant("stack", "scales-of-two", "matrix", "weight", weight_scale_inv=torch.ones(2, 2, 2))
variant("stack", "no-experts", "matrix", "weight", weight=f8(0, N, K))
variant("stack", "deep", "matrix", "weight", weight=f8(2, 3, N, K))
variant("stack", "empty-rows", "matrix", "weight", weight=f8(3, 0, K))
variant("stack", "scales-missing", "lacks a tensor", "0.weight_scale_inv", weight_scale_inv=None)
variant("stack", "scales-nan", "NaN", "weight_scale_inv", weight_scale_inv=torch.full((3, 2, 2), NAN))


# ---- GPTQ, AWQ, HQQ ------------------------------------------------------------------------------------------------------

variant("awq8", "zeros-four-bits", "disagree about bits", "qzeros", qzeros=random_int32(2, N // 8))
variant("awq8", "bits-contradict", "disagree about bits", "qweight", config={"bits": 3})
variant("awq8", "list-a-number", "not a list", config={"modules_to_not_convert": [3]})
variant("padded", "padding-filled", "does not fit qweight", "g_idx", qweight=torch.full((13, N), -1, dtype=torch.int32))
variant("padded", "padding-of-an-int32", "does not fit qweight", "g_idx", g_idx=(torch.arange(96) // 32).int())
variant("hqq_across", "group-not-a-divisor", "do not fill", "W_q", group_size=torch.tensor(31, dtype=torch.int32))
variant("hqq_across", "group-odd", "do not fit|does not fit", group_size=torch.tensor(1, dtype=torch.int32))
variant("hqq_across", "scales-of-rows", "does not fit", "scale", scale=random_scales(N, 1))
variant("hqq_across", "one-of-both", "lacks a tensor", "zero", zero=None)


@attack("params-json-not-json", says="not valid JSON", file="params.json")
def _(folder: Path) -> Path:
    (folder / "params.json").write_text("{")
    return write(folder, {"x": torch.ones(2)}, None)


@attack("config-in-a-config-a-list", says="is not an object")
def _(folder: Path) -> Path:
    path = write(folder, {"x": torch.ones(2)}, None)
    (folder / "config.json").write_text(json.dumps({"thinker_config": {"text_config": {"quantization_config": [1]}}}))
    return path


@attack("config-in-configs-without-end", harmless=True)
def _(folder: Path) -> Path:
    config: dict[str, Any] = {}
    for _ in range(400):
        config = {"a_config": config, "text_config": {"b_config": {}}}
    path = write(folder, {"x": torch.ones(2)}, None)
    (folder / "config.json").write_text(json.dumps(config))
    return path

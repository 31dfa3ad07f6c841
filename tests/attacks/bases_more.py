"""More valid checkpoints: every bit width, version, packing and kind of scale of the families. Importing this file adds them."""

from __future__ import annotations

import json
from typing import Any

import bases_variants  # noqa: F401  (adds its own)
import torch
from bases import (
    DTYPES,
    FAMILIES,
    GROUP,
    LAYER,
    G,
    K,
    N,
    auto_round,
    awq,
    bnb4,
    fp8,
    gemv_fast,
    gptq,
    group,
    hqq,
    int8,
    json_tensor,
    mxfp4,
    named,
    nvfp4,
    packed,
    quark4,
    random_int32,
    random_scales,
    torchao,
    torchao_metadata,
)  # fmt: skip  # isort: skip
from corpus_float import fp8_block, fp8_static, modelopt_awq, modelopt_nvfp4

from bitline.types import fp4_bnb

DTYPES |= {torch.float64: "F64", torch.float8_e4m3fnuz: "F8_E4M3FNUZ"}
Base = tuple[dict[str, Any], dict[str, Any]]
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_E8M0_SCALES = torch.full((N, K // 32), 120, dtype=torch.uint8)
_FP8_CODES = random_scales(N, K).to(_FP8)


def add(name: str, base: Base, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Derive a base from another: config values and tensors are replaced or added, a tensor that is None is removed."""
    data, settings = base
    changed = {f"{LAYER}.{suffix.replace('__', '.')}": t for suffix, t in tensors.items()}
    data = {key: t for key, t in (data | changed).items() if t is not None}
    settings = settings | (config or {})
    assert name not in FAMILIES
    FAMILIES[name] = lambda: (
        {key: t.clone() if isinstance(t, torch.Tensor) else dict(t) for key, t in data.items()}, json.loads(json.dumps(settings))
    )  # fmt: skip


def two_layers(base: Base, second: Base, config: dict[str, Any]) -> Base:
    """Both layers in one checkpoint, as up_proj and down_proj."""
    return base[0] | {key.replace("up_proj", "down_proj"): t for key, t in second[0].items()}, base[1] | config


_DOWN = LAYER.replace("up_proj", "down_proj")


# ---- GPTQ, AutoRound, AWQ ------------------------------------------------------------------------------------------------


def _gptq(bits: int, groups: int = K // GROUP, **config: Any) -> Base:
    tensors = {
        "qweight": random_int32(K * bits // 32, N), "qzeros": random_int32(groups, N * bits // 32),
        "scales": random_scales(groups, N),
        "g_idx": None,
    }  # fmt: skip
    base = {f"{LAYER}.{suffix}": t for suffix, t in tensors.items() if t is not None}
    return base, gptq()[1] | {"bits": bits, "group_size": -(-K // groups)} | config


for _bits in (2, 3, 5, 6, 7, 8):
    add(f"gptq{_bits}", _gptq(_bits))
    add(f"auto_round{_bits}", _gptq(_bits), {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "int"})
add("gptq_v2", _gptq(4), {"checkpoint_format": "gptq_v2"})
add("gptq3_planes", _gptq(3), {"checkpoint_format": "gptq_p"})
add("gptq_symmetric", _gptq(4), {"sym": True}, scales=random_scales(G, N, dtype=torch.bfloat16))
add("gptq_without_zeros", _gptq(4), {"sym": True}, qzeros=None)
add("gptq_rows", _gptq(4, 1), {"group_size": -1})
add("gptq_ragged", _gptq(4, 2), {"group_size": K * 3 // 4})
add("gptq_act_order", gptq(), {"desc_act": True}, g_idx=(torch.arange(K) * 7 % 2).int())
add("gptq_act_order3", _gptq(3), {"desc_act": True}, g_idx=(torch.arange(K) // 3 % 2).int())
add("gptq_dynamic", two_layers(gptq(), _gptq(8), {"dynamic": {r"-:.*gate": {}, r"+:.*down.*": {"bits": 8, "group_size": 32}}}))
add("auto_round_awq", awq(), auto_round()[1] | {"packing_format": "auto_round:auto_awq"})
add("auto_round_mixed", two_layers(auto_round(), _gptq(2), {"extra_config": {_DOWN: {"bits": 2}, "gate|x": {"bits": 16}}}))
for _bits in (5, 6, 7):
    add(f"awq{_bits}", awq(), {"bits": _bits}, qweight=random_int32(K, N * _bits // 32), qzeros=random_int32(G, N * _bits // 32))
add("awq_symmetric", awq(), {"zero_point": False}, qzeros=None, scales=random_scales(G, N, dtype=torch.bfloat16))
add("awq_with_all_zeros_8", awq(), {"zero_point": False}, qzeros=torch.full((G, N // 8), -0x77777778).int())
add("llm_awq", gemv_fast(), {"version": "llm-awq"}, scaled_zeros=gemv_fast()[0][f"{LAYER}.qzeros"], qzeros=None)


# ---- compressed-tensors --------------------------------------------------------------------------------------------------


def _packed(bits: int, columns: int, *, symmetric: bool = True, **config: Any) -> Base:
    tensors = {
        "weight_packed": random_int32(N, columns), "weight_scale": random_scales(N, K // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([N, K]),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = random_int32(-(-N * bits // 32), K // GROUP)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    return named(tensors), group(weights, format="pack-quantized", **config)


for _bits in (2, 3, 5, 6, 7, 8):
    add(f"packed{_bits}", _packed(_bits, K * _bits // 32, symmetric=_bits % 2 == 0))
for _bits in (3, 5, 6, 7):
    add(f"padded{_bits}", _packed(_bits, -(-K // (32 // _bits)), version="0.12.2"))
add("packed_preset", _packed(4, K // 8), {"config_groups": {"W4A16": ["re:.*proj$"]}})
add("packed_old_zeros", packed(), weight_zero_point=(random_int32(N, G) % 8).to(torch.int8), weight_g_idx=None)
add("packed_act_order", packed(), weight_g_idx=(torch.arange(K) * 5 % 2).int())
add("packed_rows", packed(), group({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}),
    weight_scale=random_scales(N, 1), weight_g_idx=None, weight_zero_point=None)  # fmt: skip
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
add("int4", int8(), group(_INT4, _TOKEN, format="int-quantized"), weight=(random_int32(N, K) % 8).to(torch.int8),
    weight_scale=random_scales(N, G), input_scale=None, input_zero_point=None)  # fmt: skip
add("int8_zeros", int8(), group({"num_bits": 8, "symmetric": False, "strategy": "channel"}, _TOKEN, format="int-quantized"),
    weight_zero_point=(random_int32(N, 1) % 100).to(torch.int8))  # fmt: skip
_EXPERTS = [int8()[0] | {f"{LAYER}.weight_zero_point": (random_int32(N, 1) + e).to(torch.int8)} for e in range(3)]
add("int8_stack", int8(), FAMILIES["int8_zeros"]()[1], input_scale=torch.ones(3), input_zero_point=None,
    **{s: torch.stack([e[f"{LAYER}.{s}"].roll(i, 0) for i, e in enumerate(_EXPERTS)])
       for s in ("weight", "weight_scale", "weight_zero_point")})  # fmt: skip
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
add("fp8_rows", fp8(), group(_FLOAT | {"strategy": "channel"}, _FLOAT | {"strategy": "token", "dynamic": True}),
    weight_scale=random_scales(N, 1, dtype=torch.bfloat16), input_scale=None)  # fmt: skip
add("fp8_blocks", fp8(), group(_FLOAT | {"strategy": "block", "block_structure": [N * 3 // 4, K * 5 // 8]}),
    weight_scale=random_scales(2, 2), input_scale=None)  # fmt: skip
add("nvfp4_weight_only", nvfp4(), input_global_scale=None,
    config=group({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                 format="nvfp4-pack-quantized"))  # fmt: skip
add("mxfp6", mxfp4(), group({"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32},
    format="mxfp6-pack-quantized"), weight_packed=random_int32(N, K * 6 // 8).to(torch.uint8))  # fmt: skip
add("mxfp8", mxfp4(), group(_FLOAT | {"strategy": "group", "group_size": 32}, format="mxfp8-quantized"), weight_packed=None,
    weight=_FP8_CODES)  # fmt: skip
add("two_groups", two_layers(packed(), fp8(), {"config_groups": packed()[1]["config_groups"] | {
    "fp8": fp8()[1]["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}}}))  # fmt: skip
_AR = {"quant_method": "auto-round", "act_bits": 16, "sym": True, "group_size": 32}
add("auto_round_mxfp4", (mxfp4()[0], _AR), {"bits": 4, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"})
add("auto_round_fp8_static", (fp8()[0], _AR), {"bits": 8, "data_type": "fp", "packing_format": "auto_round:fp8_static",
    "group_size": -1, "act_bits": 8, "act_group_size": 0, "act_dynamic": False}, weight_scale=random_scales(N))  # fmt: skip


# ---- fp8, ModelOpt -------------------------------------------------------------------------------------------------------

add("fp8_per_row", fp8_static(), {"activation_scheme": "dynamic"}, weight_scale=random_scales(N, 1), input_scale=None)
add("fp8_e5m2", fp8_static(), weight=_FP8_CODES.float().to(torch.float8_e5m2))
add("fp8_fnuz", fp8_static(), weight=_FP8_CODES.float().to(torch.float8_e4m3fnuz))
add("fp8_exponents", fp8_block(), {"scale_fmt": "ue8m0"}, weight_scale_inv=torch.full((2, 2), 0.01).to(_E8M0))
add("fp8_experts", (named({"weight": random_int32(N, K // 2).to(torch.int8), "scale": _E8M0_SCALES.view(_E8M0)}), fp8_block()[1]))
add("auto_round_fp8", fp8_block(), {"quant_method": "auto-round", "packing_format": "auto_round:fp8",
    "group_size": [N // 2, K // 2], "weight_block_size": None})  # fmt: skip


def _modelopt(name: str, algorithm: str, weight: torch.Tensor, scale: torch.Tensor, **more: Any) -> None:
    config = {"quant_method": "modelopt", "quant_algo": algorithm} | more.pop("config", {})
    add(f"modelopt_{name}", (named({"weight": weight, "weight_scale": scale, **more}), config))


_SCALAR = torch.tensor(0.02)
_modelopt("fp8", "FP8", _FP8_CODES, torch.tensor(0.01), input_scale=_SCALAR)
_modelopt("fp8_rows", "FP8_PER_CHANNEL_PER_TOKEN", _FP8_CODES, random_scales(N, dtype=torch.float32), bias=random_scales(N))
_modelopt("fp8_blocks", "fp8_pb_wo", _FP8_CODES, random_scales(2, 1, 2, 1, dtype=torch.float32))
_modelopt("mxfp8", "MXFP8", _FP8_CODES, _E8M0_SCALES)
_modelopt("mxfp8_tiles", "MXFP8", _FP8_CODES, _E8M0_SCALES[: N // 4].clone())
_modelopt("mxfp4", "W4A8_MXFP4_FP8", random_int32(N, K // 2).to(torch.uint8), _E8M0_SCALES)
_modelopt("w8a16", "W8A16", random_int32(N, K).to(torch.int8), random_scales(N, dtype=torch.float32))
_modelopt("w8a8", "W8A8_SQ_PER_CHANNEL", random_int32(N, K).to(torch.int8), random_scales(N, dtype=torch.float32),
          input_scale=_SCALAR, pre_quant_scale=random_scales(K))  # fmt: skip
_modelopt("w4a8", "W4A8_AWQ", random_int32(N // 2, K).to(torch.uint8), random_scales(N, G, dtype=torch.float32),
          input_scale=_SCALAR, weight_scale_2=_SCALAR, config={"group_size": GROUP})  # fmt: skip
add("modelopt_weight_only", modelopt_nvfp4(), {"quant_algo": "W4A16_NVFP4"}, input_scale=None)
add("modelopt_awq_sizes_by_shape", modelopt_awq(), {"group_size": None})


# ---- bitsandbytes, Quark, HQQ, torchao -----------------------------------------------------------------------------------


def _bnb(kind: str, n: int, k: int, block: int) -> Base:
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [n, k]}
    count = -(-n * k // block)
    tensors = {
        "weight": random_int32(-(-n * k // 2), 1).to(torch.uint8), "weight.absmax": random_scales(count, dtype=torch.float32),
        "weight.quant_map": torch.tensor(fp4_bnb.values()) if kind == "fp4" else bnb4()[0][f"{LAYER}.weight.quant_map"],
        f"weight.quant_state.bitsandbytes__{kind}": json_tensor(state),
    }  # fmt: skip
    return named(tensors), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


add("bnb_fp4", _bnb("fp4", N, K, 64))
add("bnb_across_rows", _bnb("nf4", N * 3 // 4, K * 5 // 8, 64))
add("bnb_odd", _bnb("nf4", N // 4 + 1, K // 2 + 1, 64))
add("bnb_as_bfloat16", bnb4(), weight=random_int32(N * K // 8, 1).view(torch.bfloat16))


def _quark(name: str, spec: dict[str, Any], inputs: Any = None, config: dict[str, Any] | None = None, **tensors: torch.Tensor):
    layer = {"weight": spec, "input_tensors": inputs}
    add(f"quark_{name}", (named(tensors), quark4()[1] | {"global_quant_config": layer} | (config or {})))


_GROUP = {"qscheme": "per_group", "group_size": GROUP, "ch_axis": -1}
_ROW = {"qscheme": "per_channel", "ch_axis": 0}
_TENSOR = {"qscheme": "per_tensor", "is_dynamic": False}
_quark("int4", {"dtype": "int4", "symmetric": True, **_GROUP}, weight=random_int32(K, N // 8), weight_scale=random_scales(G, N))
_quark("int4_zeros", {"dtype": "int4", "symmetric": False, **_GROUP}, config={"export": {"pack_method": "order"}},
       weight=random_int32(K, N // 8), weight_scale=random_scales(G, N - 5),
       weight_zero_point=random_int32(G, N // 8))  # fmt: skip
_quark("int8", {"dtype": "int8", "symmetric": True, **_ROW}, {"dtype": "int8", **_TENSOR}, input_scale=random_scales(1),
       weight=random_int32(N, K).to(torch.int8), weight_scale=random_scales(N),
       weight_zero_point=torch.zeros(N).to(torch.int8))  # fmt: skip
_quark("uint8", {"dtype": "uint8", "symmetric": False, **_ROW}, weight=random_int32(N, K).to(torch.uint8),
       weight_scale=random_scales(N), weight_zero_point=(random_int32(N) % 200).to(torch.uint8))  # fmt: skip
_quark("fp8", {"dtype": "fp8_e4m3", **_TENSOR}, {"dtype": "fp8_e4m3", **_TENSOR}, weight=_FP8_CODES, input_scale=_SCALAR,
       weight_scale=_SCALAR)  # fmt: skip
_quark("fp8_blocks", {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [N // 2, K * 3 // 4]}, weight=_FP8_CODES,
       weight_scale=random_scales(2, 2, dtype=torch.float32), bias=random_scales(N))  # fmt: skip
for _name, _bits in (("fp4", 4), ("fp6_e2m3", 6), ("fp6_e3m2", 6)):
    _quark(_name, {"dtype": _name, "scale_format": "e8m0", **_GROUP, "group_size": 32}, weight_scale=_E8M0_SCALES,
           weight=random_int32(N, K * _bits // 8).to(torch.uint8))  # fmt: skip
_quark("by_name", {"dtype": "uint4", "symmetric": False, **_GROUP, "group_size": 64}, config={"layer_quant_config": {
       "*gate*": {}, "*up_pr?j": {"weight": {"dtype": "uint4", "symmetric": False, **_GROUP}}}}, weight=random_int32(K, N // 8),
       weight_scale=random_scales(G, N), weight_zero_point=random_int32(G, N // 8))  # fmt: skip


_quark("int2", {"dtype": "int2", "symmetric": True, **_GROUP}, weight=(random_int32(K, N) % 2).int(),
       weight_scale=random_scales(G, N))  # fmt: skip
_quark("uint2", {"dtype": "uint2", "symmetric": False, **_GROUP}, weight=random_int32(K, N // 4).to(torch.uint8),
       weight_scale=random_scales(G, N), weight_zero_point=random_int32(G, N // 4).to(torch.uint8))  # fmt: skip
_quark("int3", {"dtype": "int3", "symmetric": True, **_GROUP}, weight=random_int32(N, K * 3 // 8).to(torch.uint8),
       weight_scale=random_scales(G, N))  # fmt: skip
_quark("int4_rows", {"dtype": "uint4", "symmetric": False, **_ROW}, weight=random_int32(N, K // 8), weight_scale=random_scales(N),
       weight_zero_point=random_int32(N // 8))  # fmt: skip
_quark("float_zeros", {"dtype": "uint4", "symmetric": False, **_GROUP}, weight=random_int32(K, N // 8),
       weight_scale=random_scales(G, N), weight_zero_point=random_scales(G, N) * 900)  # fmt: skip
for _name, _bits in (("fp4", 4), ("fp6_e2m3", 6), ("fp6_e3m2", 6)):
    _quark(f"mx_{_name}", {"dtype": "mx", "mx_element_dtype": _name, "group_size": 32, "ch_axis": -1},
           weight=random_int32(N, K * _bits // 8).to(torch.uint8), weight_scale=_E8M0_SCALES.view(torch.int8) - 125)  # fmt: skip
_quark("e5m3", {"dtype": "fp4", "scale_format": "e5m3", **_GROUP, "group_size": 16},
       weight=random_int32(N, K // 2).to(torch.uint8),
       weight_scale=(random_int32(N, K // 16) % 120).abs().to(torch.uint8))  # fmt: skip
_quark("uint8_inputs", {"dtype": "int8", "symmetric": True, **_ROW}, {"dtype": "uint8", "symmetric": False, **_TENSOR},
       weight=random_int32(N, K).to(torch.int8), weight_scale=random_scales(N), input_scale=_SCALAR,
       input_zero_point=torch.tensor(130, dtype=torch.uint8))  # fmt: skip


def _hqq(packing: str, per_element: int, storage: torch.dtype = torch.uint8, dtype: torch.dtype = torch.bfloat16) -> Base:
    groups = N * K // GROUP
    return hqq()[0] | named({
        "W_q": random_int32(-(-groups // per_element), GROUP).to(storage),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        "scale": random_scales(groups, 1).to(dtype), "zero": (random_scales(groups, 1) * 900).to(dtype),
    }), hqq()[1]  # fmt: skip


for _packing, _per in (("8bit_u8", 1), ("2bit_u8", 4), ("1bit_u8", 8)):
    add(f"hqq_{_packing}", _hqq(_packing, _per))
add("hqq_3bit_32", _hqq("3bit_32", 10, torch.int32))
add("hqq_float32", _hqq("4bit_u8", 2, dtype=torch.float32))
add("hqq_rows", hqq(), group_size=None, scale=random_scales(N, 1), zero=random_scales(N, 1) * 900)
add("hqq_over_rows", hqq(), shape=torch.tensor([N * K // 16, 16]))


add("hqq_across", hqq(), axis=torch.tensor(0).int(), scale=random_scales(1, N * K // GROUP),
    zero=random_scales(1, N * K // GROUP) * 900)  # fmt: skip
add("hqq_columns", hqq(), axis=torch.tensor(0).int(), group_size=torch.tensor(N).int(), scale=random_scales(1, K),
    zero=random_scales(1, K))  # fmt: skip
add("hqq_zero_scale", hqq(), scale=None, zero=None, zero_scale=random_scales(2, N * K // GROUP, 1))
add("hqq_one_scale", hqq(), scale=random_scales(1), zero=random_scales(1), channel_wise=torch.tensor(0).to(torch.uint8))


def _torchao(name: str, kind: str, data: dict[str, Any], **tensors: torch.Tensor | None) -> None:
    base_tensors = torchao()[0] | {"__metadata__": torchao_metadata(data, kind)}
    add(name, (base_tensors, torchao()[1]), **{f"_weight_{suffix}": t for suffix, t in tensors.items()})


_torchao("torchao", "IntxUnpackedToInt8Tensor", {})
_torchao("torchao_symmetric", "IntxUnpackedToInt8Tensor", {"target_dtype": {"_data": "int3"}},
         zero_point=torch.zeros(N, G).char(), qdata=(random_int32(N, K) % 4).to(torch.int8))  # fmt: skip
_torchao("torchao_int8", "Int8Tensor", {"block_size": [1, K]}, qdata=random_int32(N, K).to(torch.int8), scale=random_scales(N, 1),
         zero_point=(random_int32(N, 1) % 100).to(torch.int8))  # fmt: skip
_torchao("torchao_fp8", "Float8Tensor", {"block_size": [1, K]}, qdata=_FP8_CODES, scale=random_scales(N, 1, dtype=torch.float32),
         zero_point=None)  # fmt: skip

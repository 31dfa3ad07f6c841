"""Attacks on fp8, ModelOpt and gpt-oss checkpoints. Importing this file adds them to the corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bases import DTYPES, FAMILIES, GROUP, LAYER, K, N, named, random_int32, random_scales, write
from corpus import attack, family, poke, put

DTYPES |= {torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e5m2: "F8_E5M2"}
NAN, INF = float("nan"), float("inf")
Tensors = dict[str, torch.Tensor]


def fp8_block() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "weight": random_scales(N, K).to(torch.float8_e4m3fn), "weight_scale_inv": random_scales(2, 2, dtype=torch.float32),
        "bias": random_scales(N),
    }  # fmt: skip
    return named(tensors), {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [N // 2, K // 2]}


def fp8_static() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "weight": random_scales(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.01),
        "input_scale": torch.tensor([0.02]),
    }  # fmt: skip
    return named(tensors), {"quant_method": "fp8", "activation_scheme": "static"}


def modelopt_nvfp4() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "weight": random_int32(N, K // 2).to(torch.uint8), "weight_scale": random_scales(N, K // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor([0.01]), "input_scale": torch.tensor([0.02]),
    }  # fmt: skip
    return named(tensors), {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}


def modelopt_awq() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "weight": random_int32(N // 2, K).to(torch.uint8), "weight_scale": random_scales(N, K // GROUP, dtype=torch.float32),
        "pre_quant_scale": random_scales(K, dtype=torch.bfloat16),
    }  # fmt: skip
    return named(tensors), {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}


def modelopt_mixed() -> tuple[Tensors, dict[str, Any]]:
    tensors, _ = modelopt_nvfp4()
    for name, tensor in fp8_static()[0].items():
        tensors[name.replace("up_proj", "down_proj")] = tensor
    algorithms = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, LAYER.replace("up_proj", "down_proj"): {"quant_algo": "fp8"}}
    return tensors, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}


def gpt_oss() -> tuple[Tensors, dict[str, Any]]:
    tensors = {
        "experts_blocks": random_int32(3, N, K // 32, 16).to(torch.uint8),
        "experts_bias": random_scales(3, N, dtype=torch.bfloat16),
        "experts_scales": torch.full((3, N, K // 32), 120, dtype=torch.uint8),
    }  # fmt: skip
    return named(tensors), {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


FAMILIES |= {f.__name__: f for f in (fp8_block, fp8_static, modelopt_nvfp4, modelopt_awq, modelopt_mixed, gpt_oss)}


def many(base: str, suffix: str, says: str, **values: torch.Tensor) -> None:
    """Attacks that replace one tensor by others."""
    for what, value in values.items():
        family(base, f"{suffix}-{what.replace('_', '-')}", says=says, tensors=put(suffix, value), suffix=suffix)


# ---- fp8 -----------------------------------------------------------------------------------------------------------------

many("fp8_block", "weight_scale_inv", "scales do not fit", wide=torch.ones(2, 3), flat=torch.ones(4), empty=torch.ones(0, 2),
     deep=torch.ones(2, 1, 2, 1), number=torch.ones(()), rows=torch.ones(N))  # fmt: skip
many(
    "fp8_block",
    "weight_scale_inv",
    "dtype",
    integers=torch.ones(2, 2).int(),
    bytes_of_fp8=torch.ones(2, 2).to(torch.float8_e4m3fn),
)
many("fp8_block", "weight_scale_inv", "NaN or infinite", nan=torch.tensor([[1, 1], [NAN, 1]]), inf=torch.full((2, 2), INF))
many(
    "fp8_block",
    "weight",
    "matrix",
    stack=torch.ones(3, N, K).to(torch.float8_e4m3fn),
    none=torch.ones(0, K).to(torch.float8_e5m2),
)
many("fp8_block", "bias", "bias", long=torch.ones(N + 1), whole=torch.ones(N).int(), nan=torch.full((N,), NAN))
family("fp8_block", "scale-missing", says="lacks a tensor", tensors=put("weight_scale_inv", None), suffix="weight_scale_inv")
family("fp8_block", "codes-missing", says="scales without codes", tensors=put("weight", None), suffix="weight_scale_inv")
family(
    "fp8_block", "codes-plain", says="scales without codes", tensors=put("weight", torch.ones(N, K)), suffix="weight_scale_inv"
)
family("fp8_block", "scale-shared-exponents", tensors=put("weight_scale_inv", torch.ones(2, 2).to(torch.float8_e8m0fnu)),
       harmless=True)  # fmt: skip
family("fp8_block", "scale-zero", tensors=put("weight_scale_inv", torch.zeros(2, 2)), harmless=True)
family("fp8_block", "input-scale-left-over", tensors=put("input_scale", torch.tensor(-1.0)), harmless=True)
for what, value in {
    "zero": [0, 32],
    "negative": [-16, -32],
    "three": [1, 16, 32],
    "one": [32],
    "text": "16x32",
    "fraction": [16.5, 32],
}.items():
    family("fp8_block", f"blocks-{what}", says="not valid", config={"weight_block_size": value}, file="config.json")
for what, value in {"contradict": [128, 128], "2^62": [1 << 62, 1 << 62], "small": [1, 1]}.items():
    family("fp8_block", f"blocks-{what}", says="scales do not fit", config={"weight_block_size": value},
           suffix="weight_scale_inv", huge=what != "contradict")  # fmt: skip
family("fp8_block", "blocks-none", says="scales do not fit", config={"weight_block_size": None}, suffix="weight_scale_inv")
for what, value in {"unknown": "mystery", "number": 3, "list": ["static"]}.items():
    family("fp8_block", f"scheme-{what}", says="not valid", config={"activation_scheme": value}, file="config.json")
family("fp8_block", "list-a-text", says="not valid", config={"ignored_layers": "lm_head"}, file="config.json")
family("fp8_block", "list-unclosed", says="regular expression", config={"ignored_layers": ["re:("]}, file="config.json")
family("fp8_block", "list-endless", config={"ignored_layers": ["*a" * 400 + "b", "re:(a+)+$"]}, harmless=None)
family("fp8_block", "static-without-scale", says="lacks a tensor", config={"activation_scheme": "static"}, suffix="input_scale")
many("fp8_static", "input_scale", "positive", zero=torch.tensor(0.0), negative=torch.tensor([-1.0]))
many("fp8_static", "input_scale", "single number", rows=torch.ones(2), none=torch.ones(0))
many("fp8_static", "input_scale", "dtype", whole=torch.ones(1).int())
many("fp8_static", "input_scale", "NaN", nan=torch.tensor(NAN), inf=torch.tensor(INF))
many("fp8_static", "weight_scale", "NaN", nan=torch.tensor(NAN), inf=torch.tensor([INF]))
many("fp8_static", "weight_scale", "scales do not fit", short=torch.ones(N - 1), columns=torch.ones(1, K), none=torch.ones(0))


# ---- ModelOpt ------------------------------------------------------------------------------------------------------------

many("modelopt_nvfp4", "weight_scale_2", "NaN", nan=torch.tensor(NAN), inf=torch.tensor([INF]))
many("modelopt_nvfp4", "weight_scale_2", "single number", rows=torch.ones(N), none=torch.ones(0))
many("modelopt_nvfp4", "weight_scale_2", "dtype", whole=torch.tensor(1))
many("modelopt_nvfp4", "input_scale", "without a float32 reciprocal", zero=torch.tensor(0.0), negative=torch.tensor(-1.0),
     nan=torch.tensor(NAN), inf=torch.tensor(INF), tiny=torch.tensor(1e-44), large=torch.tensor(3e38))  # fmt: skip
many("modelopt_nvfp4", "input_scale", "single number", rows=torch.ones(2))
many("modelopt_nvfp4", "weight_scale", "scales do not fit", narrow=torch.ones(N, 3).to(torch.float8_e4m3fn),
     flat=torch.ones(N).to(torch.float8_e4m3fn), tall=torch.ones(N + 1, 4).to(torch.float8_e4m3fn))  # fmt: skip
many("modelopt_nvfp4", "weight_scale", "dtype", whole=torch.ones(N, 4).int())
many(
    "modelopt_nvfp4",
    "weight",
    "matrix",
    stack=torch.ones(2, N, K // 2, dtype=torch.uint8),
    none=torch.ones(0, 3, dtype=torch.uint8),
)
family("modelopt_nvfp4", "scale-nan", says="NaN", suffix="weight_scale",
       tensors=put("weight_scale", torch.full((N, 4), NAN).to(torch.float8_e4m3fn)))  # fmt: skip
family("modelopt_nvfp4", "scale-half", says="disagree about the algorithm", tensors=put("weight_scale", torch.ones(N, 4).half()),
       suffix="weight")  # fmt: skip
for lacking in ("weight_scale", "weight_scale_2", "input_scale"):
    family("modelopt_nvfp4", f"no-{lacking}", says="lacks a tensor", tensors=put(lacking, None), suffix=lacking)
family("modelopt_nvfp4", "codes-missing", says="scales without codes", tensors=put("weight", None), suffix="weight_scale")
family("modelopt_nvfp4", "low-rank", says="low-rank", tensors=put("svdquant_lora_a", torch.ones(4, K)), suffix="svdquant_lora_a")
for what, value in {"unknown": "W3A3", "low-rank": "NVFP4_SVD", "empty": ""}.items():
    family("modelopt_nvfp4", f"algorithm-{what}", says="not supported yet", config={"quant_algo": value}, file="config.json")
family("modelopt_nvfp4", "algorithm-number", says="not valid", config={"quant_algo": 4}, file="config.json")
family("modelopt_nvfp4", "algorithm-none", says="disagree", config={"quant_algo": None}, suffix="weight")
family("modelopt_nvfp4", "algorithm-contradicts", says="disagree", config={"quant_algo": "FP8"}, suffix="weight")
for what, value in {"negative": -1, "2^62": 1 << 62, "other": 32, "text": "16"}.items():
    family("modelopt_nvfp4", f"group-{what}", says="do not fit|not valid", config={"group_size": value}, huge=what == "2^62")
family("modelopt_nvfp4", "list-a-text", says="not valid", config={"ignore": "*"}, file="config.json")
family("modelopt_nvfp4", "list-names-it", config={"ignore": ["*up_pro?", "model.layers.0"]}, harmless=True)
many(
    "modelopt_awq",
    "pre_quant_scale",
    "pre_quant_scale",
    short=torch.ones(K - 1),
    whole=torch.ones(K).int(),
    square=torch.ones(K, K),
)
many("modelopt_awq", "pre_quant_scale", "NaN or infinite", nan=torch.full((K,), NAN), inf=torch.full((K,), INF).bfloat16())
many("modelopt_awq", "weight_scale", "scales do not fit", halved=torch.ones(N // 2, 2), flat=torch.ones(N), wide=torch.ones(N, K))
family("modelopt_awq", "scale-nan", says="NaN", tensors=poke("weight_scale", NAN), suffix="weight_scale")
family(
    "modelopt_awq",
    "codes-signed",
    says="disagree",
    tensors=put("weight", torch.zeros(N // 2, K, dtype=torch.int8)),
    suffix="weight",
)
family("modelopt_mixed", "layers-none", says="without the algorithms", config={"quantized_layers": {}}, file="config.json")
family("modelopt_mixed", "layers-a-list", says="not valid", config={"quantized_layers": [LAYER]}, file="config.json")
family("modelopt_mixed", "layers-nothing", says="not valid", config={"quantized_layers": {LAYER: {}}}, file="config.json")
family("modelopt_mixed", "layer-unknown", says="disagree", config={"quantized_layers": {LAYER: {"quant_algo": "NVFP4"}}})
family("modelopt_mixed", "layer-contradicts", says="disagree", config={"quantized_layers": {LAYER: {"quant_algo": "MXFP8"}}})


def side(name: str, says: str, content: Any) -> None:
    @attack(f"modelopt-side-file-{name}", says=says)
    def _(folder: Path) -> Path:
        (folder / "hf_quant_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return write(folder, *modelopt_nvfp4())


side("contradicts", "different algorithms", {"quantization": {"quant_algo": "MXFP8"}})
side("a-list", "not an object", {"quantization": [1]})
side("not-json", "not valid JSON", "{")
side("bits-text", "not valid", {"quantization": {"group_size": "16"}})


# ---- gpt-oss -------------------------------------------------------------------------------------------------------------

many("gpt_oss", "experts_blocks", "not a stack of experts", flat=torch.zeros(N, 2, 16, dtype=torch.uint8),
     short=torch.zeros(3, N, 2, 15, dtype=torch.uint8), none=torch.zeros(0, N, 2, 16, dtype=torch.uint8),
     signed=torch.zeros(3, N, 2, 16, dtype=torch.int8), no_groups=torch.zeros(3, N, 0, 16, dtype=torch.uint8))  # fmt: skip
many("gpt_oss", "experts_scales", "scales do not fit", few=torch.zeros(2, N, 2, dtype=torch.uint8), floats=torch.zeros(3, N, 2),
     swapped=torch.zeros(3, 2, N, dtype=torch.uint8), deep=torch.zeros(3, N, 2, 1, dtype=torch.uint8))  # fmt: skip
many("gpt_oss", "experts_bias", "bias", short=torch.ones(3, N - 1), whole=torch.ones(3, N).int(), nan=torch.full((3, N), NAN))
family("gpt_oss", "scales-missing", says="lacks a tensor", tensors=put("experts_scales", None), suffix="experts_scales")
family("gpt_oss", "blocks-missing", says="scales without codes", tensors=put("experts_blocks", None), suffix="experts_scales")
family("gpt_oss", "scales-nan", tensors=put("experts_scales", torch.full((3, N, 2), 255, dtype=torch.uint8)), harmless=True)

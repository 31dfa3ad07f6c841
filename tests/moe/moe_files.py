"""Checkpoints of tiny mixture-of-experts models, in the forms that quantizers write; the model gets the dequantized weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from moe_models import Matrix, matrices, others
from moe_oracle import quantize_inputs
from safetensors.torch import save_file
from torch import Tensor

import bitline
from bitline.conversion.exact import exact_encoding
from bitline.conversion.targets import TARGETS
from bitline.weight import QuantizedWeight


class Scheme(NamedTuple):
    """How one matrix is quantized: a preset of `bitline.quantize`, its group size, and the dtype that it is quantized in.

    joint: gate and up of an expert are quantized as one matrix, with one global scale. act_order: of columns, "shared"
    by an expert's gate and up, or each one's "own"; "" for none. scales: of static inputs, "shared" or "own" too.
    """

    preset: str
    group: int | None = None
    dtype: torch.dtype = torch.float16
    joint: bool = False
    act_order: str = ""
    scales: str = "shared"


Plan = Callable[[Matrix], Scheme | None]  # None: the matrix stays unquantized


def quantized(matrix: Matrix, scheme: Scheme) -> QuantizedWeight:
    """A matrix by round-to-nearest. Static schemes get a scale of inputs that differs from layer to layer."""
    kind = number_of(matrix.name, scheme.scales) % 5
    static = {"FP8": (4 + kind) / 448, "NVFP4": 2.0 ** (7 + kind)}.get(scheme.preset)
    joint = scheme.joint and matrix.expert is not None and matrix.part < 2
    master = matrix.owner.gate_up_proj.data[matrix.expert] if joint else matrix.weight
    order = None
    if scheme.act_order:
        generator = torch.Generator().manual_seed(number_of(matrix.name, scheme.act_order))
        order = torch.randperm(master.shape[1], generator=generator)
        master = master[:, order]
    weight = bitline.quantize(master.to(scheme.dtype), scheme.preset, group_size=scheme.group, input_scale=static)
    if order is not None:
        weight = dataclasses.replace(weight, spec=weight.spec.replace(act_order=True), perm=order.to(torch.int32))
    if joint:
        n = matrix.weight.shape[0]
        weight = weight.take_rows(torch.arange(matrix.part * n, (matrix.part + 1) * n))
    if weight.scale2 is not None:  # multipliers in float32, as ModelOpt stores them
        weight = dataclasses.replace(weight, scale2=weight.scale2.float().double())
    return weight


def number_of(name: str, how: str) -> int:
    """A number of a module, the same in every process; gate and up of an expert have one if it is "shared"."""
    return sum(name.replace("up_proj", "gate_proj" if how == "shared" else "up_proj").encode())


def write(folder: Path, kind: str, model: Any, target: str, plan: Plan, config: dict[str, Any] | None = None) -> Path:
    """A folder of one layer per expert matrix, as `target` of Bitline's conversions stores them.

    config: changes to the quantization config.
    """
    writer = TARGETS[target]()
    found = list(matrices(kind, model))
    weights = {m.name: quantized(m, scheme) for m in found if (scheme := plan(m)) is not None}
    stored = {name: exact_encoding(writer, w, writer.stored_specs(w.spec)) for name, w in weights.items()}
    specs, conflicts = writer.reconcile({name: w.spec for name, w in stored.items()})
    assert not conflicts, conflicts
    tensors = {}
    for name in stored:
        weight = exact_encoding(writer, weights[name], [specs[name]])
        tensors |= {f"{name}.{suffix}": t.contiguous() for suffix, t in writer.pack(weight).items()}
    tensors |= {f"{m.name}.weight": m.weight.clone() for m in found if m.name not in weights}
    tensors |= others(kind, model, {m.name for m in found})
    plain = [
        n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.dim() == 2 and t.is_floating_point()
    ]
    ignored = [n for n in plain if n not in weights and "embed" not in n and "norm" not in n]
    source: Any = SimpleNamespace(unquantized_linears=lambda: ignored, quantization={}, checkpoint=SimpleNamespace(path=folder))
    settings = writer.quantization_config(specs, source) | (config or {})
    save(folder, model, tensors, settings)
    use(model, [(m, weights[m.name]) for m in found if m.name in weights])
    return folder


def save(folder: Path, model: Any, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def use(model: Any, weights: list[tuple[Matrix, QuantizedWeight]]) -> None:
    """Make the model the oracle: dequantized weights, and inputs quantized where the scheme quantizes them."""
    for matrix, weight in weights:
        matrix.weight.copy_(weight.dequantize(torch.float32))
    quantize_inputs(weights)


# ---- forms of one model type ---------------------------------------------------------------------------------------------


def write_autoround(folder: Path, kind: str, model: Any) -> Path:
    """AutoRound's config over GPTQ's packing, as `auto-round --format auto_round` writes it."""
    config = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
        "data_type": "int", "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    write(folder, kind, model, "gptq", lambda m: Scheme("W4A16", 32))
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_stacked_fp8(folder: Path, kind: str, model: Any, block: int = 128) -> Path:
    """transformers' own FP8: `experts.gate_up_proj` [E, 2 I, K] beside `experts.gate_up_proj_scale_inv`; layers per module."""
    found = [m for m in matrices(kind, model, stacked=True) if not m.router]
    weights = [(m, quantized(m, Scheme("FP8_BLOCK"))) for m in found]
    stacks: dict[str, list[QuantizedWeight]] = {}
    tensors = others(kind, model, {m.name for m in found})
    for m, w in weights:
        if m.expert is None:
            tensors |= {f"{m.name}.weight": _e4m3(w), f"{m.name}.weight_scale_inv": w.scale.float()}
        else:
            stacks.setdefault(m.name, []).append(w)
    for name, ws in stacks.items():
        tensors |= {name: torch.stack([_e4m3(w).view(torch.uint8) for w in ws]).view(torch.float8_e4m3fn)}
        tensors |= {f"{name}_scale_inv": torch.stack([w.scale.float() for w in ws])}
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block],
                    "modules_to_not_convert": ["lm_head", "mlp.gate."]}  # fmt: skip
    save(folder, model, tensors, quantization)
    use(model, weights)
    return folder


def _e4m3(weight: QuantizedWeight) -> Tensor:
    return weight.codes[:, : weight.spec.k].contiguous().view(torch.float8_e4m3fn)


def write_gpt_oss(folder: Path, model: Any) -> Path:
    """gpt-oss: `gate_up_proj_blocks` [E, 2 I, K / 32, 16] and `_scales` of rows gate, up, gate, up, …; all else is dense."""
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    for name, module in model.named_modules():
        for leaf in ("gate_up_proj", "down_proj") if "gate_up_proj" in module._parameters else ():
            parameter = module._parameters[leaf].data  # [E, K, N]: a column is a row of the file
            ws = [bitline.quantize(part.t().contiguous(), "MXFP4A16") for part in parameter]
            e, k, n = parameter.shape
            del tensors[f"{name}.{leaf}"]
            tensors[f"{name}.{leaf}_blocks"] = torch.stack([w.codes for w in ws]).view(e, n, k // 32, 16)
            tensors[f"{name}.{leaf}_scales"] = torch.stack([w.scale.view(torch.uint8) for w in ws])
            for part, w in zip(parameter, ws, strict=True):
                part.copy_(w.dequantize(torch.float32).t())
    save(folder, model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]})
    return folder

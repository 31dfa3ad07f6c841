"""Other tools' own dequantization of what a conversion wrote. Nothing of Bitline is used."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


def config_of(folder: Path) -> dict[str, Any]:
    """The quantization config that was written."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def modules_of(folder: Path, suffix: str) -> dict[str, Weights]:
    """Tensors by module and leaf name, of every module that has a tensor `suffix`."""
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(f".{suffix}") for name in tensors if name.endswith(f".{suffix}")]
    return {m: {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == m} for m in names}


def compressed_tensors(folder: Path) -> Weights:
    """Weights as the compressed-tensors package decompresses them, in its compute dtype."""
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    tensors = load_file(folder / "model.safetensors")
    quantized = {n.rpartition(".")[0] for n in tensors if n.endswith(".weight_scale")}
    found = CompressedTensorsDequantizer(str(folder), dtype=torch.float32).process(tensors)
    return {name: found[f"{name}.weight"] for name in quantized}


def gptqmodel(folder: Path) -> Weights:
    """Weights as GPTQModel's torch kernel dequantizes them, with its own v1-to-v2 conversion and `dynamic` overrides."""
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.quantization.config import QuantizeConfig, dynamic_get
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    config = QuantizeConfig.from_quant_config(dict(config_of(folder)))
    found = {}
    for name, tensors in modules_of(folder, "qweight").items():
        override = (dynamic_get(config.dynamic, name) if config.dynamic else None) or {}
        bits, size, sym, order = (override.get(k, getattr(config, k)) for k in ("bits", "group_size", "sym", "desc_act"))
        bits, (groups, n), bias = int(bits), tensors["scales"].shape, tensors.get("bias")
        module = TorchLinear(
            bits=bits, group_size=size, sym=sym, desc_act=order, in_features=tensors["g_idx"].numel(), out_features=n,
            bias=bias is not None, format=config.format, register_buffers=True,
        )  # fmt: skip
        assert module.scales.shape == (groups, n)
        module.scales = module.scales.to(tensors["scales"].dtype)
        if bias is not None:
            module.bias = module.bias.to(bias.dtype)
        module.load_state_dict(tensors, strict=True)
        if config.format == FORMAT.GPTQ:
            convert_gptq_v1_to_v2_format_module(module, bits=bits, pack_dtype=torch.int32)
        if not module.planar:
            module._init_wf_unsqueeze_buffers()
        found[name] = PackableQuantLinear.dequantize_weight(module.eval()).T
    return found


def awq(folder: Path, package: str) -> Weights:
    """Weights as `dequantize_gemm` of AutoAWQ ("awq") or GPTQModel ("gptqmodel") dequantizes them."""
    subfolder = {"awq": "utils", "gptqmodel": "quantization/awq/utils"}[package]
    root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"{package}_packing", root / subfolder / "packing_utils.py")
    utils = importlib.util.module_from_spec(spec)  # loaded by path: AutoAWQ's package imports an old transformers
    spec.loader.exec_module(utils)
    config = config_of(folder)
    found = {}
    for name, tensors in modules_of(folder, "qweight").items():
        size = config["group_size"] if config["group_size"] > 0 else tensors["qweight"].shape[0]
        parts = (tensors[part] for part in ("qweight", "qzeros", "scales"))
        found[name] = utils.dequantize_gemm(*parts, config["bits"], size).T
    return found


def gguf_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor as the gguf package dequantizes it, float32."""
    import gguf

    out = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        out[tensor.name] = torch.from_numpy(values.astype("float32")).reshape([int(d) for d in tensor.shape][::-1])
    return out


def digest(folder: Path) -> str:
    """SHA-256 of everything that a tool reads: names, dtypes, shapes, bytes, and the quantization config without `meta`."""
    hashed = hashlib.sha256()
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        tensor = tensors[name]
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    config = {k: v for k, v in config_of(folder).items() if k != "meta"}
    hashed.update(json.dumps(config, sort_keys=True).encode())
    return hashed.hexdigest()

"""Attacks on memory: sparse files of many megabytes that make a naive reader allocate more. Importing this file adds them."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch
from bases import DTYPES, LAYER, bnb4, entry, fp8, gguf_bytes, gptq, group, hqq, json_tensor, packed
from corpus import ATTACKS, Attack
from oracle_gguf import NUMBERS, TYPES

M = 1_000_000
Shape = tuple[torch.dtype, tuple[int, ...]]


def sparse(name: str, says: str, tensors: dict[str, Shape | torch.Tensor], config: dict[str, Any], suffix: str = "") -> None:
    """A layer whose large tensors exist in the header only: the file is sparse and reads as zeros."""

    def build(folder: Path) -> Path:
        entries: dict[str, Any] = {}
        at, small = 0, []
        for key, value in tensors.items():
            dtype, shape = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value
            nbytes = math.prod(shape) * dtype.itemsize
            entries[f"{LAYER}.{key}"] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [at, at + nbytes]}
            if isinstance(value, torch.Tensor):
                small.append((at, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()))
            at += nbytes
        text = json.dumps(entries).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for start, raw in small:
                file.seek(8 + len(text) + start)
                file.write(raw)
            file.truncate(8 + len(text) + at)
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
        return folder

    ATTACKS.append(Attack(f"memory-{name}", build, says, f"{LAYER}.{suffix}" if suffix else None, huge=True))


def sparse_gguf(name: str, says: str, kind: str, dims: list[int]) -> None:
    """A matrix or a stack of one ggml type, all zeros."""

    def build(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(gguf_bytes([], [entry("a.weight", dims, NUMBERS[kind], 0)], b""))
        _, block, nbytes = TYPES[NUMBERS[kind]]
        os.truncate(path, path.stat().st_size + math.prod(dims) // block * nbytes)
        return path

    ATTACKS.append(Attack(f"memory-gguf-{name}", build, says, "a.weight", "model.gguf", huge=True))


U8, I32, F16, F32, FP8 = torch.uint8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn
ODD_K = 6401  # with blocks of 64 that cross rows every weight gets a scale of 4 bytes, where the file has half a byte
_STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [ODD_K, ODD_K]}
sparse("bnb-scales-of-odd-rows", "would take more memory", suffix="weight", config=bnb4()[1], tensors={
    "weight": (U8, (-(-ODD_K * ODD_K // 2), 1)), "weight.absmax": (F32, (-(-ODD_K * ODD_K // 64),)),
    "weight.quant_map": bnb4()[0][f"{LAYER}.weight.quant_map"],
    "weight.quant_state.bitsandbytes__nf4": json_tensor(_STATE)})  # fmt: skip
_NESTED = _STATE | {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1, "blocksize": 1}
sparse("bnb-nested-scales-of-one", "would take more memory", suffix="weight", config=bnb4()[1], tensors={
    "weight": (U8, (-(-ODD_K * ODD_K // 2), 1)), "weight.absmax": (U8, (ODD_K * ODD_K,)),
    "weight.quant_map": bnb4()[0][f"{LAYER}.weight.quant_map"], "weight.nested_absmax": (F32, (-(-ODD_K * ODD_K // 256),)),
    "weight.nested_quant_map": (F32, (256,)), "weight.quant_state.bitsandbytes__nf4": json_tensor(_NESTED)})  # fmt: skip
_HQQ = {key.removeprefix(f"{LAYER}."): t for key, t in hqq()[0].items()}
_ROWS = 6400 * 6400 // 64
sparse("hqq-groups-across-the-rows", "would take more memory", suffix="W_q", config=hqq()[1], tensors=_HQQ | {
    "W_q": (U8, (32, _ROWS)), "scale": (F16, (1, _ROWS)), "zero": (F16, (1, _ROWS)), "shape": torch.tensor([6400, 6400]),
    "axis": torch.tensor(0).int(), "group_size": torch.tensor(64).int()})  # fmt: skip
for _what, _made, _codes_name in (("gptq", gptq()[1], "qweight"), ("packed", packed()[1], "weight_packed")):
    _k = 20 * M
    _codes_shape = (_k // 8, 1) if _what == "gptq" else (1, _k // 8)
    _g_idx = "g_idx" if _what == "gptq" else "weight_g_idx"
    _rest: dict[str, Any] = {"scales": (F16, (1, 1)), "qzeros": (I32, (1, 1))}
    if _what == "packed":
        _rest = {"weight_scale": (F16, (1, 1)), "weight_shape": torch.tensor([1, _k])}
        _made = group({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}, format="pack-quantized")
    sparse(f"{_what}-order-of-20-million-columns", "more columns than any layer", suffix=_g_idx,
           config=_made | {"group_size": -1},
           tensors={_codes_name: (I32, _codes_shape), _g_idx: (I32, (_k,))} | _rest)  # fmt: skip
for _name, _shape in (("empty", (10**9, 0, 1)), ("of-one-weight", (20 * M, 1, 1))):
    sparse(f"fp8-stack-of-experts-{_name}", "more experts|not the matrix|fit", config=fp8()[1],
           tensors={"weight": (FP8, _shape), "weight_scale": (F32, (_shape[0], 1, 1))} if _name != "empty" else
           {"weight": (FP8, _shape), "weight_scale": (F32, (1,))})  # fmt: skip
    sparse(f"deepseek-stack-of-experts-{_name}", "more experts|not the matrix|fit", config={"quant_method": "fp8"},
           tensors={"weight": (FP8, _shape), "weight_scale_inv": (F32, (1,))})  # fmt: skip
sparse("gpt-oss-a-million-experts", "more experts", suffix="experts_blocks", config={"quant_method": "mxfp4"},
       tensors={"experts_blocks": (U8, (M, 1, 1, 16)), "experts_scales": (U8, (M, 1, 1))})  # fmt: skip
sparse_gguf("a-million-experts", "more experts", "Q4_0", [32, 1, M])
sparse_gguf("codes-larger-than-the-file", "would take more memory", "IQ1_M", [1 << 15, 20_000])

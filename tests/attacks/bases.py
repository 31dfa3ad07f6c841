"""Small valid checkpoints of every family, and writers that can also write invalid files."""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitline.types import nf4

LAYER = "model.layers.0.mlp.up_proj"
N, K, GROUP = (int(size) for size in os.environ.get("BITLINE_TEST_SHAPE", "32,64,32").split(","))  # larger ones to measure
G = K // GROUP
_PADDED = -(-G // 8) * 8 + 24  # groups per row, padded

DTYPES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64", torch.int8: "I8",
    torch.int16: "I16",
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


# ---- safetensors ---------------------------------------------------------------------------------------------------------


def safetensors_bytes(tensors: dict[str, Any], header: Callable[[dict[str, Any]], Any] | None = None) -> bytes:
    """A safetensors file. header: edits the header's object in place, or returns the bytes that replace it.

    "__metadata__" among the tensors is not a tensor but the header's own metadata.
    """
    entries: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            entries[name] = tensor
            continue
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    replaced = header(entries) if header else None
    text = replaced if isinstance(replaced, bytes) else json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: Any = None, *, header: Any = None, config: Any = None
) -> Path:
    """A folder with config.json and model.safetensors. config: bytes or an object that replaces the usual config."""
    usual = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    config = usual if config is None else config
    (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, header))
    return folder


def random_int32(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, generator=torch.Generator().manual_seed(7)).int()


def random_scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(8)) * 0.01 + 0.001).to(dtype)


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}


def gptq() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "qweight": random_int32(K // 8, N), "qzeros": random_int32(K // GROUP, N // 8), "scales": random_scales(K // GROUP, N),
        "g_idx": (torch.arange(K) // GROUP).int(), "bias": random_scales(N),
    }  # fmt: skip
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }
    return named(tensors), config


def awq() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "qweight": random_int32(K, N // 8),
        "qzeros": random_int32(K // GROUP, N // 8),
        "scales": random_scales(K // GROUP, N),
    }
    return named(tensors), {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def group(weights: dict[str, Any], acts: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]} | more


def packed() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight_packed": random_int32(N, K // 8), "weight_scale": random_scales(N, K // GROUP),
        "weight_zero_point": random_int32(N // 8, K // GROUP), "weight_shape": torch.tensor([N, K]),
        "weight_g_idx": (torch.arange(K) // GROUP).int(),
    }  # fmt: skip
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    return named(tensors), group(weights, format="pack-quantized")


def int8() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": random_int32(N, K).to(torch.int8), "weight_scale": random_scales(N, 1), "input_scale": random_scales(1),
        "input_zero_point": torch.tensor([3], dtype=torch.int8),
    }  # fmt: skip
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    acts = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
    return named(tensors), group(weights, acts, format="int-quantized")


def fp8() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": random_scales(N, K).to(torch.float8_e4m3fn), "weight_scale": random_scales(1, dtype=torch.float32),
        "input_scale": random_scales(1, dtype=torch.float32),
    }  # fmt: skip
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return named(tensors), group(args, args, format="float-quantized")


def nvfp4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight_packed": random_int32(N, K // 2).to(torch.uint8),
        "weight_scale": random_scales(N, K // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([123.0]), "input_global_scale": torch.tensor([45.0]),
    }  # fmt: skip
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return named(tensors), group(args, args | {"dynamic": "local"}, format="nvfp4-pack-quantized")


def mxfp4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight_packed": random_int32(N, K // 2).to(torch.uint8),
        "weight_scale": torch.full((N, K // 32), 120, dtype=torch.uint8),
    }
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return named(tensors), group(args, format="mxfp4-pack-quantized")


def auto_round() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, config = gptq()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    return tensors, {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"} | {
        key: config[key] for key in ("bits", "group_size", "sym")
    }


def bnb4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [N, K], "nested_blocksize": 256,
             "nested_dtype": "float32", "nested_offset": 0.01}  # fmt: skip
    tensors = {
        "weight": random_int32(N * K // 2, 1).to(torch.uint8), "weight.absmax": random_int32(N * K // 64).to(torch.uint8),
        "weight.quant_map": torch.tensor(nf4.values()),
        "weight.nested_absmax": random_scales(-(-N * K // (64 * 256)), dtype=torch.float32),
        "weight.nested_quant_map": random_scales(256, dtype=torch.float32),
        "weight.quant_state.bitsandbytes__nf4": json_tensor(state),
    }  # fmt: skip
    return named(tensors), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def json_tensor(value: Any) -> torch.Tensor:
    """JSON as a tensor of bytes, as bitsandbytes stores it."""
    return torch.tensor(list(value if isinstance(value, bytes) else json.dumps(value).encode()), dtype=torch.uint8)


def bnb8() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": random_int32(N, K).to(torch.int8), "SCB": random_scales(N, dtype=torch.float32),
        "weight_format": torch.tensor(0, dtype=torch.uint8), "bias": random_scales(N),
    }  # fmt: skip
    return named(tensors), {"quant_method": "bitsandbytes", "load_in_8bit": True}


def gemv() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    scales = torch.nn.functional.pad(random_scales(N, G), (0, _PADDED - G))
    return named({"qweight": random_int32(N, K // 8), "qzeros": random_int32(N, _PADDED // 8), "scales": scales}), awq()[1] | {
        "version": "gemv"
    }


def gemv_fast() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    scales = torch.nn.functional.pad(random_scales(N, G), (0, _PADDED - G)).t().contiguous()
    tensors = {"qweight": random_int32(N // 4, K).to(torch.int16), "qzeros": scales * -8, "scales": scales}
    return named(tensors), awq()[1] | {"version": "gemv_fast"}


def quark4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": random_int32(K, N // 8), "weight_scale": random_scales(K // GROUP, N),
        "weight_zero_point": random_int32(K // GROUP, N // 8),
    }  # fmt: skip
    spec = {"dtype": "uint4", "qscheme": "per_group", "group_size": GROUP, "ch_axis": -1, "symmetric": False}
    layer = {"weight": spec, "input_tensors": None, "output_tensors": None, "bias": None}
    return named(tensors), {
        "quant_method": "quark", "global_quant_config": layer, "layer_quant_config": {}, "layer_type_quant_config": {},
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


def quark_nvfp4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": random_int32(N, K // 2).to(torch.uint8), "weight_scale": random_scales(N, K // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01), "input_scale_2": torch.tensor(0.02),
    }  # fmt: skip
    spec = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1, "is_dynamic": False}
    scale = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True, "is_dynamic": False}
    layer = {"weight": [spec, scale], "input_tensors": [spec | {"is_dynamic": True}, scale]}
    return named(tensors), {"quant_method": "quark", "global_quant_config": layer, "export": {"pack_method": "reorder"}}


def hqq() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    groups = N * K // GROUP
    tensors = {
        "W_q": random_int32(groups // 2, GROUP).to(torch.uint8), "scale": random_scales(groups, 1),
        "zero": random_scales(groups, 1) * 900,
        "shape": torch.tensor([N, K]), "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "group_size": torch.tensor(GROUP, dtype=torch.int32), "axis": torch.tensor(1, dtype=torch.int32),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    return named(tensors), {"quant_method": "hqq", "quant_config": {}}


def torchao_metadata(data: Any = None, kind: str = "IntxUnpackedToInt8Tensor") -> dict[str, str]:
    """torchao's description of the layer, for the metadata of a safetensors file."""
    usual = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, GROUP], "activation_quantization": None}
    return {f"{LAYER}.weight": json.dumps({"_type": kind, "_data": usual if data is None else usual | data})}


def torchao() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "_weight_qdata": (random_int32(N, K) % 8).to(torch.int8), "_weight_scale": random_scales(N, K // GROUP),
        "_weight_zero_point": (random_int32(N, K // GROUP) % 8).to(torch.int8),
    }  # fmt: skip
    return named(tensors), {"quant_method": "torchao"}


FAMILIES = {
    f.__name__: f
    for f in (gptq, awq, packed, int8, fp8, nvfp4, mxfp4, auto_round, bnb4, bnb8, gemv, gemv_fast, quark4, quark_nvfp4, hqq)
}


# ---- GGUF ----------------------------------------------------------------------------------------------------------------

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64 = 0, 4, 5, 6, 7, 8, 9, 10, 11
_CODES = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q"}
Q8_0, Q4_K, TYPE_F32, IQ4_XS = 8, 12, 0, 23


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    """One metadata entry. value: raw bytes, a str for STRING, a number, or (kind, values) for ARRAY."""
    return text(key) + struct.pack("<I", kind) + payload(kind, value)


def payload(kind: int, value: Any) -> bytes:
    if kind == ARRAY and isinstance(value, tuple):
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(payload(inner, v) for v in values)
    if kind == STRING and isinstance(value, str):
        return text(value)
    return value if isinstance(value, bytes) else struct.pack(_CODES[kind], value)


def entry(name: str | bytes, dims: list[int], kind: int, offset: int, rank: int | None = None) -> bytes:
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def gguf_bytes(
    pairs: list[bytes], entries: list[bytes], data: bytes, *, version: int = 3, magic: bytes = b"GGUF",
    tensors: int | None = None, values: int | None = None, align: int = 32,
) -> bytes:  # fmt: skip
    head = magic + struct.pack(
        "<IQQ", version, len(entries) if tensors is None else tensors, len(pairs) if values is None else values
    )
    head += b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % align) + data


def q8_0(n: int, k: int, seed: int = 0) -> bytes:
    """Rows of Q8_0 blocks with scales near 0.01."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // 32, 34), dtype=np.uint8)
    raw[..., :2] = rng.uniform(0.005, 0.02, (n, k // 32)).astype(np.float16)[..., None].view(np.uint8)
    return raw.tobytes()


PAIRS = [
    pair("general.architecture", STRING, "llama"), pair("llama.block_count", U32, 1), pair("llama.embedding_length", U32, 64),
    pair("llama.context_length", U32, 64), pair("llama.feed_forward_length", U32, 96),
    pair("llama.attention.head_count", U32, 4), pair("llama.attention.head_count_kv", U32, 2),
    pair("llama.attention.layer_norm_rms_epsilon", F32, 1e-5), pair("llama.rope.freq_base", F32, 10000.0),
    pair("llama.vocab_size", U32, 50),
]  # fmt: skip


def with_pair(key: str, kind: int, value: Any) -> list[bytes]:
    """The usual metadata with one entry replaced or added."""
    return [p for p in PAIRS if not p.startswith(text(key))] + [pair(key, kind, value)]


def model_tensors() -> tuple[list[bytes], bytes]:
    """Every tensor of the one-layer Llama that PAIRS describe."""
    shapes = {
        "token_embd.weight": (50, 64), "output.weight": (50, 64), "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64), "blk.0.attn_v.weight": (32, 64), "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64), "blk.0.ffn_up.weight": (96, 64), "blk.0.ffn_down.weight": (64, 96),
    }  # fmt: skip
    entries, data = [], b""
    for i, (name, (n, k)) in enumerate(shapes.items()):
        entries.append(entry(name, [k, n], Q8_0, len(data)))
        raw = q8_0(n, k, i)
        data += raw + bytes(-len(raw) % 32)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        entries.append(entry(name, [64], TYPE_F32, len(data)))
        data += np.ones(64, np.float32).tobytes()
    return entries, data


def one_matrix(name: str = "blk.0.ffn_up.weight", dims: tuple[int, ...] = (64, 32)) -> tuple[list[bytes], bytes]:
    return [entry(name, list(dims), Q8_0, 0)], q8_0(32, 64)


# ---- a whole model -------------------------------------------------------------------------------------------------------


@functools.cache
def _llama() -> Path:
    from tiny import compressed, llama

    folder, _ = compressed(Path(tempfile.mkdtemp(prefix="bitline-")), llama())
    return folder


def llama_folder(folder: Path, **changes: Any) -> Path:
    """A two-layer Llama in compressed-tensors W4A16 that load_model loads, with changes to its config."""
    shutil.copytree(_llama(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder

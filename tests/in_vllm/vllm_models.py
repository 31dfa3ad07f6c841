"""Tiny Llamas in the formats that the tests serve: codes by round-to-nearest, files as their producers lay them out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bitline
import dense_gguf
from bitline import bitstream, types
from bitline.conversion.exact import exact_encoding
from bitline.conversion.targets import TARGETS
from bitline.weight import QuantizedWeight

SETTINGS = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.12, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**changes: Any) -> Any:
    """A random Llama of two layers: hidden 256, 4 heads of 64 over 2 key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SETTINGS | changes))).to(torch.bfloat16).eval()


def qwen() -> Any:
    """A random Qwen2, whose query, key and value layers have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SETTINGS)).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.3)
    return model


def of_one_range(model: Any) -> Any:
    """The model with one largest weight in all layers: they get one global scale, as fused layers have to in vLLM."""
    for module in linears(model).values():
        module.weight.data[0, 0] = 1.0
    return model


def linears(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of the blocks."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def save(folder: Path, model: Any, tensors: dict[str, Tensor], replaced: set[str], quantization: dict[str, Any] | None) -> Path:
    """config.json and model.safetensors: these tensors, and the model's own apart from the replaced layers' weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings | ({"quantization_config": quantization} if quantization else {})))
    whole = {n: t for n, t in model.state_dict().items() if n.removesuffix(".weight") not in replaced}
    if model.config.tie_word_embeddings:
        whole.pop("lm_head.weight", None)
    save_file({n: t.contiguous() for n, t in (whole | tensors).items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def write(
    folder: Path, model: Any, target: str, preset: str | Callable[[str], str | None], group: int | None = None, *,
    dtype: torch.dtype = torch.float16, act_order: bool = False,
) -> Path:  # fmt: skip
    """A folder as `target` of Bitline's conversions stores it. preset: a scheme, or one for each layer; None keeps a layer."""
    writer = TARGETS[target]()
    scheme = preset if callable(preset) else lambda _name: preset
    weights = {
        name: quantized(module, chosen, group, dtype, act_order)
        for name, module in linears(model).items()
        if (chosen := scheme(name)) is not None
    }
    stored = {name: exact_encoding(writer, w, writer.stored_specs(w.spec)) for name, w in weights.items()}
    specs, conflicts = writer.reconcile({name: w.spec for name, w in stored.items()})
    assert not conflicts, conflicts
    tensors = {}
    for name, weight in weights.items():
        packed = writer.pack(exact_encoding(writer, weight, [specs[name]]))
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    plain = ["lm_head", *(name for name in linears(model) if name not in weights)]
    source: Any = SimpleNamespace(unquantized_linears=lambda: plain, quantization={}, checkpoint=SimpleNamespace(path=folder))
    return save(folder, model, tensors, set(weights), writer.quantization_config(specs, source))


def quantized(module: nn.Linear, preset: str, group: int | None, dtype: torch.dtype, act_order: bool) -> QuantizedWeight:
    """A layer by round-to-nearest, with a static scale of inputs where the scheme has one."""
    master = module.weight.data.to(dtype)
    order = torch.randperm(master.shape[1], generator=torch.Generator().manual_seed(master.shape[1])) if act_order else None
    static = {"FP8": 6 / 448, "NVFP4": 256.0}.get(preset)
    weight = bitline.quantize(master if order is None else master[:, order], preset, group_size=group, input_scale=static)
    if order is not None:
        weight = dataclasses.replace(weight, spec=weight.spec.replace(act_order=True), perm=order.to(torch.int32))
    return weight


def write_hqq(folder: Path, model: Any) -> Path:
    """HQQ, 4 bits, groups of 64 columns: rows i and i + n / 2 share a byte, high nibble first; W = (q - zero) * scale."""
    tensors = {}
    for name, module in linears(model).items():
        w = module.weight.data.float().reshape(-1, 64)
        low, high = w.min(1, keepdim=True).values, w.max(1, keepdim=True).values
        scale = ((high - low) / 15).to(torch.bfloat16).float()
        zero = (-low / scale).to(torch.bfloat16).float()
        q = (w / scale + zero).round().clamp(0, 15).to(torch.uint8)
        half = q.shape[0] // 2
        numbers = {"nbits": (4, torch.int32), "group_size": (64, torch.int32), "axis": (1, torch.int32)}
        flags = {"channel_wise": 1, "offload_meta": 0, "optimize": 1, "quant_scale": 0, "quant_zero": 0, "round_zero": 0,
                 "stores_quant_config": 1, "view_as_float": 0, "encoded_state_dict": 1}  # fmt: skip
        texts = {"packing": "4bit_u8", "compute_dtype": "torch.bfloat16", "unpack_view_dtype": "torch.uint8"}
        state = {
            "W_q": (q[:half] << 4) | q[half:], "scale": scale.bfloat16(), "zero": zero.bfloat16(),
            "shape": torch.tensor(module.weight.shape),
        }  # fmt: skip
        state |= {key: torch.tensor(value, dtype=kind) for key, (value, kind) in numbers.items()}
        state |= {key: torch.tensor(value, dtype=torch.uint8) for key, value in flags.items()}
        state |= {key: torch.tensor(list(value.encode()), dtype=torch.uint8) for key, value in texts.items()}
        tensors |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    weights = {"nbits": 4, "group_size": 64, "axis": 1, "view_as_float": False}
    config = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"weight_quant_params": weights}}
    return save(folder, model, tensors, set(linears(model)), config)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def write_quark_mxfp6(folder: Path, model: Any, element: str, *, activations: bool = False) -> Path:
    """Quark's MXFP6, `element` fp6_e3m2 or fp6_e2m3: a bit stream of codes along K, E8M0 scales of 32 columns."""
    kind = {"fp6_e3m2": types.float6_e3m2, "fp6_e2m3": types.float6_e2m3}[element]
    values, tensors, found = torch.tensor(kind.values()), {}, linears(model)
    for name, module in found.items():
        blocks = module.weight.data.float().unflatten(1, (-1, 32))
        exponent = (blocks.abs().amax(-1) / values.max()).log2().ceil().clamp(-127, 127)
        codes = (blocks / exponent.exp2().unsqueeze(-1)).unsqueeze(-1).sub(values).abs().argmin(-1).flatten(1)
        tensors[f"{name}.weight"] = bitstream.pack(codes.to(torch.uint8), 6)
        tensors[f"{name}.weight_scale"] = (exponent + 127).to(torch.uint8)
    rule = {"dtype": element, "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "symmetric": None}
    inputs = rule | {"is_dynamic": True} if activations else None
    settings = {
        "quant_method": "quark", "exclude": ["lm_head"], "layer_quant_config": {}, "layer_type_quant_config": {},
        "global_quant_config": {
            "weight": rule | {"is_dynamic": False}, "input_tensors": inputs, "output_tensors": None, "bias": None,
        },
        "export": {"kv_cache_group": [], "pack_method": "order"},
    }  # fmt: skip
    return save(folder, model, tensors, set(found), settings)


def write_bitsandbytes(folder: Path, model: Any) -> Path:
    """bitsandbytes NF4, blocks of 64: two codes in a byte, high nibble first, and the quantization state as JSON in bytes."""
    table = torch.tensor(NF4)
    tensors = {}
    for name, module in linears(model).items():
        w = module.weight.data.float().reshape(-1, 64)
        absmax = w.abs().max(1).values
        q = ((w / absmax[:, None]).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8).reshape(-1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(module.weight.shape)}
        tensors |= {
            f"{name}.weight": ((q[::2] << 4) | q[1::2])[:, None], f"{name}.weight.absmax": absmax,
            f"{name}.weight.quant_map": table.clone(),
            f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }  # fmt: skip
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": ["lm_head"],
    }  # fmt: skip
    return save(folder, model, tensors, set(linears(model)), config)


def write_gguf(path: Path, model: Any, kind: str) -> Path:
    """A GGUF file of a Llama with a tokenizer."""
    config = model.config
    writer = dense_gguf.start(path, "llama", config)
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", *(f"t{i}" for i in range(6, config.vocab_size))]
    dense_gguf.add_tokenizer(writer, tokens, ["a b"], pre="smollm")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    dense_gguf.add_tensors(writer, model, "llama", kind, head=not config.tie_word_embeddings, encode=encode)
    return dense_gguf.finish(writer, path)


def encode(data: np.ndarray, kind: Any) -> np.ndarray:
    """A matrix in GGUF blocks; the gguf package quantizes all but Q4_K."""
    return q4_k(data) if kind is gguf.GGMLQuantizationType.Q4_K else gguf.quants.quantize(data, kind)


def q4_k(data: np.ndarray) -> np.ndarray:
    """Q4_K: 256 weights in 8 groups of 32, 6-bit scales and minimums under two float16 factors."""
    rows = data.shape[0]
    x = data.reshape(-1, 8, 32).astype(np.float32)
    minimum = np.minimum(x.min(-1), 0)
    scale = (x.max(-1) - minimum) / 15
    d, dmin = (np.float16(v.max(-1, keepdims=True) / 63).astype(np.float32) for v in (scale, -minimum))
    ls = np.clip(np.rint(scale / np.where(d, d, 1)), 0, 63).astype(np.uint8)
    lm = np.clip(np.rint(-minimum / np.where(dmin, dmin, 1)), 0, 63).astype(np.uint8)
    step, low = (d * ls)[..., None], (dmin * lm)[..., None]
    q = np.clip(np.rint((x + low) / np.where(step, step, 1)), 0, 15).astype(np.uint8)
    packed = np.empty((len(x), 12), np.uint8)
    packed[:, :4] = ls[:, :4] | (ls[:, 4:] >> 4) << 6
    packed[:, 4:8] = lm[:, :4] | (lm[:, 4:] >> 4) << 6
    packed[:, 8:] = (ls[:, 4:] & 15) | (lm[:, 4:] & 15) << 4
    codes = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(x), 128)
    factors = np.concatenate([d, dmin], -1).astype(np.float16).view(np.uint8)
    return np.concatenate([factors, packed, codes], -1).reshape(rows, -1)


BY_NAME: dict[str, Callable[[Path], Path]] = {
    "gptq": lambda f: write(f, llama(), "gptq", "W4A16", 64),
    "gptq-actorder": lambda f: write(f, llama(), "gptq", "W4A16", 64, act_order=True),
    "gptq-asym": lambda f: write(f, llama(), "gptq", "W4A16_ASYM", 64),
    "gptq-3bit": lambda f: write(f, llama(), "gptq", "W3A16", 64),
    "gptq-2bit": lambda f: write(f, llama(), "gptq", "W2A16", 32),
    "gptq-bias": lambda f: write(f, qwen(), "gptq", "W4A16", 64),
    "awq": lambda f: write(f, llama(), "awq", "W4A16_ASYM", 64),
    "ct-w4a16": lambda f: write(f, llama(), "compressed-tensors", "W4A16", 64, dtype=torch.bfloat16),
    "ct-w8a8": lambda f: write(f, llama(), "compressed-tensors", "W8A8", dtype=torch.bfloat16),
    "ct-fp8": lambda f: write(f, llama(), "compressed-tensors", "FP8_DYNAMIC", dtype=torch.bfloat16),
    "ct-fp8-static": lambda f: write(f, llama(), "compressed-tensors", "FP8", dtype=torch.bfloat16),
    "ct-mxfp4": lambda f: write(f, llama(), "compressed-tensors", "MXFP4A16", dtype=torch.bfloat16),
    "ct-nvfp4": lambda f: write(f, llama(), "compressed-tensors", "NVFP4A16", dtype=torch.bfloat16),
    "ct-mxfp8": lambda f: write(f, llama(), "compressed-tensors", "MXFP8", dtype=torch.bfloat16),
    "ct-w8a16": lambda f: write(f, llama(), "compressed-tensors", "W8A16", 64, dtype=torch.bfloat16),
    "ct-nvfp4a4": lambda f: write(f, of_one_range(llama()), "compressed-tensors", "NVFP4", dtype=torch.bfloat16),
    "ct-mixed": lambda f: write(f, llama(), "compressed-tensors", mixed_scheme, dtype=torch.bfloat16),
    "fp8-block": lambda f: write(f, llama(), "fp8", "FP8_BLOCK", dtype=torch.bfloat16),
    "quark-mxfp6": lambda f: write_quark_mxfp6(f, llama(), "fp6_e3m2"),
    "quark-mxfp6-e2m3": lambda f: write_quark_mxfp6(f, llama(), "fp6_e2m3"),
    "quark-mxfp6-activations": lambda f: write_quark_mxfp6(f, llama(), "fp6_e2m3", activations=True),
    "hqq": lambda f: write_hqq(f, llama()),
    "bnb": lambda f: write_bitsandbytes(f, llama()),
    "gguf-q4_0": lambda f: write_gguf(f / "model-Q4_0.gguf", llama(tie_word_embeddings=True), "Q4_0"),
    "gguf-q4_k": lambda f: write_gguf(f / "model-Q4_K.gguf", llama(), "Q4_K"),
}  # fmt: skip


def mixed_scheme(name: str) -> str | None:
    """q in 4 bits, k in FP8, v in 16 bits; gate in 4 bits, up in 8: no fused layer has one scheme."""
    leaf = name.rpartition(".")[2]
    return {"k_proj": "FP8_DYNAMIC", "v_proj": None, "up_proj": "W8A16"}.get(leaf, "W4A16")


def make(name: str, root: Path) -> Path:
    """The checkpoint of this name below a folder."""
    return BY_NAME[name](root / name)

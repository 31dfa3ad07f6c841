"""The packaged model as a mixture of experts: the channels of each MLP cut into experts, all of them active.

    python benchmarks/sliced_moe.py --out sliced.gguf --experts 8

The file is a Qwen2-MoE with the codes of the dense one: no weight is quantized again. The sum of the experts is the MLP: a router
of zeros gives each of E experts the weight 1/E, and the scales of down projections are multiplied by E, a power of two. So its
text is the dense model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from bitline.model import packaged

SHARED = 32  # channels of the shared expert that Qwen2-MoE has beside the others: zeros
_COPIED = {
    f"llama.{key}": f"qwen2moe.{key}"
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base",
                "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon")
}  # fmt: skip


def slice_experts(source: Path, target: Path, experts: int = 8) -> Path:
    """Write a Llama's GGUF file of Q4_1 as a Qwen2-MoE's. experts: a power of two; each has a multiple of 32 channels."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen2moe")
    channels = _copy_metadata(reader, writer)
    assert experts & (experts - 1) == 0 and channels % (32 * experts) == 0, f"{channels} channels in {experts} experts"
    writer.add_expert_count(experts)
    writer.add_expert_used_count(experts)
    writer.add_expert_feed_forward_length(channels // experts)
    writer.add_expert_shared_feed_forward_length(SHARED)
    heads = {name: int(reader.fields[f"llama.attention.{key}"].contents()) for name, key in (
        ("attn_q", "head_count"), ("attn_k", "head_count_kv"))}  # fmt: skip
    for tensor in reader.tensors:
        _add(writer, tensor.name, np.asarray(tensor.data), tensor.tensor_type, experts, heads)
    width = int(reader.fields["llama.embedding_length"].contents())
    for layer in range(int(reader.fields["llama.block_count"].contents())):
        _add_zeros(writer, f"blk.{layer}", width, experts, {t.name: t for t in reader.tensors})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _copy_metadata(reader: Any, writer: Any) -> int:
    """Copy the tokenizer and the sizes. Returns the MLP's channels."""
    for key, field in reader.fields.items():
        if key in _COPIED or key.startswith("tokenizer."):
            item = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(_COPIED.get(key, key), field.contents(), field.types[0], sub_type=item)
    return int(reader.fields["llama.feed_forward_length"].contents())


def _add(writer: Any, name: str, data: np.ndarray, kind: GGMLQuantizationType, experts: int, heads: dict[str, int]) -> None:
    """Write a tensor: MLPs in slices, q and k in the order of rows that a Qwen model has."""
    layer, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf in ("ffn_gate", "ffn_up"):
        writer.add_tensor(f"{layer}.{leaf}_exps.weight", data.reshape(experts, -1, data.shape[1]), raw_dtype=kind)
        return
    if leaf == "ffn_down":
        writer.add_tensor(f"{layer}.ffn_down_exps.weight", _cut_columns(data, kind, experts), raw_dtype=kind)
        return
    if leaf in heads:  # llama.cpp's converter puts the halves of a head's rotation side by side
        data = data.reshape(heads[leaf], -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)


def _cut_columns(data: np.ndarray, kind: GGMLQuantizationType, experts: int) -> np.ndarray:
    """Rows of Q4_1 blocks [N, bytes] as [E, N, bytes / E], their scales and minima times E: exact in float16."""
    assert kind == GGMLQuantizationType.Q4_1, kind.name
    cut = np.ascontiguousarray(data.reshape(data.shape[0], experts, -1).swapaxes(0, 1))
    scales = cut.reshape(-1, 20)[:, :4].copy().view(np.float16)
    cut.reshape(-1, 20)[:, :4] = (scales * np.float16(experts)).view(np.uint8)
    return cut


def _add_zeros(writer: Any, layer: str, width: int, experts: int, tensors: dict[str, Any]) -> None:
    """What Qwen2-MoE has and Llama has not: the router, biases of q, k and v, a shared expert and its gate."""
    zeros = lambda *shape: np.zeros(shape, np.float32)
    writer.add_tensor(f"{layer}.ffn_gate_inp.weight", zeros(experts, width))
    writer.add_tensor(f"{layer}.ffn_gate_inp_shexp.weight", zeros(width))
    for leaf in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"{layer}.{leaf}.bias", zeros(tensors[f"{layer}.{leaf}.weight"].data.shape[0]))
    for leaf, shape in (("gate", (SHARED, width)), ("up", (SHARED, width)), ("down", (width, SHARED))):
        writer.add_tensor(f"{layer}.ffn_{leaf}_shexp.weight", zeros(*shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    path = slice_experts(packaged.fetch("smollm2"), options.out, options.experts)
    print(f"{path}: {path.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()

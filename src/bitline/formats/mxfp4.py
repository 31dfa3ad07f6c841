"""quant_method mxfp4, gpt-oss: experts stacked in one tensor, `<stack>_blocks` and `<stack>_scales`, and plain weights beside.

Each expert is a layer of its own, named by its number: `model.layers.0.mlp.experts.gate_up_proj.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bitline import types
from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, check_expert_count, in_tensor, missing_codes
from bitline.formats.common.ignored_modules import left_alone
from bitline.formats.common.module_tensors import E8M0, FLOATS
from bitline.formats.quant_config import find_quantization, quantization_config
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


class MXFP4Reader:
    """Layer records of gpt-oss checkpoints, one for each expert of each stack."""

    name = "mxfp4"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "mxfp4"."""
        return quantization_config(source).get("quant_method") == "mxfp4"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every expert of every `_blocks` tensor. No tensor data is read."""
        left_alone(*find_quantization(source))  # the tensors tell them too
        for name, info in source.tensors.items():
            if name.endswith(_BLOCKS):
                yield from _experts(source, name.removesuffix(_BLOCKS), info)
            elif name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in source.tensors:
                stack = name.removesuffix(_SCALES)
                raise missing_codes(info, f"{stack}{_BLOCKS}")


def _experts(source: TensorSource, stack: str, blocks: TensorInfo) -> Iterator[LayerRecord]:
    if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or 0 in blocks.shape or blocks.shape[3] != 16:
        raise _error(blocks, "not a stack of experts", f"{blocks.dtype} {list(blocks.shape)}", "uint8 [experts, N, K / 32, 16]")
    experts, n, groups, _ = blocks.shape
    check_expert_count(blocks, experts)
    scales = source.tensors.get(stack + _SCALES)
    if scales is None:
        raise CheckpointError(
            "a quantized layer lacks a tensor", file=source.path, tensor=stack + _SCALES, found=f"{blocks.name} without it",
            fix="a shard is missing or the checkpoint was cut: download it again",
        )  # fmt: skip
    if scales.dtype not in E8M0 or scales.shape != (experts, n, groups):
        raise _error(
            scales, "scales do not fit their blocks", f"{scales.dtype} {list(scales.shape)}", f"E8M0 {[experts, n, groups]}"
        )
    bias = source.tensors.get(stack + _BIAS)
    if bias is not None and (bias.shape != (experts, n) or bias.dtype not in FLOATS):
        raise _error(bias, "a bias does not fit its weight", f"{bias.dtype} {list(bias.shape)}", f"floats {[experts, n]}")
    spec = LinearSpec(
        n, 32 * groups, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu, bias=bias is not None
    )  # fmt: skip
    parts = [blocks, scales, *([] if bias is None else [bias])]
    for expert in range(experts):
        # A block is 32 successive columns, two to a byte, the lower half first: rows are the canonical stream as they stand.
        read = _read(source, spec, f"{stack}.{expert}", expert, blocks, scales, bias)
        nbytes = sum(part.nbytes for part in parts) // experts
        yield LayerRecord(f"{stack}.{expert}", "mxfp4 experts", spec, tuple(part.name for part in parts), read, nbytes)


def _read(
    source: TensorSource, spec: LinearSpec, name: str, expert: int, blocks: TensorInfo, scales: TensorInfo,
    bias: TensorInfo | None,
) -> Callable[[], QuantizedWeight]:  # fmt: skip
    def read() -> QuantizedWeight:
        codes = source.read(blocks.name)[expert].reshape(spec.n, -1)
        scale = source.read(scales.name)[expert].view(torch.float8_e8m0fnu).reshape(spec.grid)
        try:
            return QuantizedWeight(spec, codes, scale, bias=None if bias is None else source.read(bias.name)[expert], origin=name)
        except WeightError as error:
            raise in_tensor(error, blocks, {"scale": scales, "bias": bias}) from error

    return read


def _error(info: TensorInfo, what: str, found: object, expected: object) -> CheckpointError:
    return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected)


READER = MXFP4Reader()

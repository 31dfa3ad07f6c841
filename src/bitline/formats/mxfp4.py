"""quant_method mxfp4 (gpt-oss): stacked experts as `<stack>_blocks` and `<stack>_scales`, all other weights dense.

Each expert is a layer of its own, named by its number: `model.layers.0.mlp.experts.gate_up_proj.3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bitline import types
from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import (
    LayerRecord,
    PartReader,
    Range,
    TensorInfo,
    TensorSource,
    check_expert_count,
    in_tensor,
    missing_codes,
)
from bitline.formats.common.ignored_modules import ignored_names
from bitline.formats.common.scales import E8M0, FLOATS
from bitline.formats.common.slices import part_spec
from bitline.formats.quant_config import find_quantization, quantization_config
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_BLOCK = 32  # columns of a scale


class MXFP4Reader:
    """Layer records of gpt-oss checkpoints, one for each expert of each stack."""

    name = "mxfp4"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "mxfp4"."""
        return quantization_config(source).get("quant_method") == "mxfp4"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every expert of every `_blocks` tensor. No tensor data is read."""
        ignored_names(*find_quantization(source))  # only checked: the tensors tell
        for name, info in source.tensors.items():
            if name.endswith(_BLOCKS):
                yield from _Stack.open(source, name.removesuffix(_BLOCKS), info).records()
            elif name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in source.tensors:
                raise missing_codes(info, f"{name.removesuffix(_SCALES)}{_BLOCKS}")


@dataclass(frozen=True)
class _Stack:
    """The stacked experts of one projection: blocks U8 [E, N, K/32, 16], scales E8M0 [E, N, K/32], bias [E, N] or None."""

    source: TensorSource
    name: str
    blocks: TensorInfo
    scales: TensorInfo
    bias: TensorInfo | None

    @classmethod
    def open(cls, source: TensorSource, name: str, blocks: TensorInfo) -> _Stack:
        """The stack, its headers checked."""
        if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or 0 in blocks.shape or blocks.shape[3] != 16:
            found = f"{blocks.dtype} {list(blocks.shape)}"
            raise _error(blocks, "not a stack of experts", found, "uint8 [experts, N, K / 32, 16]")
        experts, n, k_blocks, _ = blocks.shape
        check_expert_count(blocks, experts)
        scales = source.tensors.get(name + _SCALES)
        if scales is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=source.path, tensor=name + _SCALES, found=f"{blocks.name} without it",
                fix="a shard is missing or the checkpoint is truncated: download it again",
            )  # fmt: skip
        if scales.dtype not in E8M0 or scales.shape != (experts, n, k_blocks):
            found = f"{scales.dtype} {list(scales.shape)}"
            raise _error(scales, "scales do not fit their blocks", found, f"E8M0 {[experts, n, k_blocks]}")
        bias = source.tensors.get(name + _BIAS)
        if bias is not None and (bias.shape != (experts, n) or bias.dtype not in FLOATS):
            raise _error(bias, "a bias does not fit its weight", f"{bias.dtype} {list(bias.shape)}", f"floats {[experts, n]}")
        return cls(source, name, blocks, scales, bias)

    def records(self) -> Iterator[LayerRecord]:
        """One record per expert."""
        experts, n, k_blocks, _ = self.blocks.shape
        spec = LinearSpec(
            n, _BLOCK * k_blocks, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu, bias=self.bias is not None
        )
        tensors = [self.blocks, self.scales, *([] if self.bias is None else [self.bias])]
        nbytes = sum(info.nbytes for info in tensors) // experts
        for expert in range(experts):
            name = f"{self.name}.{expert}"
            read = _ExpertWeight(self, spec, name, expert)
            parts = PartReader((1, _BLOCK if k_blocks > 1 else 0), read)
            yield LayerRecord(name, "mxfp4 experts", spec, tuple(info.name for info in tensors), read, nbytes, parts=parts)


@dataclass(frozen=True)
class _ExpertWeight:
    """Reads the weight of one expert when called."""

    stack: _Stack
    spec: LinearSpec
    name: str
    expert: int

    def __call__(self, rows: Range | None = None, columns: Range | None = None) -> QuantizedWeight:
        """The weight, or rows of it and columns of whole blocks."""
        s, rows, columns = self.stack, rows or (0, self.spec.n), columns or (0, self.spec.k)
        spec = part_spec(self.spec, rows, columns)
        of_expert = [(self.expert, self.expert + 1), rows]
        blocks = (columns[0] // _BLOCK, columns[1] // _BLOCK)
        # A block is 32 successive columns, two to a byte, low nibble first: rows are canonical as they are stored.
        codes = s.source.read_part(s.blocks.name, [*of_expert, blocks, (0, s.blocks.shape[3])]).reshape(spec.n, -1)
        scale = s.source.read_part(s.scales.name, [*of_expert, blocks]).view(torch.float8_e8m0fnu).reshape(spec.grid)
        try:
            bias = None if s.bias is None else s.source.read_part(s.bias.name, of_expert)[0]
            return QuantizedWeight(spec, codes, scale, bias=bias, origin=self.name)
        except WeightError as error:
            raise in_tensor(error, s.blocks, {"scale": s.scales, "bias": s.bias}) from error


def _error(info: TensorInfo, what: str, found: object, expected: object) -> CheckpointError:
    return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected)


READER = MXFP4Reader()

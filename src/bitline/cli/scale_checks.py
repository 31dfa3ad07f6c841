"""Checks of a checkpoint's scales for `bitline inspect`: NaN, infinity, sign, and the range of float16. Codes are not read."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.formats.base import LayerRecord, TensorInfo
from bitline.types import LinearSpec

FP16_MAX, FP16_MIN_NORMAL, FP16_MIN_SUBNORMAL = 65504.0, 2.0**-14, 2.0**-24
AUTO_BYTES, AUTO_TENSORS = 64_000_000, 10_000  # scales up to this size are read by default: a fraction of a second
_BATCH_BYTES = 1 << 22  # of tensors that are checked together

# Last components of tensor names: scales of the weight, and other tensors whose values have to be finite.
_SCALES = {"scales", "scale", "weight_scale", "weight_scale_inv", "_weight_scale", "absmax", "SCB"}
_FINITE = {
    "weight_scale_2", "weight_global_scale", "input_scale", "input_scale_2", "input_global_scale", "activation_scale",
    "pre_quant_scale", "nested_absmax", "nested_quant_map", "scaled_zeros", "qzeros", "zero", "bias",
}  # fmt: skip

_PROBLEMS = {
    "nan": "NaN", "infinite": "infinite values", "overflow": "scales above float16's maximum (65504)",
    "large": "scales whose weights exceed float16's maximum (65504)", "negative": "negative scales", "zero": "zero scales",
    "vanishing": "scales that underflow to zero in float16", "subnormal": "subnormal float16 scales (below 2**-14)",
}  # fmt: skip
_HARMLESS = {"negative", "zero"}  # AutoRound's symmetric scales have either sign, and a group may be all zeros


@dataclass(frozen=True)
class _CheckedTensor:
    """A tensor of scales, biases and the like.

    dtype: what its bytes are. max_code: the largest magnitude that a scale is multiplied by; 0 for other tensors than weight
    scales. padding: how many of its zeros are padding.
    """

    info: TensorInfo
    dtype: torch.dtype
    max_code: float
    padding: int = 0


def check_scales(checkpoint: Checkpoint, records: list[LayerRecord], wanted: bool | None) -> dict[str, Any]:
    """Count problems among the scales. wanted: None reads them only if they are small, and reports whether it did.

    Problems are NaN, infinite, negative, zero and subnormal scales, and those that float16 cannot represent or whose weights it
    cannot represent. Input scales, biases and the like are checked for NaN and infinity only.
    """
    tensors = checked_tensors(checkpoint, records)
    nbytes = sum(tensor.info.nbytes for tensor in tensors)
    report: dict[str, Any] = {"checked": False, "tensors": len(tensors), "nbytes": nbytes, "findings": []}
    small = nbytes <= AUTO_BYTES and len(tensors) <= AUTO_TENSORS
    if not tensors or wanted is False or (wanted is None and not small):
        return report
    found: dict[str, dict[str, Any]] = {}
    for batch in _batches(tensors):
        for tensor, counts in _count_problems(checkpoint, batch):
            for problem, count in counts.items():
                new = {"what": _PROBLEMS[problem], "values": 0, "tensors": 0, "example": tensor.info.name}
                entry = found.setdefault(problem, new)
                entry["values"] += count
                entry["tensors"] += 1
    findings = [{"problem": p, "level": "note" if p in _HARMLESS else "odd"} | found[p] for p in _PROBLEMS if p in found]
    return report | {"checked": True, "findings": findings}


def checked_tensors(checkpoint: Checkpoint, records: Iterable[LayerRecord]) -> list[_CheckedTensor]:
    """The scales of all layers, and the other tensors that have to be finite; none of them holds codes."""
    found: dict[str, _CheckedTensor] = {}
    for record in records:
        for name in record.tensors:
            leaf = name.rpartition(".")[2]
            is_scale = leaf in _SCALES or leaf.endswith("_scales")
            if not (is_scale or leaf in _FINITE) or name in found:
                continue
            info = checkpoint.source.tensors[name]
            dtype = torch.float8_e8m0fnu if info.dtype == torch.uint8 and is_scale else info.dtype
            if dtype == torch.float8_e8m0fnu and record.spec.scale_dtype != dtype:
                continue  # quantized scales: codes of a second level
            if dtype.is_floating_point:
                # AWQ's gemv versions pad each row of their scales.
                padding = max(0, math.prod(info.shape) - record.spec.scale_count()) if leaf == "scales" else 0
                found[name] = _CheckedTensor(info, dtype, _max_code(record.spec) if is_scale else 0.0, padding)
    return list(found.values())


@functools.cache
def _max_code(spec: LinearSpec) -> float:
    """The largest magnitude that a scale is multiplied by; 1 where a second level of scales applies."""
    if spec.scale2_block is not None:
        return 1.0
    if spec.zero == "int":
        return float((1 << spec.weight.bits) - 1)
    return max(abs(spec.weight.min()), abs(spec.weight.max()))


def _batches(tensors: list[_CheckedTensor]) -> Iterator[list[_CheckedTensor]]:
    """Tensors of one dtype and range, in file order, in batches of about _BATCH_BYTES."""
    groups: dict[Any, list[_CheckedTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.max_code].append(tensor)
    for members in groups.values():
        batch: list[_CheckedTensor] = []
        nbytes = 0
        for tensor in members:
            batch.append(tensor)
            nbytes += tensor.info.nbytes
            if nbytes >= _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch


def _count_problems(checkpoint: Checkpoint, batch: list[_CheckedTensor]) -> Iterator[tuple[_CheckedTensor, dict[str, int]]]:
    """Problems of each tensor in a batch. Nearly always one pass over all of them shows that there are none."""
    values = [_read(checkpoint, tensor) for tensor in batch]
    together = torch.cat(values)
    if not together.numel():
        return
    low, high = (float(v) for v in together.aminmax())
    first = batch[0]
    smallest = {torch.float16: FP16_MIN_NORMAL, torch.float8_e8m0fnu: 0.0}.get(first.dtype, FP16_MIN_SUBNORMAL)
    # A NaN makes low and high NaN, and every comparison false.
    if first.max_code:
        clean = smallest <= low and high * first.max_code <= FP16_MAX
    else:
        clean = -torch.inf < low and high < torch.inf
    if clean:
        return
    for tensor, numbers in zip(batch, values, strict=True):
        if counts := _problems(numbers, tensor):
            yield tensor, counts


def _read(checkpoint: Checkpoint, tensor: _CheckedTensor) -> Tensor:
    """A tensor's values, flat, in float32, or float64 if it is stored so."""
    data = checkpoint.read(tensor.info.name).reshape(-1).view(tensor.dtype)
    return data if data.dtype == torch.float64 else data.float()


def _problems(values: Tensor, tensor: _CheckedTensor) -> dict[str, int]:
    """How many values have each problem."""
    size = values.abs()
    masks = {"nan": values.isnan(), "infinite": values.isinf()}
    if tensor.max_code:
        finite = size < torch.inf
        masks["overflow"] = finite & (size > FP16_MAX)
        masks["large"] = finite & (size <= FP16_MAX) & (size * tensor.max_code > FP16_MAX)
        masks["negative"] = values < 0
        masks["zero"] = size == 0
        if tensor.dtype == torch.float16:
            masks["subnormal"] = (size > 0) & (size < FP16_MIN_NORMAL)
        elif tensor.dtype != torch.float8_e8m0fnu:  # a block of zeros has the smallest E8M0 scale
            masks["vanishing"] = (size > 0) & (size <= FP16_MIN_SUBNORMAL / 2)
    counts = {problem: int(mask.sum()) for problem, mask in masks.items()}
    if counts.get("zero"):
        counts["zero"] = max(0, counts["zero"] - tensor.padding)
    return {problem: count for problem, count in counts.items() if count}

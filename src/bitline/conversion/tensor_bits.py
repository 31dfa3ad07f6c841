"""Bitwise comparison of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def float32_bits(values: Tensor) -> Tensor:
    """The bits of a tensor converted to float32, int32 of the same shape."""
    return values.float().contiguous().view(torch.int32)


def same_float32(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality of float32 tensors of one shape, where any NaN equals any NaN."""
    if torch.equal(float32_bits(one), float32_bits(other)):
        return True
    return bool(((float32_bits(one) == float32_bits(other)) | (one.isnan() & other.isnan())).all())


def same_values(one: Tensor, other: Tensor) -> bool:
    """Equal values of two tensors of any dtypes: NaN equals NaN, and the sign of zero counts."""
    if one.dtype == other.dtype:
        return one.shape == other.shape and raw_bytes(one) == raw_bytes(other)
    one, other = one.double(), other.double()
    equal = one.contiguous().view(torch.int64) == other.contiguous().view(torch.int64) if one.shape == other.shape else None
    return equal is not None and bool((equal | (one.isnan() & other.isnan())).all())

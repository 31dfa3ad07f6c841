"""Activations that are quantized before the call, laid out as the kernels with quantized activations load them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.hopper.scaled_scheme import ScaledScheme
from bitline.quantized_input import pad_codes


class QuantizedX(NamedTuple):
    """What `device.quantize` writes, in tensors that start at multiples of 16 bytes.

    Attributes:
        codes: E4M3 or int8 [rows, columns of the scheme].
        scales: float32 [groups, stride] where x is scaled in groups, else one for each row.
        zeros: int32, one for each row; None where x has no zero point.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def addresses(self) -> tuple[int, int, int]:
        """Where the three lie; 0 for what is absent."""
        return self.codes.data_ptr(), self.scales.data_ptr(), 0 if self.zeros is None else self.zeros.data_ptr()


def laid_out(
    codes: Tensor, scales: Tensor, zero: Tensor | None, scheme: ScaledScheme, stride: int, fragment_order: bool
) -> QuantizedX:
    """Codes, scales and zero points of `Kernel.apply_quantized`; what has the layout already is not copied.

    Args:
        codes: [M, K], contiguous.
        scales: [M, groups] where x is scaled in groups, else [M] or, of a scheme per tensor, [1].
        zero: As scales; None where zero points are 0.
        scheme: The layer's.
        stride: From one group's scales to the next one's, a multiple of 16 and at least M.
        fragment_order: Of the scales in groups, see `device.quantize.scale_position`.
    """
    m = codes.shape[0]
    codes = _aligned(pad_codes(codes, 0, scheme.columns))
    if scheme.traits.scaled_in_groups:
        return QuantizedX(codes, _by_group(scales, stride, fragment_order), None)
    zeros = None
    if scheme.traits.zero_points:
        zeros = codes.new_zeros(m, dtype=torch.int32) if zero is None else _aligned(zero.expand(m).contiguous())
    return QuantizedX(codes, _aligned(scales.expand(m).contiguous()), zeros)


def _by_group(scales: Tensor, stride: int, fragment_order: bool) -> Tensor:
    """Scales [M, groups] as [groups, stride]; what is past row M - 1 is of rows that are not stored."""
    m, groups = scales.shape
    if fragment_order:  # each 16 rows by the bits of their number: 8 4 2 1 become 4 2 8 1
        rows = pad(scales, (0, 0, 0, stride - m)).view(-1, 2, 2, 2, 2, groups)
        return rows.permute(5, 0, 2, 3, 1, 4).reshape(groups, stride)
    out = scales.new_empty(groups, stride)
    out[:, :m] = scales.t()
    return out


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied where it does not start at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor

"""Activations that are quantized already: what a linear layer takes in place of a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.act_quant import quantize_groups, quantize_input
from bitline.errors import InputError
from bitline.types import ActSpec, LinearSpec, dtype_name

_CODE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


class QuantizedInput(NamedTuple):
    """Quantized activations x = scales * (codes - zero), as `bitline.ops` makes them and a `QuantLinear` takes them.

    M is the product of all dimensions of `codes` but the last. The ActSpec of the layer says how many scales there are: one
    (granularity "tensor"), M ("token"), or M x ceil(K / group_size) ("group"), in row-major order and any shape. A layer with
    `input_multiplier` takes none, since it would have to be applied before.

    Attributes:
        codes: [..., K], float8_e4m3fn or int8.
        scales: float32. Powers of two for a scheme with E8M0 scales. For a static scheme, the layer's own scale.
        zero: Zero points in code units, int32, as many as scales; None for a symmetric scheme.
    """

    codes: Tensor
    scales: Tensor
    zero: Tensor | None = None

    def dequantize(self, act: ActSpec, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the codes stand for: what `act_quant.fake_quantize` gives where it computes the same codes.

        Args:
            act: The scheme.
            dtype: dtype of the result; the computation is in float32 and rounded to it once.

        Returns:
            [..., K].
        """
        k = self.codes.shape[-1]
        values = self.codes.reshape(-1, k).float()
        if self.zero is not None:
            values = values - _per_column(self.zero, act, k)
        return (values * _per_column(self.scales, act, k)).to(dtype).view(self.codes.shape)


def _per_column(tensor: Tensor, act: ActSpec, k: int) -> Tensor:
    """Scales or zero points of x [M, K] as a tensor that broadcasts to it."""
    rows = tensor.reshape(-1, scale_columns(act, k))
    return rows.repeat_interleave(act.group_size, 1)[:, :k] if act.granularity == "group" else rows


def code_dtype(act: ActSpec) -> torch.dtype | None:
    """The dtype of a scheme's codes; None for a scheme that a QuantizedInput cannot hold (FP4, FP6, E5M2, other block scales)."""
    dtype = _CODE_DTYPES.get(act.dtype.name)
    return dtype if act.scale == "float" or (act.scale == "e8m0" and dtype == torch.float8_e4m3fn) else None


def scale_columns(act: ActSpec, k: int) -> int:
    """Scales of a row of K columns."""
    return -(-k // act.group_size) if act.granularity == "group" else 1


def scale_count(act: ActSpec, m: int, k: int) -> int:
    """Scales of x [M, K]."""
    return 1 if act.granularity == "tensor" else m * scale_columns(act, k)


def pad_codes(codes: Tensor, m_padded: int, k_padded: int) -> Tensor:
    """Codes int8 or FP8 [M, K], zero-padded to at least [m_padded, k_padded]; `codes` itself where they are as large."""
    m, k = codes.shape
    if m >= m_padded and k >= k_padded:
        return codes
    return pad(codes.view(torch.uint8), (0, k_padded - k, 0, max(0, m_padded - m))).view(codes.dtype)


def reference_input(x: Tensor, act: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None) -> QuantizedInput:
    """x [M, K] quantized by `act_quant`: scales [M], [1] or [M, groups]. scale, zero: the scalars of a static scheme."""
    if code_dtype(act) is None:
        raise InputError("no quantized input for this scheme", found=str(act), expected="float8_e4m3fn or int8 activations")
    if act.granularity == "group":
        k = x.shape[1]
        codes, scales, zeros = quantize_groups(pad(x, (0, -k % act.group_size)), act)
        return QuantizedInput(codes[:, :k].contiguous(), scales, zeros)
    codes, scales, zeros = quantize_input(x, act, scale, zero)
    return QuantizedInput(codes, scales.view(-1), None if zeros is None else zeros.view(-1))


def fitted(x: QuantizedInput, spec: LinearSpec) -> QuantizedInput:
    """x as kernels take it: codes [M, K], scales and zero [M], [1] or [M, groups]. InputError where it does not fit the layer."""
    act, k = spec.act, spec.k
    dtype = None if act is None else code_dtype(act)
    if act is None or dtype is None:
        raise InputError("this layer takes no quantized input", found=f"activation scheme {act or 'none'}",
                         expected="a layer with float8_e4m3fn or int8 activations", fix="call it with a tensor")  # fmt: skip
    codes, scales, zero = x
    if codes.dim() == 0 or codes.shape[-1] != k or codes.dtype != dtype:
        raise InputError("the codes of a quantized input do not fit the layer", found=_text(codes),
                         expected=f"[..., {k}] {dtype_name(dtype)} for {act}")  # fmt: skip
    m = codes.numel() // k
    count = scale_count(act, m, k)
    if scales.dtype != torch.float32 or scales.numel() != count:
        raise InputError("the scales of a quantized input do not fit the layer", found=_text(scales),
                         expected=f"{count} float32 for {act} with M = {m}")  # fmt: skip
    _check_zero(zero, act, count)
    shape = (m, scale_columns(act, k)) if act.granularity == "group" else (count,)
    return QuantizedInput(codes.reshape(m, k), scales.reshape(shape), None if zero is None else zero.reshape(shape))


def _check_zero(zero: Tensor | None, act: ActSpec, count: int) -> None:
    if zero is None:
        if act.symmetric or not act.dynamic or count == 0:  # a static scheme may have a scale alone
            return
    elif not act.symmetric and zero.dtype == torch.int32 and zero.numel() == count:
        return
    raise InputError("the zero points of a quantized input do not fit the layer", found="none" if zero is None else _text(zero),
                     expected="none" if act.symmetric else f"{count} int32")  # fmt: skip


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"

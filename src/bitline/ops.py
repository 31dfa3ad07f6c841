"""Activation quantization as operators of a model: alone, after an RMSNorm, after a gated SiLU.

Each gives a QuantizedInput, which a `QuantLinear` takes in place of a tensor. On a GPU each is one Triton launch, except for a
dynamic scale of the whole input; on a CPU a chain of torch's operators. A compiler sees one opaque operator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.triton.act_quant import Source, quantize_fused
from bitline.linear import needs_dispatcher
from bitline.quantized_input import QuantizedInput, code_dtype, scale_columns, scale_count
from bitline.types import ActSpec

_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define(
    "quantize_activations(Tensor x, Tensor? other, Tensor? residual, float epsilon, Tensor? scale, Tensor? zero, str source, "
    "str act) -> (Tensor, Tensor, Tensor, Tensor)"
)
_parse = functools.cache(ActSpec.parse)


def quantize(x: Tensor, scheme: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None) -> QuantizedInput:
    """Quantize activations, bit for bit as a layer of the scheme quantizes its input.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        scheme: The layer's activation scheme, `layer.spec.act`.
        scale: One number, of a static scheme.
        zero: One number, of a static scheme with a zero point.

    Returns:
        Codes [..., K]; scales and zero points [M], [1] or [M, ceil(K / group_size)].

    Raises:
        InputError: For a scheme whose codes are neither float8_e4m3fn nor int8, or a static one without its scale.
    """
    return _run(x, None, None, 0.0, scale, zero, "plain", scheme)[0]


def rms_norm_quantize(
    x: Tensor, weight: Tensor, epsilon: float, scheme: ActSpec, residual: Tensor | None = None,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> tuple[QuantizedInput, Tensor]:  # fmt: skip
    """RMSNorm, then quantization: weight * (x / sqrt(mean(x^2) + epsilon)), as Llama's norm in transformers.

    The norm is computed in float32 and rounded to x's dtype before and after the product with `weight`. Where the mean is summed
    in another order than torch's, a value can be one step of x's dtype away.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        weight: [K] in x's dtype.
        epsilon: Added to the mean.
        scheme: As for `quantize`.
        residual: [..., K] in x's dtype, added to x first; the sum is rounded to it.
        scale: As for `quantize`.
        zero: As for `quantize`.

    Returns:
        The quantized norm, and the new residual [..., K]: x + residual, or x itself without one.

    Raises:
        InputError: As `quantize`; and where shapes or dtypes differ.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise _mismatch("the weight of the norm", weight, x.shape[-1:], x)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise _mismatch("the residual", residual, x.shape, x)
    quantized, total = _run(x, weight, residual, epsilon, scale, zero, "rms_norm", scheme)
    return quantized, x if residual is None else total.view(x.shape)


def silu_mul_quantize(
    gate: Tensor, up: Tensor | None, scheme: ActSpec, scale: Tensor | None = None, zero: Tensor | None = None
) -> QuantizedInput:
    """silu(gate) * up, then quantization. Both factors and the product are rounded to gate's dtype.

    Args:
        gate: [..., K]; or [..., 2 K] with `up` in its second half where `up` is None. bfloat16, float16 or float32.
        up: [..., K] in gate's dtype, or None.
        scheme: As for `quantize`.
        scale: As for `quantize`.
        zero: As for `quantize`.

    Returns:
        As `quantize`.

    Raises:
        InputError: As `quantize`; and where shapes or dtypes differ.
    """
    if up is None:
        if gate.shape[-1] % 2:
            raise InputError("gate and up in one tensor have an even number of columns", found=list(gate.shape))
        gate, up = gate.chunk(2, -1)
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise _mismatch("up", up, gate.shape, gate)
    return _run(gate, up, None, 0.0, scale, zero, "silu_mul", scheme)[0]


def _mismatch(what: str, found: Tensor, shape: Any, like: Tensor) -> InputError:
    return InputError(f"{what} does not fit", found=f"{list(found.shape)} {found.dtype}", expected=f"{list(shape)} {like.dtype}")


def _run(
    x: Tensor, other: Tensor | None, residual: Tensor | None, epsilon: float, scale: Tensor | None, zero: Tensor | None,
    source: str, act: ActSpec,
) -> tuple[QuantizedInput, Tensor]:  # fmt: skip
    """Call the operator: the quantized input, and the sum of x and residual [M, K], empty without one."""
    if code_dtype(act) is None:
        raise InputError("no quantized input for this scheme", found=str(act), expected="float8_e4m3fn or int8 activations")
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0:
        raise InputError("activations are floating-point and have columns", found=f"{list(x.shape)} {x.dtype}")
    if not act.dynamic and (scale is None or scale.numel() != 1):
        raise InputError("a static activation scheme needs its scale", found="none" if scale is None else list(scale.shape))
    rows = _rows(x)
    operands = (None if other is None else _rows(other), None if residual is None else _rows(residual))
    op = OP if needs_dispatcher(x) else _quantize_impl
    codes, scales, zeros, total = op(rows, *operands, epsilon, scale, zero, source, act.text)
    if not act.dynamic:
        assert scale is not None
        scales = scale.reshape(1).float()
        zeros = zero.reshape(1).to(torch.int32) if zero is not None and not act.symmetric else zeros
    has_zero = not act.symmetric and (act.dynamic or zeros.numel() > 0)
    return QuantizedInput(codes.view(x.shape), scales, zeros if has_zero else None), total


def _rows(x: Tensor) -> Tensor:
    """[M, K] of x [..., K] with contiguous columns; a view where x's rows are evenly spaced. A vector [K] stays one."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x if x.dim() == 1 else x.reshape(-1, x.shape[-1])


def _quantize_impl(
    x: Tensor, other: Tensor | None, residual: Tensor | None, epsilon: float, scale: Tensor | None, zero: Tensor | None,
    source: Any, act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The operator: codes, scales and zero points of a dynamic scheme, and the sum of x and residual; what is absent is empty."""
    scheme = _parse(act)
    x = x.view(-1, x.shape[-1])
    m, k = x.shape
    if m == 0:
        codes, scales, zeros, total = _quantize_fake(x, other, residual, epsilon, scale, zero, source, act)
        return codes, scales.fill_(1.0), zeros.zero_(), total  # an empty input has one scale per tensor
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return _quantize_impl(x, other, residual, epsilon, scale, zero, source, act)
    found = quantize_fused(Source(x, source, other, residual, epsilon), scheme, m, k, scale, zero)
    dynamic = scheme.dynamic
    scales = found.scale if dynamic else x.new_empty(0, dtype=torch.float32)
    zeros = found.zero if dynamic and found.zero is not None else x.new_empty(0, dtype=torch.int32)
    return found.codes, scales, zeros, x.new_empty(0, k) if found.residual is None else found.residual


def _quantize_fake(
    x: Tensor, other: Tensor | None, residual: Tensor | None, epsilon: float, scale: Tensor | None, zero: Tensor | None,
    source: str, act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scheme = _parse(act)
    k = x.shape[-1]
    m = x.numel() // k
    shape = (m, scale_columns(scheme, k)) if scheme.granularity == "group" else (scale_count(scheme, m, k),)
    asymmetric = scheme.dynamic and not scheme.symmetric and scheme.dtype.kind == "int"
    return (
        x.new_empty(m, k, dtype=code_dtype(scheme)),
        x.new_empty(shape if scheme.dynamic else 0, dtype=torch.float32),
        x.new_empty(shape if asymmetric else 0, dtype=torch.int32),
        x.new_empty(0 if residual is None else m, k),
    )


_LIBRARY.impl("quantize_activations", _quantize_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::quantize_activations", _quantize_fake, lib=_LIBRARY)
OP = torch.ops.bitline.quantize_activations.default

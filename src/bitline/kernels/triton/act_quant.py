"""Fused activation quantization on GPUs: one Triton launch, bit for bit what `bitline.act_quant` computes.

The RMSNorm or the gated SiLU before it is part of the launch where the caller asks for it (`Source`).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from bitline import env
from bitline.act_quant import quantize_groups, quantize_input
from bitline.quantized_input import code_dtype, pad_codes, scale_columns
from bitline.types import ActSpec

MIN_SCALE = torch.finfo(torch.float32).eps
_OCP_FP8_AMD = ("gfx950", "gfx1200", "gfx1201")


class Source(NamedTuple):
    """What is quantized, [M, K] of the dtype of x: x, its RMSNorm, or silu(x) * other; rounded as transformers' modules do.

    x: [M, K], columns contiguous. other: the norm's weight [K], or the factor [M, K] of a gated SiLU. residual: [M, K], added to
    x first. epsilon: of the norm.
    """

    x: Tensor
    kind: Literal["plain", "rms_norm", "silu_mul"] = "plain"
    other: Tensor | None = None
    residual: Tensor | None = None
    epsilon: float = 0.0

    def unfused(self) -> tuple[Tensor, Tensor | None]:
        """The values [M, K] by torch's operators, and the sum of x and residual where there is one."""
        total = None if self.residual is None else self.x + self.residual
        x = self.x if total is None else total
        if self.kind == "rms_norm":
            assert self.other is not None
            values = x.float()
            values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.epsilon)
            return self.other * values.to(x.dtype), total
        return (x if self.other is None else silu(x) * self.other), total


class Quantized(NamedTuple):
    """codes int8 or FP8 [m_padded, k_padded]; scale float32 and zero int32 (or None) [m_padded], [1] or [m_padded, groups];
    residual: the sum that was quantized, or None."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    residual: Tensor | None = None


class QuantizeConfig(NamedTuple):
    """Compile-time part of a launch of `device.act_quant`.

    source: see `Source`. has_residual: one is added first. static: the scale is given. fp8: codes are E4M3, else int8.
    asymmetric: the scheme computes zero points. has_zero: there are any. e8m0_scale: scales are powers of two. groups,
    group_size: the tile of a program, and the columns that share a scale. divisor: what amax, or max - min, is divided by.
    native_fp8: the device converts to OCP FP8. corrected_quotient: divide by a reciprocal and a correction; the interpreter's
    fma rounds twice.
    """

    source: str
    has_residual: bool
    static: bool
    fp8: bool
    asymmetric: bool
    has_zero: bool
    e8m0_scale: bool
    groups: int
    group_size: int
    divisor: float
    min_scale: float
    native_fp8: bool
    corrected_quotient: bool


def quantize_padded(
    x: Tensor, act: ActSpec, m_padded: int, k_padded: int, scale: Tensor | None = None, zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize x [M, K] per token or per tensor into zero-padded codes.

    scale, zero: of a static scheme; None or empty otherwise.
    Returns codes int8 or FP8 [m_padded, k_padded], scale float32 [m_padded] or [1], zero int32 of the scale's shape or None.
    """
    return quantize_fused(Source(x), act, m_padded, k_padded, scale, zero)[:3]


def quantize_groups_padded(
    x: Tensor, act: ActSpec, m_padded: int, k_padded: int, *, m_major_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] in groups of `act.group_size` columns of a row, into zero-padded codes.

    m_major_scales: store the scales of one group for all rows contiguously, as cuBLASLt and DeepGEMM read them.
    Returns codes float8_e4m3fn [m_padded, k_padded] and scale float32 [m_padded, groups].
    """
    return quantize_fused(Source(x), act, m_padded, k_padded, m_major_scales=m_major_scales)[:2]


def quantize_fused(
    source: Source, act: ActSpec, m_padded: int, k_padded: int, scale: Tensor | None = None, zero: Tensor | None = None,
    *, m_major_scales: bool = False,
) -> Quantized:  # fmt: skip
    """Quantize in one launch where the device code has the scheme, else by torch's operators.

    scale, zero: of a static scheme; None or empty otherwise. m_major_scales: as for `quantize_groups_padded`.
    """
    static = None if scale is None or scale.numel() == 0 else scale.float().reshape(1)
    static_zero = None if zero is None or zero.numel() == 0 or act.symmetric else zero.to(torch.int32).reshape(1)
    if act.dynamic:
        static = static_zero = None
    elif static is None:
        raise ValueError("a static activation scheme needs its scale")
    if not _is_fused(source.x, act):
        return _quantize_by_torch(source, act, m_padded, k_padded, static, static_zero, m_major_scales)
    return _launch(source, act, m_padded, k_padded, static, static_zero, m_major_scales)


def _is_fused(x: Tensor, act: ActSpec) -> bool:
    """Whether the device code has the scheme: no scale of the whole input, and groups of a power of two."""
    whole_input = act.dynamic and act.granularity == "tensor"
    return code_dtype(act) is not None and not whole_input and not act.group_size & (act.group_size - 1) and _use_triton(x)


def _quantize_by_torch(
    source: Source, act: ActSpec, m_padded: int, k_padded: int, static: Tensor | None, static_zero: Tensor | None, m_major: bool
) -> Quantized:
    x, total = source.unfused()
    m, k = x.shape
    if act.granularity == "group":
        columns = -(-k_padded // act.group_size) * act.group_size
        codes, scale, zero = quantize_groups(pad(x, (0, columns - k, 0, m_padded - m)), act)
        codes = codes[:, :k_padded].contiguous()
        return Quantized(codes, scale.t().contiguous().t() if m_major else scale, zero, total)
    codes, scale, zero = quantize_input(x, act, static, static_zero)
    codes = pad_codes(codes, m_padded, k_padded)
    if act.granularity == "token" and m_padded > m:
        scale = pad(scale, (0, 0, 0, m_padded - m), value=1.0)
        zero = None if zero is None else pad(zero, (0, 0, 0, m_padded - m))
    return Quantized(codes, scale.reshape(-1), None if zero is None else zero.reshape(-1), total)


def _launch(
    source: Source, act: ActSpec, m_padded: int, k_padded: int, static: Tensor | None, static_zero: Tensor | None, m_major: bool
) -> Quantized:
    x, other, residual = source.x, source.other, source.residual
    (m, k), device = x.shape, x.device
    config = quantize_config(
        act, source.kind, k_padded, has_residual=residual is not None, has_static_zero=static_zero is not None,
        native_fp8=_converts_to_fp8(device), interpreted=_interpreted(),
    )  # fmt: skip
    groups, columns = scale_columns(act, k_padded), config.groups * config.group_size
    codes = torch.empty(m_padded, k_padded, dtype=code_dtype(act), device=device)
    scale = torch.empty((groups, m_padded) if m_major else (m_padded, groups), device=device) if static is None else static
    stride_m, stride_group = (1, m_padded) if m_major else (groups, 1)
    zero = torch.empty_like(scale, dtype=torch.int32) if config.asymmetric else static_zero
    total = None if residual is None else torch.empty(m, k, dtype=x.dtype, device=device)
    _device_code().quantize_kernel[(m_padded, -(-k_padded // columns))](
        x, x if other is None else other, x if residual is None else residual, x if total is None else total,
        codes.view(torch.uint8), scale, scale if zero is None else zero, m, k, k_padded, groups,
        x.stride(0), 0 if other is None else other.stride(0), 0 if residual is None else residual.stride(0),
        stride_m, stride_group,
        source.epsilon, act.limit or math.inf, config=config, num_warps=num_warps(columns),
    )  # fmt: skip
    if act.granularity != "group":
        return Quantized(codes, scale.view(-1), None if zero is None else zero.view(-1), total)
    return Quantized(codes, scale.t() if m_major else scale, zero, total)


def quantize_config(
    act: ActSpec, source: str, k_padded: int, *, has_residual: bool, has_static_zero: bool, native_fp8: bool,
    interpreted: bool = False,
) -> QuantizeConfig:  # fmt: skip
    """The configuration of a launch: a program has the whole row where it has to see it, else 2048 columns.

    has_static_zero: a static scheme comes with a zero point. native_fp8, interpreted: of the device.
    """
    fp8, row = act.dtype.kind == "float", 1 << (k_padded - 1).bit_length()
    asymmetric = act.dynamic and not act.symmetric and not fp8
    if act.granularity == "group":
        group_size = act.group_size
        groups = max(1, (row if source == "rms_norm" else min(row, 2048)) // group_size)
    else:
        whole_row = act.dynamic or source == "rms_norm"
        groups, group_size = 1, max(256, row if whole_row else min(row, 2048))
    return QuantizeConfig(
        source, has_residual, not act.dynamic, fp8, asymmetric, asymmetric or has_static_zero, act.scale == "e8m0", groups,
        group_size, act.dtype.max() if fp8 else 255.0 if asymmetric else 127.5, MIN_SCALE, native_fp8, not interpreted,
    )  # fmt: skip


def num_warps(columns: int) -> int:
    """Warps of a program: 16 to 32 columns a thread, which are 2 to 4 loads of 16 bytes."""
    return max(1, min(16, columns // 512 if columns < 8192 else columns // 1024))


def _use_triton(x: Tensor) -> bool:
    return x.device.type in ("cuda", "xpu") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and not env.triton_interpret()


@functools.cache
def _interpreted() -> bool:
    return env.triton_interpret()


@functools.cache
def _converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton converts to OCP E4M3 by an instruction of the GPU."""
    if device.type != "cuda" or _interpreted():
        return False
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0] in _OCP_FP8_AMD
    return torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _device_code() -> Any:
    from bitline.kernels.triton.device import act_quant

    return act_quant

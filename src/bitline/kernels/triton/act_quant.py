"""Fused activation quantization on GPUs: one Triton launch, bit for bit what `bitline.act_quant` computes."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import env
from bitline.act_quant import mx_exponent, quantize_groups, quantize_input
from bitline.types import ActSpec

_MIN_SCALE = torch.finfo(torch.float32).eps


def quantize_padded(
    x: Tensor, act: ActSpec, m_padded: int, k_padded: int, scale: Tensor | None = None, zero: Tensor | None = None,
    *, fused: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Quantize x [M, K] per token or per tensor into zero-padded codes.

    scale, zero: of a static scheme; None or empty otherwise. fused: False where the device's FP8 is not OCP E4M3.
    Returns codes int8 or FP8 [m_padded, k_padded], scale float32 [m_padded] or [1], zero int32 of the scale's shape or None.
    """
    static = None if scale is None or scale.numel() == 0 else scale.float().reshape(1)
    static_zero = None if zero is None or zero.numel() == 0 or act.symmetric else zero.to(torch.int32).reshape(1)
    kind = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}.get(act.dtype.name)
    if not fused or kind is None or not _use_triton(x) or (act.dynamic and act.granularity != "token"):
        return _quantize_by_torch(x, act, m_padded, k_padded, static, static_zero)
    codes = torch.empty(m_padded, k_padded, dtype=kind, device=x.device)
    if act.dynamic:
        return codes, *_quantize_per_token(x, act, codes)
    if static is None:
        raise ValueError("a static activation scheme needs its scale")
    _device_code().quantize_static_kernel[(m_padded,)](
        x, codes, static, static if static_zero is None else static_zero, *x.shape, k_padded,
        IS_FP8=kind != torch.int8, HAS_ZERO=static_zero is not None, **_launch_options(k_padded),
    )  # fmt: skip
    return codes, static, static_zero


def _quantize_by_torch(
    x: Tensor, act: ActSpec, m_padded: int, k_padded: int, static: Tensor | None, static_zero: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    m, k = x.shape
    codes, scale, zero = quantize_input(x, act, static, static_zero)
    if codes.shape != (m_padded, k_padded):
        codes = pad(codes.view(torch.uint8), (0, k_padded - k, 0, m_padded - m)).view(codes.dtype)
    if act.granularity == "token" and m_padded > m:
        scale = pad(scale, (0, 0, 0, m_padded - m), value=1.0)
        zero = None if zero is None else pad(zero, (0, 0, 0, m_padded - m))
    return codes, scale.reshape(-1), None if zero is None else zero.reshape(-1)


def _quantize_per_token(x: Tensor, act: ActSpec, codes: Tensor) -> tuple[Tensor, Tensor | None]:
    """Fill `codes` and return scale [m_padded] and zero [m_padded] or None, of a dynamic per-token scheme."""
    (m, k), (m_padded, k_padded) = x.shape, codes.shape
    scale = torch.empty(m_padded, dtype=torch.float32, device=x.device)
    zero = None if act.symmetric else torch.empty(m_padded, dtype=torch.int32, device=x.device)
    limit, options = act.limit or math.inf, _launch_options(k_padded)
    if codes.dtype == torch.int8:
        _device_code().quantize_int8_per_token_kernel[(m_padded,)](
            x, codes, scale, scale if zero is None else zero, m, k, k_padded, limit,
            ASYMMETRIC=zero is not None, MIN_SCALE=_MIN_SCALE, **options,
        )  # fmt: skip
    else:
        _device_code().quantize_fp8_per_token_kernel[(m_padded,)](
            x, codes, scale, m, k, k_padded, limit, MIN_SCALE=_MIN_SCALE, **options
        )
    return scale, zero


def _launch_options(k_padded: int) -> dict[str, Any]:
    return {"BLOCK_SIZE_K": min(4096, max(256, 1 << (k_padded - 1).bit_length())), "num_warps": 8}


def quantize_groups_padded(
    x: Tensor, act: ActSpec, m_padded: int, k_padded: int, *, m_major_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] to FP8 in groups of `act.group_size` columns of a row, into zero-padded codes.

    m_major_scales: store the scales of one group for all rows contiguously, as cuBLASLt and DeepGEMM read them.
    Returns codes float8_e4m3fn [m_padded, k_padded] and scale float32 [m_padded, groups].
    """
    (m, k), group = x.shape, act.group_size
    groups = -(-k_padded // group)
    if not _use_triton(x) or group & (group - 1):
        padded = pad(x, (0, groups * group - k, 0, m_padded - m))
        codes, scale = _quantize_e8m0(padded.float(), act) if act.scale == "e8m0" else quantize_groups(padded, act)[:2]
        if codes.shape[1] != k_padded:
            codes = codes.view(torch.uint8)[:, :k_padded].contiguous().view(codes.dtype)
        return codes, scale.t().contiguous().t() if m_major_scales else scale
    codes = torch.empty(m_padded, k_padded, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (groups, m_padded) if m_major_scales else (m_padded, groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    scale = scale.t() if m_major_scales else scale
    groups_per_program = max(1, 2048 // group)
    _device_code().quantize_fp8_per_group_kernel[(m_padded, -(-groups // groups_per_program))](
        x, codes, scale, m, k, k_padded, groups, *scale.stride(), act.limit or math.inf,
        E8M0_SCALE=act.scale == "e8m0", MIN_SCALE=_MIN_SCALE, GROUP_SIZE=group, GROUPS_PER_PROGRAM=groups_per_program,
        num_warps=4,
    )  # fmt: skip
    return codes, scale


def _quantize_e8m0(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor]:
    """x float32 [M, K], K a multiple of the group size, to FP8 codes and power-of-two scales float32 [M, groups]."""
    groups = x.unflatten(1, (-1, act.group_size))
    amax = groups.abs().amax(-1, keepdim=True)
    power = torch.ldexp(torch.ones_like(amax), mx_exponent(amax, act.dtype.max()).clamp(-127, 127))
    scale = torch.where(amax > 0, power, torch.ones_like(amax))
    codes = (groups / scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale.squeeze(-1)


def _use_triton(x: Tensor) -> bool:
    return x.device.type in ("cuda", "xpu") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and not env.triton_interpret()


@functools.cache
def _device_code() -> Any:
    from bitline.kernels.triton.device import act_quant

    return act_quant

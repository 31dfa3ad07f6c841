"""A layer's input to codes, in one launch on GPUs that Triton knows: bit for bit what `bitline.act_quant` computes."""

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

_TINY = torch.finfo(torch.float32).eps


def rows_of(
    x: Tensor, act: ActSpec, rows: int, columns: int, scale: Tensor | None = None, zero: Tensor | None = None,
    *, fused: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """x [M, K] to codes int8 or FP8 [rows, columns], zeros beyond M and K; scale float32 [rows] or [1]; zero int32 or None.

    act: per token or tensor; `scale` and `zero`, or empty tensors, are a static scheme's. fused: False where the device's FP8 is
    not E4M3 as OCP defines it.
    """
    m, k = x.shape
    static = None if scale is None or scale.numel() == 0 else scale.float().reshape(1)
    point = None if zero is None or zero.numel() == 0 or act.symmetric else zero.to(torch.int32).reshape(1)
    kind = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}.get(act.dtype.name)
    if not fused or kind is None or not _compiled(x) or (act.dynamic and act.granularity != "token"):
        codes, found, where = quantize_input(x, act, static, point)
        if codes.shape != (rows, columns):
            codes = pad(codes.view(torch.uint8), (0, columns - k, 0, rows - m)).view(codes.dtype)
        if act.granularity == "token" and rows > m:
            found = pad(found, (0, 0, 0, rows - m), value=1.0)
            where = None if where is None else pad(where, (0, 0, 0, rows - m))
        return codes, found.reshape(-1), None if where is None else where.reshape(-1)
    codes = torch.empty(rows, columns, dtype=kind, device=x.device)
    sizes: dict[str, Any] = {"BLOCK": min(4096, max(256, 1 << (columns - 1).bit_length())), "num_warps": 8}
    if not act.dynamic:
        if static is None:
            raise ValueError("a static activation scheme needs its scale")
        _device().encode_kernel[(rows,)](
            x, codes, static, static if point is None else point, m, k, columns,
            FLOAT=kind != torch.int8, HAS_ZERO=point is not None, **sizes,
        )  # fmt: skip
        return codes, static, point
    found = torch.empty(rows, dtype=torch.float32, device=x.device)
    where = None if act.symmetric else torch.empty(rows, dtype=torch.int32, device=x.device)
    limit = act.limit or math.inf
    if kind == torch.int8:
        _device().quantize_int8_kernel[(rows,)](
            x, codes, found, found if where is None else where, m, k, columns, limit,
            ASYMMETRIC=where is not None, TINY=_TINY, **sizes,
        )  # fmt: skip
    else:
        _device().quantize_kernel[(rows,)](x, codes, found, m, k, columns, limit, TINY=_TINY, **sizes)
    return codes, found, where


def groups_of(x: Tensor, act: ActSpec, rows: int, columns: int, *, scales_by_group: bool = False) -> tuple[Tensor, Tensor]:
    """x [M, K] to codes float8_e4m3fn [rows, columns], zeros beyond M and K, and scale float32 [rows, groups], one for
    `act.group_size` columns of a row. scales_by_group: one group's scales of all rows lie one after another.
    """
    (m, k), g = x.shape, act.group_size
    groups = -(-columns // g)
    if not _compiled(x) or g & (g - 1):
        wide = pad(x, (0, groups * g - k, 0, rows - m))
        codes, scale = _powers(wide.float(), act) if act.scale == "e8m0" else quantize_groups(wide, act)[:2]
        if codes.shape[1] != columns:
            codes = codes.view(torch.uint8)[:, :columns].contiguous().view(codes.dtype)
        return codes, scale.t().contiguous().t() if scales_by_group else scale
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    shape = (groups, rows) if scales_by_group else (rows, groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    scale = scale.t() if scales_by_group else scale
    tile = max(1, 2048 // g)
    _device().quantize_groups_kernel[(rows, -(-groups // tile))](
        x, codes, scale, m, k, columns, groups, *scale.stride(), act.limit or math.inf,
        POWER=act.scale == "e8m0", TINY=_TINY, GROUP=g, TILE=tile, num_warps=4,
    )  # fmt: skip
    return codes, scale


def _powers(x: Tensor, act: ActSpec) -> tuple[Tensor, Tensor]:
    """x float32 [M, K], K whole groups, to FP8 codes and scales that are powers of two."""
    groups = x.unflatten(1, (-1, act.group_size))
    peak = groups.abs().amax(-1, keepdim=True)
    power = torch.ldexp(torch.ones_like(peak), mx_exponent(peak, act.dtype.max()).clamp(-127, 127))
    scale = torch.where(peak > 0, power, torch.ones_like(peak))
    codes = (groups / scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale.squeeze(-1)


def _compiled(x: Tensor) -> bool:
    return x.device.type in ("cuda", "xpu") and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None and not env.triton_interpret()


@functools.cache
def _device() -> Any:
    from bitline.kernels.triton.device import act_quant

    return act_quant

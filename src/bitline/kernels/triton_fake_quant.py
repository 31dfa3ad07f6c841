"""TritonFakeQuantLinearKernel: schemes that quantize their input, on GPUs without units for the codes; weights stay packed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.act_quant import fake_quantize
from bitline.kernels import weight_only
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.triton.launch import interpreted
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.platform import Platform
from bitline.types import ActSpec, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_LONGEST = 1 << 16  # columns of a row that one program holds


class Rounding(NamedTuple):
    """A scheme in the device code's words.

    static: its scale is given. asymmetric: integers with a zero point. power, fine: scales are powers of two, or E4M3, under a
    given one where `scaled`. range: what a group's largest magnitude, or its extent, is divided by. low, high: the smallest and
    largest code's value. digits: the exponent of a number just above `high`. mantissa, lowest: of a minifloat.
    """

    static: bool
    asymmetric: bool
    integer: bool
    power: bool
    fine: bool
    scaled: bool
    range: float
    low: float
    high: float
    digits: int
    mantissa: int
    lowest: int


@functools.lru_cache(maxsize=256)
def rounding(act: ActSpec, scaled: bool, point: bool) -> Rounding | None:
    """How the device code computes a scheme; None where it does not. scaled, point: what comes with the weight."""
    kind, integer = act.dtype, act.dtype.kind == "int"
    if act.scale == "e5m3" or (integer and act.scale != "float") or (act.dynamic and act.granularity == "tensor"):
        return None
    half = float(1 << (kind.bits - 1))
    low, high = (-half, half - 1) if integer else (-kind.max(), kind.max())
    extent = (high - low) / (2 if act.symmetric else 1) if integer else high
    return Rounding(
        not act.dynamic, integer and not act.symmetric and (act.dynamic or point), integer, act.scale == "e8m0",
        act.scale == "e4m3", scaled, extent, low, high, math.frexp(high)[1], kind.mantissa,
        0 if integer else 2 - (1 << (kind.exponent - 1)),
    )  # fmt: skip


def _columns(act: ActSpec, k: int) -> int:
    """Columns that the device code works on at a time, 0 where it cannot."""
    if not act.dynamic:
        return 1024
    width = act.group_size if act.granularity == "group" else 1 << (k - 1).bit_length()
    return 0 if width & (width - 1) or width > _LONGEST else width


def read_back(x: Tensor, act: ActSpec, scale: Tensor, zero: Tensor) -> Tensor:
    """x [M, K] quantized and read back, in its dtype: `activations.fake_quantize`. scale, zero: empty where there are none."""
    (m, k), width = x.shape, _columns(act, x.shape[1])
    how = rounding(act, scale.numel() > 0, zero.numel() > 0)
    if how is None or not width:
        given = [t if t.numel() else None for t in (scale, zero)]
        return fake_quantize(x, act, *given).to(x.dtype)
    # The interpreter's own rounding to bfloat16 is not to nearest; torch's is.
    out = torch.empty(m, k, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    tile = max(1, 2048 // width)
    _device().fake_quantize_kernel[(m, -(-k // (width * tile)))](
        x, out, scale, zero, k, act.limit or math.inf, R=how, TINY=torch.finfo(torch.float32).eps, GROUP=width, TILE=tile,
        num_warps=max(4, min(16, width // 1024)),
    )  # fmt: skip
    return out.to(x.dtype)


@functools.cache
def _device() -> Any:
    from bitline.kernels.triton.device import fake_quant

    return fake_quant


@functools.lru_cache(maxsize=4096)
def _plain(spec: LinearSpec) -> LinearSpec:
    """The layer as if its input were not quantized; the same object at each call."""
    return spec.replace(act=None)


class TritonFakeQuantLinearKernel(Kernel):
    """Stands in for units of 4 and 8 bits: in one launch, the input is rounded as the scheme asks and read back in its own dtype;
    the product is a weight-only one.

    What the reference computes, but no weight is dequantized in memory. A dynamic scale of the whole input, and groups that are
    no power of two, take torch's operators.
    """

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    quantizes_input = True
    emulates = True
    measured = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """As the weight-only kernels."""
        return TritonMinifloatLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Every input scheme; weights that a portable weight-only kernel takes."""
        if spec.act is None:
            return no("the input stays as it is", "a weight-only kernel, such as TritonW4A16LinearKernel")
        return weight_only.takes(_plain(spec))

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """As the weight-only kernel on the weight's device, then the input's static scale and zero point or empty tensors."""
        plain, absent = _plain(weight.spec), torch.empty(0, device=weight.device)
        under = weight_only.here(plain, weight.device)
        packed = under.pack(replace(weight, spec=plain, input_scale=None, input_zero=None))
        return {
            **packed,
            "input_scale": absent if weight.input_scale is None else weight.input_scale.float().reshape(1),
            "input_zero": absent if weight.input_zero is None else weight.input_zero.to(torch.int32).reshape(1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        *weight, scale, zero = packed
        plain = _plain(spec)
        return weight_only.here(plain, x.device).apply(read_back(x, spec.act, scale, zero), weight, bias, plain)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x and a launch, or 20 of both with torch's operators, before the weight-only product."""
        fused = spec.act is None or (rounding(spec.act, True, True) is not None and _columns(spec.act, spec.k))
        one = 2 * m * spec.k * spec.act_dtype.itemsize / platform.rates.bandwidth + platform.rates.launch
        plain = _plain(spec)
        return (1 if fused else 20) * one + weight_only.on(plain, platform).cost(plain, platform, m)

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Of the portable kernel; Hopper's differs by its padding."""
        return TritonMinifloatLinearKernel.packed_bytes(_plain(spec)) + 8

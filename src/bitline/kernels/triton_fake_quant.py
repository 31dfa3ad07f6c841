"""TritonFakeQuantLinearKernel: activation quantization emulated on GPUs without the matrix instructions, over packed weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.act_quant import fake_quantize
from bitline.expert_gate import ExpertGate
from bitline.kernels import weight_only
from bitline.kernels.base import Kernel, Packed, experts_proven
from bitline.kernels.triton.launch import interpreted
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.platform import Platform
from bitline.quantized_input import QuantizedInput
from bitline.types import ActSpec, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_MAX_GROUP = 1 << 16  # columns of a row that one program holds


class FakeQuantConfig(NamedTuple):
    """An activation scheme as the device code is compiled for it.

    static: the scale is given. asymmetric: integers with a zero point. integer: codes are integers, else minifloats.
    e8m0_scale, e4m3_scale: the kind of block scale. global_scale: E4M3 scales are under a global one. divisor: what amax, or
    max - min, is divided by to give the scale. qmin, qmax: the smallest and largest code's value. max_exponent: of the smallest
    power of two above qmax. mantissa_bits, min_exponent: of the minifloat.
    """

    static: bool
    asymmetric: bool
    integer: bool
    e8m0_scale: bool
    e4m3_scale: bool
    global_scale: bool
    divisor: float
    qmin: float
    qmax: float
    max_exponent: int
    mantissa_bits: int
    min_exponent: int


@functools.lru_cache(maxsize=256)
def fake_quant_config(act: ActSpec, has_scale: bool, has_zero: bool) -> FakeQuantConfig | None:
    """The device code's config of a scheme; None where it has no code for it. has_scale, has_zero: what comes with the weight."""
    kind, integer = act.dtype, act.dtype.kind == "int"
    if act.scale == "e5m3" or (integer and act.scale != "float") or (act.dynamic and act.granularity == "tensor"):
        return None
    half = float(1 << (kind.bits - 1))
    qmin, qmax = (-half, half - 1) if integer else (-kind.max(), kind.max())
    return FakeQuantConfig(
        static=not act.dynamic,
        asymmetric=integer and not act.symmetric and (act.dynamic or has_zero),
        integer=integer,
        e8m0_scale=act.scale == "e8m0",
        e4m3_scale=act.scale == "e4m3",
        global_scale=has_scale,
        divisor=(qmax - qmin) / (2 if act.symmetric else 1) if integer else qmax,
        qmin=qmin,
        qmax=qmax,
        max_exponent=math.frexp(qmax)[1],
        mantissa_bits=kind.mantissa,
        min_exponent=0 if integer else 2 - (1 << (kind.exponent - 1)),
    )


def _group_columns(act: ActSpec, k: int) -> int:
    """Columns per group of the device code, a power of two; 0 where it cannot run."""
    if not act.dynamic:
        return 1024
    columns = act.group_size if act.granularity == "group" else 1 << (k - 1).bit_length()
    return 0 if columns & (columns - 1) or columns > _MAX_GROUP else columns


def fake_quantize_fused(x: Tensor, act: ActSpec, scale: Tensor, zero: Tensor) -> Tensor:
    """`act_quant.fake_quantize` of x [M, K] in x's dtype, in one launch where the device code has the scheme.

    scale, zero: of a static scheme, or the global scale; empty where there are none.
    """
    (m, k), group = x.shape, _group_columns(act, x.shape[1])
    config = fake_quant_config(act, scale.numel() > 0, zero.numel() > 0)
    if config is None or not group:
        given = [t if t.numel() else None for t in (scale, zero)]
        return fake_quantize(x, act, *given).to(x.dtype)
    # The interpreter does not round bfloat16 to nearest, torch does.
    out = torch.empty(m, k, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    groups_per_program = max(1, 2048 // group)
    _device_code().fake_quantize_kernel[(m, -(-k // (group * groups_per_program)))](
        x, out, scale, zero, k, act.limit or math.inf, CONFIG=config, MIN_SCALE=torch.finfo(torch.float32).eps, GROUP_SIZE=group,
        GROUPS_PER_PROGRAM=groups_per_program, num_warps=max(4, min(16, group // 1024)),
    )  # fmt: skip
    return out.to(x.dtype)


@functools.cache
def _device_code() -> Any:
    from bitline.kernels.triton.device import fake_quant

    return fake_quant


@functools.lru_cache(maxsize=4096)
def _weight_only_spec(spec: LinearSpec) -> LinearSpec:
    """The layer without activation quantization; cached, since launch plans are keyed by the spec's identity."""
    return spec.replace(act=None)


class TritonFakeQuantLinearKernel(Kernel):
    """W8A8, W4A8, FP8, MX and NVFP4 schemes without the matrix instructions: fake-quantized activations, then a weight-only GEMM.

    Same result as the reference, but weights stay packed. Dynamic per-tensor activation scales, and groups that are no power of
    two, are quantized by torch's operators.
    """

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    quantizes_input = True
    takes_quantized_input = True
    emulates = True
    measured = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """As the weight-only kernels."""
        return TritonMinifloatLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Every activation scheme, with weights that a portable weight-only kernel takes."""
        if spec.act is None:
            return no("the scheme does not quantize activations", "a weight-only kernel, such as TritonW4A16LinearKernel")
        return weight_only.can_implement(_weight_only_spec(spec))

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """The weight-only kernel's tensors, then input_scale float32 [1] and input_zero int32 [1], or empty."""
        spec, absent = _weight_only_spec(weight.spec), torch.empty(0, device=weight.device)
        kernel = weight_only.kernel_for_device(spec, weight.device)
        packed = kernel.pack(replace(weight, spec=spec, input_scale=None, input_zero=None))
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
        scale, zero = packed[-2:]
        return cls._weight_only(fake_quantize_fused(x, spec.act, scale, zero), packed, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        assert spec.act is not None
        return cls._weight_only(QuantizedInput(codes, scales, zero).dequantize(spec.act, spec.act_dtype), packed, bias, spec)

    @classmethod
    def _weight_only(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """x [M, K], fake-quantized, times the weight."""
        weight_spec = _weight_only_spec(spec)
        return weight_only.kernel_for_device(weight_spec, x.device).apply(x, packed[:-2], bias, weight_spec)

    @classmethod
    def fuses_experts(cls, spec: LinearSpec, platform: Platform) -> bool:
        """Where the weight-only kernel does, and each row is quantized by itself, with no scale of the expert's own."""
        act, weight_spec = spec.act, _weight_only_spec(spec)
        kernel = weight_only.kernel_for_platform(weight_spec, platform)
        by_row = act is not None and act.dynamic and act.granularity != "tensor" and act.scale != "e4m3"
        return by_row and experts_proven(kernel, platform) and kernel.fuses_experts(weight_spec, platform)

    @classmethod
    def apply_experts(
        cls, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate,
    ) -> Tensor:  # fmt: skip
        """See Kernel.apply_experts: rows of x, and of the second projection's input, are fake-quantized."""
        up_act, down_act, absent = up_spec.act, down_spec.act, x.new_empty(0)
        assert up_act is not None and down_act is not None
        return weight_only.run_experts(
            fake_quantize_fused(x, up_act, absent, absent), index, weights, up[:-2], up_bias, down[:-2], down_bias,
            _weight_only_spec(up_spec), _weight_only_spec(down_spec), gate,
            between=lambda hidden: fake_quantize_fused(hidden, down_act, absent, absent),
        )  # fmt: skip

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A pass over x and a launch, or 20 of both with torch's operators, and the weight-only GEMM."""
        fused = spec.act is None or (fake_quant_config(spec.act, True, True) is not None and _group_columns(spec.act, spec.k))
        one_pass = 2 * m * spec.k * spec.act_dtype.itemsize / platform.rates.bandwidth + platform.rates.launch
        weight_spec = _weight_only_spec(spec)
        gemm = weight_only.kernel_for_platform(weight_spec, platform).cost(weight_spec, platform, m)
        return (1 if fused else 20) * one_pass + gemm

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Of the portable kernel; the Hopper kernel's differs by padding."""
        return TritonMinifloatLinearKernel.packed_bytes(_weight_only_spec(spec)) + 8

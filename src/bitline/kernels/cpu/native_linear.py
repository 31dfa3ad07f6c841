"""Bitline's own CPU kernel: codes are dequantized in registers and multiplied there, in C++ (csrc/gemm*, docs/cpu-design.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline import native
from bitline.act_quant import fake_quantize
from bitline.errors import BitlineError
from bitline.expert_gate import ExpertGate
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import native_costs, native_experts, packed_weight, unpack_weight
from bitline.kernels.cpu.native_experts import DTYPE_CODES, FAILURES
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

# The core registers an implementation for CPU tensors (csrc/torch_op.cpp) when the first weight is packed. The one in Python
# serves processes that pack none, such as one that runs an exported graph, and torch versions without the C functions.
_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define("cpu_linear(Tensor x, Tensor weight, Tensor? bias, int n) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, n: int) -> Tensor:
    register_native_op()
    core = native.core()
    if core is None:
        raise BitlineError("a weight packed for the native core cannot run without it", found=native.why_not(),
                           expected="the native core")  # fmt: skip
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    m = y.numel() // n
    failed = m and core.gemm(
        x.data_ptr(), m, weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), DTYPE_CODES[x.dtype]
    )
    if failed:
        raise BitlineError("the native core cannot run a packed weight", found=FAILURES[failed])
    return y


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, n: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


_LIBRARY.impl("cpu_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::cpu_linear", _linear_fake, lib=_LIBRARY)
OP = torch.ops.bitline.cpu_linear.default


@functools.cache
def register_native_op() -> bool:
    """Register the core's implementation of the operator, once; False where torch lacks what that takes and Python's is used."""
    core = native.core()
    return core is not None and core.register_torch_op(core.torch_library) == 0


class CPUWNA16LinearKernel(Kernel):
    """Every format on a CPU's vector units, from one packed layout.

    Codes are dequantized through a look-up table in registers, multiplied with x (bfloat16 pairs, float32, or int8 where the
    scheme quantizes activations to it), accumulated in float32 or int32 within a group, and each group's accumulator is scaled.
    """

    platforms = ("cpu",)
    backend = "native"
    priority = 10
    measured = ("zen", "amx")

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2 or ARM with dotprod, and the native core built."""
        if not platform.native:
            return no("Bitline's native core is not available", "install Bitline where there is a C++ compiler")
        if not platform.features & {"avx2", "dotprod"}:
            return no("it has code for AVX2, AVX-512 and ARM's dotprod only", "an x86-64 CPU with AVX2, an ARM CPU with dotprod")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Every valid spec."""
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """weight: uint8, see packed_weight.py; for activation schemes that the kernel does not run itself, their static scale and
        zero point too.
        """
        packed = {"weight": packed_weight.pack(weight, cls.batch_invariant)}
        register_native_op()
        if not packed_weight.quantizes_activations(weight.spec.act):
            absent = torch.empty(0)
            for name in ("input_scale", "input_zero"):
                value = getattr(weight, name)
                packed[name] = absent if value is None else value.clone()
        return packed

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if len(packed) > 1:
            assert spec.act is not None
            x = fake_quantize(x, spec.act, *(t if t.numel() else None for t in packed[1:])).to(x.dtype)
        return OP(x, packed[0], bias, spec.n)

    @classmethod
    def unpack(cls, packed: Sequence[Tensor], spec: LinearSpec) -> Tensor:
        """See Kernel.unpack."""
        return unpack_weight.unpack(packed[0], spec.act_dtype)

    @classmethod
    def fuses_experts(cls, spec: LinearSpec, platform: Platform) -> bool:
        """All but activation schemes that are fake-quantized by torch."""
        return packed_weight.quantizes_activations(spec.act)

    @classmethod
    def can_experts(cls, up: LinearSpec, down: LinearSpec, gate: ExpertGate) -> bool:
        """As `fuses_experts`."""
        quantizes = all(packed_weight.quantizes_activations(spec.act) for spec in (up, down))
        return quantizes and super().can_experts(up, down, gate)

    @classmethod
    def apply_experts(
        cls, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate,
    ) -> Tensor:  # fmt: skip
        """See Kernel.apply_experts; both projections of an expert are rounded to act_dtype, as the kernel alone rounds them."""
        return native_experts.apply_experts(x, index, weights, up[0], up_bias, down[0], down_bias, down_spec.n, gate)

    @classmethod
    def direct(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> tuple[Any, tuple[Any, ...]] | None:
        """The operator alone, unless x is fake-quantized before it."""
        return None if len(packed) > 1 else (OP, (packed[0], bias, spec.n))

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """See native_costs."""
        return native_costs.seconds(spec, platform, m, cls.packed_bytes(spec), cls.batch_invariant)

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed weight."""
        return packed_weight.layout_of(spec).section_offsets()[1]


class CPUBatchInvariantLinearKernel(CPUWNA16LinearKernel):
    """CPUWNA16LinearKernel with one reduction order for every M, so that a row's result does not depend on the batch.

    Slower for M of 1 to 5, and at large M for formats with 8-bit codes or short groups.
    """

    priority = -5
    batch_invariant = True

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """10 % above the kernel without batch invariance, whose tiles it does not use."""
        return 1.1 * max(super().cost(spec, platform, m), CPUWNA16LinearKernel.cost(spec, platform, m))

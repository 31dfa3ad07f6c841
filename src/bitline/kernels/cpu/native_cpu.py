"""Bitline's own CPU kernel: packed codes are decoded in registers and multiplied there, in C++ (csrc/gemm*)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline import native
from bitline.act_quant import fake_quantize
from bitline.errors import BitlineError
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import cpu_costs
from bitline.kernels.cpu import native_cpu_pack as packing
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

# Measured on two Zen 5 cores (docs/performance.md). Operations a second and core with AVX-512; seconds a weight with AVX2 on
# two cores, for a call of up to three rows or of more, for each row, and for types that are gathered from a table. The matrix
# unit of a CPU with AMX is not used, and its vector unit does one bf16 product a cycle where Zen 5 does two: not measured.
BF16_RATE, F32_RATE, INT8_RATE, BYTES_RATE = 500e9, 260e9, 900e9, 460e9
AVX2_FEW, AVX2_MANY, AVX2_ROW, AVX2_GATHERED = 15e-12, 60e-12, 7.5e-12, 90e-12
WITHOUT_TILES = 0.33
PREPARE = 1e-10  # a number of the input
CALL = 3e-6
FAST = frozenset(("avx512_bf16", "avx512_vnni", "avx512_vbmi"))

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# The core registers an implementation for the CPU (csrc/op.cpp) when the first weight is packed; the one in Python is for a
# process that has packed none, as one that runs an exported graph, and for a torch without the C functions that binding takes.
_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define("cpu_linear(Tensor x, Tensor weight, Tensor? bias, int n) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, n: int) -> Tensor:
    bound()
    core = native.core()
    if core is None:
        raise BitlineError("a weight packed for the native core has to run", found=native.why_not(), expected="the native core")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    rows = y.numel() // n
    failed = rows and core.gemm(
        x.data_ptr(), rows, weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), _DTYPES[x.dtype]
    )
    if failed:
        reason = {-1: "it was packed by another version", -2: "no memory", -3: "no kernel for this level of CPU features"}[failed]
        raise BitlineError("the native core cannot run a packed weight", found=reason)
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, n: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


_LIBRARY.impl("cpu_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::cpu_linear", _fake, lib=_LIBRARY)
OP = torch.ops.bitline.cpu_linear.default


@functools.cache
def bound() -> bool:
    """Bind the operator to the core, once. False where that is not possible and it runs through Python."""
    core = native.core()
    return core is not None and core.bind(core.torch_library) == 0


class CPUWNA16LinearKernel(Kernel):
    """Every format on a CPU's vector units, from one packed layout.

    Codes become exact numbers through a table in registers, are multiplied with the input (bfloat16 pairs, float32, or int8
    where the scheme quantizes the input to it), summed in float32 or int32 within a group, and each group's sum is scaled.
    """

    platforms = ("cpu",)
    backend = "native"
    priority = 10
    measured = ("zen",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2, and the native core built."""
        if not platform.native:
            return no("Bitline's native core is not there", "install Bitline where there is a C++ compiler")
        if "avx2" not in platform.features:
            return no("it has code for AVX2 and AVX-512 alone", "an x86-64 CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Everything that the canonical weight can say."""
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """One tensor; for input schemes that the kernel does not quantize itself, their scalars."""
        packed = {"weight": packing.pack(weight, cls.batch_invariant)}
        bound()
        if not packing.folds_act(weight.spec.act):
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
    def direct(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> tuple[Any, tuple[Any, ...]] | None:
        """The operator alone, where nothing is to be done to the input before."""
        return None if len(packed) > 1 else (OP, (packed[0], bias, spec.n))

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The larger of reading the weight and multiplying; with AVX2 decoding is the most of it."""
        weights, extra = spec.n * spec.k, CALL
        if not packing.folds_act(spec.act):
            extra += cpu_costs.quantized_input(spec, platform, m)
        read = cls.packed_bytes(spec) / platform.rates.bandwidth
        if not platform.features >= FAST:
            each = (AVX2_FEW if m <= 3 else AVX2_MANY) + m * AVX2_ROW
            each += AVX2_GATHERED if spec.weight.kind != "int" and spec.weight.bits != 4 else 0.0
            return max(read, weights * each * cpu_costs.share(platform)) + extra
        rate = _rate(spec) * platform.cores * (WITHOUT_TILES if "amx" in platform.features else 1.0)
        return max(read, 2.0 * m * weights / rate) + m * spec.k * PREPARE * cpu_costs.share(platform) + extra

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed weight."""
        return packing.layout(spec).places()[1]


class CPUBatchInvariantLinearKernel(CPUWNA16LinearKernel):
    """CPUWNA16LinearKernel where a row's sums are added up in one order however many rows come with it.

    That is slower for one to five rows, and for many rows of formats with 8-bit codes or short groups.
    """

    priority = -5
    batch_invariant = True

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A tenth more than without the promise."""
        return 1.1 * super().cost(spec, platform, m)


def _rate(spec: LinearSpec) -> float:
    """Operations a second on one core, by what is multiplied."""
    width = packing.layout(spec).width
    folded = spec.act is not None and packing.folds_act(spec.act)
    if folded and spec.act is not None and spec.act.dtype.kind == "int" and spec.weight.kind == "int" and width in (4, 8):
        return INT8_RATE
    if spec.act_dtype != torch.bfloat16 and not folded:
        return F32_RATE
    return BYTES_RATE if width == 8 else BF16_RATE

"""Bitline's own CPU kernel: packed codes are decoded in registers and multiplied there, in C++ (csrc/gemm*)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bitline import native
from bitline.activations import fake_quantize
from bitline.errors import BitlineError
from bitline.kernels import native_cpu_pack as packing
from bitline.kernels.base import Kernel, Packed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class CPUWNA16LinearKernel(Kernel):
    """Every format on a CPU's vector units, from one packed layout.

    Codes become exact numbers through a table in registers, are multiplied with the input (bfloat16 pairs, float32, or int8
    where the scheme quantizes the input to it), summed in float32 or int32 within a group, and each group's sum is scaled.
    """

    platforms = ("cpu",)
    backend = "native"
    priority = 10

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX-512 and its bf16, VNNI and VBMI, and the native core built."""
        if not platform.native:
            return no("Bitline's native core is not there", "install Bitline where there is a C++ compiler")
        if not {"avx512_bf16", "avx512_vnni"} <= platform.features:
            return no("it has code for AVX-512 with bf16 and VNNI alone", "a CPU of Sapphire Rapids' or Zen 4's kind")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Everything that the canonical weight can say."""
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """One tensor; for input schemes that the kernel does not quantize itself, their scalars."""
        packed = {"weight": packing.pack(weight)}
        if not packing.folds_act(weight.spec.act):
            absent = torch.empty(0)
            for name in ("input_scale", "input_zero"):
                value = getattr(weight, name)
                packed[name] = absent if value is None else value.clone()
        return packed

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        core = native.core()
        assert core is not None, "is_supported refuses a machine without the native core"
        if len(packed) > 1:
            assert spec.act is not None
            x = fake_quantize(x, spec.act, *(t if t.numel() else None for t in packed[1:])).to(x.dtype)
        y = x.new_empty(x.shape[0], spec.n)
        failed = core.gemm(
            x.data_ptr(), x.shape[0], packed[0].data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            _DTYPES[x.dtype],
        )  # fmt: skip
        if failed:
            raise BitlineError(f"the native kernel could not run {spec}", found=f"code {failed}")
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The larger of reading and multiplying, plus the decoding of a panel."""
        rate = platform.rates.bf16 if spec.act_dtype == torch.bfloat16 or spec.act is not None else platform.rates.fp32
        return max(cls.packed_bytes(spec) / platform.rates.bandwidth, 2.0 * m * spec.n * spec.k / rate) + 3e-6

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed weight."""
        return packing.layout(spec).places()[1]

"""The kernel protocol: five functions, two that a kernel may have beside them, and a few declared facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict
from bitline.weight import QuantizedWeight

Packed = dict[str, Tensor]


class Kernel:
    """One way to run a linear layer. Stateless: every member is a class method, the class itself is the kernel.

    Facts (each is declared here and proven by the conformance tests):
    deterministic: the same call gives the same bits; None where nobody knows, and one that does not comes last, unless
    all others emulate. batch_invariant: row i of a batch equals the same row alone.
    cuda_graph: a call can be captured. act_dtypes: input dtypes it takes. quantizes_input: it multiplies codes by codes,
    so it is for specs with `act` alone. emulates: it stands in for a fast kernel that is not there, and on a GPU comes after all
    that do not. exact: it computes what the spec says up to rounding; one that does not runs only where it, or its backend, is
    asked for by name.
    measured: architectures and CPU features of the machines on which its cost was fitted to measured times; it is modelled on
    others.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm", "xpu")
    backend: ClassVar[str] = "torch"
    families: ClassVar[tuple[str, ...]] = ()  # mp, int8, fp8, fp8_block, nvfp4, mxfp4, mxfp8; empty: all of them
    priority: ClassVar[int] = 0
    deterministic: ClassVar[bool | None] = True
    batch_invariant: ClassVar[bool] = False
    cuda_graph: ClassVar[bool] = True
    quantizes_input: ClassVar[bool] = False
    emulates: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ()
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Can it run on this machine: vendor, architecture, features, installed packages."""
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Can it do this layer exactly as the spec says."""
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """Re-lay a weight for this kernel, on the weight's device. The weight is not changed and not kept."""
        raise NotImplementedError

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """x [M, K] contiguous in spec.act_dtype, M from 0 up; `packed` is what `pack` gave, in its order. -> [M, N]."""
        raise NotImplementedError

    @classmethod
    def direct(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> tuple[Any, tuple[Any, ...]] | None:
        """An operator of the kernel's own and what follows x [..., K] in its arguments, giving [..., N]; None: `apply`."""
        return None

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Callable[[Tensor], Tensor | None] | None:
        """A layer's own calls where nobody watches: x [..., K] of any kind to [..., N], or None where `apply` is to be called."""
        return None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Estimated seconds of one call with M rows, from a roofline."""
        raise NotImplementedError

    @classmethod
    def cost_basis(cls, platform: Platform) -> str:
        """ "measured" where `cost` was fitted to times of such a machine, else "modelled"."""
        return "measured" if {platform.arch, *platform.features} & set(cls.measured) else "modelled"

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed weight, estimated; what `cost` reckons with."""
        return spec.weight_bytes()


def matmul_rate(spec: LinearSpec, platform: Platform) -> float:
    """Operations per second of torch's matrix product in the layer's input dtype."""
    return platform.rates.of("fp32" if spec.act_dtype == torch.float32 else "bf16")


def roofline(spec: LinearSpec, platform: Platform, m: int, *, weight_bytes: float, rate: float) -> float:
    """Seconds by the larger of bytes over bandwidth and operations over rate, plus one launch."""
    io = weight_bytes + m * (spec.n + spec.k) * spec.act_dtype.itemsize
    return max(io / platform.rates.bandwidth, 2.0 * m * spec.n * spec.k / rate) + platform.rates.launch

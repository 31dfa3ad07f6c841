"""The kernel protocol: what every kernel class implements, and the facts that it declares about itself."""

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
    """One way to run a quantized linear layer y = x @ W.T + bias. Stateless: the class itself is the kernel, all methods are
    class methods.

    A kernel implements `can_implement`, `pack`, `apply` and `cost`, and usually `is_supported`; `direct` and `eager` are optional
    shortcuts around the dispatcher. The facts below are promises: the conformance tests prove the ones that can be measured.

    platforms: vendors it is offered on. backend: the provider's name, as in `Policy(backend=...)`.
    families: kernel families of vLLM's protocol that it serves (mp, int8, fp8, fp8_block, nvfp4, mxfp4, mxfp8); empty: all.
    priority: breaks ties of `cost`, larger first.
    deterministic: the same call gives the same bits; None: unknown. One that is not ranks last, unless all others emulate.
    batch_invariant: row i of a batch gives the same bits as the same row alone.
    cuda_graph: a call can be captured into a CUDA graph.
    quantizes_input: it multiplies activation codes by weight codes, so it serves only specs with `act`.
    emulates: it stands in for hardware or a fast kernel that is missing; on a GPU it ranks after all kernels that do not emulate.
    exact: it computes what the spec says up to rounding. One that does not runs only where it, or its backend, is asked for by
    name.
    is_fallback: it dequantizes the weight in memory at each call. Running on one unasked counts as degraded if a faster kernel of
    the platform refused the layer.
    requires_bf16_hardware: it needs bfloat16 arithmetic of the GPU (NVIDIA sm80 and later) to take bfloat16 inputs.
    measured: architectures and CPU features of the machines on which `cost` was fitted to measured times.
    act_dtypes: input (and output) dtypes it takes.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm", "xpu")
    backend: ClassVar[str] = "torch"
    families: ClassVar[tuple[str, ...]] = ()
    priority: ClassVar[int] = 0
    deterministic: ClassVar[bool | None] = True
    batch_invariant: ClassVar[bool] = False
    cuda_graph: ClassVar[bool] = True
    quantizes_input: ClassVar[bool] = False
    emulates: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    is_fallback: ClassVar[bool] = False
    requires_bf16_hardware: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ()
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Whether it runs on this machine: vendor, architecture, features, installed packages."""
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Whether it computes this layer exactly as the spec says; a refusal names the reason and the nearest fix."""
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """Repack a canonical weight into this kernel's layout, on the weight's device. The weight is neither changed nor kept."""
        raise NotImplementedError

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """x [M, K] contiguous in spec.act_dtype, M >= 0; `packed`: the tensors of `pack`, in its order. Returns [M, N]."""
        raise NotImplementedError

    @classmethod
    def direct(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> tuple[Any, tuple[Any, ...]] | None:
        """(op, arguments) of a torch operator of its own, called as op(x, *arguments): [..., K] -> [..., N]; None: `apply`."""
        return None

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Callable[[Tensor], Tensor | None] | None:
        """A function for calls that are not traced, compiled or hooked: any x [..., K] to y [..., N], or to None where `apply` is
        to be called."""
        return None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Estimated seconds of one call with M = m, usually from a roofline."""
        raise NotImplementedError

    @classmethod
    def cost_basis(cls, platform: Platform) -> str:
        """ "measured" where `cost` was fitted to times measured on such a machine, else "modelled"."""
        return "measured" if {platform.arch, *platform.features} & set(cls.measured) else "modelled"

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Estimated bytes of the packed weight, as `cost` assumes them."""
        return spec.weight_bytes()


def matmul_rate(spec: LinearSpec, platform: Platform) -> float:
    """FLOP/s of torch's matmul in the layer's input dtype."""
    return platform.rates.of("fp32" if spec.act_dtype == torch.float32 else "bf16")


def roofline(spec: LinearSpec, platform: Platform, m: int, *, weight_bytes: float, rate: float) -> float:
    """Seconds of one GEMM: the larger of bytes over bandwidth and FLOPs over `rate`, plus one launch."""
    io = weight_bytes + m * (spec.n + spec.k) * spec.act_dtype.itemsize
    return max(io / platform.rates.bandwidth, 2.0 * m * spec.n * spec.k / rate) + platform.rates.launch

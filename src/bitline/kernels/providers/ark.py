"""AutoRound's CPU kernels (ARK, the package auto-round-lib): weight-only GEMM of 2-, 4- and 8-bit integers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.cpu import costs as cpu_costs
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_WEIGHT_TYPES = {4: "int4", 8: "int8", 2: "int2"}


class ArkState(NamedTuple):
    """available: a backend library is loaded. reason: why not, else None. ark: the module. quant_linear: its layer class."""

    available: bool
    reason: str | None
    ark: Any
    quant_linear: Any


@functools.cache
def get_ark_state() -> ArkState:
    """Whether ARK can run, found out once per process: an installed package may have no library that this machine can load."""
    output = io.StringIO()  # the package prints why a library did not load
    try:
        with contextlib.redirect_stdout(output):
            ark = importlib.import_module("auto_round_kernel")
            layer = importlib.import_module("auto_round_kernel.qlinear").QuantLinear
    except (ImportError, OSError) as error:
        return ArkState(False, f"auto_round_kernel cannot be imported: {error}", None, None)
    if getattr(ark, "cpu_lib", None) is None and getattr(ark, "xpu_lib", None) is None:
        why = f" ({output.getvalue().strip()})" if output.getvalue().strip() else ""
        return ArkState(False, f"auto_round_kernel has loaded no backend library{why}", None, None)
    return ArkState(True, None, ark, layer)


def _ark() -> Any:
    state = get_ark_state()
    if not state.available:
        raise InputError(
            "ARK does not run on this machine", found=state.reason, fix="install auto-round-lib for this torch and CPU"
        )
    return state.ark


class ArkWNA16LinearKernel(Kernel):
    """ARK's `woqgemm` with compute type "fp32": a float32 GEMM of the dequantized weight.

    The input is cast to float32, since the library aborts the process for other dtypes. float32 inputs are not offered: the
    result is less accurate than torch's. Compute type "auto" rounds activations to 8 bits and is a kernel of its own below.
    """

    platforms = ("cpu",)
    backend = "ark"
    families = ("mp",)
    act_dtypes = (torch.bfloat16, torch.float16)
    compute = "fp32"
    measured: ClassVar[tuple[str, ...]] = ("amx",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """An x86-64 CPU with AVX2, and the package. Whether its library loads is found out when the first weight is packed."""
        if platform.arch != "x86_64" or "avx2" not in platform.features:
            return no("ARK's library is for x86-64 CPUs with AVX2", "cpu:avx2")
        return installed(platform, "auto_round_kernel")

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """2-, 4- and 8-bit integers, symmetric or with zero points, in aligned groups of a multiple of 8 columns."""
        if spec.act is not None:
            return no(f"the scheme quantizes activations ({spec.act}); this kernel is weight-only", "a weight-only scheme")
        kind = spec.weight
        symmetric = spec.zero == "none" and kind.kind == "int" and kind.bias == 1 << (kind.bits - 1)
        if kind.bits not in _WEIGHT_TYPES or not (symmetric or (spec.zero == "int" and not kind.signed and not kind.bias)):
            return no(f"{kind} with zero {spec.zero!r}", "uint4b8 or uint8b128 and the like, or uint4 and uint8 with zero points")
        if spec.act_order or spec.ragged or spec.block[0] != 1 or spec.block_offset[1] or spec.scale2_block is not None:
            return no("act-order, or groups that are not aligned", "aligned groups of a row in the input's column order")
        if spec.k % spec.block[1] or spec.block[1] % 8:
            return no(f"K of {spec.k} in groups of {spec.block[1]}", "a group size that divides K, a multiple of 8")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """blob int8 [bytes]: the library packs it from signed codes [K, N], float32 scales and signed zero points [groups, N]."""
        s = weight.spec
        half = 1 << (s.weight.bits - 1)
        signed = lambda t: (t.int() - half).to(torch.int8).t().contiguous()
        zero = torch.zeros(s.grid[1], s.n, dtype=torch.int8) if weight.zero is None else signed(weight.zero)
        blob = _ark().repack_quantized_weight(
            signed(weight.unpacked()), weight.scale.float().t().contiguous(), zero, s.block[1], cls.compute,
            _WEIGHT_TYPES[s.weight.bits], "fp32", weight.zero is not None,
        )  # fmt: skip
        return {"blob": blob}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        bias32 = torch.empty(0) if bias is None else bias.float()
        y: Tensor = _ark().woqgemm(
            x.float().contiguous(), packed[0], bias32, spec.n, spec.k, spec.block[1], cls.compute,
            _WEIGHT_TYPES[spec.weight.bits], "fp32", spec.zero == "int",
        )  # fmt: skip
        return y.to(x.dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A quarter of the bandwidth and twice the rate of torch's float32 matmul, as measured on two cores with AMX at
        4096x4096: 1.0 ms at M=1, 23 ms at M=256."""
        size = 4 * spec.weight_bytes()
        return roofline(spec, platform, m, weight_bytes=size, rate=2 * platform.rates.fp32) + cpu_costs.CALL


class ArkInt8WNA16LinearKernel(ArkWNA16LinearKernel):
    """`woqgemm` with compute type "auto", which rounds activations to 8 bits: runs only where it is asked for by name."""

    exact = False
    compute = "auto"
    priority = -1
    measured = ()

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """An int8 roofline at half of peak, and a call."""
        return 2 * roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=platform.rates.int8) + cpu_costs.CALL

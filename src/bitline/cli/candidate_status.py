"""Why a candidate kernel was refused: by the policy, the layer, the scheme, a missing package, or the hardware."""

from __future__ import annotations

from dataclasses import replace

from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.platform import PACKAGES, Platform
from bitline.select import Candidate, Choice
from bitline.types import LinearSpec, Verdict


def status(candidate: Candidate, choice: Choice) -> str:
    """ "runs", or what is in the way.

    policy: disabled, or not what the policy asks for. layer: the kernel supports such schemes, but not this shape, group size,
    act-order or input dtype. scheme: it is for other weights or activations. package: a package is missing. machine: it is for
    another architecture. vendor: it is for another vendor's hardware.
    """
    spec, platform, kernel = choice.spec, choice.platform, candidate.kernel
    if candidate.verdict:
        return "runs"
    if not candidate.supported:
        vendors = next((e.platforms for e in registry.entries() if e.name == candidate.name), kernel.platforms)
        if platform.vendor not in vendors:
            return "vendor"
        return "package" if kernel.is_supported(_with_all_packages(platform)) else "machine"
    if spec.act_dtype in kernel.act_dtypes and kernel.can_implement(spec):
        return "policy"
    return "layer" if supports_scheme(kernel, spec) else "scheme"


def hardware_verdict(candidate: Candidate, platform: Platform) -> Verdict:
    """The kernel's verdict on the platform if every package were installed there."""
    return candidate.kernel.is_supported(_with_all_packages(platform))


def missing_package(candidate: Candidate, platform: Platform) -> str | None:
    """The import name of the one package that would make the kernel run on the platform; None if one is not enough."""
    missing = (p for p in PACKAGES if p not in platform.packages)
    add = lambda package: replace(platform, packages=platform.packages | {package})
    return next((p for p in missing if candidate.kernel.is_supported(add(p))), None)


def supports_scheme(kernel: type[Kernel], spec: LinearSpec) -> bool:
    """Whether the kernel supports the scheme at a regular shape: 4096 × 4096, whole blocks, no act-order, any of its dtypes."""
    n = k = 4096
    (bn, bk), act_dtypes = spec.block, kernel.act_dtypes
    rows = {bn, n if bn >= spec.n > 1 else bn}  # a block as large as a small layer may be per-tensor or not
    columns = {bk, k if bk >= spec.k else bk}
    blocks = {(r, c) for r in rows for c in columns}
    if bn == 1 and bk < spec.k and spec.weight.kind == "int":
        blocks.add((1, 128))
    scale2 = None if spec.scale2_block is None else (n, k) if spec.scale2_block[0] >= spec.n else spec.scale2_block
    return any(
        kernel.can_implement(
            spec.replace(n=n, k=k, block=block, block_offset=(0, 0), act_order=False, ragged=False, scale2_block=scale2,
                         act_dtype=dtype)
        )
        for block in blocks
        for dtype in act_dtypes
    )  # fmt: skip


def _with_all_packages(platform: Platform) -> Platform:
    return replace(platform, packages=frozenset(PACKAGES))

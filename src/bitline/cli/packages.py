"""What an optional package would change for a layer."""

from __future__ import annotations

from dataclasses import replace

from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.platform import PACKAGES, Platform
from bitline.select import Candidate, Choice
from bitline.types import LinearSpec, Verdict


def kind(candidate: Candidate, choice: Choice) -> str:
    """What stands behind a verdict.

    runs: nothing. policy: it could, but is disabled or not what the policy asks for. layer: it does such schemes, but not
    this shape, group, order of columns or input dtype. scheme: it is for other weights or inputs. package: one is missing.
    machine: it is for another architecture. vendor: it is for another vendor's hardware.
    """
    spec, platform, kernel = choice.spec, choice.platform, candidate.kernel
    if candidate.verdict:
        return "runs"
    if not candidate.supported:
        offered = next((e.platforms for e in registry.entries() if e.name == candidate.name), kernel.platforms)
        everything = replace(platform, packages=frozenset(PACKAGES))
        if platform.vendor not in offered:
            return "vendor"
        return "package" if kernel.is_supported(everything) else "machine"
    if spec.act_dtype in kernel.act_dtypes and kernel.can_implement(spec):
        return "policy"
    return "layer" if does(kernel, spec) else "scheme"


def obstacle(candidate: Candidate, platform: Platform) -> Verdict:
    """Why a kernel does not run on the platform, whatever is installed there."""
    return candidate.kernel.is_supported(replace(platform, packages=frozenset(PACKAGES)))


def missing(candidate: Candidate, platform: Platform) -> str | None:
    """The one package, by its import name, that would make the kernel run on the platform."""
    more = (p for p in PACKAGES if p not in platform.packages)
    return next((p for p in more if candidate.kernel.is_supported(replace(platform, packages=platform.packages | {p}))), None)


def does(kernel: type[Kernel], spec: LinearSpec) -> bool:
    """Would the kernel take such a weight if shape, groups, order of columns and the input's dtype were as it likes them?"""
    n = k = 4096
    (bn, bk), kernel_dtypes = spec.block, kernel.act_dtypes
    rows = {bn, n if bn >= spec.n > 1 else bn}  # a block as large as a small layer may be either
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
        for dtype in kernel_dtypes
    )  # fmt: skip

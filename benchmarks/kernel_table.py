"""docs/kernels.md: every kernel, the platforms it is offered on, the schemes it takes there, and how that is proven.

python benchmarks/kernel_table.py        writes the page; the tests hold it against the code
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bitline import types
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.types import ActSpec, LinearSpec

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
N, K = 4096, 4096
_W4 = LinearSpec(N, K, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
_E4M3 = types.float8_e4m3fn
_INT8, _FP8 = LinearSpec(N, K, types.int8, (1, K), act=ActSpec(types.int8)), LinearSpec(N, K, _E4M3, (1, K))
_MX = LinearSpec(N, K, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu)
_NV = LinearSpec(N, K, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(N, K))
SCHEMES: dict[str, LinearSpec] = {
    "W4A16": _W4,
    "W4A16 asym": _W4.replace(weight=types.uint4, zero="int"),
    "W2A16": _W4.replace(weight=types.uint2b2),
    "W3A16": _W4.replace(weight=types.uint3b4),
    "W8A16": _W4.replace(weight=types.uint8b128),
    "act-order": _W4.replace(act_order=True),
    "NF4": _W4.replace(weight=types.nf4, block=(1, 64)),
    "W8A8": _INT8,
    "W8A8 azp": _INT8.replace(act=ActSpec(types.int8, True, "token", 0, False)),
    "W4A8": _W4.replace(act=ActSpec(types.int8)),
    "FP8A16": _FP8,
    "FP8": _FP8.replace(block=(N, K), act=ActSpec(_E4M3, False, "tensor")),
    "FP8 dynamic": _FP8.replace(act=ActSpec(_E4M3)),
    "FP8 block": _FP8.replace(block=(128, 128), act=ActSpec(_E4M3, True, "group", 128)),
    "MXFP4A16": _MX,
    "MXFP4": _MX.replace(act=ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0")),
    "MXFP6A16": _MX.replace(weight=types.float6_e2m3),
    "MXFP8A16": _MX.replace(weight=_E4M3),
    "MXFP8": _MX.replace(weight=_E4M3, act=ActSpec(_E4M3, True, "group", 32, scale="e8m0")),
    "NVFP4A16": _NV,
    "NVFP4": _NV.replace(act=ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3")),
}
HEAD = """# Kernels

Made by `benchmarks/kernel_table.py` from the kernels' own verdicts and from `tests/proofs.py`. `bitline explain` says for a
checkpoint and a platform which of them runs each layer, and why the others do not; `bitline doctor` which can run here.

A kernel that is *interpreted* runs under Triton's interpreter against the reference; one that is *compiled* is compiled ahead
of time for the architectures that its test names, without being run. Tests marked with an H200 are run on one by hand, with
`python -m pytest tests/gpu -m gpu`. Where a kernel is offered and *not tried*, the same source runs by torch's or Triton's own
support of that platform, and no test of ours has seen it there.
"""


def schemes(kernel: type[Kernel]) -> str:
    """The schemes that it takes with some input dtype of its own; "all" where it refuses none."""
    taken = [
        name
        for name, spec in SCHEMES.items()
        if any(kernel.can_implement(spec.replace(act_dtype=dtype)) for dtype in kernel.act_dtypes)
    ]
    return "all" if len(taken) == len(SCHEMES) else ", ".join(taken)


def page(proofs: dict[str, list[tuple[str, str, str]]]) -> str:
    """The whole page."""
    rows = ["| kernel | backend | platforms | schemes | proof |", "|---|---|---|---|---|"]
    for entry in sorted(registry.entries(), key=lambda e: (e.kernel.platforms, e.kernel.backend, e.name)):
        if entry.source != "bitline":
            continue
        proof = "; ".join(f"{platform}: [{how}](../{test.split('::')[0]})" for platform, how, test in proofs[entry.name])
        tried = {platform for platform, _, _ in proofs[entry.name]}
        if left := [platform for platform in entry.kernel.platforms if platform not in tried]:
            proof += f"; not tried: {', '.join(left)}"
        offered = ", ".join(entry.kernel.platforms)
        rows.append(f"| `{entry.name}` | {entry.kernel.backend} | {offered} | {schemes(entry.kernel)} | {proof} |")
    return HEAD + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from proofs import PROOFS

    PAGE.write_text(page(PROOFS))

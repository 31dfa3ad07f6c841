"""Compiles the Hopper kernels with 4-bit weights and 8-bit activations for sm_90a without a GPU, one variant a line of JSON."""

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from hopper_scaled_targets import compiled
from hopper_targets import TOOLS, inner_loop

from bitline import types
from bitline.kernels.hopper.scaled_linear import small_m_limit
from bitline.kernels.hopper.w4a8_heuristics import COSTS
from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.kernels.hopper.w4a8_plans import W4A8PersistentPlan, W4A8SmallMPlan
from bitline.kernels.hopper.w4a8_scheme import w4a8_scheme
from bitline.types import ActSpec, LinearSpec

F8, I8, I4 = types.float8_e4m3fn, types.int8, types.int4
INT8 = LinearSpec(18432, 512, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16, act=ActSpec(I8))
FP8 = INT8.replace(act=ActSpec(F8))
SPECS = {
    "int8 g128": INT8,
    "fp8 g128": FP8,
    "int8 channel": INT8.replace(weight=I4, block=(1, 512), act_dtype=torch.float16, bias=True),
    "fp8 channel": FP8.replace(weight=I4, block=(1, 512), bias=True),
    "fp8 g32": FP8.replace(block=(1, 32)),
    "int8 g64": INT8.replace(block=(1, 64)),
    "fp8 mxfp4": FP8.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    "fp8 g256 static": FP8.replace(block=(1, 256), act=ActSpec(F8, False, "tensor")),
}


def report(label, name, kernel, plan):
    found = {"label": label, "kernel": name, "shared": kernel.metadata.shared}
    text = kernel.asm["ptx"]
    found["wgmma"] = sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.(\S+)", text)))
    found["a_in_registers"] = not re.search(r"wgmma\.mma_async\S+\s*\{[^}]*\}\s*,\s*%rd\d+\s*,\s*%rd", text)
    if (TOOLS / "cuobjdump").exists() and (TOOLS / "nvdisasm").exists():
        Path("w4a8.cubin").write_bytes(kernel.asm["cubin"])
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", "w4a8.cubin"], capture_output=True, text=True, check=True).stdout
        loop = inner_loop(sass, "QGMMA") or inner_loop(sass, "IGMMA")
        count = Counter(op.split(".")[0] for op in loop)
        blocks = plan.config.k_blocks * plan.config.parts if name == "w4a8_small_m" else 1  # of 64 rows x 128 columns
        found |= {"blocks": blocks, "integer": count["LOP3"] + count["SHF"] + count["LEA"], "spills": count["LDL"] + count["STL"]}
        found |= {"loop": len(loop), "mmas": count["QGMMA"] + count["IGMMA"]}
    return found


def cases():
    """(label, spec, M, config or None) of every layer and M."""
    for label, spec in SPECS.items():
        for m in (1, 16, 32, 300):
            yield label, spec, m, None
    for label in ("int8 g128", "fp8 g128", "fp8 channel"):
        for n, k in ((4096, 4096), (8192, 8192), (28672, 4096)):
            for m in (1, 8, 16, 32):
                yield label, SPECS[label].replace(n=n, k=k, block=(1, 128 if "g128" in label else k)), m, None
        for config in COSTS:
            if "int8" not in label or config.cta_m < 256:
                yield label, SPECS[label], 300, config._replace(num_ctas=132)


def plan_of(spec, m, config):
    kind = W4A8SmallMPlan if m <= small_m_limit(spec) else W4A8PersistentPlan
    return kind(spec, w4a8_scheme(spec), m, spec.bias, 132, config)


def variants():
    """(label, compiled kernel) of every variant, in a fixed order."""
    for label, built, _plan in compiled(cases(), plan_of, GluonHopperW4A8LinearKernel):
        for name, kernel in built:
            yield f"{label} {name}", kernel


def main(step=1):
    """Report the kernels of every `step`-th case."""
    for label, built, plan in compiled(itertools.islice(cases(), 0, None, step), plan_of, GluonHopperW4A8LinearKernel):
        for name, kernel in built:
            if name != "quantize_x":
                print(json.dumps(report(label, name, kernel, plan)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

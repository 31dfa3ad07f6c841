"""Compiles the Hopper kernels for sm_90a without a GPU, one variant a line of JSON. Run by test_hopper_compile.py."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from bitline import types
from bitline.kernels.hopper.device.gemv_mma import gemv_mma
from bitline.kernels.hopper.device.small_m_pipelined import small_m_pipelined
from bitline.kernels.hopper.device.wgmma_persistent import wgmma_persistent
from bitline.kernels.hopper.heuristics import SMALL_M_COSTS
from bitline.kernels.hopper.launch import SMALL_M
from bitline.kernels.hopper.plans import SmallMPlan, WgmmaPlan
from bitline.kernels.hopper.scheme import dequant_scheme
from bitline.types import LinearSpec

BASE = LinearSpec(4096, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
E4M3 = BASE.replace(weight=types.float8_e4m3fn, block=(1, 4096), scale_dtype=torch.float32)
SPECS = {
    "g128": BASE,
    "wide g128": BASE.replace(n=28672),
    "deep g128": BASE.replace(n=8192, k=28672),
    "tall g128": BASE.replace(k=14336),
    "square g128": BASE.replace(n=8192, k=8192),
    "odd g128": BASE.replace(n=4104, k=4160),
    "odd bias g128": BASE.replace(n=4104, k=4160, bias=True),
    "wide odd g128": BASE.replace(n=13653, k=4304),
    "g128 fp16": BASE.replace(act_dtype=torch.float16, scale_dtype=torch.float16),
    "g32 float32 scales": BASE.replace(block=(1, 32), scale_dtype=torch.float32),
    "g64 zero": BASE.replace(weight=types.uint4, zero="int", block=(1, 64)),
    "int8": BASE.replace(weight=types.int8),
    "int8 wide": BASE.replace(n=28672, weight=types.int8),
    "uint8 zero": BASE.replace(weight=types.uint8, zero="int"),
    "MXFP4": BASE.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    "NVFP4": BASE.replace(weight=types.float4_e2m1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(4096, 4096)),
    "MXFP4 fp16": BASE.replace(
        weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act_dtype=torch.float16
    ),
    "FP8": E4M3,
    "FP8 fp16": E4M3.replace(act_dtype=torch.float16),
}
BATCHES = {
    "g128": (1, 16, 17, 64, 256, 1024),
    "tall g128": (1, 16),
    "odd g128": (1, 16),
    "square g128": (1, 16),
    "wide odd g128": (1, 16),
    "wide g128": (1, 16, 32, 64, 96, 128, 160, 192, 256, 300, 4096),
    "deep g128": (1, 16, 64, 256),
}
TOOLS = Path(triton.__path__[0]) / "backends/nvidia/bin"


def build(kernel, pointers, constants, options):
    names = kernel.arg_names
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(names) if pointers.get(a, "").startswith("*")}
    return triton.compile(GluonASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32), options=options)


def small_m(spec, m, config=None):
    """`gemv_mma` or `small_m_pipelined` for a layer, as a call with M would compile it."""
    scheme = dequant_scheme(spec)
    plan = SmallMPlan(spec, scheme, m, spec.bias, config)
    act = "*fp16" if scheme.fp16 else "*bf16"
    pointers = {
        "x_ptr": act,
        "w_ptr": "*i32",
        "scale_ptr": "*fp32" if scheme.fp32_scales else "*i32",
        "zero_ptr": "*i16",
        "bias_ptr": act,
        "alpha_ptr": "*fp32",
        "y_ptr": act,
        "partials_ptr": "*fp32",
        "flags_ptr": "*i32",
    }
    constants = dict(zip(("scheme", "cfg", "num_warps"), plan.constants, strict=True))
    cfg = constants["cfg"]
    compiled = build(small_m_pipelined if cfg.stages else gemv_mma, pointers, constants, plan.options)
    claimed = plan.config.smem_bytes(scheme, m)
    if hasattr(compiled, "metadata"):
        assert claimed <= compiled.metadata.shared < claimed + 512, (claimed, compiled.metadata.shared)
    compiled.instruction = "HMMA"
    compiled.weights = cfg.n16_per_warp * cfg.k_tiles_per_iter * cfg.k_blocks_per_tile * 32  # of a thread, per iteration
    return compiled


def wgmma(spec, m):
    """`wgmma_persistent` for a layer, as a call with M would compile it."""
    scheme = dequant_scheme(spec)
    plan = WgmmaPlan(spec, scheme, m, spec.bias, 132)
    config, (rows, weight_columns, scale_columns, zero_columns) = plan.config, plan.weight_boxes
    act = "fp16" if scheme.fp16 else "bf16"

    def descriptor(dtype, height, width, swizzle, bits):
        shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
        return f"tensordesc<{dtype}[{height}, {width}],{shared!r}>"

    extra = config.tile_m_extra
    pointers = {
        "x_desc": descriptor(act, config.tile_m, 64, 128, 16),
        "x_extra_desc": descriptor(act, extra, 64, 128, 16) if extra else "*i32",
        "w_desc": descriptor("i32", rows, weight_columns, 0, 32),
        "scale_desc": descriptor("fp32" if scheme.fp32_scales else "i32", rows, scale_columns, 0, 32),
        "zero_desc": descriptor("i16", rows, zero_columns, 0, 16) if scheme.zero_points else "*i32",
        "y_desc": descriptor(act, plan.store_rows[0], 64, 128, 16),
        "y_extra_desc": descriptor(act, plan.store_rows[1], 64, 128, 16) if extra else "*i32",
        "partials_ptr": "*fp32", "flags_ptr": "*i32", "bias_ptr": "*" + act, "alpha_ptr": "*fp32",
    }  # fmt: skip
    constants = dict(zip(("scheme", "cfg"), plan.constants, strict=True))
    compiled = build(wgmma_persistent, pointers, constants, plan.options)
    compiled.instruction = "HGMMA"
    compiled.weights = config.k_blocks_per_stage * config.n64_per_warpgroup * 32  # of a thread, per stage
    return compiled


def inner_loop(sass, instruction):
    """Opcodes of the shortest loop with that instruction."""
    labels, code, found = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if re.search(r"/\*[0-9a-f]{4,5}\*/\s", line):
            code.append(re.sub(r"/\*.*?\*/", "", line).strip())
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", code[-1])
            if back and back[1] in labels:
                found.append(code[labels[back[1]] :])
    found = [body for body in found if any(instruction in line for line in body)]
    return [line.split()[line.startswith("@")] for line in min(found, key=len)] if found else []


def report(label, kernel):
    found = {"kernel": label, "shared": kernel.metadata.shared, "weights": kernel.weights}
    text = kernel.asm["ptx"]
    found["a_in_registers"] = not re.search(r"wgmma\.mma_async\S+\s*\{[^}]*\}\s*,\s*%rd\d+\s*,\s*%rd", text)
    if (TOOLS / "cuobjdump").exists() and (TOOLS / "nvdisasm").exists():
        Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", "kernel.cubin"], capture_output=True, text=True, check=True)
        registers = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
        loop = inner_loop(sass, kernel.instruction)
        found |= {"registers": int(registers[1]), "stack": int(registers[2]), "loop": len(loop)}
        count = Counter(op.split(".")[0] for op in loop)
        found |= {"mmas": count[kernel.instruction], "spills": count["LDL"] + count["STL"]}
    return found


def variants():
    """(label, compiled kernel) of every variant, in a fixed order."""
    for label, spec in SPECS.items():
        for m in BATCHES.get(label, (1, 16, 64, 1024) if "g128" not in label else (1, 64)):
            yield f"{label} M={m}", (small_m if m <= SMALL_M else wgmma)(spec, m)
    for spec in (BASE, SPECS["odd g128"]):
        for m8_tiles, rows in SMALL_M_COSTS.items():
            for c in (row.config for row in rows if spec is BASE or (m8_tiles == 2 and row.config.n16_per_warp in (1, 7))):
                shape = f"{c.n16_per_warp} {c.warps_per_k_slice} {c.num_warps} {c.split_k}"
                yield f"{'odd' if spec.k % 128 else 'even'} pipelined {shape} M={8 * m8_tiles}", small_m(spec, 8 * m8_tiles, c)


def main(step=1):
    """Report every `step`-th variant."""
    from every import every  # found only where this file is run as a script

    global build
    build = every(step, build)
    for label, kernel in variants():
        if hasattr(kernel, "asm"):
            print(json.dumps(report(label, kernel)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Compiles the Hopper kernels for sm_90a without a GPU, one variant a line of JSON. Run by test_hopper_compile.py."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from bitline import types
from bitline.kernels.hopper import heuristics, launch
from bitline.kernels.hopper.device import gemv_mma, small_m_pipelined, wgmma_persistent
from bitline.kernels.hopper.scheme import scheme_of
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
ROWS = {
    "g128": (1, 16, 17, 64, 256, 1024),
    "tall g128": (1, 16),
    "odd g128": (1, 16),
    "square g128": (1, 16),
    "wide odd g128": (1, 16),
    "wide g128": (1, 16, 32, 64, 96, 128, 160, 192, 256, 300, 4096),
    "deep g128": (1, 16, 64, 256),
}
TOOLS = Path(triton.__path__[0]) / "backends/nvidia/bin"


def built(kernel, pointers, constants, options):
    names = kernel.arg_names
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(names) if pointers.get(a, "").startswith("*")}
    return triton.compile(GluonASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32), options=options)


def decode(spec, m, tile=None):
    scheme = scheme_of(spec)
    plan = launch._DecodePlan(spec, scheme, m, spec.bias, tile)
    act = "*fp16" if scheme.half else "*bf16"
    scale = "*fp32" if scheme.wide else "*i32"
    pointers = {
        "x_ptr": act,
        "w_ptr": "*i32",
        "s_ptr": scale,
        "z_ptr": "*i16",
        "bias_ptr": act,
        "alpha_ptr": "*fp32",
        "o_ptr": act,
        "ws": "*fp32",
        "flags": "*i32",
    }
    constants = dict(zip(("S", "G", "num_warps"), plan.constants, strict=True))
    lanes = constants["G"]
    weights = lanes.r * lanes.c * lanes.blocks * 32
    kernel = small_m_pipelined.ring if lanes.depth else gemv_mma.decode
    made = built(kernel, pointers, constants, plan.options)
    claimed = plan.tile.shared_bytes(scheme, m)
    assert claimed <= made.metadata.shared < claimed + 512, (claimed, made.metadata.shared)
    return made, "HMMA", weights


def wide(spec, m):
    scheme = scheme_of(spec)
    plan = launch._WidePlan(spec, scheme, m, spec.bias, 132)
    act = "fp16" if scheme.half else "bf16"
    tile, (rows, words, entries, zeros) = plan.tile, plan.boxes

    def box(dtype, height, width, swizzle, bits):
        shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
        return f"tensordesc<{dtype}[{height}, {width}],{shared!r}>"

    pointers = {
        "xd": box(act, tile.bm, 64, 128, 16), "xe": box(act, tile.bm2, 64, 128, 16) if tile.bm2 else "*i32",
        "oe": box(act, plan.kept[1], 64, 128, 16) if tile.bm2 else "*i32", "wd": box("i32", rows, words, 0, 32),
        "sd": box("fp32" if scheme.wide else "i32", rows, entries, 0, 32),
        "zd": box("i16", rows, zeros, 0, 16) if scheme.zero else "*i32", "od": box(act, plan.kept[0], 64, 128, 16),
        "ws": "*fp32", "flags": "*i32", "bias_ptr": "*" + act, "alpha_ptr": "*fp32",
    }  # fmt: skip
    constants = dict(zip(("S", "G"), plan.constants, strict=True))
    return built(wgmma_persistent.wide, pointers, constants, plan.options), "HGMMA", tile.h * tile.mr * 32


def inner_loop(sass, instruction):
    """Instructions of the shortest loop that holds `instruction`: the opcode of each."""
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


def report(label, kernel, instruction, weights):
    found = {"kernel": label, "shared": kernel.metadata.shared, "weights": weights}
    text = kernel.asm["ptx"]
    found["register_a"] = not re.search(r"wgmma\.mma_async\S+\s*\{[^}]*\}\s*,\s*%rd\d+\s*,\s*%rd", text)
    if (TOOLS / "cuobjdump").exists() and (TOOLS / "nvdisasm").exists():
        Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", "kernel.cubin"], capture_output=True, text=True, check=True)
        registers = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
        loop = inner_loop(sass, instruction)
        found |= {"registers": int(registers[1]), "stack": int(registers[2]), "loop": len(loop)}
        count = Counter(op.split(".")[0] for op in loop)
        found |= {"products": count[instruction], "spills": count["LDL"] + count["STL"]}
    return found


def main():
    for label, spec in SPECS.items():
        for m in ROWS.get(label, (1, 16, 64, 1024) if "g128" not in label else (1, 64)):
            kernel, instruction, weights = (decode if m <= launch.DECODE_ROWS else wide)(spec, m)
            print(json.dumps(report(f"{label} M={m}", kernel, instruction, weights)), flush=True)
    for spec in (BASE, SPECS["odd g128"]):
        for mt, kinds in heuristics._FEW.items():
            for tile in (k.tile for k in kinds if spec is BASE or (mt == 2 and k.tile.r in (1, 7))):
                label = f"{'odd' if spec.k % 128 else 'even'} ring {tile.r} {tile.groups} {tile.warps} {tile.cut} M={8 * mt}"
                print(json.dumps(report(label, *decode(spec, 8 * mt, tile))), flush=True)


if __name__ == "__main__":
    main()

"""Compiles the Triton kernels for GPUs that are not here, one variant a line of JSON. Run by test_triton_compile.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bitline import types
from bitline.kernels.triton.device import act_quant, fake_quant, gemm
from bitline.kernels.triton.device import scaled_mm as scaled_mm_device
from bitline.kernels.triton.heuristics import Machine, choose_tile
from bitline.kernels.triton.launch import constants_of, format_of
from bitline.kernels.triton.layout import layout_of
from bitline.kernels.triton.scaled_mm import _tile as tile_of_scaled_mm
from bitline.kernels.triton_fake_quant import rounding
from bitline.types import ActSpec, LinearSpec

# name -> (target, what tiles depend on)
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), Machine(True, False, 64 * 1024, fma=True)),
    "sm_80": (GPUTarget("cuda", 80, 32), Machine(True, False, 163 * 1024)),
    "sm_90": (GPUTarget("cuda", 90, 32), Machine(True, False, 227 * 1024)),
    "sm_120": (GPUTarget("cuda", 120, 32), Machine(True, False, 99 * 1024)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Machine(False, False, 64 * 1024)),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), Machine(False, True, 64 * 1024)),
    "gfx1201": (GPUTarget("hip", "gfx1201", 32), Machine(False, True, 64 * 1024)),
}
BASE = LinearSpec(4096, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
MX = BASE.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu)
FP8 = BASE.replace(weight=types.float8_e4m3fn, block=(1, 4096), scale_dtype=torch.float32)
VARIANTS = {
    "g128": (BASE, (1, 16, 32, 64, 256)),
    "offset g32": (BASE.replace(n=1536, k=576, weight=types.uint4, zero="float", block=(1, 32)), (1, 16)),
    "fp16 zero": (BASE.replace(weight=types.uint4, zero="int", act_dtype=torch.float16), (1, 256)),
    "act-order": (BASE.replace(act_order=True), (1,)),
    "3 bits": (BASE.replace(weight=types.uint3b4), (1, 16, 64, 256)),
    "6 bits zero": (BASE.replace(weight=types.uint6, zero="int"), (1, 64)),
    "NF4": (BASE.replace(weight=types.nf4, block=(1, 64), scale_dtype=torch.float32), (1, 16, 64, 256)),
    "3 bits zero": (BASE.replace(weight=types.uint3, zero="int"), (1, 64)),
    "zero": (BASE.replace(weight=types.uint4, zero="int"), (1, 64)),
    "2 bits channel": (BASE.replace(weight=types.uint2b2, block=(1, 4096)), (1, 64)),
    "8 bits": (BASE.replace(weight=types.uint8b128), (1, 64)),
    "float32": (BASE.replace(act_dtype=torch.float32), (1,)),
    "MXFP4": (MX, (1, 16, 256)),
    "NVFP4": (MX.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(4096, 4096)), (1, 16, 64, 256)),
    "NVFP4 fp16": (MX.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, act_dtype=torch.float16), (1, 256)),
    "MXFP8": (MX.replace(weight=types.float8_e4m3fn), (1, 256)),
    "FP8": (FP8, (1, 16, 64, 256)),
    "FP8 fp16": (FP8.replace(act_dtype=torch.float16), (1, 256)),
    "FP8 block": (FP8.replace(block=(128, 128)), (1, 64)),
    "E5M2": (FP8.replace(weight=types.float8_e5m2), (1, 256)),
}
INPUTS = [
    (ActSpec(types.int8, True, "token", 0, False), 4096), (ActSpec(types.float8_e4m3fn, True, "group", 128), 128),
    (ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0"), 32),
    (ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3"), 16),
]  # fmt: skip
ONCE = ("fp16 zero", "8 bits", "NVFP4 fp16", "FP8 fp16", "MXFP8", "FP8 block", "E5M2")  # for sm_90 alone
LIMIT = {"limit": "fp32"}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel, pointers, constants, target):
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    aligned = {a for a in kernel.arg_names if "*" in pointers.get(a, "")} | {"N", "K", "columns"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a in aligned}
    return triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)


def resources(kernel):
    """[registers of a thread, bytes that it keeps in memory for want of them]; None where Triton's package has no tool for it."""
    if "amdgcn" in kernel.asm:
        found = [re.search(rf"\.{name}:\s*(\d+)", kernel.asm["amdgcn"]) for name in ("vgpr_count", "private_segment_fixed_size")]
        return [int(number[1]) for number in found]
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
    text = subprocess.run([tool, "-res-usage", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return [int(found[1]), int(found[2])] if found else None


# Of assembly: a label, an instruction, a jump to a label, and what multiplies.
AMD = (r"(\.LBB\w+):", r"\t([a-z]+_.*)", r"s_c?branch\S*\s+(\.LBB\w+)", r"v_s?mfma|v_wmma|v_fma|v_dual_fma")
NVIDIA = (r"\s*(\.L_x_\d+):", r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*)", r".*BRA.*`\((\.L_x_\d+)\)", r".*MMA|FFMA")


def main_loop(kernel):
    """Instructions of the longest loop that multiplies; None where Triton's package brings no disassembler."""
    if "amdgcn" in kernel.asm:
        lines, (label, code, back, product) = kernel.asm["amdgcn"].splitlines(), AMD
    else:
        tool = Path(triton.__path__[0]) / "backends/nvidia/bin/nvdisasm"
        if not tool.exists():
            return None
        Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
        lines = subprocess.run([tool, "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout.splitlines()
        label, code, back, product = NVIDIA
    labels, body, loops = {}, [], []
    for line in lines:
        if found := re.match(label, line):
            labels[found[1]] = len(body)
        elif found := re.match(code, line):
            body.append(found[1])
            end = re.match(back, body[-1])
            if end and end[1] in labels:
                loops.append(body[labels[end[1]] :])
    return max((len(loop) for loop in loops if any(re.match(product, line) for line in loop)), default=None)


def pointers(spec):
    act, scale = "*" + NAMES[spec.act_dtype], "*" + NAMES.get(spec.scale_dtype, "fp32")
    layout = layout_of(spec)
    side = "*i32" if layout.fine and layout.chunk == 128 else "*u8" if layout.high == 1 and layout.bits == 4 else "*i16"
    table = {"x_ptr": act, "codes_ptr": "*i32", "scale_ptr": scale, "zero_ptr": "*u8", "offset_ptr": scale, "perm_ptr": "*i32"}
    return {**table, "side_ptr": side, "bias_ptr": act, "out_ptr": act}


def compile_all(name):
    target, machine = TARGETS[name]
    for label, (spec, rows) in VARIANTS.items():
        if name != "sm_90" and label in ONCE and not machine.fma:
            continue
        if machine.fma:  # no bfloat16 and no matrix instructions: few rows alone
            spec, rows = spec.replace(act_dtype=torch.float16), (1, 8)
        layout = layout_of(spec)
        chunks = -(-spec.k // layout.chunk)
        for m in rows if name == "sm_90" else dict.fromkeys((rows[0], rows[-1])):
            tile = choose_tile(m, spec.n, chunks, layout, spec.act_dtype, spec.zero != "none", machine)
            constants = constants_of(spec, False, tile, chunks, machine.nvidia, machine.fma)
            table = pointers(spec)
            if tile.splits > 1:
                table["out_ptr"] = "*fp32"
            kernel = compiled(gemm.gemm_kernel, table, constants, target)
            kernel.weights = tile.slices * tile.bn * layout.chunk // (tile.warps * target.warp_size)  # of a thread and round
            yield f"{label} M={m}", kernel
    table = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    yield "reduce", compiled(gemm.reduce_kernel, table, {"SPLITS": 8, "HAS_BIAS": True, "BLOCK": 512}, target)
    for label, spec in (("dequantize", BASE), ("dequantize NVFP4", VARIANTS["NVFP4"][0])):
        layout = layout_of(spec)
        constants = {"F": format_of(spec, packed_bfloat=False, panel=True), "GROUP": layout.group, "SPAN": layout.span,
                     "HAS_ZERO": False, "HAS_OFFSET": False, "BN": 32}  # fmt: skip
        yield label, compiled(gemm.dequantize_kernel, pointers(spec), constants, target)
    if name in ("sm_90", "sm_120", "gfx1201"):
        table = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32", **LIMIT}
        yield "fp8", compiled(act_quant.quantize_kernel, table, {"TINY": 1e-7, "BLOCK": 4096, "num_warps": 8}, target)
    table = {"x_ptr": "*bf16", "out_ptr": "*bf16", "scale_ptr": "*fp32", "zero_ptr": "*i32", **LIMIT}
    for act, width in INPUTS:
        constants = {"R": rounding(act, True, True), "TINY": 1e-7, "GROUP": width, "TILE": max(1, 2048 // width), "num_warps": 4}
        yield f"{act} read back", compiled(fake_quant.fake_quantize_kernel, table, constants, target)
    yield from scaled_mm(name, target, machine)


def scaled_mm(name, target, machine):
    """int8 everywhere, FP8 where there are instructions for it; the tiles of one row, of some and of many."""
    device = scaled_mm_device
    kinds = {} if machine.fma else {"int8": ("*i8", 0, True)}
    kinds |= {"fp8": ("*fp8e4nv", 128, False)} if name in ("sm_90", "sm_120", "gfx1201") else {}
    for kind, (codes, block, zero) in kinds.items():
        table = {"a_ptr": codes, "b_ptr": codes, "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "a_zero_ptr": "*i32",
                 "colsum_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}  # fmt: skip
        for m in (1, 32, 64, 128, 256, 1024) if name == "sm_90" else (1, 64, 256):
            bm, bn, bk, slices, warps, stages = tile_of_scaled_mm(m, 4096, 128, kind, not machine.nvidia, name == "sm_90")
            constants = {
                "A_TOKEN": True, "BLOCK_N": max(block, 1), "BLOCK_K": block, "GROUP": max(block, 1), "HAS_ZERO": zero,
                "HAS_BIAS": False, "EVEN": True, "UPCAST": False, "SLICES": slices, "BM": bm, "BN": bn, "BK": bk,
                "num_warps": warps, "num_stages": stages,
            }  # fmt: skip
            yield f"{kind} M={m}", compiled(device.scaled_mm_kernel, table, constants, target)
    table = {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i32", **LIMIT}
    constants = {"ASYMMETRIC": True, "TINY": 1e-7, "BLOCK": 4096, "num_warps": 8}
    yield "int8 of x", compiled(act_quant.quantize_int8_kernel, table, constants, target)
    if "fp8" in kinds:
        table = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32", **LIMIT}
        constants = {"POWER": True, "TINY": 1e-7, "GROUP": 128, "TILE": 16, "num_warps": 4}
        yield "fp8 groups of x", compiled(act_quant.quantize_groups_kernel, table, constants, target)


for label, kernel in compile_all(sys.argv[1]):
    limit = TARGETS[sys.argv[1]][1].shared
    report = {"kernel": label, "shared": kernel.metadata.shared, "limit": limit, "usage": resources(kernel)}
    if hasattr(kernel, "weights"):
        report |= {"weights": kernel.weights, "loop": main_loop(kernel)}
    print(json.dumps(report))

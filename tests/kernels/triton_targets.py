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
from bitline.kernels.triton import fp8_quantize_device, scaled_mm_device, w4a16, w4a16_device
from bitline.kernels.triton.scaled_mm import _tile as tile_of_scaled_mm
from bitline.kernels.triton.tiles import choose_tile
from bitline.types import LinearSpec

# name -> (target, shared memory that one program may take)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64 * 1024),
    "gfx1201": (GPUTarget("hip", "gfx1201", 32), 64 * 1024),
}
BASE = LinearSpec(4096, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
VARIANTS = {
    "g128": (BASE, (1, 16, 32, 64, 256)),
    "offset g32": (BASE.replace(n=1536, k=576, weight=types.uint4, zero="float", block=(1, 32)), (1, 16)),
    "fp16 zero": (BASE.replace(weight=types.uint4, zero="int", act_dtype=torch.float16), (1, 256)),
    "act-order": (BASE.replace(act_order=True), (1,)),
    "2 bits channel": (BASE.replace(weight=types.uint2b2, block=(1, 4096)), (1, 64)),
    "8 bits": (BASE.replace(weight=types.uint8b128), (1, 64)),
    "float32": (BASE.replace(act_dtype=torch.float32), (1,)),
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel, pointers, constants, target):
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    aligned = {a for a in kernel.arg_names if a in pointers} | {"N", "K", "columns"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a in aligned}
    return triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)


def resources(binary):
    """Registers and stack bytes by the cuobjdump that comes with Triton; None where it does not."""
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    Path("kernel.cubin").write_bytes(binary)
    text = subprocess.run([tool, "-res-usage", "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return [int(found[1]), int(found[2])] if found else None


def pointers(spec):
    act, scale = "*" + NAMES[spec.act_dtype], "*" + NAMES[spec.scale_dtype]
    table = {"x_ptr": act, "codes_ptr": "*i32", "scale_ptr": scale, "zero_ptr": "*u8", "offset_ptr": scale, "perm_ptr": "*i32"}
    return {**table, "bias_ptr": act, "out_ptr": act}


def compile_all(name):
    target, shared = TARGETS[name]
    nvidia = target.backend == "cuda"
    for label, (spec, rows) in VARIANTS.items():
        if name != "sm_90" and label in ("fp16 zero", "8 bits"):
            continue
        layout = w4a16._layout(spec)
        chunks = -(-spec.k // layout.chunk)
        for m in rows if name == "sm_90" else rows[:1] + rows[-1:]:
            tile = choose_tile(m, spec.n, chunks, layout.chunk, spec.act_dtype, spec.zero != "none", nvidia, shared)
            constants = w4a16._constants(spec, False, tile, chunks, nvidia)
            table = pointers(spec)
            if tile.splits > 1:
                table["out_ptr"] = "*fp32"
            yield f"{label} M={m}", compiled(w4a16_device.gemm_kernel, table, constants, target)
    table = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    yield "reduce", compiled(w4a16_device.reduce_kernel, table, {"SPLITS": 8, "HAS_BIAS": True, "BLOCK": 512}, target)
    constants = {"BITS": 4, "GROUP": 128, "SPAN": 128, "MIDDLE": 8, "ADJUST": 8, "HAS_ZERO": False, "HAS_OFFSET": False, "BN": 32}
    yield "dequantize", compiled(w4a16_device.dequantize_kernel, pointers(BASE), constants, target)
    if name in ("sm_90", "sm_120", "gfx1201"):
        table = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        yield "fp8", compiled(fp8_quantize_device.quantize_kernel, table, {"TINY": 1e-7, "BLOCK": 4096, "num_warps": 8}, target)
    yield from scaled_mm(name, target)


def scaled_mm(name, target):
    """int8 everywhere, FP8 where there are instructions for it; the tiles of one row, of some and of many."""
    device = scaled_mm_device
    kinds = {"int8": ("*i8", 0, True)} | ({"fp8": ("*fp8e4nv", 128, False)} if name in ("sm_90", "sm_120", "gfx1201") else {})
    for kind, (codes, block, zero) in kinds.items():
        table = {"a_ptr": codes, "b_ptr": codes, "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "a_zero_ptr": "*i32",
                 "colsum_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}  # fmt: skip
        for m in (1, 64, 256):
            bm, bn, bk, warps, stages = tile_of_scaled_mm(m, 128)
            constants = {
                "A_TOKEN": True, "BLOCK_N": max(block, 1), "BLOCK_K": block, "GROUP": max(block, 1), "HAS_ZERO": zero,
                "HAS_BIAS": False, "EVEN": True, "UPCAST": False, "BM": bm, "BN": bn, "BK": bk, "num_warps": warps,
                "num_stages": stages,
            }  # fmt: skip
            yield f"{kind} M={m}", compiled(device.scaled_mm_kernel, table, constants, target)
    table = {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i32"}
    constants = {"ASYMMETRIC": True, "TINY": 1e-7, "BLOCK": 4096, "num_warps": 8}
    yield "int8 of x", compiled(device.quantize_int8_kernel, table, constants, target)
    if "fp8" in kinds:
        table = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
        constants = {"POWER": True, "TINY": 1e-7, "GROUP": 128, "TILE": 16, "num_warps": 4}
        yield "fp8 groups of x", compiled(device.quantize_groups_kernel, table, constants, target)


for label, kernel in compile_all(sys.argv[1]):
    usage = resources(kernel.asm["cubin"]) if "cubin" in kernel.asm else None
    print(json.dumps({"kernel": label, "shared": kernel.metadata.shared, "limit": TARGETS[sys.argv[1]][1], "usage": usage}))

"""Compiles the Triton kernels for GPUs that are not here, one JSON line per variant. Run by test_triton_compile.py."""

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
from bitline.expert_gate import ExpertGate
from bitline.kernels.triton import experts as experts_host
from bitline.kernels.triton.act_quant import num_warps, quantize_config
from bitline.kernels.triton.device import act_quant, experts, experts_sort, fake_quant, gemm
from bitline.kernels.triton.device import scaled_mm as scaled_mm_device
from bitline.kernels.triton.heuristics import DeviceTraits, choose_gemm_config
from bitline.kernels.triton.launch import code_format, gemm_constants
from bitline.kernels.triton.layout import layout_of
from bitline.kernels.triton.scaled_mm import tile_config
from bitline.kernels.triton_fake_quant import fake_quant_config
from bitline.types import ActSpec, LinearSpec

# name -> (compile target, what tile configurations depend on)
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), DeviceTraits(True, False, 64 * 1024, no_mma=True)),
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceTraits(True, False, 163 * 1024)),
    "sm_90": (GPUTarget("cuda", 90, 32), DeviceTraits(True, False, 227 * 1024)),
    "sm_120": (GPUTarget("cuda", 120, 32), DeviceTraits(True, False, 99 * 1024)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceTraits(False, False, 64 * 1024)),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), DeviceTraits(False, True, 64 * 1024)),
    "gfx1201": (GPUTarget("hip", "gfx1201", 32), DeviceTraits(False, True, 64 * 1024)),
}
BASE = LinearSpec(4096, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
MX = BASE.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu)
FP8 = BASE.replace(weight=types.float8_e4m3fn, block=(1, 4096), scale_dtype=torch.float32)
SPECS = {  # label: (spec, values of M)
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
FAKE_QUANT = [  # (activation scheme, columns per group)
    (ActSpec(types.int8, True, "token", 0, False), 4096), (ActSpec(types.float8_e4m3fn, True, "group", 128), 128),
    (ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0"), 32),
    (ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3"), 16),
]  # fmt: skip
QUANTIZED = (
    ActSpec(types.float8_e4m3fn), ActSpec(types.int8), ActSpec(types.int8, symmetric=False),
    ActSpec(types.float8_e4m3fn, True, "group", 128), ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0"),
    ActSpec(types.int8, False, "tensor", symmetric=False),
)  # fmt: skip
SM90_ONLY = ("fp16 zero", "8 bits", "NVFP4 fp16", "FP8 fp16", "MXFP8", "FP8 block", "E5M2")
EXPERTS = {  # label: (gate of the first projection, or None for the second; M of an expert, 0 for pairs that are not sorted)
    "g128": (ExpertGate("silu"), (0, 8, 16, 32, 64, 128)), "zero": (ExpertGate("gelu"), (0, 64)),
    "act-order": (ExpertGate("relu2", False), (0, 64)), "offset g32": (ExpertGate("silu"), (0, 64)),
    "MXFP4": (ExpertGate("silu", True, 1.702, 7.0), (0, 64, 128)),
    "NVFP4": (ExpertGate("gelu_tanh"), (0, 64)), "3 bits": (None, (0, 64)), "FP8 block": (None, (0, 16, 64)),
    "8 bits": (None, (0, 64)), "float32": (ExpertGate("silu"), (0, 64)),
}  # fmt: skip
LIMIT = {"limit": "fp32"}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel, pointers, constants, target):
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    aligned = {a for a in kernel.arg_names if "*" in pointers.get(a, "")} | {"N", "K", "k_padded"}
    aligned |= {"stride_x", "stride_other", "stride_residual"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a in aligned}
    return triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)


def resources(kernel):
    """[registers, bytes of spills] per thread; None where Triton's package has no cuobjdump."""
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


# Patterns of assembly: a label, an instruction, a branch to a label, an MMA or FMA.
AMD = (r"(\.LBB\w+):", r"\t([a-z]+_.*)", r"s_c?branch\S*\s+(\.LBB\w+)", r"v_s?mfma|v_wmma|v_fma|v_dual_fma")
NVIDIA = (r"\s*(\.L_x_\d+):", r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*)", r".*BRA.*`\((\.L_x_\d+)\)", r".*MMA|FFMA")


def main_loop(kernel):
    """Instructions of the longest loop with an MMA or FMA; None where Triton's package has no disassembler."""
    if "amdgcn" in kernel.asm:
        lines, (label, code, branch, mma) = kernel.asm["amdgcn"].splitlines(), AMD
    else:
        tool = Path(triton.__path__[0]) / "backends/nvidia/bin/nvdisasm"
        if not tool.exists():
            return None
        Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
        lines = subprocess.run([tool, "-c", "kernel.cubin"], capture_output=True, text=True, check=True).stdout.splitlines()
        label, code, branch, mma = NVIDIA
    labels, body, loops = {}, [], []
    for line in lines:
        if found := re.match(label, line):
            labels[found[1]] = len(body)
        elif found := re.match(code, line):
            body.append(found[1])
            end = re.match(branch, body[-1])
            if end and end[1] in labels:
                loops.append(body[labels[end[1]] :])
    return max((len(loop) for loop in loops if any(re.match(mma, line) for line in loop)), default=None)


def pointers(spec):
    act, scale = "*" + NAMES[spec.act_dtype], "*" + NAMES.get(spec.scale_dtype, "fp32")
    layout = layout_of(spec)
    int32_scales, uint8_bits = layout.sf_vec_size and layout.block_k == 128, layout.high_bits == 1 and layout.low_bits == 4
    aux = "*i32" if int32_scales else "*u8" if uint8_bits else "*i16"
    table = {"x_ptr": act, "codes_ptr": "*i32", "scale_ptr": scale, "zero_ptr": "*u8", "offset_ptr": scale, "perm_ptr": "*i32"}
    return {**table, "aux_ptr": aux, "bias_ptr": act, "out_ptr": act}


def variants(name):
    """(label, compiled kernel) of every variant for the target of that name, in a fixed order."""
    target, traits = TARGETS[name]
    yield from weight_only(name, target, traits)
    yield from quantization(name, target)
    table = {"x_ptr": "*bf16", "out_ptr": "*bf16", "scale_ptr": "*fp32", "zero_ptr": "*i32", **LIMIT}
    for act, group in FAKE_QUANT:
        constants = {"CONFIG": fake_quant_config(act, True, True), "MIN_SCALE": 1e-7, "GROUP_SIZE": group,
                     "GROUPS_PER_PROGRAM": max(1, 2048 // group), "num_warps": 4}  # fmt: skip
        yield f"fake quantize {act}", compiled(fake_quant.fake_quantize_kernel, table, constants, target)
    yield from scaled_mm(name, target, traits)
    yield from experts_of_layers(name, target, traits)


def experts_of_layers(name, target, traits):
    """Both projections of experts with few and many tokens, the sort, and the weighted sum."""
    for label, (gate, m_values) in EXPERTS.items():
        spec = SPECS[label][0]
        spec = spec.replace(act_dtype=torch.float16) if traits.no_mma else spec
        k_blocks = -(-spec.k // layout_of(spec).block_k)
        for m in m_values if name == "sm_90" else (m_values[0], m_values[-1]):
            load = experts_host.Load(max(m, 8), m > 0, (m <= 8, m <= 8))
            config, _ = experts_host.gemm_configs((spec, spec), (k_blocks, k_blocks), load, traits)
            constants = experts_host.projection_constants(
                spec, gate, config, k_blocks, False, m > 0, traits.is_nvidia, traits.no_mma
            )
            table = {**pointers(spec), "index_ptr": "*i64", "sorted_ptr": "*i32", "blocks_ptr": "*i32"}
            if gate is None:
                table["out_ptr"] = "*fp32"
            yield f"experts {label} M={m}", compiled(experts.experts_gemm_kernel, table, constants, target)
    table = dict.fromkeys(("sorted_ptr", "ranges_ptr", "blocks_ptr"), "*i32") | {"index_ptr": "*i64"}
    yield "experts sort", compiled(experts_sort.sort_kernel, table, {"BLOCK_SIZE": experts_host.SORT_BLOCK}, target)
    for most in (8, 512):
        constants = {"BLOCK_SIZE_M": 16, "MAX_EXPERTS": most, "BLOCK_SIZE": experts_host.MAP_BLOCK}
        yield f"experts blocks of {most}", compiled(experts_sort.blocks_kernel, table, constants, target)
    table = {"y_ptr": "*fp32", "index_ptr": "*i64", "weights_ptr": "*fp32", "rows_ptr": "*i64", "out_ptr": "*bf16"}
    constants = {"N": 4096, "HAS_ROWS": False, "BLOCK_SIZE": experts_host.SUM_BLOCK}
    yield "experts sum", compiled(experts.weighted_sum_kernel, table, constants, target)
    table = {"x_ptr": "*bf16", "sorted_ptr": "*i32", "blocks_ptr": "*i32", "out_ptr": "*bf16", "rows_ptr": "*i32"}
    constants = {"K": 4096, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 1024}
    yield "experts gather", compiled(experts_sort.gather_kernel, table, constants, target)


def weight_only(name, target, traits):
    """The fused GEMM for every spec and M, the split-K reduction, and the dequantization of panels."""
    for label, (spec, m_values) in SPECS.items():
        if name != "sm_90" and label in SM90_ONLY and not traits.no_mma:
            continue
        if traits.no_mma:  # no bfloat16 and no matrix instructions: small M alone
            spec, m_values = spec.replace(act_dtype=torch.float16), (1, 8)
        layout = layout_of(spec)
        k_blocks = -(-spec.k // layout.block_k)
        for m in m_values if name == "sm_90" else dict.fromkeys((m_values[0], m_values[-1])):
            config = choose_gemm_config(m, spec.n, k_blocks, layout, spec.act_dtype, spec.zero != "none", traits)
            constants = gemm_constants(spec, False, config, k_blocks, traits.is_nvidia, traits.no_mma)
            table = pointers(spec)
            if config.split_k > 1:
                table["out_ptr"] = "*fp32"
            kernel = compiled(gemm.gemm_kernel, table, constants, target)
            threads = config.num_warps * target.warp_size
            kernel.weights = config.k_slices * config.tile_n * layout.block_k // threads  # per thread and K iteration
            yield f"{label} M={m}", kernel
    table = {"partials_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"SPLIT_K": 8, "HAS_BIAS": True, "BLOCK_SIZE": 512}
    yield "split-K reduce", compiled(gemm.reduce_kernel, table, constants, target)
    for label, spec in (("dequantize", BASE), ("dequantize NVFP4", SPECS["NVFP4"][0])):
        layout = layout_of(spec)
        constants = {"FMT": code_format(spec, has_bf16x2=False, to_panel=True), "SCALE_BLOCK_K": layout.scale_block_k,
                     "PROMOTE_K": layout.promote_k, "HAS_ZERO": False, "HAS_OFFSET": False, "BLOCK_SIZE_N": 32}  # fmt: skip
        yield label, compiled(gemm.dequantize_kernel, pointers(spec), constants, target)


def scaled_mm(name, target, traits):
    """W8A8: int8 everywhere, FP8 where there are instructions for it; small to large M."""
    kinds = {} if traits.no_mma else {"int8": ("*i8", 0, True)}
    kinds |= {"fp8": ("*fp8e4nv", 128, False)} if name in ("sm_90", "sm_120", "gfx1201") else {}
    for kind, (codes, block, zero) in kinds.items():
        table = {"a_ptr": codes, "b_ptr": codes, "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "a_zero_ptr": "*i32",
                 "colsum_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}  # fmt: skip
        for m in (1, 32, 64, 128, 256, 1024) if name == "sm_90" else (1, 64, 256):
            config = tile_config(m, 4096, 128, kind, is_amd=not traits.is_nvidia, is_hopper=name == "sm_90")
            constants = {
                "PER_TOKEN": True, "SCALE_BLOCK_N": max(block, 1), "SCALE_BLOCK_K": block, "ACT_GROUP_SIZE": max(block, 1),
                "HAS_ZERO": zero, "HAS_BIAS": False, "EVEN_K": True, "UPCAST": False, "K_SLICES": config.k_slices,
                "BLOCK_SIZE_M": config.tile_m, "BLOCK_SIZE_N": config.tile_n, "BLOCK_SIZE_K": config.tile_k,
                "num_warps": config.num_warps, "num_stages": config.num_stages,
            }  # fmt: skip
            yield f"{kind} M={m}", compiled(scaled_mm_device.scaled_mm_kernel, table, constants, target)


def quantization(name, target):
    """Activation quantization, alone and after an RMSNorm or a gated SiLU, for K = 8192."""
    x, scale = dict.fromkeys(("x_ptr", "other_ptr", "residual_ptr", "new_residual_ptr"), "*bf16"), {"scale_ptr": "*fp32"}
    table = {**x, "codes_ptr": "*u8", **scale, "zero_ptr": "*i32", "epsilon": "fp32", **LIMIT}
    native = name in ("sm_90", "sm_120", "gfx1201")
    for act in QUANTIZED:
        for source in ("plain", "rms_norm", "silu_mul"):
            config = quantize_config(act, source, 8192, has_residual=source == "rms_norm", has_static_zero=not act.dynamic and not
                                     act.symmetric, native_fp8=native)  # fmt: skip
            constants = {"config": config, "num_warps": num_warps(config.groups * config.group_size)}
            yield f"quantize {act} {source}", compiled(act_quant.quantize_kernel, table, constants, target)


def report(label, kernel, name):
    found = {
        "kernel": label, "shared": kernel.metadata.shared, "limit": TARGETS[name][1].shared_bytes, "usage": resources(kernel)
    }  # fmt: skip
    if hasattr(kernel, "weights"):
        found |= {"weights": kernel.weights, "loop": main_loop(kernel)}
    return found


def main(name, step=1):
    """Report every `step`-th variant for a target."""
    from every import every  # found only where this file is run as a script

    global compiled
    compiled = every(int(step), compiled)
    for label, kernel in variants(name):
        if hasattr(kernel, "asm"):
            print(json.dumps(report(label, kernel, name)))


if __name__ == "__main__":
    main(*sys.argv[1:])

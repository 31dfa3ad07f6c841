"""Compiles the Hopper kernels of experts for sm_90a without a GPU, one variant a line of JSON. Run by a test."""

import json
import sys

import hopper_targets
import torch
from triton.experimental.gluon import language as gl

from bitline import types
from bitline.expert_gate import ExpertGate
from bitline.kernels.hopper.device.experts_persistent import experts_persistent
from bitline.kernels.hopper.device.experts_small_m import experts_small_m
from bitline.kernels.hopper.experts import fuses_experts
from bitline.kernels.hopper.experts_config import persistent_config, small_m_config
from bitline.kernels.hopper.experts_plans import PersistentProjection, SmallProjection
from bitline.kernels.hopper.scheme import dequant_scheme

SILU, CLAMPED, RELU2 = ExpertGate("silu"), ExpertGate("silu", True, 1.702, 7.0), ExpertGate("relu2", False)
UP = hopper_targets.BASE.replace(n=1536, k=2048)
DOWN = hopper_targets.BASE.replace(n=2048, k=768)
MX4 = {"weight": types.float4_e2m1, "block": (1, 32), "scale_dtype": torch.float8_e8m0fnu}
LAYERS = {  # both projections, and what is between them
    "W4 up": (UP, SILU), "W4 down": (DOWN, None),
    "MXFP4 bias up": (UP.replace(n=5760, k=2880, bias=True, **MX4), CLAMPED),
    "MXFP4 bias down": (DOWN.replace(n=2880, k=2880, bias=True, **MX4), None),
    "zero g64 up": (UP.replace(weight=types.uint4, zero="int", block=(1, 64)), ExpertGate("gelu")),
    "int8 up": (UP.replace(weight=types.int8), ExpertGate("gelu_tanh")),
    "FP8 block up": (
        UP.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), ExpertGate("relu")
    ),
    "fp16 up": (UP.replace(act_dtype=torch.float16, scale_dtype=torch.float16), RELU2),
    "odd down": (DOWN.replace(n=2080, k=776, block=(1, 16)), None),
}  # fmt: skip
SMALL_TILES, TILES = (8, 16), (32, 64, 128)


def small(spec, gate, tile, is_sorted):
    """`experts_small_m` as a call with blocks of `tile` pairs compiles it."""
    scheme, gated = dequant_scheme(spec), gate is not None and gate.gated
    config = small_m_config(spec, scheme, tile, 8.0, gated, 132)
    plan = SmallProjection(spec, scheme, gate, spec.bias, config, tile, is_sorted=is_sorted, waits_first=gate is not None)
    act, table = ("*fp16" if scheme.fp16 else "*bf16"), ("*i32" if is_sorted else "*i64")
    pointers = {
        "x_ptr": act, "w_ptr": "*i32", "scale_ptr": "*fp32" if scheme.fp32_scales else "*i32",
        "zero_ptr": "*i16" if scheme.zero_points else "*i32", "bias_ptr": act, "alpha_ptr": "*fp32", "out_ptr": act,
        "index_ptr": "*i64", "sorted_ptr": table, "blocks_ptr": table,
    }  # fmt: skip
    constants = dict(zip(("scheme", "cfg", "experts", "num_warps"), plan.constants, strict=True))
    compiled = hopper_targets.build(experts_small_m, pointers, constants, plan.options)
    compiled.instruction, cfg = "HMMA", constants["cfg"]
    compiled.weights = cfg.n16_per_warp * cfg.k_tiles_per_iter * cfg.k_blocks_per_tile * 32
    return compiled


def persistent(spec, gate, tile):
    """`experts_persistent` as a call with tiles of `tile` rows compiles it."""
    scheme, gated = dequant_scheme(spec), gate is not None and gate.gated
    config = persistent_config(spec, scheme, tile, 8.0, gated, 132)
    plan = PersistentProjection(spec, scheme, gate, spec.bias, config)
    act = "fp16" if scheme.fp16 else "bf16"

    def descriptor(dtype, height, width, swizzle, bits):
        shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
        return f"tensordesc<{dtype}[{height}, {width}],{shared!r}>"

    rows, (weight_columns, scale_columns, zero_columns) = plan.box_rows, plan.columns
    pointers = {
        "x_desc": descriptor(act, tile, 64, 128, 16), "w_desc": descriptor("i32", rows, weight_columns, 0, 32),
        "scale_desc": descriptor("fp32" if scheme.fp32_scales else "i32", rows, scale_columns, 0, 32),
        "zero_desc": descriptor("i16", rows, zero_columns, 0, 16) if scheme.zero_points else "*i32",
        "y_desc": descriptor(act, tile, 64, 128, 16), "bias_ptr": "*" + act, "alpha_ptr": "*fp32", "blocks_ptr": "*i32",
    }  # fmt: skip
    constants = dict(zip(("scheme", "cfg", "experts"), plan.constants, strict=True))
    compiled = hopper_targets.build(experts_persistent, pointers, constants, plan.options)
    compiled.instruction = "HGMMA"
    compiled.weights = config.k_blocks_per_stage * config.n64_per_warpgroup * 32
    return compiled


def variants():
    """(label, compiled kernel) of every variant, in a fixed order."""
    for label, (spec, gate) in LAYERS.items():
        assert fuses_experts(spec), label
        for tile in SMALL_TILES:
            yield f"{label} small {tile}", small(spec, gate, tile, is_sorted=True)
        yield f"{label} small 1", small(spec, gate, 8, is_sorted=False)
        for tile in TILES:
            yield f"{label} persistent {tile}", persistent(spec, gate, tile)


def main(step=1):
    """Report every `step`-th variant."""
    from every import every  # found only where this file is run as a script

    hopper_targets.build = every(step, hopper_targets.build)
    for label, kernel in variants():
        if hasattr(kernel, "asm"):
            print(json.dumps(hopper_targets.report(label, kernel)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

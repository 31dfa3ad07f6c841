"""Compiles the Hopper kernels with quantized activations for sm_90a without a GPU, one variant a line of JSON."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from hopper_targets import TOOLS, inner_loop
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bitline import types
from bitline.kernels.hopper import runtime, scaled_plans, w4a8_plans
from bitline.kernels.hopper.config import LargeMConfig
from bitline.kernels.hopper.device.quantize import quantize_x
from bitline.kernels.hopper.device.scaled_large_m import scaled_large_m
from bitline.kernels.hopper.device.scaled_persistent import scaled_persistent
from bitline.kernels.hopper.device.scaled_small_m import scaled_small_m
from bitline.kernels.hopper.scaled_config import SCALED_SMALL_M
from bitline.kernels.hopper.scaled_heuristics import costs_of
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.scaled_plans import ScaledSmallMPlan, persistent_plan
from bitline.kernels.hopper.scaled_scheme import scaled_scheme
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec

F8, I8 = types.float8_e4m3fn, types.int8
FP8 = LinearSpec(18432, 256, F8, (1, 256), scale_dtype=torch.float32, act=ActSpec(F8))
INT8 = FP8.replace(weight=I8, act=ActSpec(I8))
GROUPS = ActSpec(F8, True, "group", 128)
SPECS = {
    "fp8": FP8,
    "fp8 fp16 bias": FP8.replace(act_dtype=torch.float16, bias=True),
    "fp8 static": FP8.replace(act=ActSpec(F8, False, "tensor")),
    "fp8 blocks": FP8.replace(block=(128, 128), act=GROUPS),
    "fp8 blocks offset": FP8.replace(block=(128, 128), block_offset=(40, 0), act=GROUPS),
    "fp8 e8m0 groups": FP8.replace(act=ActSpec(F8, True, "group", 256, scale="e8m0")),
    "int8": INT8,
    "int8 azp": INT8.replace(act=ActSpec(I8, symmetric=False)),
    "int8 static": INT8.replace(act=ActSpec(I8, False, "tensor")),
}
ROWS = (18432, 3072, 4096, 8192, 28672)  # one to four 64-row parts per tile
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int8: "i8", F8: "fp8e4nv",
    torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
}  # fmt: skip


def shared_layout(swizzle, bits):
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)


def type_of(argument):
    """An argument's type as Triton's compiler names it."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{DTYPES[argument.base.dtype]}{list(argument.block_shape)},{argument.layout!r}>"
    if isinstance(argument, runtime.TypedPointer):
        return "*" + argument.dtype
    if isinstance(argument, torch.Tensor):
        return "*" + DTYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def compile_only(found):
    """`runtime.compile_and_run` that runs nothing and appends (kernel, compiled)."""

    def compile_and_run(kernel, num_ctas, args, constants, options):
        names = kernel.arg_names
        assert num_ctas > 0 and len(names) == len(args) + len(constants)
        constants = dict(zip(names[len(args) :], constants, strict=True))
        signature = {name: type_of(a) for name, a in zip(names, args, strict=False)} | dict.fromkeys(constants, "constexpr")
        attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
        source = GluonASTSource(kernel, signature, constants, attrs)
        found.append((kernel.__name__, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)))

    return compile_and_run


def report(label, name, kernel, config):
    accumulators = 64 if isinstance(config, LargeMConfig) else config.tile_m // 2  # of a thread and MMA
    found = {"label": label, "kernel": name, "shared": kernel.metadata.shared, "accumulators": accumulators}
    text = kernel.asm["ptx"]
    found["wgmma"] = sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.(\S+)", text)))
    if (TOOLS / "cuobjdump").exists() and (TOOLS / "nvdisasm").exists():
        Path("scaled.cubin").write_bytes(kernel.asm["cubin"])
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", "scaled.cubin"], capture_output=True, text=True, check=True).stdout
        loop = inner_loop(sass, "QGMMA") or inner_loop(sass, "IGMMA")
        names = [op.split(".")[0] for op in loop]
        found |= {"loop": len(names), "mmas": names.count("QGMMA") + names.count("IGMMA")}
        found["spills"] = names.count("LDL") + names.count("STL")
    return found


def cases():
    """(label, spec, M, config or None) of every layer and M."""
    for label, spec in SPECS.items():
        for m in (1, 16, 64, 300):
            yield label, spec, m, None
    for label in ("fp8", "fp8 blocks", "int8"):
        for n in ROWS:
            for m in (1, 4, 16, 32, 64):
                yield label, SPECS[label].replace(n=n), m, None
        for config in costs_of(scaled_scheme(SPECS[label])):
            yield label, SPECS[label], 300, config._replace(num_ctas=132)
    for label in ("fp8 fp16 bias", "fp8 e8m0 groups", "int8 azp"):
        for tile_n in (128, 256):
            yield label, SPECS[label], 300, LargeMConfig(tile_n, num_ctas=132, pingpong=label != "int8 azp")


def plan_of(spec, m, config):
    kind = ScaledSmallMPlan if m <= SCALED_SMALL_M else persistent_plan
    return kind(spec, scaled_scheme(spec), m, spec.bias, 132, config)


def compiled(cases, plan_of, kernel_class):
    """(label, [(name, compiled kernel)], plan) of each case: what a call of its plan launches."""
    built = []
    runtime.gluon = lambda: SimpleNamespace(
        quantize_x=quantize_x, scaled_small_m=scaled_small_m, scaled_persistent=scaled_persistent,
        scaled_large_m=scaled_large_m, TensorDescriptor=TensorDescriptor, swizzle128=shared_layout(128, 16),
        swizzle128_bytes=shared_layout(128, 8), plain32=shared_layout(0, 32),
    )  # fmt: skip
    runtime.raw_stream = lambda device: 0
    runtime.compile_and_run = compile_only(built)
    scaled_plans.workspace = w4a8_plans.workspace = lambda x, size, stream: (4096, 4096)
    for label, spec, m, config in cases:
        runtime.binaries.clear()
        packed = list(kernel_class.pack(random_weight(spec.replace(n=64), 1)).values())
        plan = plan_of(spec, m, config)
        plan(inputs(m, spec, 1), packed, torch.zeros(spec.n, dtype=spec.act_dtype) if spec.bias else None)
        yield f"{label} {spec.n}x{spec.k} M={m}", list(built), plan
        built.clear()


def variants():
    """(label, compiled kernel) of every variant, in a fixed order."""
    for label, built, _plan in compiled(cases(), plan_of, GluonHopperScaledMMLinearKernel):
        for name, kernel in built:
            yield f"{label} {name}", kernel


def main(step=1):
    """Report the kernels of every `step`-th case."""
    for label, built, plan in compiled(itertools.islice(cases(), 0, None, step), plan_of, GluonHopperScaledMMLinearKernel):
        for name, kernel in built:
            if name != "quantize_x":
                print(json.dumps(report(label, name, kernel, plan.config)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

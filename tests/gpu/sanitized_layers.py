"""What runs under compute-sanitizer: every Hopper kernel and config, on layers that a tool finishes in seconds.

Weights and inputs are made and checked on the CPU, so that nearly all that runs on the GPU is ours.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

BEGAN = time.perf_counter()


def grid() -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, spec, values of M): every scheme, with remainders of N and K or without."""
    from bitline import types
    from bitline.types import LinearSpec

    odd = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    even = odd.replace(n=256, k=1024)
    e2m1 = even.replace(weight=types.float4_e2m1)
    batches = (1, 5, 16, 17, 90)
    return [
        ("u4", odd, batches), ("u4 even, bias", even.replace(bias=True), batches),
        ("u4 g32", odd.replace(block=(1, 32)), batches),
        ("u4 fp16", odd.replace(act_dtype=torch.float16, scale_dtype=torch.float16), batches),
        ("u4 padded", odd.replace(n=67, k=129), batches),
        ("z4", odd.replace(weight=types.uint4, zero="int", block=(1, 64)), batches),
        ("u8", odd.replace(weight=types.uint8b128), batches), ("z8", odd.replace(weight=types.uint8, zero="int"), batches),
        ("MXFP4", e2m1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu), batches),
        ("NVFP4", e2m1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024)), batches),
        ("FP8", odd.replace(weight=types.float8_e4m3fn, block=(1, 520)), batches),
        ("FP8 g128", odd.replace(weight=types.float8_e4m3fn, block=(128, 128), scale_dtype=torch.float32), batches),
    ]  # fmt: skip


def activation_grid() -> list[tuple[str, Any]]:
    """(name, spec) of the kernels with 8-bit codes of x and W."""
    from bitline import types
    from bitline.types import ActSpec, LinearSpec

    f8, i8 = types.float8_e4m3fn, types.int8
    token = LinearSpec(200, 520, f8, (1, 520), scale_dtype=torch.float32, act=ActSpec(f8))
    blocks = token.replace(block=(128, 128), act=ActSpec(f8, True, "group", 128))
    int8 = token.replace(weight=i8, act=ActSpec(i8))
    return [
        ("FP8 token", token), ("FP8 padded, bias", token.replace(n=67, k=129, block=(1, 129), bias=True)),
        ("FP8 static fp16", token.replace(block=(200, 520), act=ActSpec(f8, False, "tensor"), act_dtype=torch.float16)),
        ("FP8 blocks", blocks), ("FP8 blocks, offset", blocks.replace(block_offset=(40, 0), bias=True)),
        ("FP8 g256 E8M0", blocks.replace(block=(1, 520), act=ActSpec(f8, True, "group", 256, scale="e8m0"))),
        ("W8A8", int8), ("W8A8 zero points, bias", int8.replace(act=ActSpec(i8, symmetric=False), bias=True)),
    ]  # fmt: skip


def w4a8_grid() -> list[tuple[str, Any]]:
    """(name, spec) of the kernels with 4-bit codes of W and 8-bit codes of x."""
    from bitline import types
    from bitline.types import ActSpec, LinearSpec

    fp8 = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16, act=ActSpec(types.float8_e4m3fn))
    int8 = fp8.replace(act=ActSpec(types.int8))
    return [
        ("W4AFP8", fp8),
        ("W4AFP8 g32", fp8.replace(block=(1, 32))),
        ("W4A8", int8),
        ("W4A8 channel", int8.replace(block=(1, 520))),
    ]


def experts_grid() -> list[tuple[str, Any, Any, int]]:
    """(name, second projection, gate, K)."""
    from bitline import types
    from bitline.expert_gate import ExpertGate
    from bitline.types import LinearSpec

    w4 = LinearSpec(256, 192, types.uint4b8, (1, 64), scale_dtype=torch.bfloat16)
    mx = w4.replace(weight=types.float4_e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu, bias=True)
    return [("W4", w4, ExpertGate("silu"), 520), ("MXFP4", mx, ExpertGate("relu", False), 512)]


def small_m_configs() -> list[tuple[int, Any]]:
    """(M, config): every config for M up to 8, 16, 24 and 32 that W4A16 takes on layers of many shapes."""
    from bitline.kernels.hopper import heuristics, layout
    from bitline.kernels.hopper.scheme import dequant_scheme

    found = set()
    for n in (1024, 2176, 4096, 5120, 6144, 8192, 13656, 28672, 57344):
        for k in (4096, 4160, 8192, 14336):
            n16_tiles, columns = layout.padded_shape(n, k)
            scheme = dequant_scheme(grid()[0][1].replace(n=n, k=k))
            for m in (5, 13):
                found.add((m, heuristics.small_m_config(m, n16_tiles, columns // 64, scheme, k % 128 == 0)))  # type: ignore[arg-type]
            for m in (20, 30):
                config = heuristics.small_m_config_if_faster(m, n16_tiles, n, k, scheme)  # type: ignore[arg-type]
                found |= {(m, config)} if config else set()
    return sorted(found)


def packed_on_gpu(kernel: Any, weight: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """A layer's tensors and bias, packed on the CPU."""
    bias = None if weight.bias is None else weight.bias.to(weight.spec.act_dtype).cuda()
    return [t.cuda() for t in kernel.pack(weight).values()], bias


class Runner:
    """Runs layers on the GPU and compares with the reference on the CPU; counts launches."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def layer(self, spec: Any, seed: int) -> tuple[Any, list[torch.Tensor], torch.Tensor | None]:
        """Of the weight-only kernels."""
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel
        from bitline.testing.generators import random_weight

        weight = random_weight(spec, seed)
        return weight, *packed_on_gpu(GluonHopperLinearKernel, weight)

    def run(self, call: Any, weight: Any, m: int, name: str) -> None:
        """A call on an input of M rows."""
        from bitline.testing import check
        from bitline.testing.generators import inputs

        x = inputs(m, weight.spec, m)
        y = call(x.cuda())
        check(y.cpu(), x, weight)
        self.count(name, m)

    def count(self, name: str, m: int) -> None:
        """A launch that was right."""
        self.launches[name] += 1
        print(f"{time.perf_counter() - BEGAN:.1f} s: {name} M={m}", flush=True)

    def cases(self) -> list[Callable[[], None]]:
        """All that runs, in parts that compile on their own."""
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS

        cases = [functools.partial(self.run_case, i) for i in range(len(grid()))]
        cases += [functools.partial(self.run_wgmma_config, i) for i in range(len(WGMMA_COSTS))]
        cases += [functools.partial(self.run_small_m_config, i) for i in range(len(small_m_configs()))]
        cases += [functools.partial(self.run_activations, *c) for c in activation_grid()]
        cases += [functools.partial(self.run_w4a8, *c) for c in w4a8_grid()]
        cases += [functools.partial(self.run_experts, *c) for c in experts_grid()]
        return [*cases, self.two_streams]

    def all(self, only: Sequence[int] = ()) -> None:
        """Run all cases, or some by number."""
        from bitline.kernels.hopper import runtime, workspace

        workspace.CAPTURED_LAUNCHES = 16  # nothing is captured, and a tool would track each flag
        runtime.fast_empty = lambda: written
        cases = self.cases()
        for i in only or range(len(cases)):
            cases[i]()

    def run_case(self, i: int) -> None:
        """A weight-only scheme, with the configs that calls take."""
        from bitline.kernels.hopper.launch import SMALL_M
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel

        name, spec, batches = grid()[i]
        weight, packed, bias = self.layer(spec, i)
        for m in batches:
            kernel = "mma.sync" if m <= SMALL_M else "wgmma"
            self.run(lambda x: GluonHopperLinearKernel.apply(x, packed, bias, spec), weight, m, f"{kernel} {name}")

    def run_wgmma_config(self, i: int) -> None:
        """A config with whole tiles and with stream-K tiles."""
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS
        from bitline.kernels.hopper.plans import WgmmaPlan
        from bitline.kernels.hopper.scheme import dequant_scheme

        config, spec = list(WGMMA_COSTS)[i], grid()[i % 2][1]
        weight, packed, bias = self.layer(spec, i)
        for num_ctas in (1, 3):
            m = config.cta_m - 5
            plan = WgmmaPlan(spec, dequant_scheme(spec), m, bias is not None, 132, config._replace(num_ctas=num_ctas))  # type: ignore[arg-type]
            tiles = "stream-K" if plan.workspace_size else "whole"
            self.run(functools.partial(plan, packed=packed, bias=bias), weight, m, f"wgmma, each config, {tiles} tiles")

    def run_small_m_config(self, i: int) -> None:
        """A config with remainders and without."""
        from bitline.kernels.hopper.plans import SmallMPlan
        from bitline.kernels.hopper.scheme import dequant_scheme

        m, config = small_m_configs()[i]
        for spec in (grid()[0][1], grid()[1][1].replace(bias=False)):
            if config.stages == 0 and spec.k % 64:
                continue  # `launch.run` pads x for gemv_mma
            spec = spec.replace(n=max(spec.n, 16 * config.n16_per_cta + 8))  # a CTA's rows at least
            weight, packed, _ = self.layer(spec, i)
            plan = SmallMPlan(spec, dequant_scheme(spec), m, False, config)  # type: ignore[arg-type]
            name = "pipelined" if config.stages else "gemv"
            self.run(functools.partial(plan, packed=packed, bias=None), weight, m, f"{name}, each config")

    def run_activations(self, name: str, spec: Any) -> None:
        """A scheme with 8-bit codes: the configs that calls take, and each config with whole and with stream-K tiles."""
        from bitline.kernels.hopper.scaled_heuristics import costs_of
        from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel as Kernel
        from bitline.kernels.hopper.scaled_plans import persistent_plan
        from bitline.kernels.hopper.scaled_scheme import scaled_scheme
        from bitline.testing.generators import random_weight

        weight = random_weight(spec, 1)
        packed, bias = packed_on_gpu(Kernel, weight)
        for m in (1, 5, 16, 33, 64):
            self.run(lambda x: Kernel.apply(x, packed, bias, spec), weight, m, f"scaled small M, {name}")
        if spec.k % 8 or spec.n % 8:
            return  # calls pad x
        scheme = scaled_scheme(spec)
        for config in costs_of(scheme):
            for num_ctas in (1, 3):
                m = config.cta_m - 5
                plan = persistent_plan(spec, scheme, m, bias is not None, 132, config._replace(num_ctas=num_ctas))
                tiles = "stream-K" if plan.workspace_size else "whole"
                self.run(
                    functools.partial(plan, packed=packed, bias=bias), weight, m, f"{plan.kernel_name}, {name}, {tiles} tiles"
                )

    def run_w4a8(self, name: str, spec: Any) -> None:
        """A scheme with 4-bit and 8-bit codes, as `run_activations`."""
        from bitline.kernels.hopper.w4a8_heuristics import COSTS
        from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel as Kernel
        from bitline.kernels.hopper.w4a8_plans import W4A8PersistentPlan
        from bitline.kernels.hopper.w4a8_scheme import w4a8_scheme
        from bitline.testing.generators import random_weight

        weight = random_weight(spec, 1)
        packed, _ = packed_on_gpu(Kernel, weight)
        for m in (1, 5, 16, 32):
            self.run(lambda x: Kernel.apply(x, packed, None, spec), weight, m, f"w4a8 small M, {name}")
        for config in COSTS:
            for num_ctas in (1, 3):
                m = config.cta_m - 5
                plan = W4A8PersistentPlan(spec, w4a8_scheme(spec), m, False, 132, config._replace(num_ctas=num_ctas))
                tiles = "stream-K" if plan.workspace_size else "whole"
                self.run(functools.partial(plan, packed=packed, bias=None), weight, m, f"w4a8_persistent, {name}, {tiles} tiles")

    def run_experts(self, name: str, down: Any, gate: Any, k: int) -> None:
        """A layer of experts with few tokens, which are not sorted, and with more."""
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from bitline.testing.generators import inputs
        from experts_oracle import Experts, routing, specs_of

        up, down = specs_of(down, gate, k)
        layer = Experts.make(up, down, gate, 6)
        module = layer.on("GluonHopperLinearKernel", "cuda")
        for tokens in (1, 7, 40, 300):
            x, (index, weights) = inputs(tokens, up), routing(tokens, 2, 6)
            y = module(x.cuda(), index.cuda(), weights.cuda())
            layer.check(y.cpu(), x, index, weights)
            self.count(f"experts {name}", tokens)

    def two_streams(self) -> None:
        """Stream-K on two streams at once: each has its own flags."""
        from bitline.kernels.hopper.heuristics import WGMMA_COSTS
        from bitline.kernels.hopper.plans import WgmmaPlan
        from bitline.kernels.hopper.scheme import dequant_scheme
        from bitline.testing import check
        from bitline.testing.generators import inputs

        weight, packed, _ = self.layer(grid()[0][1], 1)
        spec = weight.spec
        plan = WgmmaPlan(spec, dequant_scheme(spec), 30, False, 132, next(iter(WGMMA_COSTS))._replace(num_ctas=3))  # type: ignore[arg-type]
        assert plan.workspace_size
        xs = [inputs(30, spec, seed) for seed in (1, 2)]
        given = [x.cuda() for x in xs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        found: list[list[torch.Tensor]] = [[], []]
        for _ in range(4):
            for stream, x, out in zip(streams, given, found, strict=True):
                with torch.cuda.stream(stream):
                    out.append(plan(x, packed, None))
        torch.cuda.synchronize()
        for x, out in zip(xs, found, strict=True):
            for y in out:
                check(y.cpu(), x, weight)
                self.launches["wgmma, two streams"] += 1

    def control(self) -> None:
        """A warp-specialized kernel that does nothing else."""
        sys.path.insert(0, str(Path(__file__).parent))
        from specialized import specialized  # type: ignore[import-not-found]

        out = torch.zeros(3, dtype=torch.int32).cuda()
        specialized[(1,)](out, num_warps=4)
        assert out.tolist() == [1, 2, 3]

    def planted(self, fault: str) -> None:
        """A launch that a tool must report."""
        from bitline.kernels.hopper.linear import GluonHopperLinearKernel

        weight, packed, bias = self.layer(grid()[0][1], 0)
        packed[0] = packed[0][:-1].clone() if fault == "short" else torch.empty_like(packed[0])
        x = torch.ones(1, weight.spec.k, dtype=weight.spec.act_dtype).cuda()
        GluonHopperLinearKernel.apply(x, packed, bias, weight.spec)
        torch.cuda.synchronize()


def written(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that was written: initcheck does not see TMA stores, and would call y uninitialized when it is copied to the CPU."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 0x5A, dtype=dtype, device="cuda")

"""TritonW4A16LinearKernel under Triton's interpreter, in a process of its own: interpreted and compiled code do not mix."""

import pytest
import torch
from interpreter import INTERPRETED, apply, needs_interpreter, run_interpreted, tiers

from bitline import Platform, QuantizedWeight, bitstream, types
from bitline.kernels.triton.layout import layout_of
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec
from thinning import thinned

pytest.importorskip("triton")

if INTERPRETED:
    from bitline.kernels.aliases.rdna3 import RDNA3W4A16LinearKernel
    from bitline.kernels.triton import launch
    from bitline.kernels.triton.heuristics import DeviceTraits, GemmConfig, max_fused_m
    from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel as Kernel

BASE = LinearSpec(40, 272, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
SPECS = [
    BASE,
    BASE.replace(act_dtype=torch.float32, block=(1, 96)),
    BASE.replace(n=33, k=261, weight=types.uint4, zero="int", block=(1, 32), bias=True, act_dtype=torch.float16),
    BASE.replace(weight=types.uint4, zero="float", block=(1, 32), scale_dtype=torch.float16, k=256),
    BASE.replace(weight=types.uint2, zero="int", block=(1, 64)),
    BASE.replace(weight=types.int8, block=(1, 272), act_order=True),
    BASE.replace(act_order=True, ragged=True, block=(1, 48)),
    BASE.replace(weight=types.uint3b4),
    BASE.replace(weight=types.uint3, zero="int", act_order=True, bias=True, act_dtype=torch.float16),
    BASE.replace(weight=types.uint6b32, block=(1, 16), scale_dtype=torch.int8, scale2_block=(1, 256), k=256),
    BASE.replace(weight=types.nf4, block=(1, 64), scale_dtype=torch.float32),
    BASE.replace(weight=types.nf4, block=(1, 64), act_dtype=torch.float16, bias=True),
    BASE.replace(weight=types.iq2, block=(1, 8), act_dtype=torch.float32),
]
TABLES = [t for t in types.SCALAR_TYPES.values() if t.kind == "table"]


def _apply(*arguments):
    return apply(Kernel, *arguments)


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@needs_interpreter
@pytest.mark.parametrize("spec", thinned(SPECS, 13), ids=lambda s: s.scheme)
def test_conformance(spec):
    check_kernel(Kernel, [spec], Platform.detect("cpu"))


@needs_interpreter
@pytest.mark.parametrize("group", thinned([16, 32, 48, 64, 80, 128, 160, 256, 272], 9, start=2))
def test_every_group_size(group):
    weight = random_weight(BASE.replace(weight=types.uint4, zero="int", block=(1, group)))
    check(_apply(weight, x := inputs(3, weight.spec)), x, weight)


@needs_interpreter
@pytest.mark.parametrize("width", thinned(range(1, 9), 5, start=2))
@pytest.mark.parametrize("zero", thinned(["none", "int", "float"], 2))
def test_every_width_by_both_paths(width, zero):
    spec = BASE.replace(weight=types.unsigned(width, symmetric=zero == "none"), zero=zero, n=17, k=300, bias=True)
    weight, exact = random_weight(spec), lossless_weight(spec)
    for path in (None, "panels"):
        check(_apply(weight, x := inputs(2, spec), path), x, weight)
        check_exact(_apply(exact, x := lossless_inputs(2, spec), path), x, exact)


@needs_interpreter
@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16, torch.float32], 3))
@pytest.mark.parametrize(
    "kind", [*map(types.SCALAR_TYPES.get, ("uint1", "uint3b4", "uint5", "uint6", "uint7b64", "int4")), *TABLES]
)
def test_every_code_in_every_position(kind, dtype):
    """Each row cycles through all codes, starting at another one; x selects one column at a time."""
    n, k = 1 << kind.bits, 288
    codes = ((torch.arange(n)[:, None] + torch.arange(k)) % n).to(torch.uint8)
    weight = QuantizedWeight(LinearSpec(n, k, kind, (1, k), act_dtype=dtype), bitstream.pack(codes, kind.bits), torch.ones(n, 1))
    exact = torch.tensor(kind.values())[codes.int()].t()  # LUT values are rounded once, by either path
    for path in (None, "panels"):
        assert torch.equal(_apply(weight, torch.eye(k, dtype=dtype), path), exact.to(dtype))


@needs_interpreter
@pytest.mark.parametrize("kind", thinned(["uint4", "uint3", "uint6"], 3))
def test_a_shard_that_starts_inside_a_group(kind):
    for order in (False, True):
        whole = random_weight(LinearSpec(24, 512, types.SCALAR_TYPES[kind], (1, 128), zero="int", act_order=order))
        part = whole.narrow(1, 40, 470)
        check(_apply(part, x := inputs(3, part.spec)), x, part)
        check(_apply(part, x := inputs(3, part.spec), "panels"), x, part)


@needs_interpreter
@pytest.mark.exhaustive
def test_split_k_and_k_slices_compute_the_same():
    for kind in ("uint4b8", "uint3b4", "uint5b16", "nf4"):
        weight = lossless_weight(BASE.replace(n=70, k=640, bias=True, weight=types.SCALAR_TYPES[kind]))
        x = lossless_inputs(17, weight.spec)
        for config in (
            GemmConfig(1, 32, 16, 4, 2), GemmConfig(1, 64, 16, 4, 2, 3), GemmConfig(2, 32, 16, 4, 2, 2),
            GemmConfig(4, 16, 8, 4, 2), GemmConfig(8, 16, 8, 8, 2),
        ):  # fmt: skip
            check_exact(_apply(weight, x, config), x, weight)


@needs_interpreter
def test_every_bucket_of_m():
    weight = lossless_weight(BASE.replace(n=20))
    for m in (9, 16, 33, 129, 257):
        check_exact(_apply(weight, x := lossless_inputs(m, weight.spec)), x, weight)
    for kind, most in ((types.uint3b4, 64), (types.nf4, 128), (types.uint6b32, 128)):  # above, panels are dequantized
        weight = lossless_weight(BASE.replace(n=20, weight=kind))
        assert max_fused_m(torch.bfloat16, layout_of(weight.spec), False) == most
        for m in (most, most + 1):
            check_exact(_apply(weight, x := lossless_inputs(m, weight.spec)), x, weight)


@needs_interpreter
@pytest.mark.exhaustive
@pytest.mark.parametrize("wave32", [True, False])
def test_amd_tile_configs(wave32, monkeypatch):
    """RDNA (wave32) and CDNA (wave64): tile_m of at least 16, and split-K partials reduced in a fixed order."""
    monkeypatch.setattr(launch, "device_traits", lambda device: DeviceTraits(False, wave32, 64 * 1024))
    monkeypatch.setattr(launch, "_plans", {})
    half = BASE.replace(n=33, k=520, block=(1, 64), act_dtype=torch.float16)
    if wave32:
        check_kernel(RDNA3W4A16LinearKernel, [BASE, half.replace(act_order=True)], "rocm:gfx1100")
    else:
        check_kernel(Kernel, [half], "rocm:gfx942")
    configs = [plan.config for plan in launch._plans.values()]
    assert {c.split_k > 1 for c in configs} == {True, False} and all(c.tile_m >= 16 for c in configs)
    assert not wave32 or all(c.tile_n <= 64 and c.num_warps >= 4 for c in configs)


@needs_interpreter
@pytest.mark.exhaustive
def test_without_matrix_instructions(monkeypatch):
    """NVIDIA GPUs before sm80: the fused kernel with PROMOTE_K of 32 up to M=8, panels and torch's matmul above."""
    monkeypatch.setattr(launch, "device_traits", lambda device: DeviceTraits(True, False, 64 * 1024, True))
    monkeypatch.setattr(launch, "_plans", {})
    half = BASE.replace(n=33, k=520, act_dtype=torch.float16)
    check_kernel(Kernel, [half, half.replace(weight=types.uint3, zero="int", bias=True)], "cuda:sm75")
    plans = launch._plans.values()
    assert {plan.constants["PROMOTE_K"] for plan in plans} == {32} and all(plan.config.tile_m == 8 for plan in plans)


@needs_interpreter
def test_split_k_partials_are_reduced_in_order():
    """Bit for bit the float32 sum of the partials, first to last."""
    weight = random_weight(BASE.replace(n=48, k=640, act_dtype=torch.float16))
    x = inputs(5, weight.spec)
    packed = list(Kernel.pack(weight).values())
    plan = launch.LaunchPlan(weight.spec, GemmConfig(1, 64, 16, 4, 1, 5), 5, False, False)
    partials = torch.empty(5, 5, 48)
    codes, scale, zero, offset, aux, perm = packed
    plan.launch((1, 1, 5), False, x, codes, scale, zero, offset, aux, perm, x, partials, 5, 48, 640, 0, 5, scale.shape[0], 1)
    total = torch.zeros(5, 48)
    for partial in partials:
        total = total + partial
    assert torch.equal(launch.fused_gemm(x, packed, None, plan), total.half())


def test_float32_accumulation_is_promoted_often():
    for group in (256, 272, 128, 64):
        layout = layout_of(BASE.replace(weight=types.uint2b1, block=(1, group), act_dtype=torch.float32))
        assert layout.promote_k == 32  # with 256, one output in a few hundred misses the tolerance
    assert layout_of(BASE).promote_k == 128


@needs_interpreter
def test_packed_size():
    for kind, most in (("uint4b8", 4), ("uint2b2", 2), ("uint3b4", 3), ("uint5b16", 5), ("uint6b32", 6), ("uint8b128", 8)):
        spec = LinearSpec(64, 4096, types.SCALAR_TYPES[kind], (1, 128), scale_dtype=torch.bfloat16)
        size = sum(t.nbytes for t in Kernel.pack(random_weight(spec)).values())
        assert size == Kernel.packed_bytes(spec) and size * 8 / (64 * 4096) <= most + 0.25
    for kind, block in ((types.nf4, 64), (types.nf4, 48), (types.iq2, 8), (types.uint3, 96)):
        spec = LinearSpec(64, 4096, kind, (1, block), act_order=block == 96)
        assert sum(t.nbytes for t in Kernel.pack(random_weight(spec)).values()) == Kernel.packed_bytes(spec)


def test_refusals_name_the_reason():
    from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel

    assert "compiler" in TritonW4A16LinearKernel.is_supported(Platform("cpu", packages=frozenset({"triton"}))).reason
    assert "not installed" in TritonW4A16LinearKernel.is_supported(Platform("cuda", "sm90")).reason
    assert "older" in TritonW4A16LinearKernel.is_supported(Platform.parse("cuda:sm70")).reason
    for name in ("cuda:sm75", "cuda:sm90", "cuda:sm120", "rocm:gfx942", "rocm:gfx1100", "xpu"):
        assert TritonW4A16LinearKernel.is_supported(Platform.parse(name))
    assert "neither an integer" in TritonW4A16LinearKernel.can_implement(BASE.replace(weight=types.float8_e4m3fn)).reason
    assert "zero points" in TritonW4A16LinearKernel.can_implement(BASE.replace(weight=types.nf4, zero="int")).reason
    assert not TritonW4A16LinearKernel.can_implement(BASE.replace(act=types.ActSpec(types.int8)))

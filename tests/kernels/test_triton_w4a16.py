"""TritonW4A16LinearKernel under Triton's interpreter, in a process of its own: interpreted and compiled code do not mix."""

import pytest
import torch
from interpreter import INTERPRETED, apply, inside, run_inside

from bitline import Platform, types
from bitline.kernels.triton.layout import layout_of
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec

pytest.importorskip("triton")

if INTERPRETED:
    from bitline.kernels.triton import launch
    from bitline.kernels.triton.rdna3 import RDNA3W4A16LinearKernel
    from bitline.kernels.triton.tiles import Machine, Tile
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
]


def _apply(*words):
    return apply(Kernel, *words)


def test_under_the_interpreter():
    run_inside(__file__)


@inside
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.scheme)
def test_conformance(spec):
    check_kernel(Kernel, [spec], Platform.detect("cpu"))


@inside
@pytest.mark.parametrize("group", [16, 32, 48, 64, 80, 128, 160, 256, 272])
def test_every_group_size(group):
    weight = random_weight(BASE.replace(weight=types.uint4, zero="int", block=(1, group)))
    check(_apply(weight, x := inputs(3, weight.spec)), x, weight)


@inside
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_every_width_by_both_paths(bits, zero):
    spec = BASE.replace(weight=types.unsigned(bits, symmetric=zero == "none"), zero=zero, n=17, k=300, bias=True)
    weight, exact = random_weight(spec), lossless_weight(spec)
    for path in (None, "panels"):
        check(_apply(weight, x := inputs(2, spec), path), x, weight)
        check_exact(_apply(exact, x := lossless_inputs(2, spec), path), x, exact)


@inside
def test_a_cut_inside_a_group():
    for order in (False, True):
        whole = random_weight(LinearSpec(24, 512, types.uint4, (1, 128), zero="int", act_order=order))
        part = whole.narrow(1, 40, 470)
        check(_apply(part, x := inputs(3, part.spec)), x, part)
        check(_apply(part, x := inputs(3, part.spec), "panels"), x, part)


@inside
def test_splits_and_slices_compute_the_same():
    weight = lossless_weight(BASE.replace(n=70, k=640, bias=True))
    x = lossless_inputs(17, weight.spec)
    for tile in (
        Tile(1, 32, 16, 4, 2),
        Tile(1, 64, 16, 4, 2, 3),
        Tile(2, 32, 16, 4, 2, 2),
        Tile(4, 16, 8, 4, 2),
        Tile(8, 16, 8, 8, 2),
    ):
        check_exact(_apply(weight, x, tile), x, weight)


@inside
def test_rows_of_every_bucket():
    weight = lossless_weight(BASE.replace(n=20))
    for m in (9, 16, 33, 129, 257):
        check_exact(_apply(weight, x := lossless_inputs(m, weight.spec)), x, weight)


@inside
@pytest.mark.parametrize("wave32", [True, False])
def test_the_tiles_of_amd(wave32, monkeypatch):
    """RDNA's, and those of CDNA's waves of 64: 16 columns of x at least, K split over programs whose float32 sums are added in
    their order."""
    monkeypatch.setattr(launch, "machine", lambda device: Machine(False, wave32, 64 * 1024))
    monkeypatch.setattr(launch, "_plans", {})
    half = BASE.replace(n=33, k=520, block=(1, 64), act_dtype=torch.float16)
    if wave32:
        check_kernel(RDNA3W4A16LinearKernel, [BASE, half.replace(act_order=True)], "rocm:gfx1100")
    else:
        check_kernel(Kernel, [half], "rocm:gfx942")
    tiles = [plan.tile for plan in launch._plans.values()]
    assert {tile.splits > 1 for tile in tiles} == {True, False} and all(tile.bm >= 16 for tile in tiles)
    assert not wave32 or all(tile.bn <= 64 and tile.warps >= 4 for tile in tiles)


@inside
def test_splits_are_added_in_their_order():
    """Bit for bit the sum of what each part of K gives alone, first to last, in float32."""
    weight = random_weight(BASE.replace(n=48, k=640, act_dtype=torch.float16))
    x = inputs(5, weight.spec)
    packed = list(Kernel.pack(weight).values())
    plan = launch.Plan(weight.spec, Tile(1, 64, 16, 4, 1, 5), 5, False, False)
    parts = torch.empty(5, 5, 48)
    codes, scale, zero, offset, fine, perm = packed
    plan.launch((1, 1, 5), False, x, codes, scale, zero, offset, fine, perm, x, parts, 5, 48, 640, 0, 5, scale.shape[0], 1)
    total = torch.zeros(5, 48)
    for part in parts:
        total = total + part
    assert torch.equal(launch.fused(x, packed, None, plan), total.half())


def test_sums_in_float32_alone_stay_short():
    for group in (256, 272, 128, 64):
        layout = layout_of(BASE.replace(weight=types.uint2b1, block=(1, group), act_dtype=torch.float32))
        assert layout.span == 32  # of 256 columns at once, one output in a few hundred is off by more than is allowed
    assert layout_of(BASE).span == 128


@inside
def test_packed_size():
    spec = LinearSpec(64, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    packed = Kernel.pack(random_weight(spec))
    size = sum(t.nbytes for t in packed.values())
    assert size == Kernel.packed_bytes(spec)
    assert size * 8 / (64 * 4096) <= 4.25


def test_refusals_name_the_fact():
    from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel

    assert "compiler" in TritonW4A16LinearKernel.is_supported(Platform("cpu", packages=frozenset({"triton"}))).reason
    assert "not installed" in TritonW4A16LinearKernel.is_supported(Platform("cuda", "sm90")).reason
    assert "older" in TritonW4A16LinearKernel.is_supported(Platform.parse("cuda:sm70")).reason
    for name in ("cuda:sm75", "cuda:sm90", "cuda:sm120", "rocm:gfx942", "rocm:gfx1100", "xpu"):
        assert TritonW4A16LinearKernel.is_supported(Platform.parse(name))
    assert not TritonW4A16LinearKernel.can_implement(BASE.replace(weight=types.uint3b4))
    assert not TritonW4A16LinearKernel.can_implement(BASE.replace(act=types.ActSpec(types.int8)))

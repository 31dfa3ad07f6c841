"""TritonW4A16LinearKernel under Triton's interpreter, in a process of its own: interpreted and compiled code do not mix."""

import os
import subprocess
import sys

import pytest
import torch

from bitline import Platform, types
from bitline.testing import check, check_exact, poison
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from bitline.kernels.triton import w4a16
    from bitline.kernels.triton.tiles import Tile
    from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel as Kernel

inside = pytest.mark.skipif(not INTERPRETED, reason="runs inside the interpreted process")
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


def _apply(weight, x, tile=None):
    with poison():
        packed = list(Kernel.pack(weight).values())
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        if tile is None:
            return Kernel.apply(x, packed, bias, weight.spec)
        if tile == "panels":
            return w4a16._by_panels(x, packed, bias, weight.spec)
        return w4a16._fused(x, packed, bias, w4a16._Plan(weight.spec, tile, packed[0].shape[0], bias is not None, x.device))


def test_under_the_interpreter():
    if INTERPRETED:
        pytest.skip("this is the interpreted process")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


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

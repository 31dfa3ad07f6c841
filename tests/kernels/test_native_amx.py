"""AMX tiles: every place where scales are applied, ragged tiles of M, N and K, and the same bits for any number of threads.

Runs where the CPU has AMX, or in tests/test_native_emulated.py's process with an emulated one.
"""

import pytest
import torch
from test_native_cpu import run_poisoned

from bitline import native, types
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.testing import check, check_exact
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import ActSpec, LinearSpec

pytestmark = pytest.mark.skipif("amx" not in native.isas(), reason="no AMX here")
F32, INT8, FP8 = torch.float32, ActSpec(types.int8), ActSpec(types.float8_e4m3fn)
W4 = LinearSpec(70, 600, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
NVFP4 = W4.replace(weight=types.float4_e2m1, k=320, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(70, 320))
# Groups of 16 make K steps of 8, of 24 none, of 40 steps of 4; 600 columns are two groups that share a scale, and ragged slices.
SPECS = {
    "group 128": W4, "group 64, bias": W4.replace(block=(1, 64), n=33, bias=True), "group 16": W4.replace(block=(1, 16), k=200),
    "group 24": W4.replace(block=(1, 24), k=240), "group 40": W4.replace(block=(1, 40), k=200),
    "group 600": W4.replace(block=(1, 600), k=1300), "zeros": W4.replace(weight=types.uint4, block=(1, 32), zero="int"),
    "offsets": W4.replace(weight=types.uint6, block=(1, 64), zero="float", scale_dtype=F32), "nvfp4": NVFP4,
    "2 bits": W4.replace(weight=types.uint2b2), "3 bits": W4.replace(weight=types.uint3b4, n=1),
    "5 bits": W4.replace(weight=types.uint5b16, n=31), "8 bits": W4.replace(weight=types.int8, block=(1, 32)),
    "channel": W4.replace(weight=types.int8, block=(1, 1111), k=1111, scale_dtype=F32),
    "channel, zeros": W4.replace(weight=types.uint8, block=(1, 530), k=530, zero="int", bias=True),
    "act-order": W4.replace(act_order=True), "fp8": W4.replace(weight=types.float8_e4m3fn, block=(1, 600), scale_dtype=F32),
    "fp8 inputs": W4.replace(weight=types.float8_e4m3fn, act=FP8, act_dtype=torch.float16),
    "W8A8": W4.replace(weight=types.int8, block=(1, 600), scale_dtype=F32, act=INT8),
    "W8A8 long": W4.replace(weight=types.int8, block=(1, 2200), k=2200, n=40, scale_dtype=F32, act=INT8),
    "W8A8 static": W4.replace(weight=types.uint8b128, act=ActSpec(types.int8, False, "tensor"), act_dtype=F32),
    "W4A8": W4.replace(act=INT8), "W4A8 group 32": W4.replace(block=(1, 32), act=INT8, act_dtype=torch.float16),
    "W4A8 zeros": W4.replace(weight=types.uint4, zero="int", act=INT8, bias=True),
    "W4A8 offsets": W4.replace(weight=types.uint4, block=(1, 600), zero="float", act=INT8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def amx():
    before, threads = native.isa(), torch.get_num_threads()
    native.use_isa("amx")
    yield
    native.use_isa(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SPECS)
def test_every_m(name):
    spec = SPECS[name]
    exact, weight = lossless_weight(spec, 1), random_weight(spec, 3)
    for m in (2, 4, 6, 7, 12, 15, 16, 17, 32, 33, 50, 65, 130):
        x = lossless_inputs(m, spec, m)
        check_exact(run_poisoned(spec, exact, x), x, exact)
        x = inputs(m, spec, m)
        check(run_poisoned(spec, weight, x), x, weight)


@pytest.mark.parametrize("name", ["group 128", "group 24", "channel", "W8A8", "W4A8"])
def test_same_bits_for_any_number_of_threads(name):
    spec = SPECS[name].replace(n=300)
    weight = random_weight(spec, 1)
    packed = list(Kernel.pack(weight).values())
    for m in (17, 200, 224):
        x, results = inputs(m, spec), []
        for count in (1, 2, 3, 16):
            torch.set_num_threads(count)
            results.append(Kernel.apply(x, packed, None, spec))
        assert all(torch.equal(results[0], r) for r in results)


def test_large_m_and_several_passes():
    for m in (600, 1100):
        for name in ("group 128", "W8A8"):
            weight = random_weight(SPECS[name], 1)
            x = inputs(m, SPECS[name], 2)
            check(run_poisoned(SPECS[name], weight, x), x, weight)


def test_torchs_own_tiles_before_and_after():
    """torch configures tiles for itself; neither's configuration may reach the other."""
    spec = SPECS["group 128"]
    weight, x = random_weight(spec, 1), inputs(40, spec)
    dense, big = torch.randn(256, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    expected, ours = big @ dense, run_poisoned(spec, weight, x)
    for _ in range(3):
        assert torch.equal(big @ dense, expected) and torch.equal(run_poisoned(spec, weight, x), ours)

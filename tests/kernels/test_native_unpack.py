"""The native core's unpacked weights against the torch code's, bit for bit, at every ISA level of this machine."""

import dataclasses

import pytest
import torch

from bitline import QuantLinear, native, types
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.kernels.cpu.unpack_weight import unpack, unpack_in_torch
from bitline.testing.conformance import default_specs
from bitline.testing.generators import random_spec, random_weight
from bitline.types import LinearSpec, ScalarType

LEVELS = [level for level in native.isas() if level != "portable"]
pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no native kernel here: {native.why_not() or 'no AVX2'}")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INTEGERS = {2: torch.int16, 4: torch.int32}
SHAPES = ((1, 1), (31, 7), (33, 65), (64, 129), (70, 300))


def same_bits(a, b):
    integers = INTEGERS[a.itemsize]
    assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.view(integers)[~a.isnan()], b.view(integers)[~b.isnan()])


def native_unpack(packed, n, k, dtype):
    """By the C function, into a buffer with a margin, which must not be written."""
    out = torch.full((n * k + 64,), 0x5A, dtype=INTEGERS[dtype.itemsize]).view(dtype)
    margin = out[n * k :].clone()
    assert native.core().gemm_unpack(packed.data_ptr(), out.data_ptr(), DTYPES[dtype]) == 0
    assert torch.equal(out[n * k :], margin), "written past the end"
    return out[: n * k].view(n, k)


def check(weight):
    packed = Kernel.pack(weight)["weight"]
    for dtype in DTYPES:
        w = native_unpack(packed, weight.spec.n, weight.spec.k, dtype)
        same_bits(w, unpack_in_torch(packed, dtype))
        if not weight.spec.scale2_block:  # two levels of scales are multiplied in another order
            same_bits(w, weight.dequantize(dtype))


@pytest.mark.parametrize("kind", types.SCALAR_TYPES.values(), ids=str)
@pytest.mark.parametrize("zero", ["none", "int", "float"])
def test_every_type(kernel_level, kind, zero):
    if zero != "none" and (kind.kind != "int" or kind.signed or kind.bias):
        return
    for i, (n, k) in enumerate(SHAPES):
        for group in (1, 7, 16, 32, 100, k):
            scale_dtype = (torch.float32, torch.float16, torch.bfloat16)[(i + group) % 3]
            spec = LinearSpec(
                n, k, kind, (1, group), scale_dtype=scale_dtype, zero=zero, act_order=k > 1 and (i + group) % 2 == 0
            )
            check(random_weight(spec, i))


def test_common_and_random_schemes(kernel_level):
    for i, spec in enumerate(default_specs() + [random_spec(seed) for seed in range(600, 760)]):
        check(random_weight(spec, i))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_several_tasks(kernel_level, bits, threads):
    kind = types.SCALAR_TYPES[f"uint{bits}b{1 << (bits - 1)}"]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(random_weight(LinearSpec(1009, 515, kind, (1, 128)), bits))
    finally:
        torch.set_num_threads(before)


def test_nan_codes_of_fp8(kernel_level):
    for kind in (types.float8_e4m3fn, types.float8_e5m2, types.float8_e4m3fnuz):
        weight = random_weight(LinearSpec(70, 128, kind, (1, 128), scale_dtype=torch.float32), 1)
        codes = torch.randint(256, weight.codes.shape, dtype=torch.uint8)
        check(dataclasses.replace(weight, codes=codes))
        codes[40:] &= 0x3F  # N blocks with and without NaN
        check(dataclasses.replace(weight, codes=codes))


def test_subnormal_and_infinite_values(kernel_level):
    for scale in (2.0**-130, 2.0**-20, 2.0**125):  # rounded to subnormal numbers and infinities of each dtype
        weight = random_weight(LinearSpec(33, 96, types.int8, (1, 32), scale_dtype=torch.float32), 1)
        check(dataclasses.replace(weight, scale=weight.scale * scale))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tables_that_bfloat16_rounds(kernel_level, bits, monkeypatch):
    table = tuple(((i * 37) % 16 - 7.3) / 3 for i in range(1 << bits))
    kind = ScalarType(f"inexact{bits}", bits, "table", table=tuple(torch.tensor(table).tolist()))
    monkeypatch.setitem(types.SCALAR_TYPES, kind.name, kind)
    for group in (4, 16, 96):
        check(random_weight(LinearSpec(40, 96, kind, (1, group), scale_dtype=torch.float32), group))


@pytest.mark.parametrize(("n", "k"), [(33, 129), (1, 1), (95, 72)])
@pytest.mark.parametrize("m", [0, 1, 17])
def test_the_gradient_of_x(kernel_level, n, k, m):
    weight = random_weight(LinearSpec(n, k, types.uint4b8, (1, 32), act_dtype=torch.float32), 1)
    x = torch.randn(m, k, requires_grad=True)
    y = QuantLinear(weight, kernel=Kernel.__name__)(x)
    grad = torch.randn(m, n)
    y.backward(grad)
    assert torch.allclose(x.grad, grad @ weight.dequantize(torch.float32), rtol=1e-5, atol=1e-5)


def test_without_a_kernel_torch_unpacks(monkeypatch):
    packed = Kernel.pack(random_weight(LinearSpec(40, 96, types.uint4b8, (1, 32)), 1))["weight"]
    want = unpack(packed, torch.bfloat16)
    before = native.isa()
    native.use_isa("portable")
    try:
        assert native.core().gemm_unpack(packed.data_ptr(), want.clone().data_ptr(), 2) == -3
        same_bits(unpack(packed, torch.bfloat16), want)
    finally:
        native.use_isa(before)
    monkeypatch.setattr(native, "core", lambda: None)
    same_bits(unpack(packed, torch.bfloat16), want)


def test_what_is_no_packed_weight_is_refused():
    packed = Kernel.pack(random_weight(LinearSpec(40, 96, types.uint4b8, (1, 32)), 1))["weight"].clone()
    packed[0] ^= 1
    assert native.core().gemm_unpack(packed.data_ptr(), 0, 2) == -1


def test_the_default_device_does_not_matter():
    for n in (40, 8192):  # of memory of its own, and pooled
        weight = random_weight(LinearSpec(n, 320, types.uint4b8, (1, 32)), 1)
        packed = Kernel.pack(weight)["weight"]
        with torch.device("meta"):
            w = unpack(packed, torch.bfloat16)
        assert torch.equal(w, weight.dequantize(torch.bfloat16))


def test_weights_that_are_kept_share_no_memory():
    weights = [random_weight(LinearSpec(8192, 320, types.uint4b8, (1, 32)), seed) for seed in range(3)]
    unpacked = [unpack(Kernel.pack(weight)["weight"], torch.bfloat16) for weight in weights]
    for w, weight in zip(unpacked, weights, strict=True):
        same_bits(w, weight.dequantize(torch.bfloat16))


def test_other_dtypes_are_unpacked_in_torch():
    weight = random_weight(LinearSpec(40, 96, types.uint4b8, (1, 32), scale_dtype=torch.float32), 1)
    packed = Kernel.pack(weight)["weight"]
    assert torch.equal(unpack(packed, torch.float64), weight.dequantize(torch.float32).double())

"""Activations in groups of columns on the native CPU kernel: the bits of the values that `act_quant` puts in their place."""

from dataclasses import replace

import pytest
import torch

from bitline import native, quantize, types
from bitline.act_quant import fake_quantize
from bitline.kernels.cpu import packed_weight
from bitline.kernels.cpu.native_linear import CPUBatchInvariantLinearKernel
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.testing.generators import inputs
from bitline.types import ActSpec

pytestmark = pytest.mark.skipif(len(native.isas()) < 2, reason="no level with linear kernels here")

N, K = 40, 203
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped(name, size, scale="float", **changes):
    return ActSpec(types.SCALAR_TYPES[name], granularity="group", group_size=size, scale=scale, **changes)


MINIFLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1", "float6_e2m3", "float6_e3m2")
ACTS = [grouped(name, size) for name in ("int8", "float8_e4m3fn", "float8_e5m2") for size in (1, 7, 32, 128)]
ACTS += [grouped(name, size, scale) for name in MINIFLOATS for scale in ("e8m0", "e4m3", "e5m3") for size in (5, 16, 32)]
ACTS += [grouped("float8_e4m3fn", 32, limit=1.5), grouped("int8", 16, limit=0.25)]


def layer(act, dtype, global_scale=None, kernel=Kernel, k=K):
    """What packs with the scheme and what packs without, each as a function of x."""
    weight = quantize(torch.randn(N, k, generator=torch.Generator().manual_seed(0)), "W8A16").with_act_dtype(dtype)
    quantizing = replace(weight, spec=weight.spec.replace(act=act), input_scale=global_scale)

    def apply(weight):
        packed = list(kernel.pack(weight).values())
        assert len(packed) == 1, "the kernel does not quantize x itself"
        return lambda x: kernel.apply(x, packed, None, weight.spec)

    return apply(quantizing), apply(weight)


def hard_rows(m, k, dtype):
    """Rows of all magnitudes, of zeros, of subnormal numbers, and with groups of zeros."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-6, 4, m)[:, None]
    x[0] = 0
    x[:, 3::17] = 0
    if m > 3:
        x[2] *= 1e-38
        x[3, :40] = 1e-30
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_bits_are_those_of_the_reference(kernel_level, act):
    global_scale = torch.tensor(3.7) if act.scale == "e4m3" and act.group_size != 32 else None
    for dtype in DTYPES:
        quantizing, plain = layer(act, dtype, global_scale)
        for m in (1, 2, 7, 17, 65):
            x = hard_rows(m, K, dtype)
            assert torch.equal(quantizing(x), plain(fake_quantize(x, act, global_scale).to(dtype))), (dtype, m)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("m", [33, 300, 1100])
def test_many_rows_on_several_threads(threads, m):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        act = grouped("float8_e4m3fn", 128)
        quantizing, plain = layer(act, torch.bfloat16, k=1030)
        x = hard_rows(m, 1030, torch.bfloat16)
        assert torch.equal(quantizing(x), plain(fake_quantize(x, act).bfloat16()))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("act", [grouped("float8_e4m3fn", 32), grouped("float4_e2m1", 32, "e8m0"),
                                 grouped("float4_e2m1", 16, "e4m3")], ids=str)  # fmt: skip
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_row_alone(kernel_level, act, bad):
    quantizing, _ = layer(act, torch.bfloat16)
    x = hard_rows(7, K, torch.bfloat16)
    want = quantizing(x)
    x[4, 100] = bad
    y = quantizing(x)
    saturates = act.scale == "e4m3" and bad == bad  # a static global scale bounds the largest value
    assert saturates or not bool(y[4].isfinite().any())
    rest = [r for r in range(7) if r != 4]
    torch.testing.assert_close(y[rest], want[rest], rtol=1e-2, atol=0)


def test_a_row_does_not_depend_on_the_batch(kernel_level):
    quantizing, _ = layer(grouped("float8_e4m3fn", 128), torch.bfloat16, kernel=CPUBatchInvariantLinearKernel)
    x = hard_rows(65, K, torch.bfloat16)
    y = quantizing(x)
    assert all(torch.equal(quantizing(x[i : i + 1])[0], y[i]) for i in (0, 1, 30, 64))


@pytest.mark.parametrize("name", ["FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4"])
def test_presets_need_nothing_but_the_operator(name):
    weight = quantize(torch.randn(33, 256), name)
    packed = list(Kernel.pack(weight).values())
    assert Kernel.direct(packed, None, weight.spec) is not None
    assert Kernel.fuses_experts(weight.spec, None)


@pytest.mark.parametrize("act", [grouped("int8", 32, symmetric=False), grouped("int8", 32, "e8m0")], ids=str)
def test_other_groups_are_left_to_torch(act):
    assert not packed_weight.quantizes_activations(act)
    weight = quantize(torch.randn(33, 256), "W8A16")
    weight = replace(weight, spec=weight.spec.replace(act=act))
    packed = list(Kernel.pack(weight).values())
    assert len(packed) == 3 and Kernel.direct(packed, None, weight.spec) is None
    x = inputs(3, weight.spec)
    plain = list(Kernel.pack(replace(weight, spec=weight.spec.replace(act=None))).values())
    want = Kernel.apply(fake_quantize(x, act).to(x.dtype), plain, None, weight.spec.replace(act=None))
    assert torch.equal(Kernel.apply(x, packed, None, weight.spec), want)

"""The GPU kernels on a real device: conformance, CUDA graphs, determinism, torch.compile, large shapes."""

from dataclasses import replace

import pytest
import torch
from graphs import captured

from bitline import Platform, QuantLinear, types
from bitline.act_quant import fake_quantize, quantize_input
from bitline.kernels import emulation
from bitline.kernels.aliases import cutlass, marlin, wna16
from bitline.kernels.reference import BatchInvariantLinearKernel
from bitline.kernels.torch import fp8
from bitline.kernels.torch.int8_mm import TorchInt8ScaledMMLinearKernel
from bitline.kernels.triton import launch
from bitline.kernels.triton.act_quant import quantize_groups_padded, quantize_padded
from bitline.kernels.triton.minifloat import TritonMinifloatLinearKernel
from bitline.kernels.triton.scaled_mm import TritonFp8BlockScaledMMKernel, TritonInt8ScaledMMLinearKernel
from bitline.kernels.triton.w4a16 import TritonW4A16LinearKernel
from bitline.kernels.triton_fake_quant import TritonFakeQuantLinearKernel, fake_quantize_fused
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import ActSpec, LinearSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")]

W4 = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
TRITON = [
    W4,
    W4.replace(n=512, k=1024),
    W4.replace(n=512, k=1024, act_dtype=torch.float16, bias=True),
    W4.replace(act_dtype=torch.float32, bias=True),
    W4.replace(weight=types.uint4, zero="int", block=(1, 32), n=512, k=1024),
    W4.replace(weight=types.uint4, zero="float", block=(1, 32), scale_dtype=torch.float16, n=576, k=576),
    W4.replace(weight=types.uint8b128),
    W4.replace(weight=types.uint8, zero="int", act_dtype=torch.float16),
    W4.replace(weight=types.uint8b128, act_dtype=torch.float16),
    W4.replace(weight=types.uint2, zero="int", block=(1, 64)),
    W4.replace(block=(1, 520), act_order=True, bias=True),
    W4.replace(block=(1, 48), weight=types.int4),
]
W3 = W4.replace(weight=types.uint3b4)
NF4 = W4.replace(weight=types.nf4, block=(1, 64), scale_dtype=torch.float32)
INTEGER_ALIASES = [
    wna16.MarlinLinearKernel, wna16.MacheteLinearKernel, wna16.ExllamaLinearKernel, wna16.ConchLinearKernel,
]  # fmt: skip
SPLIT_OR_LUT = [  # codes with a high-bit plane, or LUT types
    W3, W3.replace(n=512, k=1024), W3.replace(weight=types.uint3, zero="int", act_order=True, act_dtype=torch.float16),
    W4.replace(weight=types.uint5, zero="int", block=(1, 32), bias=True), W3.replace(act_dtype=torch.float32),
    W4.replace(weight=types.uint6b32, act_dtype=torch.float16), W4.replace(weight=types.uint7b64),
    W4.replace(weight=types.uint1, zero="float", block=(1, 64)), W4.replace(weight=types.iq2, block=(1, 8)),
    NF4, NF4.replace(n=512, k=1024, act_dtype=torch.float16), NF4.replace(act_dtype=torch.float32),
    W4.replace(weight=types.iq4_nl, block=(1, 32), scale_dtype=torch.float16, k=512),
]  # fmt: skip
E4M3 = LinearSpec(200, 520, types.float8_e4m3fn, (1, 520), scale_dtype=torch.float32, act=ActSpec(types.float8_e4m3fn))
FP8 = [
    E4M3,
    E4M3.replace(bias=True, act_order=True),
    E4M3.replace(n=67, k=129, block=(1, 129), bias=True),
    E4M3.replace(block=(200, 520), act=ActSpec(types.float8_e4m3fn, False, "tensor"), bias=True),
    E4M3.replace(block=(200, 520), act=ActSpec(types.float8_e4m3fn, True, "tensor"), act_dtype=torch.float16),
    E4M3.replace(act=ActSpec(types.float8_e4m3fn, False, "tensor"), act_dtype=torch.float16, bias=True),
    E4M3.replace(act_dtype=torch.float16, bias=True),
    E4M3.replace(act=ActSpec(types.float8_e4m3fn, limit=2.0)),
]
BLOCK = LinearSpec(
    200, 330, types.float8_e4m3fn, (128, 128), scale_dtype=torch.float32, act=ActSpec(types.float8_e4m3fn, True, "group", 128)
)
BLOCKS = [
    BLOCK, BLOCK.replace(bias=True, n=33), BLOCK.replace(block_offset=(72, 0)), BLOCK.replace(n=512, k=1024),
    BLOCK.replace(act_dtype=torch.float16, block_offset=(0, 32)),
    BLOCK.replace(
        block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act=ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0")
    ),
]  # fmt: skip
INT8 = LinearSpec(200, 520, types.int8, (1, 520), act=ActSpec(types.int8))
INT8S = [
    INT8,
    INT8.replace(block=(200, 520), bias=True, act=ActSpec(types.int8, True, "tensor")),
    INT8.replace(n=512, k=1024, block=(1, 1024)),
    INT8.replace(act=ActSpec(types.int8, True, "token", 0, False), act_dtype=torch.float16),
    INT8.replace(act=ActSpec(types.int8, False, "tensor", 0, False), act_dtype=torch.float32),
    INT8.replace(act=ActSpec(types.int8, False, "tensor"), weight=types.uint4b8),
    INT8.replace(act_order=True, n=33, k=77, block=(1, 77)),
]
E8M0 = torch.float8_e8m0fnu
MX4 = LinearSpec(200, 544, types.float4_e2m1, (1, 32), scale_dtype=E8M0)
NV4 = MX4.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(200, 544))
MX8 = MX4.replace(weight=types.float8_e4m3fn)
A16 = MX8.replace(block=(1, 544), scale_dtype=torch.float32)  # FP8 weights, per-channel scales
HALF, FULL = {"act_dtype": torch.float16}, {"act_dtype": torch.float32}
MXFP4 = [MX4, MX4.replace(bias=True, **HALF), MX4.replace(act_order=True, **FULL), MX4.replace(n=33, k=96, bias=True)]
SMALL_NV4 = NV4.replace(n=33, k=272, scale2_block=(33, 272))
NVFP4 = [NV4, NV4.replace(bias=True, act_order=True, **HALF), NV4.replace(**FULL), SMALL_NV4]
MXFP8 = [MX8, MX8.replace(bias=True, **HALF), MX8.replace(act_order=True), MX8.replace(n=77, k=99, **FULL)]
FP8A16 = [
    A16, A16.replace(bias=True, **HALF), A16.replace(block=(200, 544), bias=True), A16.replace(block=(128, 128)),
    A16.replace(block=(128, 128), block_offset=(72, 40), **HALF), A16.replace(block=(1, 128), scale_dtype=torch.bfloat16),
    A16.replace(act_order=True, **FULL), A16.replace(n=33, k=77, block=(33, 77)),
]  # fmt: skip
MINIFLOATS = [
    *MXFP4, *NVFP4, *MXFP8, *FP8A16,
    *(MX4.replace(weight=w, bias=True, **dtype) for w in (types.float6_e2m3, types.float6_e3m2) for dtype in ({}, HALF, FULL)),
    MX4.replace(weight=types.float6_e2m3, act_order=True), MX8.replace(weight=types.float8_e5m2, bias=True),
    *(A16.replace(weight=types.float8_e5m2, block=b, **HALF) for b in ((1, 544), (128, 128), (200, 544))),
    A16.replace(weight=types.float8_e5m2, act_order=True, bias=True, **FULL), A16.replace(weight=types.float8_e4m3fnuz),
    MX4.replace(block=(1, 64)), NV4.replace(scale_dtype=torch.bfloat16, scale2_block=None), MX4.replace(block_offset=(0, 7)),
    MX4.replace(block=(1, 40), ragged=True, act_order=True, **HALF), MX4.replace(n=512, k=1024),
    NV4.replace(n=512, k=1024, scale2_block=(512, 1024), **HALF), A16.replace(n=512, k=1024, block=(128, 128)),
]  # fmt: skip
MARLIN = [
    (marlin.MarlinMxFp4LinearKernel, MXFP4), (marlin.MarlinNvFp4LinearKernel, NVFP4), (marlin.MarlinMxfp8LinearKernel, MXFP8),
    (marlin.MarlinFP8ScaledMMLinearKernel, FP8A16),
]  # fmt: skip
ACT_SCHEMES = [
    *(ActSpec(types.int8, *how) for how in ((), (True, "token", 0, False), (False, "tensor"), (False, "tensor", 0, False))),
    ActSpec(types.float8_e4m3fn), ActSpec(types.float8_e4m3fn, False, "tensor"), ActSpec(types.float8_e4m3fn, limit=40.0),
    ActSpec(types.int8, limit=25.0), ActSpec(types.int8, True, "token", 0, False, limit=25.0),
]  # fmt: skip
MX4_INPUT = ActSpec(types.float4_e2m1, True, "group", 32, scale="e8m0")
NV4_INPUT = ActSpec(types.float4_e2m1, True, "group", 16, scale="e4m3")
INT8_INPUT, FP8_INPUT = ActSpec(types.int8), ActSpec(types.float8_e4m3fn)
FAKE_QUANT = [  # fake-quantized activations before a weight-only GEMM
    MX4.replace(act=MX4_INPUT),
    MX4.replace(act=MX4_INPUT, bias=True, **HALF),
    MX4.replace(act=MX4_INPUT, act_order=True, **FULL),
    NV4.replace(act=NV4_INPUT),
    NV4.replace(act=NV4_INPUT, bias=True, **HALF),
    BLOCKS[-1],
    BLOCK,
    E4M3.replace(act_order=True),
    W4.replace(act=INT8_INPUT),
    W4.replace(act=ActSpec(types.int8, True, "token", 0, False), bias=True),
    W3.replace(act=INT8_INPUT),
    W4.replace(act=ActSpec(types.int8, True, "group", 32), **HALF),
    W4.replace(act=FP8_INPUT),
    W4.replace(act=ActSpec(types.int8, False, "tensor", 0, False)),
    E4M3.replace(act=ActSpec(types.float8_e4m3fn, True, "tensor")),
]
EMULATED = [
    (emulation.EmulationMxFp4LinearKernel, [*MXFP4, MX4.replace(act=MX4_INPUT)]),
    (emulation.EmulationNvFp4LinearKernel, [*NVFP4, NV4.replace(act=NV4_INPUT)]),
    (emulation.EmulationMxfp8LinearKernel, [*MXFP8, BLOCKS[-1]]),
    (emulation.EmulationMxfp6LinearKernel, [s for s in MINIFLOATS if s.weight.bits == 6]),
]
FP8_KERNELS = [
    cutlass.CutlassFP8ScaledMMLinearKernel,
    fp8.PerTensorTorchFP8ScaledMMLinearKernel,
    fp8.RowWiseTorchFP8ScaledMMLinearKernel,
    fp8.ChannelWiseTorchFP8ScaledMMLinearKernel,
]
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and not fp8.RowWiseTorchFP8ScaledMMLinearKernel.is_supported(Platform.detect("cuda")),
    reason="no FP8 matrix instructions",
)


@pytest.mark.parametrize("spec", [*TRITON, *SPLIT_OR_LUT], ids=lambda s: s.key)
def test_triton_conformance(spec):
    check_kernel(TritonW4A16LinearKernel, [spec], device="cuda")


@needs_fp8
@pytest.mark.parametrize("kernel", FP8_KERNELS)
def test_fp8_conformance(kernel):
    report = check_kernel(kernel, FP8, device="cuda")
    assert len(report.passed) >= 2


@pytest.mark.parametrize("spec", MINIFLOATS, ids=lambda s: s.key)
def test_minifloat_conformance(spec):
    assert check_kernel(TritonMinifloatLinearKernel, [spec], device="cuda").passed


@pytest.mark.parametrize(("kernel", "specs"), MARLIN)
def test_marlin_conformance(kernel, specs):
    accepted = [s for s in specs if s.act_dtype in kernel.act_dtypes]
    assert len(check_kernel(kernel, accepted, device="cuda").passed) == len(accepted) >= 3


@pytest.mark.parametrize("kernel", INTEGER_ALIASES)
def test_integer_alias_conformance(kernel):
    specs = [s for s in TRITON if s.act_dtype in kernel.act_dtypes and kernel.can_implement(s)]
    assert len(check_kernel(kernel, specs, device="cuda").passed) == len(specs) >= 2


@pytest.mark.parametrize(("kernel", "specs"), EMULATED)
def test_emulation_conformance(kernel, specs):
    assert len(check_kernel(kernel, specs, device="cuda").passed) == len(specs)


@pytest.mark.parametrize("spec", FAKE_QUANT, ids=lambda s: s.key)
def test_fake_quant_conformance(spec):
    assert check_kernel(TritonFakeQuantLinearKernel, [spec], device="cuda").passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_fake_quantization_is_bit_exact(dtype):
    x = torch.randn(37, 4096, device="cuda", dtype=dtype) * 10.0 ** torch.linspace(-4, 3, 37, device="cuda", dtype=dtype)[:, None]
    x[5], x[6, :32] = 0, 1e-30 if dtype != torch.float16 else 1e-7
    empty, given = torch.empty(0, device="cuda"), torch.full((1,), 0.01171875, device="cuda")
    dynamic = [ActSpec(kind, True, "group", g) for kind in (types.int8, types.float8_e4m3fn) for g in (32, 128)]
    for act in (*dynamic, INT8_INPUT, FP8_INPUT, ActSpec(types.int8, True, "token", 0, False), MX4_INPUT, BLOCKS[-1].act):
        assert torch.equal(fake_quantize_fused(x, act, empty, empty), fake_quantize(x, act).to(dtype)), act
    for act in (NV4_INPUT, ActSpec(types.int8, False, "tensor"), ActSpec(types.float8_e4m3fn, False, "tensor")):
        assert torch.equal(fake_quantize_fused(x, act, given, empty), fake_quantize(x, act, given).to(dtype)), act


def test_batch_invariant_conformance():
    nf4 = W4.replace(weight=types.nf4, block=(1, 64), bias=True)
    specs = [W4, nf4, MX4, NV4.replace(**HALF), A16.replace(**FULL), INT8, E4M3]
    assert len(check_kernel(BatchInvariantLinearKernel, specs, device="cuda").passed) == len(specs)


@pytest.mark.parametrize(
    "kernel", [TritonInt8ScaledMMLinearKernel, cutlass.CutlassInt8ScaledMMLinearKernel, TorchInt8ScaledMMLinearKernel]
)
def test_int8_conformance(kernel):
    assert len(check_kernel(kernel, INT8S, device="cuda").passed) == len(INT8S)


@needs_fp8
@pytest.mark.parametrize(
    ("kernel", "accepted"), [(TritonFp8BlockScaledMMKernel, 6), (cutlass.CutlassFp8BlockScaledMMKernel, 4)],
)  # fmt: skip
def test_block_conformance(kernel, accepted):
    if not kernel.is_supported(Platform.detect("cuda")):
        pytest.skip("not on this GPU")
    assert len(check_kernel(kernel, BLOCKS, device="cuda").passed) == accepted


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_activation_quantization_is_bit_exact(dtype):
    x = torch.randn(37, 1024, device="cuda", dtype=dtype) * 30
    x[5] = 0
    x[6, :32] = 1e-30 if dtype != torch.float16 else 1e-7
    static = torch.tensor([0.37], device="cuda"), torch.tensor([-5], device="cuda", dtype=torch.int32)
    for act in ACT_SCHEMES:
        given = () if act.dynamic else static[: 1 + (not act.symmetric)]
        want, want_scale, want_zero = quantize_input(x, act, *given)
        for m_padded, k_padded in ((37, 1024), (40, 1040)):
            codes, scale, zero = quantize_padded(x, act, m_padded, k_padded, *given)
            assert torch.equal(scale[: want_scale.numel()], want_scale.view(-1)) and codes.shape == (m_padded, k_padded)
            assert torch.equal(codes[:37, :1024].view(torch.uint8), want.view(torch.uint8))
            assert not codes[37:].view(torch.uint8).any() and not codes[:, 1024:].view(torch.uint8).any()
            assert (zero is None) == (want_zero is None)
            assert zero is None or torch.equal(zero[: want_zero.numel()], want_zero.view(-1))
    groups = [ActSpec(types.float8_e4m3fn, True, "group", g, scale=s) for g in (32, 128) for s in ("float", "e8m0")]
    for act in [*groups, replace(groups[0], limit=20.0)]:
        codes, scale = quantize_groups_padded(x, act, 40, 1024)
        found = codes.float() * scale.repeat_interleave(act.group_size, 1)
        assert torch.equal(found[:37], fake_quantize(x, act)) and not codes[37:].view(torch.uint8).any()
        m_major = quantize_groups_padded(x, act, 40, 1024, m_major_scales=True)[1]
        assert torch.equal(m_major, scale) and m_major.stride() == (1, 40)
    codes, scale = quantize_groups_padded(x[:, :1000].contiguous(), ActSpec(types.float8_e4m3fn, True, "group", 128), 37, 1008)
    want = fake_quantize(x[:, :1000], ActSpec(types.float8_e4m3fn, True, "group", 128))
    assert torch.equal((codes.float() * scale.repeat_interleave(128, 1)[:, :1008])[:, :1000], want) and codes.shape == (37, 1008)


@needs_fp8
def test_fp8_quantization_is_bit_exact():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(37, 1000, device="cuda", dtype=dtype) * 30
        x[5] = 0
        spec = E4M3.replace(n=16, k=1000, block=(1, 1000), act_dtype=dtype)
        codes, scale, _ = quantize_padded(x, spec.act, 48, 1008)
        want, want_scale, _ = quantize_input(x, spec.act)
        assert torch.equal(scale[:37], want_scale.view(-1))
        assert torch.equal(codes[:37, :1000].view(torch.uint8), want.view(torch.uint8))
        assert not codes[37:].view(torch.uint8).any() and not codes[:, 1000:].view(torch.uint8).any()


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 64, 65, 200, 256, 257, 1000])
def test_every_config_on_a_large_layer(m):
    for n, k in ((4096, 4096), (10240, 2048)):
        spec = W4.replace(n=n, k=k, weight=types.uint4b8)
        weight = random_weight(spec, 1, "cuda")
        packed = list(TritonW4A16LinearKernel.pack(weight).values())
        check(TritonW4A16LinearKernel.apply(x := inputs(m, spec, m, "cuda"), packed, None, spec), x, weight)
        exact = lossless_weight(spec, 1, "cuda")
        packed = list(TritonW4A16LinearKernel.pack(exact).values())
        check_exact(TritonW4A16LinearKernel.apply(x := lossless_inputs(m, spec, m, "cuda"), packed, None, spec), x, exact)


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 200, 257])
@pytest.mark.parametrize("spec", [MX4, NV4, MX8, A16, A16.replace(block=(128, 128))], ids=lambda s: s.scheme)
def test_minifloats_on_a_large_layer(spec, m):
    """Every tile configuration, and split-K."""
    for n, k in ((2048, 4096), (10240, 1056)):
        block = (spec.block[0], min(spec.block[1], 128) if spec is not A16 else k)
        layer = spec.replace(n=n, k=k, block=block, scale2_block=spec.scale2_block and (n, k))
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight, x = make(layer, 1, "cuda"), given(m, layer, m, "cuda")
            packed = list(TritonMinifloatLinearKernel.pack(weight).values())
            judge(TritonMinifloatLinearKernel.apply(x, packed, None, layer), x, weight)


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 200, 257])
@pytest.mark.parametrize("spec", [W3, NF4, W3.replace(weight=types.uint6, zero="int")], ids=lambda s: s.scheme)
def test_split_and_lut_codes_on_a_large_layer(spec, m):
    for n, k in ((2048, 4096), (10240, 1024)):
        layer = spec.replace(n=n, k=k)
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight, x = make(layer, 1, "cuda"), given(m, layer, m, "cuda")
            packed = list(TritonW4A16LinearKernel.pack(weight).values())
            judge(TritonW4A16LinearKernel.apply(x, packed, None, layer), x, weight)


@needs_fp8
@pytest.mark.parametrize("m", [1, 16, 20, 40, 100, 200, 1000])
@pytest.mark.parametrize(
    ("kernel", "spec"),
    [(TritonInt8ScaledMMLinearKernel, INT8), (TritonFp8BlockScaledMMKernel, BLOCK), (TritonFp8BlockScaledMMKernel, BLOCKS[-1])],
    ids=["int8", "blocks", "mxfp8"],
)
def test_scaled_mm_on_large_layers(kernel, spec, m):
    """Every tile configuration, a K that K slices do not divide, and an N so large that there is one K slice."""
    for n, k in ((2048, 4096), (20480, 1056)):
        layer = spec.replace(n=n, k=k, block=(spec.block[0], k) if kernel is TritonInt8ScaledMMLinearKernel else spec.block)
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight, x = make(layer, 1, "cuda"), given(m, layer, m, "cuda")
            judge(kernel.apply(x, list(kernel.pack(weight).values()), None, layer), x, weight)


def test_panels_and_the_fused_kernel_agree_with_the_reference():
    spec = W4.replace(n=1000, k=1000, weight=types.uint4, zero="int", block=(1, 32), bias=True, act_order=True)
    weight = random_weight(spec, 2, "cuda")
    packed, bias = list(TritonW4A16LinearKernel.pack(weight).values()), weight.bias.bfloat16()
    x = inputs(300, spec, 3, "cuda")
    check(launch.dequantize_then_matmul(x, packed, bias, spec), x, weight)
    for spec in (MX4, NV4.replace(**HALF), A16.replace(block=(128, 128)), MX4.replace(weight=types.float6_e3m2, act_order=True)):
        weight, x = random_weight(spec, 2, "cuda"), inputs(300, spec, 3, "cuda")
        check(launch.dequantize_then_matmul(x, list(TritonMinifloatLinearKernel.pack(weight).values()), None, spec), x, weight)


def _layers():
    yield QuantLinear(random_weight(W4.replace(n=4096, k=4096), 1, "cuda"), kernel="TritonW4A16LinearKernel")
    yield QuantLinear(random_weight(MX4.replace(n=1024, k=2048), 1, "cuda"), kernel="TritonMinifloatLinearKernel")
    if fp8.RowWiseTorchFP8ScaledMMLinearKernel.is_supported(Platform.detect("cuda")):
        yield QuantLinear(random_weight(E4M3, 1, "cuda"), kernel="RowWiseTorchFP8ScaledMMLinearKernel")


def test_graph_replays_are_bitwise_equal():
    for layer in _layers():
        for m in (1, 16, 64, 300):
            x = inputs(m, layer.spec, m, "cuda")
            want = layer(x)
            graph, out = captured(lambda layer=layer, x=x: layer(x))
            for _ in range(3):
                out.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(out, want)


def test_a_hundred_runs_are_bitwise_equal():
    for layer in _layers():
        for m in (1, 40):
            x = inputs(m, layer.spec, m, "cuda")
            want = layer(x)
            assert all(torch.equal(layer(x), want) for _ in range(100))


def test_torch_compile():
    for layer in _layers():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        with torch.inference_mode():
            for m in (2, 5, 70):
                x = inputs(m, layer.spec, m, "cuda")
                assert torch.equal(compiled(x), layer(x))

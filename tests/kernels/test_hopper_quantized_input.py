"""Inputs that are quantized before a call of the Hopper kernels: their layout, and launches of the binaries of a tensor."""

import importlib

import pytest
import torch

from bitline import InputError, types
from bitline.kernels.hopper import runtime, scaled_linear
from bitline.kernels.hopper.quantized_x import laid_out
from bitline.kernels.hopper.scaled_config import scaled_small_m_config
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.scaled_scheme import scaled_scheme
from bitline.kernels.hopper.w4a8_config import w4a8_small_m_config
from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.kernels.hopper.w4a8_scheme import w4a8_scheme
from bitline.quantized_input import fitted, reference_input
from bitline.testing.generators import inputs, random_weight
from bitline.types import ActSpec, LinearSpec

F8, I8, U4 = types.float8_e4m3fn, types.int8, types.uint4b8
FP8 = LinearSpec(200, 520, F8, (1, 520), scale_dtype=torch.float32, act=ActSpec(F8))
BLOCKS = FP8.replace(block=(128, 128), act=ActSpec(F8, True, "group", 128))
INT8 = FP8.replace(weight=I8, act=ActSpec(I8))
AZP = INT8.replace(act=ActSpec(I8, symmetric=False), bias=True)
W4A8 = LinearSpec(200, 520, U4, (1, 128), scale_dtype=torch.bfloat16, act=ActSpec(I8))
SPECS = {
    "fp8": FP8, "fp8 static": FP8.replace(block=(200, 520), act=ActSpec(F8, False, "tensor")),
    "fp8 per tensor": FP8.replace(act=ActSpec(F8, True, "tensor")), "fp8 ragged": FP8.replace(n=67, k=129, block=(1, 129)),
    "blocks": BLOCKS, "blocks offset": BLOCKS.replace(block_offset=(40, 0)), "int8 azp": AZP,
    "int8 static azp": INT8.replace(act=ActSpec(I8, False, "tensor", symmetric=False)),
    "w4a8": W4A8, "w4afp8 bias": W4A8.replace(act=ActSpec(F8), bias=True),
}  # fmt: skip
SIZES = [1, 2, 8, 9, 32, 33, 64, 65, 300]


def kernel_of(spec):
    return GluonHopperW4A8LinearKernel if spec.weight is U4 else GluonHopperScaledMMLinearKernel


def layer_of(spec, seed=1):
    """Packed tensors, bias, and x quantized by the reference."""
    weight = random_weight(spec, seed)
    packed = list(kernel_of(spec).pack(weight).values())
    bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)

    def quantized(m):
        return fitted(reference_input(inputs(m, spec, m), spec.act, weight.input_scale, weight.input_zero), spec)

    return packed, bias, quantized


def position(row):
    """`device.quantize.scale_position` with fragment_order."""
    return (row & -16) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1)


@pytest.mark.parametrize("fragment_order", [False, True])
@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 40, 64])
def test_scales_in_groups_lie_where_the_quantization_writes_them(m, fragment_order):
    codes, scales = torch.zeros(m, 520, dtype=torch.int8).view(torch.float8_e4m3fn), torch.rand(m, 5)
    stride = max(32, -(-m // 16) * 16)
    found = laid_out(codes, scales, None, scaled_scheme(BLOCKS), stride, fragment_order)
    assert found.scales.shape == (5, stride) and found.scales.is_contiguous() and found.zeros is None
    at = [position(row) if fragment_order else row for row in range(m)]
    assert torch.equal(found.scales[:, at], scales.t())
    assert sorted(map(position, range(stride))) == list(range(stride))


def test_codes_are_padded_to_the_columns_of_a_tensor_map():
    for spec, columns in ((FP8, 528), (FP8.replace(k=129, block=(1, 129)), 144), (FP8.replace(k=512, block=(1, 512)), 512)):
        codes = torch.randint(1, 100, (3, spec.k), dtype=torch.int8)
        found = laid_out(codes.view(torch.float8_e4m3fn), torch.ones(3), None, scaled_scheme(spec), 16, False).codes
        assert found.shape == (3, columns) and found.dtype == torch.float8_e4m3fn and found.is_contiguous()
        assert torch.equal(found.view(torch.int8)[:, : spec.k], codes) and not found.view(torch.int8)[:, spec.k :].any()


def test_rows_share_a_scale_and_zero_point_per_tensor():
    codes = torch.zeros(5, 520, dtype=torch.int8)
    found = laid_out(codes, torch.tensor([0.5]), torch.tensor([-7], dtype=torch.int32), scaled_scheme(AZP), 16, False)
    assert found.scales.tolist() == [0.5] * 5 and found.zeros.tolist() == [-7] * 5 and found.zeros.dtype == torch.int32
    found = laid_out(codes, torch.ones(5), None, scaled_scheme(AZP), 16, False)  # absent zero points are 0
    assert found.zeros.tolist() == [0] * 5 and found.zeros.dtype == torch.int32
    assert laid_out(codes, torch.ones(5), None, scaled_scheme(INT8), 16, False).zeros is None


def test_what_has_the_layout_is_not_copied_and_what_is_not_aligned_is():
    scheme = scaled_scheme(AZP.replace(k=512, block=(1, 512)))
    given = torch.ones(4, 512, dtype=torch.int8), torch.ones(4), torch.ones(4, dtype=torch.int32)
    found = laid_out(*given, scheme, 16, False)
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in given]
    shifted = [torch.ones(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in given]
    found = laid_out(*shifted, scheme, 16, False)
    assert all(t.data_ptr() % 16 == 0 and torch.equal(t, want) for t, want in zip(found, given, strict=True))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_row_has_the_tiles_and_sums_of_the_launch_for_up_to_eight(spec):
    """Only where x is quantized differs, so that a row gives the same bits by both."""
    for n in (16, 576, 1000, 4096, 8192, 28672, 152064):
        for k in (128, 512, 4096, 8192, 28672):
            if spec.weight is U4:
                scheme = w4a8_scheme(spec.replace(n=n, k=k))
                one, more = (w4a8_small_m_config(m, n, k, scheme, 132) for m in (1, 2))
                assert one._replace(resident=False, x_chunks=0, stages=0) == more._replace(stages=0)
            else:
                one, more = (scaled_small_m_config(m, n, k, 132) for m in (1, 2))
                assert one._replace(private=False) == more and not more.private


# ---- launches ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(fake, monkeypatch):
    """`run_quantized` on a device that runs nothing."""
    pytest.importorskip("triton")
    monkeypatch.setattr(scaled_linear, "_check_device", lambda x, weight: None)
    return scaled_linear.run_quantized


def named(call):
    """A launch's arguments by name; of a tensor map its address and shape."""
    kernel, count, (_, _, _, _, _, *values) = call
    names = getattr(importlib.import_module(f"bitline.kernels.hopper.device.{MODULES.get(kernel, kernel)}"), kernel).arg_names
    assert len(names) == count
    found, rest = {}, iter(values)
    for name in names:
        value = next(rest)
        if isinstance(value, tuple) and value[:1] == ("map",):
            assert [next(rest) for _ in range(4)] == [*value[2], value[2][1], 1]
            value = value[1:]
        found[name] = value
    assert not list(rest)
    return found


MODULES = {"quantize_x": "quantize"}


def types_of(args):
    """What the compiler sees of a kernel's arguments: two calls of the same types have the same code."""

    def of(a):  # fmt: skip
        if isinstance(a, tuple):
            return "map", a[0].dtype, tuple(a[1])
        return a.dtype if isinstance(a, torch.Tensor) else f"*{a.dtype}" if isinstance(a, runtime.TypedPointer) else type(a)

    names = {torch.float32: "*fp32", torch.int32: "*i32", torch.int8: "*i8"}
    return [names.get(t, t) if isinstance(t, torch.dtype) else t for t in map(of, args)]


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_launch_multiplies_the_given_codes_and_quantizes_nothing(fake, run, spec, m):
    packed, bias, quantized = layer_of(spec)
    q = quantized(m)
    run(*q, packed, bias, spec)  # compiles
    assert not fake.calls and len(fake.compiled) == 1
    fake.maps.clear()
    y = run(*q, packed, bias, spec)
    assert y.shape == (m, spec.n) and y.dtype == spec.act_dtype and y.is_contiguous()
    (call,) = fake.calls
    args, small = named(call), m <= scaled_linear.small_m_limit(spec)
    assert call[0].endswith("small_m") == small
    columns, plan = -(-spec.k // 16) * 16, scaled_linear.plan_of(spec, max(2, m), bias is not None, -1)
    assert args["x_desc"][1] == (m, columns) and args["M"] == m and args["N"] == spec.n
    if columns == spec.k:
        assert args["x_desc"][0] == q.codes.data_ptr()
    if small:
        assert args["units"] == args["num_quantizers"] == 0 and args["codes_ptr"] == args["x_desc"][0]
        assert not getattr(plan.config, "private", False) and not getattr(plan.config, "resident", False)
    if spec.act.granularity == "group":
        address, shape = args["x_scale_desc"]
        assert shape == (5, plan.space.stride) and address == args["x_scale_ptr"]
    elif spec.act.granularity == "token":
        assert args["x_scale_ptr"] == q.scales.data_ptr()
        assert "x_zero_ptr" not in args or args["x_zero_ptr"] == (0 if q.zero is None else q.zero.data_ptr())
    assert args["x_scale_ptr"] and args["x_scale_ptr"] not in {t.data_ptr() for t in packed}


@pytest.mark.parametrize("m", [2, 64, 300])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_binary_is_that_of_a_tensor(fake, run, spec, m):
    packed, bias, quantized = layer_of(spec)
    x, q = torch.ones(m, -(-spec.k // 8) * 8, dtype=spec.act_dtype), quantized(m)
    plan = scaled_linear.plan_of(spec, m, bias is not None, -1)
    plan(x, packed, bias)
    count = len(fake.compiled)
    run(*q, packed, bias, spec)
    assert len(fake.compiled) == count and fake.calls  # neither compiles nor launches the quantization
    runtime.binaries.clear()
    plan.binary = None
    run(*q, packed, bias, spec)
    (*_, one), other = fake.compiled[:count], fake.compiled[count]
    assert len(fake.compiled) == count + 1
    assert one[0] == other[0] and one[2] == other[2] and types_of(one[1]) == types_of(other[1])


@pytest.mark.parametrize("spec", [FP8, BLOCKS, AZP, W4A8], ids=["fp8", "blocks", "azp", "w4a8"])
def test_maps_follow_the_tensors_and_m(fake, run, spec):
    spec = spec.replace(k=512, block=spec.block if spec.block[1] == 128 else (1, 512))
    packed, bias, quantized = layer_of(spec)
    kept = [quantized(m) for m in (3, 5, 8, 70)]
    for q in kept:
        run(*q, packed, bias, spec)
    for _ in range(2):
        for q in kept:
            run(*q, packed, bias, spec)
            found = named(fake.calls[-1])
            assert found["x_desc"] == (q.codes.data_ptr(), tuple(q.codes.shape)) and found["M"] == q.codes.shape[0]
    larger = kept[0]._replace(codes=torch.cat([kept[0].codes.view(torch.uint8)] * 2).view(kept[0].codes.dtype))
    for rows in (6, 4):  # the same address with another number of rows
        codes = larger.codes[:rows]
        double = [None if t is None else torch.cat([t, t])[:rows] for t in larger[1:]]
        run(codes, *double, packed, bias, spec)
        assert named(fake.calls[-1])["x_desc"] == (codes.data_ptr(), (rows, 512))


@pytest.mark.parametrize("m", [8, 300])
def test_a_tensor_after_a_quantized_input_is_quantized(fake, run, m):
    packed, bias, quantized = layer_of(AZP)
    x, q = torch.ones(m, 520).bfloat16(), quantized(m)
    plan = scaled_linear.plan_of(AZP, m, True, -1)
    for _ in range(3):
        run(*q, packed, bias, AZP)
        fake.calls.clear()
        plan(x, packed, bias)
    names = [name for name, _, _ in fake.calls]
    last = named(fake.calls[-1])
    assert last["x_desc"][0] != q.codes.data_ptr() and last["x_zero_ptr"] != q.zero.data_ptr()
    if m == 8:
        assert last["x_ptr"] == x.data_ptr() and last["units"] >= 8 and last["num_quantizers"] > 0
    else:
        assert names[0] == "quantize_x" and named(fake.calls[0])["x_ptr"] == x.data_ptr()


def test_every_tensor_has_to_be_on_the_weights_gpu(fake, monkeypatch):
    packed, bias, quantized = layer_of(AZP)
    with pytest.raises(InputError, match="on one GPU"):
        GluonHopperScaledMMLinearKernel.apply_quantized(*quantized(3), packed, bias, AZP)
    seen = []
    monkeypatch.setattr(scaled_linear, "_check_device", lambda x, weight: seen.append(x))
    q = quantized(3)
    scaled_linear.run_quantized(*q, packed, bias, AZP)
    assert {id(t) for t in q} <= {id(t) for t in seen}

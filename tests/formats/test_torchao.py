"""torchao against its own weights, and against the definition on tensors made here."""

import json

import float_files
import pytest
import torch
from producers import cases, check, one

from bitline import CheckpointError

CONFIG = {"quant_method": "torchao"}


def metadata(kind, **data):
    return {"m.proj.weight": json.dumps({"_type": kind, "_data": data})}


def int8_inputs(how):
    return {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {"granularity": {"_type": how}, "mapping_type": {"_data": "SYMMETRIC"}},
    }


@pytest.mark.parametrize("case", cases("torchao_"))
def test_producers_own_weight(case):
    check(case)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_integers_of_few_bits(width, asymmetric, tmp_path):
    g = torch.Generator().manual_seed(width)
    half = 1 << (width - 1)
    codes = torch.randint(-half, half, (6, 70), generator=g).to(torch.int8)
    zero = torch.randint(-half, half, (6, 3), generator=g).to(torch.int8) * asymmetric
    scale = torch.rand(6, 3, generator=g)
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero}
    facts = metadata("IntxUnpackedToInt8Tensor", target_dtype={"_data": f"int{width}"}, block_size=[1, 32])
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.zero == ("int" if asymmetric else "none") and record.spec.weight.bits == width
    group = torch.arange(70) // 32
    assert torch.equal(record.weight().dequantize(), (codes.float() - zero.float()[:, group]) * scale[:, group])


@pytest.mark.parametrize(("how", "granularity"), [("PerRow", "token"), ("PerTensor", "tensor")])
def test_inputs(how, granularity, tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int8), "_weight_scale": torch.ones(4, 1), "bias": torch.ones(4)}
    record = one(tmp_path, CONFIG, tensors, metadata("Int8Tensor", block_size=[1, 8], act_quant_kwargs=int8_inputs(how)))
    assert str(record.spec.act) == f"int8-dynamic-{granularity}" and record.spec.bias


def test_kinds_that_belong_to_a_kernel_are_named(tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int32), "_weight_scale": torch.ones(4, 1)}
    with pytest.raises(CheckpointError, match=r"not supported yet.*'Int4TilePackedTo4dTensor'.*IntxUnpacked"):
        one(tmp_path, CONFIG, tensors, metadata("Int4TilePackedTo4dTensor"))


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


def tiles(scales):
    """Scales as cuBLAS wants them, one at a time: tiles of 128 rows by 4, row r at (r % 32, 4 * (r // 32))."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * 32, across * 16, dtype=torch.uint8)
    flat = out.view(-1)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * across + c // 4
            flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales.view(torch.uint8)[r, c]
    return out.view(scales.dtype)


ELEMENTS = {
    "float8_e4m3fn": (dtype("float8_e4m3fn"), 8), "float8_e5m2": (dtype("float8_e5m2"), 8), "float6_e2m3": ("fp6_e2m3", 6),
    "float6_e3m2": ("fp6_e3m2", 6), "float4_e2m1": (dtype("float4_e2m1fn_x2"), 4),
}  # fmt: skip


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx(element, tiled, tmp_path):
    name, width = ELEMENTS[element]
    n, k, size = 130, 96, 32
    codes = float_files.random_bytes(n, k, below=1 << width if width < 8 else 0x7C)
    scales = float_files.random_bytes(n, k // size, below=255).view(torch.float8_e8m0fnu)
    stored = codes if width == 6 else codes[:, ::2] | codes[:, 1::2] << 4 if width == 4 else codes.view(getattr(torch, element))
    tensors = {"_weight_qdata": stored, "_weight_scale": tiles(scales) if tiled else scales}
    inputs = {"_type": "QuantizeTensorToMXKwargs", "_data": {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 32}}
    facts = metadata("MXTensor", elem_dtype=name, block_size=size, is_swizzled_scales=tiled, act_quant_kwargs=inputs)
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.weight.name == element and str(record.spec.act) == "float8_e4m3fn-dynamic-group32-e8m0"
    values = torch.tensor(record.spec.weight.values(), dtype=torch.float64)[codes.int()]
    factor = torch.tensor([[float_files.e8m0(int(b)) for b in row] for row in scales.view(torch.uint8)], dtype=torch.float64)
    wanted = (values * factor.repeat_interleave(size, 1)).float()
    assert torch.equal(record.weight().dequantize(), wanted)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("two", [False, True])
def test_nvfp4(two, tiled, tmp_path):
    n, k = 40, 80
    packed, scales = float_files.random_bytes(n, k // 2), float_files.finite_fp8(n, k // 16, seed=3)
    tensors = {"_weight_qdata": packed, "_weight_scale": tiles(scales) if tiled else scales}
    tensors |= (
        {"_weight_per_tensor_scale": torch.tensor(0.013), "_weight_act_per_tensor_scale": torch.tensor(0.25)} if two else {}
    )
    inputs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"block_size": 16, "use_dynamic_per_tensor_scale": False}}
    record = one(
        tmp_path, CONFIG, tensors, metadata("NVFP4Tensor", block_size=16, is_swizzled_scales=tiled, act_quant_kwargs=inputs)
    )
    weight = record.weight()
    assert str(record.spec.act) == "float4_e2m1-dynamic-group16-e4m3"
    assert weight.input_scale is None if not two else float(weight.input_scale) == 4.0
    top = float(torch.tensor(0.013)) if two else 1.0
    codes = [float_files.nibbles(row) for row in packed.tolist()]
    raw = scales.view(torch.uint8)
    wanted = torch.empty(n, k)
    for i in range(n):
        for j in range(k):
            scale = torch.tensor(float_files.e4m3(int(raw[i, j // 16])) * top, dtype=torch.float64).float()
            wanted[i, j] = float_files.e2m1(codes[i][j]) * scale
    assert torch.equal(weight.dequantize(), wanted)


@pytest.mark.parametrize("eight", [False, True])
def test_int4(eight, tmp_path):
    n, k, size = 6, 64, 32
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(-8, 8, (n, k), generator=g)
    packed = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    scale = torch.rand(k // size, n, generator=g).bfloat16()
    zero = torch.randn(k // size, n, generator=g).bfloat16() * (not eight)
    tensors = {
        "_weight_qdata": packed,
        "_weight_scale": scale,
        "_weight_zero_point": zero,
        "_weight_act_pre_scale": torch.rand(k),
    }
    facts = metadata("Int4Tensor", block_size=[1, size], shape=[n, k],
                     activation_dtype=dtype("float8_e4m3fn" if eight else "bfloat16"))  # fmt: skip
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.input_multiplier and str(record.spec.act) == ("float8_e4m3fn-dynamic-token" if eight else "None")
    spread = lambda t: t.float().t().repeat_interleave(size, 1)
    assert torch.equal(record.weight().dequantize(), codes.float() * spread(scale) + spread(zero))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_static_inputs(asymmetric, tmp_path):
    tensors = {
        "_weight_qdata": torch.ones(4, 8, dtype=torch.int8), "_weight_scale": torch.ones(4, 1),
        "_weight_act_quant_scale": torch.tensor([[0.5]]), "_weight_act_quant_zero_point": torch.tensor([[3]], dtype=torch.int8),
    }  # fmt: skip
    inputs = int8_inputs("PerTensor")
    inputs["_data"]["mapping_type"] = {"_type": "MappingType", "_data": "ASYMMETRIC" if asymmetric else "SYMMETRIC"}
    record = one(tmp_path, CONFIG, tensors, metadata("Int8Tensor", block_size=[1, 8], act_quant_kwargs=inputs))
    weight = record.weight()
    assert str(record.spec.act) == "int8-static-tensor" + "-asym" * asymmetric and float(weight.input_scale) == 0.5
    assert (None if weight.input_zero is None else int(weight.input_zero)) == (3 if asymmetric else None)


@pytest.mark.parametrize(
    ("granularity", "bound", "text"),
    [
        ({"_type": "PerRow", "_data": {"dim": -1}}, None, "token"),
        ({"_type": "PerTensor", "_data": {}}, 1200.0, "tensor-limit1200.0"),
        ({"_type": "PerBlock", "_data": {"block_size": [1, 128]}}, None, "group128"),
    ],
)  # fmt: skip
def test_fp8_inputs(granularity, bound, text, tmp_path):
    inputs = {"_type": "", "_data": {"float8_dtype": dtype("float8_e4m3fn"), "granularity": granularity, "hp_value_ub": bound}}
    tensors = {"_weight_qdata": float_files.finite_fp8(4, 8), "_weight_scale": torch.ones(())}
    record = one(tmp_path, CONFIG, tensors, metadata("Float8Tensor", block_size=[], act_quant_kwargs=inputs))
    assert str(record.spec.act) == f"float8_e4m3fn-dynamic-{text}"
    assert torch.equal(record.weight().dequantize(), tensors["_weight_qdata"].float())

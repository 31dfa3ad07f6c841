"""torchao against its own weights, and against the definition of each tensor subclass."""

import json

import pytest
import reference_minifloats as minifloats
import torch
from producers import cases, check, one

from bitline import CheckpointError

CONFIG = {"quant_method": "torchao"}


def metadata(kind, **data):
    return {"m.proj.weight": json.dumps({"_type": kind, "_data": data})}


def int8_act(granularity):
    return {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {"granularity": {"_type": granularity}, "mapping_type": {"_data": "SYMMETRIC"}},
    }


@pytest.mark.parametrize("case", cases("torchao_"))
def test_producers_weight(case):
    check(case)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_integers(bits, asymmetric, tmp_path):
    g = torch.Generator().manual_seed(bits)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (6, 70), generator=g).to(torch.int8)
    zero = torch.randint(-half, half, (6, 3), generator=g).to(torch.int8) * asymmetric
    scale = torch.rand(6, 3, generator=g)
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero}
    facts = metadata("IntxUnpackedToInt8Tensor", target_dtype={"_data": f"int{bits}"}, block_size=[1, 32])
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.zero == ("int" if asymmetric else "none") and record.spec.weight.bits == bits
    group = torch.arange(70) // 32
    assert torch.equal(record.weight().dequantize(), (codes.float() - zero.float()[:, group]) * scale[:, group])


@pytest.mark.parametrize(("name", "granularity"), [("PerRow", "token"), ("PerTensor", "tensor")])
def test_activations(name, granularity, tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int8), "_weight_scale": torch.ones(4, 1), "bias": torch.ones(4)}
    record = one(tmp_path, CONFIG, tensors, metadata("Int8Tensor", block_size=[1, 8], act_quant_kwargs=int8_act(name)))
    assert str(record.spec.act) == f"int8-dynamic-{granularity}" and record.spec.bias


def test_kernel_specific_layouts_are_refused_by_name(tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int32), "_weight_scale": torch.ones(4, 1)}
    with pytest.raises(CheckpointError, match=r"not supported yet.*'Int4TilePackedTo4dTensor'.*IntxUnpacked"):
        one(tmp_path, CONFIG, tensors, metadata("Int4TilePackedTo4dTensor"))


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


def swizzle(scales):
    """Scales in cuBLAS's swizzled layout, one at a time: tiles of 128 rows by 4, row r at (r % 32, 4 * (r // 32))."""
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


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx(element, swizzled, tmp_path):
    name, bits = ELEMENTS[element]
    n, k, size = 130, 96, 32
    codes = minifloats.random_bytes(n, k, below=1 << bits if bits < 8 else 0x7C)
    scales = minifloats.random_bytes(n, k // size, below=255).view(torch.float8_e8m0fnu)
    stored = codes if bits == 6 else codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes.view(getattr(torch, element))
    tensors = {"_weight_qdata": stored, "_weight_scale": swizzle(scales) if swizzled else scales}
    inputs = {"_type": "QuantizeTensorToMXKwargs", "_data": {"elem_dtype": dtype("float8_e4m3fn"), "block_size": 32}}
    facts = metadata("MXTensor", elem_dtype=name, block_size=size, is_swizzled_scales=swizzled, act_quant_kwargs=inputs)
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.weight.name == element and str(record.spec.act) == "float8_e4m3fn-dynamic-group32-e8m0"
    values = torch.tensor(record.spec.weight.values(), dtype=torch.float64)[codes.int()]
    factor = torch.tensor([[minifloats.e8m0(int(b)) for b in row] for row in scales.view(torch.uint8)], dtype=torch.float64)
    wanted = (values * factor.repeat_interleave(size, 1)).float()
    assert torch.equal(record.weight().dequantize(), wanted)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("has_global", [False, True])
def test_nvfp4(has_global, swizzled, tmp_path):
    n, k = 40, 80
    packed, scales = minifloats.random_bytes(n, k // 2), minifloats.finite_fp8(n, k // 16, seed=3)
    tensors = {"_weight_qdata": packed, "_weight_scale": swizzle(scales) if swizzled else scales}
    tensors |= (
        {"_weight_per_tensor_scale": torch.tensor(0.013), "_weight_act_per_tensor_scale": torch.tensor(0.25)}
        if has_global
        else {}
    )
    inputs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"block_size": 16, "use_dynamic_per_tensor_scale": False}}
    record = one(
        tmp_path, CONFIG, tensors, metadata("NVFP4Tensor", block_size=16, is_swizzled_scales=swizzled, act_quant_kwargs=inputs)
    )
    weight = record.weight()
    assert str(record.spec.act) == "float4_e2m1-dynamic-group16-e4m3"
    assert weight.input_scale is None if not has_global else float(weight.input_scale) == 4.0
    global_scale = float(torch.tensor(0.013)) if has_global else 1.0
    codes = [minifloats.nibbles(row) for row in packed.tolist()]
    raw = scales.view(torch.uint8)
    wanted = torch.empty(n, k)
    for i in range(n):
        for j in range(k):
            scale = torch.tensor(minifloats.e4m3(int(raw[i, j // 16])) * global_scale, dtype=torch.float64).float()
            wanted[i, j] = minifloats.e2m1(codes[i][j]) * scale
    assert torch.equal(weight.dequantize(), wanted)


@pytest.mark.parametrize("fp8_act", [False, True])
def test_int4(fp8_act, tmp_path):
    n, k, size = 6, 64, 32
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(-8, 8, (n, k), generator=g)
    packed = ((codes[:, ::2] & 15) | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    scale = torch.rand(k // size, n, generator=g).bfloat16()
    zero = torch.randn(k // size, n, generator=g).bfloat16() * (not fp8_act)
    tensors = {
        "_weight_qdata": packed,
        "_weight_scale": scale,
        "_weight_zero_point": zero,
        "_weight_act_pre_scale": torch.rand(k),
    }
    facts = metadata("Int4Tensor", block_size=[1, size], shape=[n, k],
                     activation_dtype=dtype("float8_e4m3fn" if fp8_act else "bfloat16"))  # fmt: skip
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.input_multiplier and str(record.spec.act) == ("float8_e4m3fn-dynamic-token" if fp8_act else "None")
    spread = lambda t: t.float().t().repeat_interleave(size, 1)
    assert torch.equal(record.weight().dequantize(), codes.float() * spread(scale) + spread(zero))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_static_activations(asymmetric, tmp_path):
    tensors = {
        "_weight_qdata": torch.ones(4, 8, dtype=torch.int8), "_weight_scale": torch.ones(4, 1),
        "_weight_act_quant_scale": torch.tensor([[0.5]]), "_weight_act_quant_zero_point": torch.tensor([[3]], dtype=torch.int8),
    }  # fmt: skip
    inputs = int8_act("PerTensor")
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
def test_fp8_activations(granularity, bound, text, tmp_path):
    inputs = {"_type": "", "_data": {"float8_dtype": dtype("float8_e4m3fn"), "granularity": granularity, "hp_value_ub": bound}}
    tensors = {"_weight_qdata": minifloats.finite_fp8(4, 8), "_weight_scale": torch.ones(())}
    record = one(tmp_path, CONFIG, tensors, metadata("Float8Tensor", block_size=[], act_quant_kwargs=inputs))
    assert str(record.spec.act) == f"float8_e4m3fn-dynamic-{text}"
    assert torch.equal(record.weight().dequantize(), tensors["_weight_qdata"].float())

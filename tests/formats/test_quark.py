"""Quark against its own weights, and against packers that pack one code at a time."""

import pytest
import torch
from producers import cases, check, one, write
from reference_packers import AWQ_ORDER, as_int32, random_layer, stream, values

from bitline import CheckpointError

G = 32


def config(weight, order="reorder", **layer):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, **layer}, "export": {"pack_method": order}}


def spec(dtype="uint4", **more):
    shared = {"qscheme": "per_group", "group_size": G, "ch_axis": -1, "symmetric": dtype == "int4", "is_dynamic": False}
    return {"dtype": dtype, **shared, **more}


def pack(rows, order):
    """Rows of codes, 8 in an int32, padded with zeros."""
    packed = []
    for row in rows:
        row = [int(c) & 15 for c in row] + [0] * (-len(row) % 8)
        columns = AWQ_ORDER if order == "reorder" else range(8)
        packed.append(stream([row[block + c] for block in range(0, len(row), 8) for c in columns], 4))
    return as_int32(packed)


@pytest.mark.parametrize("case", cases("quark_"))
def test_producers_weight(case):
    check(case)


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize(("k", "n"), [(96, 16), (64, 13), (41, 9)])
def test_uint4(k, n, order, tmp_path):
    codes, zeros, scales = random_layer(k, n, -(-k // G), 4)
    tensors = {"weight": pack(codes, order), "weight_scale": scales, "weight_zero_point": pack(zeros, order)}
    record = one(tmp_path, config(spec(), order), tensors)
    assert (record.format, record.spec.scheme) == (f"quark uint4 {order}", "uint4+zero g32")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(k)]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4(symmetric, tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    if symmetric:
        zeros = [[8] * 16] * 2
    flip = lambda rows: [[int(c) ^ 8 for c in row] for row in rows]  # two's complement of code - 8
    tensors = {"weight": pack(flip(codes), "reorder"), "weight_scale": scales}
    tensors["weight_zero_point"] = pack(flip(zeros), "reorder")
    record = one(tmp_path, config(spec("int4", symmetric=symmetric)), tensors)
    assert record.spec.weight.name == ("uint4b8" if symmetric else "uint4")
    assert torch.equal(record.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(64)]))


def test_asymmetric_int8(tmp_path):
    g = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(-128, 128, shape, generator=g).to(torch.int8) for shape in ((6, 40), (6,)))
    scale = torch.rand(6, generator=g)
    rule = spec("int8", qscheme="per_channel", ch_axis=0, symmetric=False)
    record = one(tmp_path, config(rule), {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros})
    assert torch.equal(record.weight().dequantize(), (codes.float() - zeros.float()[:, None]) * scale[:, None])


def test_fp6_under_e8m0_scales(tmp_path):
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (4, 48), generator=g).to(torch.uint8)  # 64 codes of 6 bits
    scale = torch.randint(100, 150, (4, 2), generator=g).to(torch.uint8)
    record = one(tmp_path, config(spec("fp6_e3m2", scale_format="e8m0")), {"weight": codes, "weight_scale": scale})
    table, rows = record.spec.weight.values(), [sum(int(b) << 8 * i for i, b in enumerate(row)) for row in codes]
    expected = [
        [table[row >> 6 * k & 63] * 2.0 ** (int(scale[n, k // 32]) - 127) for k in range(64)] for n, row in enumerate(rows)
    ]
    assert torch.equal(record.weight().dequantize(), torch.tensor(expected))


def test_the_first_matching_pattern_wins(tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    tensors = {"weight": pack(codes, "reorder"), "weight_scale": scales, "weight_zero_point": pack(zeros, "reorder")}
    conf = config(spec(group_size=64)) | {"layer_quant_config": {"x*": {}, "*proj": {"weight": spec()}, "m.*": {}}}
    assert one(tmp_path, conf, tensors).spec.block == (1, G)


def test_unsupported_activations_are_refused(tmp_path):
    codes, zeros, scales = random_layer(64, 16, 2, 4)
    tensors = {"weight": pack(codes, "reorder"), "weight_scale": scales, "weight_zero_point": pack(zeros, "reorder")}
    with pytest.raises(CheckpointError, match=r"inputs quantized this way are not supported yet.*int16 per_group"):
        one(tmp_path, config(spec(), input_tensors=spec("int16")), tensors)


def stored_row(row, dtype, order="order"):
    """One row of codes as Quark stores it: packed in int32, packed in bytes, or one byte or int32 per code."""
    row, mask = [int(c) for c in row], (1 << int(dtype[-1])) - 1
    if dtype.endswith("4"):
        return pack([row], order)[0]
    if dtype == "uint2":
        return torch.tensor([sum(c << 6 - 2 * i for i, c in enumerate(row[at : at + 4])) for at in range(0, len(row), 4)]).byte()
    if dtype == "int3":
        number = sum((c & mask) << 3 * i for i, c in enumerate(row))
        return torch.tensor(list(number.to_bytes(len(row) * 3 // 8, "little"))).byte()
    return torch.tensor(row, dtype={"int2": torch.int32, "int8": torch.int8, "uint8": torch.uint8}[dtype])


INTEGERS = ["int2", "uint2", "int3", "int4", "uint4", "int8", "uint8"]


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("how", ["per_tensor", "per_channel", "per_group"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype, how, symmetric, order, tmp_path):
    if symmetric and dtype.startswith("u"):
        return  # Quark stores zero points for these, implicit or not
    n, k, bits = 16, 256, int(dtype[-1])
    low = 0 if dtype.startswith("u") else -(1 << bits - 1)
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(low, low + (1 << bits), (n, k), generator=g)
    grid = {"per_tensor": (1, 1), "per_channel": (n, 1), "per_group": (n, k // G)}[how]
    zero = torch.zeros(grid, dtype=torch.long) if symmetric else torch.randint(low, low + (1 << bits), grid, generator=g)
    scale = torch.rand(grid, generator=g)
    grouped = how == "per_group"
    stored_rows = lambda rows: torch.stack([stored_row(row, dtype, order) for row in rows])
    stored_zero = {
        "per_tensor": lambda: zero.reshape(()).int(), "per_channel": lambda: stored_row(zero.flatten(), dtype, order),
        "per_group": lambda: stored_rows(zero if dtype == "int3" else zero.t()),
    }[how]()  # fmt: skip
    tensors = {
        "weight": stored_rows(codes.t() if grouped and dtype != "int3" else codes), "weight_zero_point": stored_zero,
        "weight_scale": scale.t() if grouped else scale.reshape(grid[:1] if how == "per_channel" else ()),
    }  # fmt: skip
    rule = spec(dtype, qscheme=how, ch_axis=-1 if grouped else 0, symmetric=symmetric, group_size=G if grouped else None)
    record = one(tmp_path, config(rule, order), tensors)
    spread = lambda t: t.repeat_interleave(G, 1) if grouped else t
    assert record.spec.weight.bits == bits
    assert torch.equal(record.weight().dequantize(), ((codes - spread(zero)).float() * spread(scale)).float())


@pytest.mark.parametrize("stored", [torch.int32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["uint2", "int4"])
def test_float_zero_points(dtype, stored, tmp_path):
    n, k, bits = 16, 64, int(dtype[-1])
    low = 0 if dtype.startswith("u") else -(1 << bits - 1)
    g = torch.Generator().manual_seed(3)
    codes, zero = torch.randint(low, low + (1 << bits), (n, k), generator=g), torch.randint(-20, 40, (n, k // G), generator=g)
    zero = zero + (0.5 if stored.is_floating_point else 0)
    scale = torch.rand(n, k // G, generator=g).bfloat16()
    tensors = {
        "weight": torch.stack([stored_row(row, dtype, "order") for row in codes.t()]), "weight_scale": scale.t(),
        "weight_zero_point": zero.t().to(stored),
    }  # fmt: skip
    record = one(tmp_path, config(spec(dtype, symmetric=False, zero_point_type="float32"), "order"), tensors)
    spread = lambda t: t.double().repeat_interleave(G, 1)
    assert record.spec.zero == "float"
    assert torch.equal(record.weight().dequantize(), ((codes - spread(zero)) * spread(scale)).float())


@pytest.mark.parametrize("element", ["fp4", "fp6_e2m3", "fp6_e3m2"])
def test_mx_type_with_unbiased_exponents(element, tmp_path):
    n, k, bits = 4, 64, 4 if element == "fp4" else 6
    g = torch.Generator().manual_seed(7)
    codes, exponent = torch.randint(1 << bits, (n, k), generator=g), torch.randint(-100, 100, (n, k // 32), generator=g)
    rows = []
    for row in codes.tolist():
        if bits == 4:
            rows.append([a | b << 4 for a, b in zip(row[::2], row[1::2], strict=True)])
        else:
            four = [row[i : i + 4] for i in range(0, k, 4)]
            rows.append([byte for a, b, c, d in four for byte in (
                a >> 4 << 6 | b >> 4 << 4 | c >> 4 << 2 | d >> 4, (a & 15) << 4 | b & 15, (c & 15) << 4 | d & 15)])  # fmt: skip
    tensors = {"weight": torch.tensor(rows).byte(), "weight_scale": exponent.to(torch.int8).view(torch.uint8)}
    rule = {"dtype": "mx", "mx_element_dtype": element, "group_size": 32, "ch_axis": -1, "qscheme": None}
    record = one(tmp_path, config(rule), tensors)
    table = torch.tensor(record.spec.weight.values(), dtype=torch.float64)
    wanted = (table[codes] * 2.0 ** exponent.double().repeat_interleave(32, 1)).float()
    assert record.format == f"quark mx {element}" and torch.equal(record.weight().dequantize(), wanted)


def test_e5m3_scales(tmp_path):
    codes, scale = torch.arange(256).reshape(2, 128).byte(), torch.tensor([range(0, 256, 16), range(5, 255, 16)]).byte()
    value = lambda b: (b & 7) * 2.0**-17 if b < 8 else (8 + (b & 7)) * 2.0 ** ((b >> 3) - 18)
    tensors = {"weight": codes, "weight_scale": scale}
    record = one(tmp_path, config(spec("fp4", group_size=16, scale_format="e5m3")), tensors)
    table = record.spec.weight.values()
    wanted = [[table[c >> h & 15] * value(int(scale[n, i // 8])) for i, c in enumerate(row) for h in (0, 4)]
              for n, row in enumerate(codes.tolist())]  # fmt: skip
    assert torch.equal(record.weight().dequantize(), torch.tensor(wanted))


def fp8_layer():
    scalars = {name: torch.tensor(0.5) for name in ("weight_scale", "input_scale")}
    return {"weight": torch.ones(4, 8).to(torch.float8_e4m3fn), **scalars}


FP8_RULE = spec("fp8_e4m3", qscheme="per_tensor", symmetric=True)


def test_quantized_outputs_of_the_kv_cache(tmp_path):
    tensors = {"m.k_proj." + name: t for name, t in {**fp8_layer(), "output_scale": torch.tensor(0.1)}.items()}
    conf = config(FP8_RULE, input_tensors=FP8_RULE, output_tensors=FP8_RULE)
    checkpoint = write(tmp_path, conf, {"x": torch.ones(1)}, modules=tensors)
    (record,) = checkpoint.layers()
    assert "cache" in record.oddities[0] and str(record.spec.act) == "float8_e4m3fn-static-tensor"
    assert checkpoint.dense_names() == ["m.proj.x"]


def test_quantized_outputs_of_other_layers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"output_tensors of a layer is quantized.*m\.proj"):
        one(tmp_path, config(FP8_RULE, output_tensors=FP8_RULE), fp8_layer())


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_static_activations_with_a_zero_point(dtype, tmp_path):
    rule = spec("int8", qscheme="per_tensor", symmetric=True)
    tensors = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(0.5)}
    tensors["input_zero_point"] = torch.tensor(140 if dtype == "uint8" else 12, dtype=getattr(torch, dtype))
    inputs = spec(dtype, qscheme="per_tensor", symmetric=False)
    record = one(tmp_path, config(rule, input_tensors=inputs), tensors)
    assert str(record.spec.act) == "int8-static-tensor-asym" and int(record.weight().input_zero) == 12


@pytest.mark.parametrize("dtype", ["mx6", "mx9", "bfp16", "int16"])
def test_unsupported_types_are_named(dtype, tmp_path):
    tensors = {"weight": torch.ones(4, 32, dtype=torch.uint8), "weight_scale": torch.ones(4, 2, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"not supported yet.*{dtype}"):
        one(tmp_path, config(spec(dtype, group_size=16)), tensors)


def test_an_excluded_layer_that_is_quantized_is_a_warning(tmp_path):
    record = one(tmp_path, config(FP8_RULE) | {"exclude": ["lm_head", "*.proj"]}, fp8_layer())
    assert "the config says that this layer is not quantized, but its tensors are" in record.oddities

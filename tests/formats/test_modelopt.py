"""ModelOpt's own files bit for bit, and every layout against a reference that dequantizes one code at a time."""

import dataclasses
import json

import pytest
import torch
from reference_minifloats import (
    CASES,
    CHECKPOINTS,
    e2m1,
    e4m3,
    e8m0,
    finite_fp8,
    matches_producer,
    nibbles,
    one,
    product,
    random_bytes,
    shards_make_whole,
)
from reference_packers import write

from bitline import CheckpointError, LinearSpec, QuantLinear, choose, open_checkpoint
from bitline.act_quant import fake_quantize
from bitline.errors import InputError, WeightError
from bitline.model.embedding import QuantEmbedding
from bitline.testing import check

N, K = 40, 96


def config(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def fp8_numbers(weight):
    return [[e4m3(b) for b in row] for row in weight.view(torch.uint8).tolist()]


def nvfp4():
    return {
        "weight": random_bytes(N, K // 2), "weight_scale": finite_fp8(N, K // 16, seed=3).float().abs().to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.0123), "input_scale": torch.tensor(0.0371),
    }  # fmt: skip


def awq(groups=3):
    multiplier = (torch.rand(K, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    return {"weight": random_bytes(N // 2, K), "weight_scale": torch.rand(N, groups) + 0.01, "pre_quant_scale": multiplier}


def row_pairs(packed):
    """Two's complement rows: the low nibbles of a row of bytes are an even row, the high ones the odd row after it."""
    nibbles = [[[b & 15 for b in row], [b >> 4 for b in row]] for row in packed.tolist()]
    return [[c - 16 if c > 7 else c for c in row] for pair in nibbles for row in pair]


# ---- real files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "module"), [c for c in CASES if c[0].startswith("mo_")])
def test_producers_weight(case, module):
    assert matches_producer(case, module)


@pytest.mark.parametrize(
    ("case", "label", "scheme"),
    [
        ("mo_fp8", "FP8", "float8_e4m3fn tensor a:float8_e4m3fn-static-tensor"),
        ("mo_mxfp8", "MXFP8", "float8_e4m3fn g32 a:float8_e4m3fn-dynamic-group32-e8m0"),
        ("mo_nvfp4", "NVFP4", "float4_e2m1 g16 a:float4_e2m1-dynamic-group16-e4m3"),
        ("mo_w4a16_awq", "W4A16_AWQ", "uint4b8 g128"),
    ],
)
def test_real_checkpoints_have_their_scheme(case, label, scheme):
    checkpoint = open_checkpoint(CHECKPOINTS / case)
    assert checkpoint.format == "modelopt" and checkpoint.dense_names() == []
    for layer in checkpoint.layers():
        weight = layer.weight()
        scaled = " input-scaled" if f"{layer.name}.pre_quant_scale" in layer.tensors else ""
        assert (layer.format, layer.spec.scheme, layer.oddities) == (f"modelopt {label}", scheme + scaled, ())
        assert weight.spec == layer.spec and shards_make_whole(weight, 0) and shards_make_whole(weight, 1)
        assert layer.nbytes == sum(checkpoint.source.tensors[t].nbytes for t in layer.tensors)


# ---- layouts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["NVFP4", "nvfp4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_nvfp4(algorithm, tmp_path):
    tensors = nvfp4()
    weight = one(tmp_path, config(algorithm, group_size=16), tensors).weight()
    scales, scale_2 = tensors["weight_scale"].view(torch.uint8), float(tensors["weight_scale_2"])
    codes = [[e2m1(c) for c in nibbles(row)] for row in tensors["weight"].tolist()]
    block_scales = {
        (n, g): torch.tensor(e4m3(int(scales[n, g])) * scale_2).float().item() for n in range(N) for g in range(K // 16)
    }
    assert torch.equal(weight.dequantize(), product(codes, lambda n, k: block_scales[n, k // 16]))
    acts = {"W4A16_NVFP4": None, "W4A8_NVFP4_FP8": "float8_e4m3fn-static-tensor"}
    expected = acts.get(algorithm, "float4_e2m1-dynamic-group16-e4m3")
    assert weight.spec.act == expected or str(weight.spec.act) == expected
    if algorithm.upper() == "NVFP4":  # the canonical global scale divides, ModelOpt's multiplies
        assert float(weight.input_scale) == float((1 / tensors["input_scale"].double()).float())
    elif weight.spec.act is not None:
        assert torch.equal(weight.input_scale, tensors["input_scale"])
    assert shards_make_whole(weight, 0) and shards_make_whole(weight, 1)


def test_nvfp4_quantizes_activations_with_modelopt_scales(tmp_path):
    tensors = nvfp4()
    weight = one(tmp_path, config("NVFP4"), tensors).weight()
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(2))
    found = fake_quantize(x, weight.spec.act, weight.input_scale)
    groups, scale = x.double().view(-1, 16), float(tensors["input_scale"])
    block_scale = (groups.abs().amax(1, keepdim=True) / 6 / scale).float().clamp(max=448).to(torch.float8_e4m3fn).double() * scale
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    nearest = levels[((groups / block_scale).abs().unsqueeze(-1) - levels).abs().argmin(-1)] * groups.sign() * block_scale
    assert torch.allclose(found.double().view(-1, 16), nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (N,), (N, 1), "blocks", "blocks of 4 dimensions"])
def test_fp8(shape, tmp_path):
    weight, n, k = finite_fp8(N, K), 16, 16
    if isinstance(shape, str):
        algorithm, scales = "fp8_pb_wo", torch.rand(3, 6) + 0.1
        grid = scales
        scales = scales if shape == "blocks" else scales[:, None, :, None].contiguous()
    else:
        algorithm, scales = "FP8_PER_CHANNEL_PER_TOKEN" if N in shape else "FP8", torch.rand(shape) + 0.1
        grid, n, k = scales.reshape(-1, 1), 1 if N in shape else N, K
    tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.tensor(0.5)}
    layer = one(tmp_path, config(algorithm, group_size=16 if isinstance(shape, str) else None), tensors)
    found = layer.weight()
    assert torch.equal(found.dequantize(), product(fp8_numbers(weight), lambda r, c: float(grid[r // n, c // k])))
    acts = {"fp8_pb_wo": "None", "FP8": "float8_e4m3fn-static-tensor"}
    assert str(layer.spec.act) == acts.get(algorithm, "float8_e4m3fn-dynamic-token")
    assert layer.format == f"modelopt {algorithm.upper()}" and shards_make_whole(found, 0) and shards_make_whole(found, 1)


def test_fp8_blocks_without_a_size_in_the_config(tmp_path):
    made = lambda folder, n, k, grid: one(
        tmp_path / folder, config("FP8_PB_WO"), {"weight": finite_fp8(n, k), "weight_scale": torch.rand(grid[0], 1, grid[1], 1)}
    )
    assert made("a", 192, 384, (2, 3)).spec.block == (128, 128)
    assert made("b", 64, 96, (4, 6)).spec.block == (16, 16)
    with pytest.raises(CheckpointError, match=r"scales do not fit a \[64, 96\] weight"):
        made("c", 64, 96, (5, 6))


@pytest.mark.parametrize("tile_rows", [1, 8, 32])
def test_mxfp8_with_scales_per_row_and_per_tile(tile_rows, tmp_path):
    weight, scales = finite_fp8(N, K), random_bytes(-(-N // tile_rows), 3, seed=6)
    scales[0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    layer = one(tmp_path, config("MXFP8"), {"weight": weight, "weight_scale": scales})
    expected = product(fp8_numbers(weight), lambda n, k: e8m0(int(scales[n // tile_rows, k // 32])))
    assert torch.equal(layer.weight().dequantize().nan_to_num(-7.0), expected.nan_to_num(-7.0))
    assert layer.spec.block == (tile_rows, 32) and str(layer.spec.act) == "float8_e4m3fn-dynamic-group32-e8m0"
    assert shards_make_whole(layer.weight(), 0) and shards_make_whole(layer.weight(), 1)


@pytest.mark.parametrize("algorithm", ["mxfp4", "W4A8_MXFP4_FP8"])
def test_mxfp4(algorithm, tmp_path):
    packed, scales = random_bytes(N, K // 2), random_bytes(N, 3, seed=7, below=200)
    weight = one(tmp_path, config(algorithm), {"weight": packed, "weight_scale": scales}).weight()
    codes = [[e2m1(c) for c in nibbles(row)] for row in packed.tolist()]
    assert torch.equal(weight.dequantize(), product(codes, lambda n, k: e8m0(int(scales[n, k // 32]))))
    assert str(weight.spec.act) == ("None" if algorithm == "mxfp4" else "float8_e4m3fn-dynamic-tensor")


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ"])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_int4_row_pairs(groups, algorithm, tmp_path):
    tensors = awq(groups) | ({"input_scale": torch.tensor(0.1), "weight_scale_2": torch.tensor(9.0)} if "A8" in algorithm else {})
    weight = one(tmp_path, config(algorithm), tensors).weight()
    assert (weight.spec.weight.name, weight.spec.block) == ("uint4b8", (1, K // groups))
    scales = tensors["weight_scale"]
    expected = product(row_pairs(tensors["weight"]), lambda n, k: float(scales[n, k * groups // K]))
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.input_multiplier, tensors["pre_quant_scale"])
    assert str(weight.spec.act) == ("float8_e4m3fn-static-tensor" if "A8" in algorithm else "None")


@pytest.mark.parametrize("algorithm", ["W8A8_SQ_PER_CHANNEL", "W8A16"])
def test_int8(algorithm, tmp_path):
    packed, scales = random_bytes(N, K).view(torch.int8), torch.rand(N) + 0.1
    tensors = {"weight": packed, "weight_scale": scales, "input_scale": torch.tensor(0.1), "pre_quant_scale": torch.rand(K)}
    weight = one(tmp_path, config(algorithm), tensors).weight()
    assert torch.equal(weight.dequantize(), product(packed.tolist(), lambda n, k: float(scales[n])))
    assert weight.spec.scheme.startswith("int8 channel input-scaled") and (weight.spec.act is None) == (algorithm == "W8A16")


def test_mixed_precision(tmp_path):
    fp8 = {"weight": finite_fp8(N, K), "weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(1.0)}
    layers = {"m.a": nvfp4(), "m.b": fp8, "m.c": awq(), "m.gate": {"weight": torch.ones(4, 4)}}
    named = {
        "m.a": {"quant_algo": "NVFP4", "group_size": 16},
        "m.b": {"quant_algo": "FP8"},
        "m.z": {"quant_algo": "W4A16_AWQ"},
    }
    checkpoint = write(tmp_path, config("MIXED_PRECISION", quantized_layers=named), layers)
    a, b, c = (checkpoint.layer(f"m.{x}") for x in "abc")
    assert [a.format, b.format, c.format] == ["modelopt NVFP4", "modelopt FP8", "modelopt W4A16_AWQ"]
    assert a.oddities == b.oddities == () and "does not name this layer" in c.oddities[0]
    assert checkpoint.dense_names() == ["m.gate.weight"]


def test_group_size_from_the_side_file(tmp_path):
    tensors = {"m.proj": awq(1)}  # of one group, whose size could be anything: only the side file says 128
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 32}}))
    with pytest.raises(CheckpointError, match=r"weight_scale.*\[40, 3\]"):
        write(tmp_path, config("W4A16_AWQ"), tensors).layers()
    (layer,) = write(tmp_path / "b", {"quantization": {"quant_algo": "w4a16_awq"}}, tensors, side="hf_quant_config.json").layers()
    assert layer.format == "modelopt W4A16_AWQ"


def test_ignore_lists_are_hints(tmp_path):
    layers = {"m.gate_up": nvfp4(), "m.gate": {"weight": torch.ones(2, 2)}, "x.q": nvfp4()}
    gate_up, q = write(tmp_path, config("NVFP4", ignore=["*.gate", "x.*"]), layers).layers()
    assert gate_up.oddities == () and "not quantized" in q.oddities[0]


# ---- input_multiplier (pre_quant_scale) ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["mo_w4a16_awq", "static"])
def test_the_layer_applies_the_input_multiplier(case, dtype, tmp_path):
    if case == "static":
        layer = one(tmp_path, config("W4A8_AWQ"), awq() | {"input_scale": torch.tensor(0.01)})
    else:
        layer = open_checkpoint(CHECKPOINTS / case).layer("model.layers.0.mlp.down_proj")
    weight = layer.weight().with_act_dtype(dtype)
    x = torch.randn(5, weight.spec.k, generator=torch.Generator().manual_seed(4)).to(dtype)
    for kernel in ("ReferenceLinearKernel", "auto"):
        linear = QuantLinear(weight, kernel=kernel)
        check(linear(x), x, weight)
        assert torch.equal(linear(x.view(1, 5, -1))[0], linear(x))
        linear.reload(weight)
        check(linear(x), x, weight)
        with pytest.raises(InputError, match="another spec"):
            linear.reload(weight.without_input_multiplier())
    if case != "static":
        plain = QuantLinear(weight.without_input_multiplier(), kernel="ReferenceLinearKernel")
        assert torch.equal(
            plain((x.float() * weight.input_multiplier.float()).to(dtype)), QuantLinear(weight, kernel="ReferenceLinearKernel")(x)
        )


@pytest.mark.parametrize("world", [2, 3, 5])
def test_shards_slice_the_input_multiplier(world, tmp_path):
    weight = one(tmp_path, config("W4A16_AWQ"), awq()).weight().with_act_dtype(torch.float32)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(0))
    whole = QuantLinear(weight, kernel="ReferenceLinearKernel")(x)
    shards = [weight.shard(1, r, world) for r in range(world)]
    columns = x.split([w.spec.k for w in shards], 1)
    total = sum(
        QuantLinear(w, kernel="ReferenceLinearKernel")(part.contiguous()) for w, part in zip(shards, columns, strict=True)
    )
    assert (total - whole).abs().max() <= 1e-5 * whole.abs().max()  # float32 accumulation in another order
    assert torch.equal(torch.cat([w.input_multiplier for w in shards]), weight.input_multiplier)
    rows = [QuantLinear(weight.shard(0, r, world), kernel="ReferenceLinearKernel")(x) for r in range(world)]
    assert torch.allclose(torch.cat(rows, 1), whole, rtol=1e-5, atol=1e-5)


def test_specs_have_input_multiplier(tmp_path):
    spec = one(tmp_path, config("W4A16_AWQ"), awq()).spec
    assert LinearSpec.parse(spec.key) == spec != spec.replace(input_multiplier=False)
    assert LinearSpec.parse(spec.replace(input_multiplier=False).key).input_multiplier is False
    choice = choose(spec, "cuda:sm90")
    assert choice.spec == spec.replace(input_multiplier=False) and choice.kernel.__name__ != "ReferenceLinearKernel"


def test_a_weight_and_its_spec_agree_about_input_multiplier(tmp_path):
    weight = one(tmp_path, config("W4A16_AWQ"), awq()).weight()
    for wrong in (None, torch.ones(K + 1), torch.full((K,), float("nan"))):
        with pytest.raises(WeightError, match="input_multiplier"):
            dataclasses.replace(weight, input_multiplier=wrong)
    with pytest.raises(WeightError, match="no input to scale"):
        QuantEmbedding(weight, torch.float32, "cpu")

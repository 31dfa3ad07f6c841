"""fp8 against AutoRound's own weights and against a reference that dequantizes one code at a time."""

import pytest
import torch
from reference_minifloats import (
    CASES,
    CHECKPOINTS,
    e2m1,
    e4m3,
    e5m2,
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

from bitline import CheckpointError, open_checkpoint
from bitline.act_quant import fake_quantize
from bitline.types import ActSpec, float8_e4m3fn

N, K = 40, 72
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
PLAIN = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def block_scales(dtype=torch.float32, n=N, k=K, bn=16, bk=32):
    return (torch.rand(-(-n // bn), -(-k // bk), generator=torch.Generator().manual_seed(3)) + 0.01).to(dtype)


def numbers(weight, value):
    return [[value(b) for b in row] for row in weight.view(torch.uint8).tolist()]


@pytest.mark.parametrize(("case", "module"), [c for c in CASES if c[0].startswith("ar_")])
def test_producers_weight(case, module):
    assert matches_producer(case, module)


def test_auto_round_block_export():
    checkpoint = open_checkpoint(CHECKPOINTS / "ar_fp8block_autoround")
    assert checkpoint.format == "fp8" and checkpoint.dense_names() == []
    for layer in checkpoint.layers():
        assert (layer.format, layer.oddities) == ("auto-round fp8 block", ())
        assert layer.spec.scheme == "float8_e4m3fn 128x128 a:float8_e4m3fn-dynamic-group128"
        assert layer.weight().spec == layer.spec


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_with_ragged_edges(dtype, name, tmp_path):
    weight, scales = finite_fp8(N, K), block_scales(dtype)
    layer = one(tmp_path, BLOCK, {"weight": weight, name: scales})
    assert (layer.format, layer.spec.block, layer.spec.scale_dtype) == ("fp8 block", (16, 32), dtype)
    assert layer.spec.act == ActSpec(float8_e4m3fn, True, "group", 32)
    s = scales.double()
    assert torch.equal(layer.weight().dequantize(), product(numbers(weight, e4m3), lambda n, k: float(s[n // 16, k // 32])))
    assert shards_make_whole(layer.weight(), 0) and shards_make_whole(layer.weight(), 1)


@pytest.mark.parametrize("fmt", [None, "ue8m0"])
def test_e8m0_scales(fmt, tmp_path):
    weight, scales = finite_fp8(N, K), random_bytes(3, 3, seed=4)
    scales[0, :3] = torch.tensor([0, 1, 255], dtype=torch.uint8)
    layer = one(tmp_path, BLOCK | {"scale_fmt": fmt}, {"weight": weight, "scale": scales.view(torch.float8_e8m0fnu)})
    found = layer.weight().dequantize()
    expected = product(numbers(weight, e4m3), lambda n, k: e8m0(int(scales[n // 16, k // 32])))
    assert torch.equal(found.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0)) and bool(found[:16, 64:].isnan().all())
    assert layer.spec.act.scale == ("e8m0" if fmt else "float")
    assert shards_make_whole(layer.weight(), 1)


def test_ue8m0_rounds_activation_scales_up_to_a_power_of_two():
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(5)) * 3
    found = fake_quantize(x, ActSpec(float8_e4m3fn, True, "group", 128, scale="e8m0"))
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax(1, keepdim=True).double() / 448))
    assert torch.equal(found, ((x / scale.float()).to(torch.float8_e4m3fn).float() * scale.float()))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_per_tensor(scheme, shape, tmp_path):
    weight, scale = finite_fp8(N, K), torch.tensor(0.037)
    tensors = {"weight": weight, "weight_scale": scale.reshape(shape)}
    if scheme == "static":
        tensors["input_scale"] = torch.tensor(0.5).reshape(shape)
    layer = one(tmp_path, PLAIN | {"activation_scheme": scheme}, tensors)
    static = ActSpec(float8_e4m3fn, False, "tensor")
    assert (layer.format, layer.spec.act) == ("fp8 tensor", static if scheme == "static" else ActSpec(float8_e4m3fn))
    assert torch.equal(layer.weight().dequantize(), product(numbers(weight, e4m3), lambda n, k: float(scale)))
    assert layer.weight().input_scale is None or float(layer.weight().input_scale) == 0.5
    assert shards_make_whole(layer.weight(), 0) and shards_make_whole(layer.weight(), 1)


def test_transformers_names_of_static_scales(tmp_path):
    tensors = {
        "weight": finite_fp8(N, K),
        "weight_scale_inv": torch.tensor(0.5).bfloat16(),
        "activation_scale": torch.tensor(2.0).bfloat16(),
    }
    layer = one(tmp_path, PLAIN | {"activation_scheme": "static", "weight_block_size": None}, tensors)
    assert layer.spec.scheme == "float8_e4m3fn tensor a:float8_e4m3fn-static-tensor" and float(layer.weight().input_scale) == 2


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_per_row_and_e5m2(shape, tmp_path):
    weight, scales = finite_fp8(N, K, dtype=torch.float8_e5m2), torch.rand(N) + 0.1
    layer = one(
        tmp_path, PLAIN | {"fmt": "e5m2"}, {"weight": weight, "weight_scale": scales.reshape(shape), "bias": torch.ones(N)}
    )
    assert layer.spec.scheme == "float8_e5m2 channel a:float8_e5m2-dynamic-token"
    assert torch.equal(layer.weight().dequantize(), product(numbers(weight, e5m2), lambda n, k: float(scales[n])))


def test_fp4_experts_of_deepseek_v4(tmp_path):
    packed, scales = random_bytes(N, 48), random_bytes(N, 3, seed=2, below=200)
    layer = one(tmp_path, BLOCK, {"weight": packed.view(torch.int8), "scale": scales.view(torch.float8_e8m0fnu)})
    codes = [[e2m1(c) for c in nibbles(row)] for row in packed.tolist()]
    assert (layer.format, layer.spec.n, layer.spec.k) == ("fp8 fp4", N, 96)
    assert torch.equal(layer.weight().dequantize(), product(codes, lambda n, k: e8m0(int(scales[n, k // 32]))))
    assert shards_make_whole(layer.weight(), 1)


def test_tensors_decide_and_ignore_lists_are_hints(tmp_path):
    layers = {
        "a.gate": {"weight": torch.randn(N, K)}, "a.gate_up": {"weight": finite_fp8(N, K), "weight_scale_inv": block_scales()},
        "b.q": {"weight": finite_fp8(N, K), "weight_scale_inv": block_scales()},
    }  # fmt: skip
    checkpoint = write(tmp_path, BLOCK | {"modules_to_not_convert": ["a.gate"], "ignored_layers": ["b"]}, layers)
    gate_up, q = checkpoint.layers()
    assert (gate_up.name, gate_up.oddities) == ("a.gate_up", ()) and "not quantized" in q.oddities[0]
    assert checkpoint.dense_names() == ["a.gate.weight"]


def test_blocks_that_the_config_does_not_name(tmp_path):
    layer = one(tmp_path, PLAIN, {"weight": finite_fp8(200, 300), "weight_scale_inv": torch.rand(2, 3) + 0.1})
    assert layer.spec.block == (128, 128) and "128 x 128 fit" in layer.oddities[0]


def test_auto_round_weight_only(tmp_path):
    config = {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "act_bits": 16, "group_size": [16, 32]}
    layer = one(tmp_path, config, {"weight": finite_fp8(N, K), "weight_scale_inv": block_scales()})
    assert layer.spec.act is None and layer.spec.block == (16, 32)


def test_contradictions_name_both_sides(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"weight_scale_inv.*found \[3, 3\].*\[1, 1\], as blocks of 128 x 128 in config\.json"
    ):
        one(tmp_path, BLOCK | {"weight_block_size": [128, 128]}, {"weight": finite_fp8(N, K), "weight_scale_inv": block_scales()})


def test_fbgemm_activation_limit(tmp_path):
    tensors = {"weight": finite_fp8(N, K), "weight_scale": block_scales(bn=1, bk=K), "input_scale_ub": torch.tensor([900.0])}
    layer = one(tmp_path / "a", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 900.0}, tensors)
    assert (layer.format, layer.spec.act) == ("fbgemm_fp8 channel", ActSpec(float8_e4m3fn, limit=900.0))
    scales = tensors["weight_scale"].double()
    assert torch.equal(layer.weight().dequantize(), product(numbers(tensors["weight"], e4m3), lambda n, k: float(scales[n, 0])))
    assert one(tmp_path / "b", {"quant_method": "fbgemm_fp8"}, tensors).spec.act.limit == 1200.0
    with pytest.raises(CheckpointError, match="activation_scale_ub is -1"):
        one(tmp_path / "c", {"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, tensors)


@pytest.mark.parametrize("config", [{}, {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}])
def test_mxfp8(config, tmp_path):
    weight, scale = finite_fp8(N, 96), random_bytes(N, 3, below=255)
    layer = one(tmp_path, {"quant_method": "mxfp8", **config}, {"weight": weight, "weight_scale_inv": scale})
    assert layer.spec.scheme == "float8_e4m3fn g32 a:float8_e4m3fn-dynamic-group32-e8m0"
    codes = numbers(weight, e4m3)
    assert torch.equal(layer.weight().dequantize(), product(codes, lambda n, k: e8m0(int(scale[n, k // 32]))))


@pytest.mark.parametrize(("scheme", "static"), [("TENSOR", True), ("NO_SCALES", False)])
def test_mistrals_own_names(scheme, static, tmp_path):
    tensors = {"weight": finite_fp8(N, K), "qscale_weight": torch.tensor(0.25)}
    tensors |= {"qscale_act": torch.tensor(0.5)} if static else {}
    layer = one(tmp_path, {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}}, tensors, side="params.json")
    assert str(layer.spec.act) == ("float8_e4m3fn-static-tensor" if static else "float8_e4m3fn-dynamic-token")
    assert torch.equal(layer.weight().dequantize(), tensors["weight"].float() * 0.25)


def test_params_json_of_an_unquantized_model(tmp_path):
    assert write(tmp_path, {"dim": 64}, {"m": {"weight": torch.ones(2, 2)}}, side="params.json").layers() == []


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_auto_round_weight_only_export_without_packing_format(shape, tmp_path):
    config = {"quant_method": "auto-round", "data_type": "fp8", "bits": 8, "group_size": -1, "act_bits": 16, "sym": True,
              "fmt": "e4m3", "activation_scheme": "dynamic"}  # fmt: skip
    tensors = {"weight": finite_fp8(N, K), "weight_scale": block_scales(torch.bfloat16, bn=1, bk=K).reshape(shape)}
    layer = one(tmp_path, config, tensors)
    assert layer.spec.scheme == "float8_e4m3fn channel"


def test_auto_round_flattens_group_scales(tmp_path):
    config = {"quant_method": "auto-round", "data_type": "fp8", "bits": 8, "group_size": 24, "act_bits": 16}
    weight, scales = finite_fp8(N, K), block_scales(bn=1, bk=24)
    layer = one(tmp_path, config, {"weight": weight, "weight_scale": scales.reshape(-1)})
    s = scales.double()
    assert torch.equal(layer.weight().dequantize(), product(numbers(weight, e4m3), lambda n, k: float(s[n, k // 24])))


@pytest.mark.parametrize("shape", [(), (N,), (3, 3)])
def test_gptqmodel_scales_divide(shape, tmp_path):
    config = {"quant_method": "fp8", "bits": 8, "format": "float8_e4m3fn", "weight_scale_semantics": "inverse",
              "weight_scale_method": "row", "weight_block_size": [16, 32] if len(shape) == 2 else None}  # fmt: skip
    weight, scales = finite_fp8(N, K), torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 3
    layer = one(tmp_path / "a", config, {"weight": weight, "weight_scale_inv": scales})
    grid = scales.reshape(layer.spec.grid)
    spread = grid.repeat_interleave(-(-N // grid.shape[0]) if len(shape) < 2 else 16, 0)[:N]
    spread = spread.repeat_interleave(-(-K // grid.shape[1]) if len(shape) < 2 else 32, 1)[:, :K]
    assert layer.spec.act is None and torch.equal(layer.weight().dequantize(), weight.float() * spread.reciprocal())
    with pytest.raises(CheckpointError, match="without a float32 reciprocal"):
        one(tmp_path / "b", config, {"weight": weight, "weight_scale_inv": torch.zeros(shape)}).weight()

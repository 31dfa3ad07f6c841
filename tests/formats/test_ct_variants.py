"""compressed-tensors beyond its presets, and AutoRound's own exports: E5M3 scales, MXINT4, 1 bit, …."""

import pytest
import torch
from producers import one, write
from reference_minifloats import e2m1, e8m0, nibbles, random_bytes
from reference_packers import as_int32, stream

from bitline import CheckpointError

N, K = 8, 64


def config(weights, form="pack-quantized", **group):
    groups = {"g": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": form, "version": "0.20.0", "config_groups": groups}


def auto_round(**keys):
    return {"quant_method": "auto-round", "bits": 4, "sym": True, **keys}


def e5m3(byte):
    """The value of an unsigned E5M3 code."""
    return (byte & 7) * 2.0**-17 if byte < 8 else (8 + (byte & 7)) * 2.0 ** ((byte >> 3) - 18)


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    "settings",
    [
        config(NVFP4, "nvfp4-e5m3-pack-quantized", input_activations=NVFP4 | {"dynamic": "local"}),
        auto_round(data_type="nvfp4_v2", group_size=16, packing_format="auto_round:llm_compressor_nvfp4_e5m3",
                   act_bits=4, act_data_type="nvfp4_v2", act_group_size=16),
    ],
)  # fmt: skip
def test_e5m3_scales(settings, tmp_path):
    codes, scale = random_bytes(N, K // 2), random_bytes(N, K // 16, below=255)
    record = one(tmp_path, settings, {"weight_packed": codes, "weight_scale": scale})
    assert record.format == "compressed-tensors nvfp4-e5m3-pack-quantized" and not record.oddities
    assert str(record.spec.act) == "float4_e2m1-dynamic-group16-e5m3"
    wanted = [
        [e2m1(c) * e5m3(int(scale[n, k // 16])) for k, c in enumerate(nibbles(row))] for n, row in enumerate(codes.tolist())
    ]
    assert torch.equal(record.weight().dequantize(), torch.tensor(wanted))


@pytest.mark.parametrize("act_bits", [16, 4])
def test_mxint4(act_bits, tmp_path):
    codes, scale = random_bytes(N, K // 2), random_bytes(N, K // 32, below=250)
    settings = auto_round(data_type="mx_int", group_size=32, packing_format="auto_round", act_bits=act_bits,
                          act_data_type="mx_int", act_group_size=32)  # fmt: skip
    record = one(tmp_path, settings, {"weight_packed": codes, "weight_scale": scale})
    value = lambda code: (-1) ** (code >> 3) * (code & 7) / 4  # sign and magnitude, one integer bit and two fractional bits
    wanted = [
        [value(c) * e8m0(int(scale[n, k // 32])) for k, c in enumerate(nibbles(row))] for n, row in enumerate(codes.tolist())
    ]
    assert record.spec.scheme == "uint4b8 g32" + " a:int4-dynamic-group32-e8m0" * (act_bits == 4)
    assert torch.equal(record.weight().dequantize(), torch.tensor(wanted))
    assert not record.weight().dequantize().isnan().any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_bit(symmetric, tmp_path):
    g = torch.Generator().manual_seed(1)
    codes, zero = torch.randint(2, (N, K), generator=g), torch.randint(2, (N, 2), generator=g)
    scale = torch.rand(N, 2, generator=g).bfloat16()
    tensors = {
        "weight_packed": as_int32([stream(row, 1) for row in codes.tolist()]), "weight_scale": scale,
        "weight_shape": torch.tensor([N, K]),
        "weight_zero_point": as_int32([stream(column + [0] * (32 - N), 1) for column in zero.t().tolist()]).t(),
    }  # fmt: skip
    record = one(tmp_path, config({"num_bits": 1, "symmetric": symmetric, "group_size": 32}), tensors)
    offset = torch.ones(N, 2) if symmetric else zero
    spread = lambda t: t.float().repeat_interleave(32, 1)
    assert torch.equal(record.weight().dequantize(), (codes - spread(offset)) * spread(scale))


def eight(**more):
    return {"weight": torch.ones(N, K, dtype=torch.int8), "weight_scale": torch.ones(N, 1), **more}


def test_16_bit_activations_are_weight_only(tmp_path):
    inputs = {"num_bits": 16, "type": "float", "strategy": "token", "dynamic": True}
    assert one(tmp_path, config({"strategy": "channel"}, "int-quantized", input_activations=inputs), eight()).spec.act is None


def test_quantized_outputs_are_of_the_kv_cache(tmp_path):
    conf = config({"strategy": "channel"}, "int-quantized", output_activations={"num_bits": 8, "type": "float"})
    conf["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    conf["config_groups"]["attention"] = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    scales = {f"m.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "proj.output_scale")}
    checkpoint = write(tmp_path, conf, eight(), modules=scales)
    (record,) = checkpoint.layers()
    assert "cache" in record.oddities[0] and set(checkpoint.dense_names()) == set(scales)


def test_minifloats_with_zero_points_are_refused(tmp_path):
    tensors = {"weight": torch.ones(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.ones(N, 1)}
    conf = config({"type": "float", "strategy": "channel", "symmetric": False}, "naive-quantized")
    assert one(tmp_path / "without", conf, tensors).spec.zero == "none"
    with pytest.raises(CheckpointError, match="zero points are not supported"):
        one(tmp_path / "with", conf, tensors | {"weight_zero_point": torch.zeros(N, 1, dtype=torch.int8)})


def test_rotated_auto_round_is_refused(tmp_path):
    conf = auto_round(data_type="mx_fp", group_size=32, packing_format="auto_round:llm_compressor", rotation_config={"R1": 1})
    with pytest.raises(CheckpointError, match="rotated"):
        one(tmp_path, conf, {"weight_packed": random_bytes(N, K // 2), "weight_scale": random_bytes(N, K // 32)})


@pytest.mark.parametrize("name", ["model.language_model.layers.0.q_proj", "language_model.model.layers.0.q_proj"])
def test_targets_and_ignore_lists_under_other_wrappers(name, tmp_path):
    int8 = {"strategy": "channel"}
    conf = config(int8, "int-quantized") | {"ignore": ["model.layers.0.q_proj"]}
    conf["config_groups"]["g"]["targets"] = ["model.layers.0.qkv_proj"]
    (record,) = write(tmp_path, conf, {}, modules={f"{name}.{k}": v for k, v in eight().items()}).layers()
    assert "ignore list names this layer" in record.oddities[0]


@pytest.mark.parametrize("key", ["m.proj", "model.m.proj", "model.language_model.m.proj"])
def test_auto_round_overrides_under_other_wrappers(key, tmp_path):
    settings = auto_round(data_type="mx_fp", group_size=32, packing_format="auto_round:llm_compressor", extra_config={
        "model.other": {"bits": 4}, key: {"bits": 8}})  # fmt: skip
    tensors = {"weight": random_bytes(N, K, below=120).view(torch.float8_e4m3fn), "weight_scale": random_bytes(N, 2, below=250)}
    assert one(tmp_path, settings, tensors).format == "compressed-tensors mxfp8-quantized"

"""A tensor of a quantized layer that nothing uses is refused by name; what is known to be harmless is not."""

import json

import numpy as np
import pytest
import torch
from gguf_files import random_blocks
from gguf_files import write as write_gguf
from reference_packers import as_int32, gptq, random_layer, stream
from safetensors.torch import save_file

from bitline import CheckpointError, open_checkpoint

N, K, G = 16, 64, 32


def checkpoint(folder, tensors, quantization):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_checkpoint(folder)


def weight(folder, tensors, quantization):
    (record,) = checkpoint(folder, tensors, quantization).layers()
    return record.weight()


def named(tensors, module="m.proj"):
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def ct_config(form, weights, act=None):
    """A config group without `symmetric`."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": act}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def packed(zero):
    """Four bits, one zero point for all groups of a row: N int32-packed values per group."""
    zeros = as_int32([stream([zero[n] for n in range(N)], 4) for _ in range(K // G)]).t().contiguous()
    return named({
        "weight_packed": torch.zeros(N, K // 8, dtype=torch.int32), "weight_scale": torch.ones(N, K // G),
        "weight_shape": torch.tensor([N, K]), "weight_zero_point": zeros,
    })  # fmt: skip


PACKED = ct_config("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": G})
INT8 = ct_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def int8(**more):
    return named({"weight": torch.ones(N, K, dtype=torch.int8), "weight_scale": torch.ones(N, 1), **more})


def fp8(**more):
    return named({"weight": torch.ones(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1), **more})


# ---- symmetric dropped from a config of compressed-tensors ---------------------------------------------------------------


@pytest.mark.parametrize("zeros", [[8] * (N - 1) + [7], [0] * N])
def test_packed_zero_points_without_symmetric(zeros, tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.proj\.weight_zero_point.*no symmetric.*\"symmetric\": false"):
        weight(tmp_path, packed(zeros), PACKED)


def test_packed_zero_points_that_mean_nothing(tmp_path):
    assert weight(tmp_path / "a", packed([8] * N), PACKED).spec.zero == "none"
    stated = json.loads(json.dumps(PACKED))
    stated["config_groups"]["group_0"]["weights"]["symmetric"] = True
    assert weight(tmp_path / "b", packed([3] * N), stated).spec.zero == "none"
    stated["config_groups"]["group_0"]["weights"]["symmetric"] = False
    assert weight(tmp_path / "c", packed([3] * N), stated).spec.zero == "int"


def test_int8_and_float_zero_points_without_symmetric(tmp_path):
    zeros = torch.zeros(N, 1, dtype=torch.int8)
    assert weight(tmp_path / "a", int8(weight_zero_point=zeros), INT8).spec.zero == "none"
    zeros[3] = -1
    with pytest.raises(CheckpointError, match=r"does not account for.*weight_zero_point"):
        weight(tmp_path / "b", int8(weight_zero_point=zeros), INT8)
    config = ct_config("float-quantized", FLOAT8)
    assert weight(tmp_path / "c", fp8(weight_zero_point=torch.zeros(1)), config)
    with pytest.raises(CheckpointError, match=r"does not account for.*weight_zero_point"):
        weight(tmp_path / "d", fp8(weight_zero_point=torch.ones(1)), config)


def test_zero_points_of_activations_without_symmetric(tmp_path):
    act = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    config = ct_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, act)
    tensors = lambda zero: int8(input_scale=torch.ones(1), input_zero_point=torch.tensor([zero], dtype=torch.int8))
    assert weight(tmp_path / "a", tensors(0), config).spec.act.symmetric
    with pytest.raises(CheckpointError, match=r"does not account for.*input_zero_point"):
        weight(tmp_path / "b", tensors(5), config)
    config["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    assert int(weight(tmp_path / "c", tensors(5), config).input_zero) == 5


def test_act_order_where_no_weight_has_one(tmp_path):
    trivial = torch.zeros(K, dtype=torch.int32)
    assert weight(tmp_path / "a", int8(weight_g_idx=trivial), INT8)
    config = ct_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": G, "symmetric": True})
    grouped = int8(weight_g_idx=torch.arange(K).flip(0).int() // G) | named({"weight_scale": torch.ones(N, K // G)})
    with pytest.raises(CheckpointError, match=r"act-order of such weights.*weight_g_idx|weight_g_idx.*act-order of such weights"):
        weight(tmp_path / "b", grouped, config)


# ---- sym dropped from a config of GPTQ and AutoRound ---------------------------------------------------------------------

AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": G}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": False}


@pytest.mark.parametrize("config", [AUTO_ROUND, GPTQ], ids=["auto-round", "gptq"])
def test_zero_points_without_sym(config, tmp_path):
    codes, zeros, scales = random_layer(K, N, K // G, 4)
    layer = lambda zeros: named(gptq(codes, zeros, scales, 4))
    implicit = [[8] * N for _ in range(K // G)]
    with pytest.raises(CheckpointError, match=r"m\.proj\.qzeros.*no sym in config\.json.*\"sym\": false"):
        weight(tmp_path / "a", layer(zeros), config)
    later = [implicit[0], [8] * (N - 1) + [5]]  # beyond the row that the header's check reads
    with pytest.raises(CheckpointError, match=r"does not account for.*m\.proj\.qzeros"):
        weight(tmp_path / "b", layer(later), config)
    assert weight(tmp_path / "c", layer(implicit), config).spec.zero == "none"
    assert weight(tmp_path / "d", layer(zeros), config | {"sym": False}).spec.zero == "int"
    assert weight(tmp_path / "e", layer(zeros), config | {"sym": True}).spec.zero == "none"


# ---- tensors that no reader knows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["weight_scale_2", "lora_A", "lora_A.default.weight", "rotation"])
def test_an_unknown_tensor_of_a_layer(suffix, tmp_path):
    opened = checkpoint(tmp_path, int8(**{suffix: torch.ones(3)}), INT8)
    (record,) = opened.layers()
    assert f"not known and not used: {suffix}" in record.oddities[0]
    with pytest.raises(CheckpointError, match=rf"nothing uses.*m\.proj\.{suffix}") as caught:
        record.weight()
    assert caught.value.tensor == f"m.proj.{suffix}"


@pytest.mark.parametrize(
    "suffix", ["k_scale", "v_scale", "output_scale", "e_score_correction_bias", "input_scale", "weight_shape"]
)
def test_a_harmless_tensor_of_a_layer(suffix, tmp_path):
    assert weight(tmp_path, int8(**{suffix: torch.ones(1)}), INT8).spec.n == N


def test_a_tensor_that_somebody_else_reads(tmp_path):
    opened = checkpoint(tmp_path, int8(gain=torch.ones(3)), INT8)
    opened.read("m.proj.gain")
    assert opened.layers()[0].weight().spec.n == N


def test_tensors_of_other_modules_are_nobody_s_business(tmp_path):
    others = {"m.projection.gain": torch.ones(1), "m.proj_norm.weight": torch.ones(1), "m.rotary_emb.inv_freq": torch.ones(1)}
    assert weight(tmp_path, int8() | others, INT8).spec.n == N


def test_an_unknown_tensor_of_stacked_experts(tmp_path):
    stack = {"m.experts.up_proj": torch.ones(3, 128, 128).to(torch.float8_e4m3fn)}
    stack["m.experts.up_proj_scale_inv"] = torch.ones(3, 1, 1)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert [record.weight() for record in checkpoint(tmp_path / "a", stack, config).layers()]
    first, *_ = checkpoint(tmp_path / "b", stack | {"m.experts.up_proj_rotation": torch.ones(3, 4)}, config).layers()
    with pytest.raises(CheckpointError, match=r"nothing uses.*m\.experts\.up_proj_rotation"):
        first.weight()


def test_an_unknown_tensor_of_a_gguf_layer(tmp_path):
    raw = random_blocks("Q8_0", 3, 256, np.random.default_rng(0), edges=False)
    tensors = {"a.weight": ("Q8_0", raw), "a.input_scale": ("F32", np.float32([1])), "a.scale": ("F32", np.ones(5, np.float32))}
    (record,) = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors).path).layers()
    assert record.weight().spec.n == 3
    (record,) = open_checkpoint(write_gguf(tmp_path / "n.gguf", tensors | {"a.rotation": tensors["a.scale"]}).path).layers()
    with pytest.raises(CheckpointError, match=r"nothing uses.*a\.rotation"):
        record.weight()

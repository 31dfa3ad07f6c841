"""gpt-oss experts against a reference that dequantizes one code at a time."""

import json

import pytest
import torch
from reference_minifloats import e2m1, e8m0, nibbles, product, random_bytes, shards_make_whole
from safetensors.torch import save_file

from bitline import CheckpointError, choose, load_model, open_checkpoint

E, N, G = 3, 20, 3
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def experts(dtype=torch.uint8):
    scales = random_bytes(E, N, G, seed=1)
    scales[0, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    return {
        f"{STACK}_blocks": random_bytes(E, N, G, 16), f"{STACK}_scales": scales.view(dtype),
        f"{STACK}_bias": torch.randn(E, N).bfloat16(), "model.norm.weight": torch.ones(4),
    }  # fmt: skip


def write(folder, tensors, **more):
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}} | more
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_expert_is_a_layer(dtype, tmp_path):
    tensors = experts(dtype)
    checkpoint = write(tmp_path, tensors)
    layers = checkpoint.layers()
    assert [layer.name for layer in layers] == [f"{STACK}.{e}" for e in range(E)] and checkpoint.format == "mxfp4"
    assert checkpoint.dense_names() == ["model.norm.weight"]
    scales = tensors[f"{STACK}_scales"].view(torch.uint8)
    for e, layer in enumerate(layers):
        assert layer.spec.scheme == "float4_e2m1 g32" and layer.nbytes * E == sum(tensors[t].nbytes for t in layer.tensors)
        codes = [[e2m1(c) for c in nibbles(row.flatten().tolist())] for row in tensors[f"{STACK}_blocks"][e]]
        weight = layer.weight()
        expected = product(codes, lambda n, k, e=e: e8m0(int(scales[e, n, k // 32])))
        found = weight.dequantize()
        assert torch.equal(found.nan_to_num(-7.0), expected.nan_to_num(-7.0)) and torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(weight.bias, tensors[f"{STACK}_bias"][e])
        assert shards_make_whole(weight, 0) and shards_make_whole(weight, 1, 5)


def test_experts_of_one_block_per_row_without_bias(tmp_path):
    tensors = {f"{STACK}_blocks": random_bytes(1, 8, 1, 16), f"{STACK}_scales": random_bytes(1, 8, 1, below=200)}
    (layer,) = write(tmp_path, tensors).layers()
    assert layer.weight().shape == (8, 32) and choose(layer.spec, "cuda:sm90").best.verdict


def test_experts_without_a_bias_are_refused_where_the_model_has_one(tmp_path):
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1, vocab_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, layer_types=["full_attention"],
    )  # fmt: skip
    state = {n: t.contiguous() for n, t in GptOssForCausalLM(config).state_dict().items()}
    for name, (n, k) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
        stack = f"model.layers.0.mlp.experts.{name}"
        del state[stack]
        state |= {f"{stack}_blocks": random_bytes(2, n, k // 32, 16), f"{stack}_scales": random_bytes(2, n, k // 32, below=130)}
    del state["model.layers.0.mlp.experts.down_proj_bias"]
    write(tmp_path, state, **config.to_diff_dict())
    with pytest.raises(CheckpointError, match=r"bias of experts is missing.*down_proj"):
        load_model(tmp_path, dtype=torch.float32)

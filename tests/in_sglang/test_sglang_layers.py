"""Layers of SGLang's stubs on Bitline: equal to the checkpoint's layers, on one rank and cut over several."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import bitline

FORMATS = ("gptq-actorder", "awq", "ct-w4a16", "fp8-block", "ct-mixed", "gptq-bias")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@pytest.fixture
def models(sglang):
    import sglang_models

    return sglang_models


def references(path):
    """The layers of the first block by name: Bitline's own, or plain ones where the checkpoint does not quantize them."""
    opened = bitline.open_checkpoint(path)
    layers = {r.name: bitline.QuantLinear(r.weight(), act_dtype=torch.float32) for r in opened.layers()}
    for name in opened.dense_names():
        if name.endswith("_proj.weight"):
            weight = opened.read(name).float()
            layers[name.removesuffix(".weight")] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layers[name.removesuffix(".weight")].weight.data = weight
    return {n.removeprefix("model.layers.0."): layer for n, layer in layers.items() if n.startswith("model.layers.0.")}


def fused(layers, stem, parts, x):
    return [layers[f"{stem}.{part}"](x).detach() for part in parts]


def check(y, expected):
    torch.testing.assert_close(y.detach(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_layers_equal_those_of_the_checkpoint(models, checkpoint, name):
    path = checkpoint(name)
    model, layers = models.load(path), references(path)
    block = model.model.layers[0]
    x, wide = torch.randn(5, 256), torch.randn(5, 512)
    check(block.self_attn.qkv_proj(x)[0], torch.cat(fused(layers, "self_attn", QKV, x), -1))
    check(block.self_attn.o_proj(x)[0], layers["self_attn.o_proj"](x))
    check(block.mlp.gate_up_proj(x)[0], torch.cat(fused(layers, "mlp", GATE_UP, x), -1))
    check(block.mlp.down_proj(wide)[0], layers["mlp.down_proj"](wide))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_together_equal_the_whole_layer(models, checkpoint, name, size):
    """4 query heads over 2 key and value heads: 2 ranks cut both, 4 ranks share each key and value head between two."""
    path = checkpoint(name)
    ranks = [models.load(path, rank=rank, size=size).model.layers[0] for rank in range(size)]
    layers = references(path)
    x, wide = torch.randn(5, 256), torch.randn(5, 512)
    whole = fused(layers, "self_attn", QKV, x)
    kv = min(size, 2)
    for rank, block in enumerate(ranks):
        pieces = [y.chunk(n, -1)[rank * n // size] for y, n in zip(whole, (size, kv, kv), strict=True)]
        check(block.self_attn.qkv_proj(x)[0], torch.cat(pieces, -1))
        pieces = [y.chunk(size, -1)[rank] for y in fused(layers, "mlp", GATE_UP, x)]
        check(block.mlp.gate_up_proj(x)[0], torch.cat(pieces, -1))
    down = sum(block.mlp.down_proj(part)[0] for block, part in zip(ranks, wide.chunk(size, -1), strict=True))
    if name == "fp8-block" and size == 4:  # 512 columns in blocks of 128: each rank quantizes its own block
        assert ranks[0].mlp.down_proj.bitline_parts[0].spec.k == 128
    check(down, layers["mlp.down_proj"](wide))


def test_tensors_of_quantized_layers_do_not_reach_the_model(models, checkpoint):
    path = checkpoint("ct-mixed")
    model = models.load(path)
    assert sorted(model.seen) == sorted(n for n in load_file(path / "model.safetensors") if "norm" in n or n in (
        "lm_head.weight", "model.embed_tokens.weight"))  # fmt: skip
    expected = load_file(path / "model.safetensors")
    assert torch.equal(model.model.norm.weight.data, expected["model.norm.weight"].float())
    assert torch.equal(model.lm_head.weight.data[:256], expected["lm_head.weight"].float())


def test_neighbours_of_one_scheme_are_one_weight(models, checkpoint):
    block = models.load(checkpoint("ct-w4a16")).model.layers[0]
    assert [part.spec.n for part in block.self_attn.qkv_proj.bitline_parts] == [512]
    block = models.load(checkpoint("ct-mixed")).model.layers[0]
    assert len(block.self_attn.qkv_proj.bitline_parts) == 3


def test_a_bias_is_added_once_and_by_the_first_rank_of_a_row_parallel_layer(models, checkpoint):
    from sglang.srt.layers.linear import RowParallelLinear

    path = checkpoint("ct-w4a16")
    outputs = []
    for rank in range(2):
        model = models.load(path, rank=rank, size=2)
        config = model.model.layers[0].mlp.down_proj.quant_config
        layer = RowParallelLinear(512, 256, bias=True, quant_config=config, prefix="model.layers.0.mlp.down_proj")
        layer.bias.data.fill_(3.0)
        layer.quant_method.process_weights_after_loading(layer)
        outputs.append(layer(torch.zeros(2, 256))[0])
    assert torch.equal(outputs[0], torch.full((2, 256), 3.0))
    assert torch.equal(outputs[1], torch.zeros(2, 256))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_quantized_tables_and_output_layers(models, checkpoint, tmp_path, tied, size):
    path = with_quantized_table(checkpoint("ct-w4a16"), tmp_path, tied)
    opened = {r.name: r.weight() for r in bitline.open_checkpoint(path).layers()}
    table = opened["model.embed_tokens"].dequantize(torch.float32)
    head = table if tied else opened["lm_head"].dequantize(torch.float32)
    x, half = torch.randn(3, 256), 256 // size
    for rank in range(size):
        model = models.load(path, rank=rank, size=size)
        ids = torch.tensor([[0, 7, half - 1]])
        embed = model.model.embed_tokens
        assert torch.equal(embed.quant_method.embedding(embed, ids), table[ids + rank * half])
        logits = model.lm_head.quant_method.apply(model.lm_head, x, None)
        assert logits.shape[-1] == model.lm_head.num_embeddings_per_partition
        check(logits, x @ head[rank * half : (rank + 1) * half].T)
        assert model.lm_head.weight.dtype == torch.uint8  # SGLang's logits and its AMX path ask for it


def with_quantized_table(path, tmp_path, tied):
    tensors = load_file(path / "model.safetensors")
    for name in ["model.embed_tokens", *([] if tied else ["lm_head"])]:
        packed = bitline.quantize(tensors.pop(f"{name}.weight"), "W4A16", group_size=64)
        tensors[f"{name}.weight_packed"] = packed.codes.contiguous().view(torch.int32)
        tensors[f"{name}.weight_scale"] = packed.scale.contiguous()
        tensors[f"{name}.weight_shape"] = torch.tensor(packed.shape)
    if tied:
        tensors.pop("lm_head.weight")
    settings = json.loads((path / "config.json").read_text())
    settings["tie_word_embeddings"] = tied
    quantization = settings["quantization_config"]
    quantization["ignore"] = []
    group = next(iter(quantization["config_groups"].values()))
    group["targets"] = ["Linear", "Embedding"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path

"""replace_linears with checkpoints of every producer: any module's layers are bit-equal to their dequantized weights."""

import numpy as np
import pytest
import torch
from gguf_files import random_blocks
from gguf_files import write as write_gguf
from reference_packers import CHECKPOINTS, gptq, random_layer, values
from safetensors.torch import load_file, save_file
from torch import nn

import bitline
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.testing.tolerance import compare

REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")
CASES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())


def module_of(checkpoint, dtype=torch.float32):
    """A module with an nn.Linear for each quantized layer, and a parameter for each other tensor, on the meta device."""
    root = nn.Module()

    def owner_of(name):
        owner, _, leaf = name.rpartition(".")
        part = root
        for step in owner.split(".") if owner else []:
            if step not in part._modules:
                part.add_module(step, nn.Module())
            part = part._modules[step]
        return part, leaf

    for record in checkpoint.layers():
        owner, leaf = owner_of(record.name)
        layer = nn.Linear(record.spec.k, record.spec.n, bias=record.spec.bias, device="meta", dtype=dtype)
        owner.add_module(leaf, layer)
    for name in checkpoint.dense_names():
        tensor = checkpoint.read(name)
        owner, leaf = owner_of(name)
        if isinstance(owner, nn.Linear):  # its bias, which the reader leaves to the model
            owner.bias = nn.Parameter(torch.empty(owner.out_features, device="meta", dtype=dtype))
        else:
            owner.register_parameter(leaf, nn.Parameter(torch.empty(tensor.shape, device="meta", dtype=dtype)))
    return root


@pytest.mark.parametrize("case", CASES)
def test_layers_of_every_producer(case):
    checkpoint = bitline.open_checkpoint(CHECKPOINTS / case)
    module = module_of(checkpoint)
    done = bitline.replace_linears(module, checkpoint, policy=REFERENCE)
    assert set(done.layers) == {record.name for record in checkpoint.layers()} and not (done.kept or done.unused)
    for record in checkpoint.layers():
        layer, weight = module.get_submodule(record.name), record.weight().with_act_dtype(torch.float32)
        assert type(layer) is QuantLinear and layer.source == (record.name, record.format)
        if layer._buffers["bias"] is not None:
            weight = weight.with_bias(layer._buffers["bias"])
        x = torch.randn(3, record.spec.k, generator=torch.Generator().manual_seed(0))
        assert compare(layer(x), x, weight).ok
        if record.spec.act is None and not record.spec.input_multiplier:
            assert torch.equal(layer(x), nn.functional.linear(x, weight.dequantize(), weight.bias))
    for name in checkpoint.dense_names():
        assert torch.equal(module.get_parameter(name), checkpoint.read(name).float())


class Table(nn.Module):
    """What no library has an architecture for: an embedding, a normalization, two linear layers."""

    def __init__(self, device="meta"):
        super().__init__()
        with torch.device(device):
            self.table, self.norm = nn.Embedding(40, 64), nn.LayerNorm(64)
            self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, ids):
        return self.last(torch.relu(self.first(self.norm(self.table(ids)))))


def test_gptq_written_one_code_at_a_time(tmp_path):
    g = torch.Generator().manual_seed(1)
    tensors = {"norm.weight": torch.rand(64, generator=g), "norm.bias": torch.rand(64, generator=g),
               "table.weight": torch.randn(40, 64, generator=g), "first.bias": torch.rand(96, generator=g)}  # fmt: skip
    dense = Table("cpu")
    for i, (name, n, k) in enumerate((("first", 96, 64), ("last", 32, 96))):
        codes, zeros, scales = random_layer(k, n, k // 32, 4, seed=i)
        tensors |= {f"{name}.{leaf}": t for leaf, t in gptq(codes, zeros, scales, 4, v1=True).items()}
        dense.get_submodule(name).weight.data = values(codes, zeros, scales, [j // 32 for j in range(k)])
    save_file(tensors, tmp_path / "model.safetensors")
    config = '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": false, "desc_act": false}}'
    (tmp_path / "config.json").write_text(config)
    dense.load_state_dict({n: t for n, t in load_file(tmp_path / "model.safetensors").items() if n in dense.state_dict()},
                          strict=False)  # fmt: skip
    module, ids = Table(), torch.arange(40)
    bitline.replace_linears(module, tmp_path, policy=REFERENCE)
    with torch.inference_mode():
        assert torch.equal(module(ids), dense(ids))


def test_fp8_blocks(tmp_path):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 1, generator=torch.Generator().manual_seed(3)) + 0.5
    tensors = {"deep.first.weight": weight, "deep.first.weight_scale_inv": scale, "deep.first.bias": torch.ones(96)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = '{"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}}'
    (tmp_path / "config.json").write_text(config)
    module = Table("cpu")
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    done = bitline.replace_linears(module, tmp_path, prefix="deep", strict=False)
    assert done.layers == ("first",) and done.tensors == () and "last.weight" in done.kept
    exact = weight.double() * scale.double().repeat_interleave(64, 0)[:96]
    read = module.bitline_weights["first"]()
    assert torch.equal(read.dequantize().double(), exact.float().double()) and bool((module.first.bias == 1).all())
    assert all(torch.equal(module.state_dict()[name], kept[name]) for name in done.kept)
    bitline.verify(module)


def test_gguf_names_and_a_quantized_embedding(tmp_path):
    rng = np.random.default_rng(0)
    blocks = {"token_embd": ("Q8_0", random_blocks("Q8_0", 40, 64, rng, edges=False)),
              "blk.0.up": ("Q4_0", random_blocks("Q4_0", 96, 64, rng, edges=False)),
              "blk.0.down": ("Q5_1", random_blocks("Q5_1", 32, 96, rng, edges=False))}  # fmt: skip
    dense = {"blk.0.norm.weight": np.ones(64, np.float32), "blk.0.norm.bias": np.zeros(64, np.float32),
             "blk.0.up.bias": rng.normal(size=96).astype(np.float32)}  # fmt: skip
    tensors = {f"{name}.weight": block for name, block in blocks.items()} | {name: ("F32", data) for name, data in dense.items()}
    write_gguf(tmp_path / "table.gguf", tensors)
    checkpoint = bitline.open_checkpoint(tmp_path / "table.gguf")
    module, exact = Table(), Table("cpu")
    names = {"token_embd": "table", "blk.0": "", "blk.0.up": "first", "blk.0.down": "last"}
    done = bitline.replace_linears(module, checkpoint, rename=names, policy=REFERENCE)
    assert done.layers == ("first", "last", "table") and type(module.table) is QuantEmbedding
    assert type(module.first) is QuantLinear and done.tensors == ("norm.bias", "norm.weight")
    for name, target in (("token_embd", "table"), ("blk.0.up", "first"), ("blk.0.down", "last")):
        exact.get_submodule(target).weight.data = checkpoint.layer(name).weight().dequantize()
    exact.first.bias.data = torch.from_numpy(dense["blk.0.up.bias"])
    with torch.inference_mode():
        assert torch.equal(module(torch.arange(40)), exact(torch.arange(40)))

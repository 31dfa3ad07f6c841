"""load_model: every weight in the right module, or an error that names the one that is not."""

import copy
import json
import logging

import pytest
import torch

import bitline
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.model.plan import plan, quant_linears
from tiny import compressed, llama, rewrite

IDS = torch.tensor([[1, 5, 9, 77, 3]])


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits


def test_equals_the_dequantized_model_bit_for_bit(tmp_path):
    folder, dense = compressed(tmp_path, llama())
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    assert torch.equal(logits(model), logits(dense))
    names = [n for n, _ in quant_linears(model)]
    assert len(names) == 14 and not any("lm_head" in n for n in names)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    assert all(not b.is_meta for b in model.buffers()) and all(not p.is_meta for p in model.parameters())


def test_default_kernels_stay_close(tmp_path):
    folder, dense = compressed(tmp_path, llama())
    model = bitline.load_model(folder, dtype=torch.bfloat16)
    exact, mine, theirs = logits(dense), logits(model).float(), logits(copy.deepcopy(dense).bfloat16()).float()
    assert (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 0.05


def test_plan_groups_equal_layers_and_names_their_format(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    rows = plan(bitline.load_model(folder, dtype=torch.bfloat16))
    assert sum(len(r.names) for r in rows) == 14
    assert {(r.spec.n, r.spec.k) for r in rows} == {(64, 64), (32, 64), (160, 64), (64, 160)}
    assert all("pack-quantized" in r.format for r in rows)


@pytest.mark.parametrize("tied", [False, True])
def test_lm_head_and_tied_embeddings(tmp_path, tied):
    folder, dense = compressed(tmp_path, llama(tie_word_embeddings=tied))
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(logits(model), logits(dense))


def test_quantized_lm_head(tmp_path):
    folder, dense = compressed(tmp_path, llama(), skip=())
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    assert isinstance(model.lm_head, QuantLinear)
    assert torch.equal(logits(model), logits(dense))


def test_biases(tmp_path):
    dense = llama(attention_bias=True)
    for name, p in dense.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    folder, dense = compressed(tmp_path, dense)
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    assert model.model.layers[0].self_attn.q_proj.spec.bias
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-5)


def test_batches_and_a_single_token(tmp_path):
    folder, dense = compressed(tmp_path, llama())
    model = bitline.load_model(folder, dtype=torch.float32)
    ids = torch.randint(0, 100, (3, 7))
    torch.testing.assert_close(logits(model, ids), logits(dense, ids), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model, ids[:1, :1]), logits(dense, ids[:1, :1]), rtol=1e-4, atol=1e-4)


def test_compiles_as_one_graph_with_one_operator_per_layer(tmp_path):
    folder, dense = compressed(tmp_path, llama(num_hidden_layers=1))
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    counts = []

    def backend(graph, _inputs):
        counts.append(sum(1 for node in graph.graph.nodes if node.target is torch.ops.bitline.linear.default))
        return graph

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch.inference_mode():
        for length in (5, 9, 4):
            ids = torch.randint(0, 100, (2, length))
            assert torch.equal(compiled(ids, use_cache=False).logits, logits(dense, ids))
    assert set(counts) == {7}


def test_layers_are_read_again_and_reloaded(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    model = bitline.load_model(folder, dtype=torch.float32)
    before = logits(model)
    name, layer = next(quant_linears(model))
    layer.reload(model.bitline_weights[name]())
    assert torch.equal(logits(model), before)


def test_sharded_index(tmp_path):
    from safetensors.torch import load_file, save_file

    folder, dense = compressed(tmp_path, llama())
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: f for f, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    assert torch.equal(logits(model), logits(dense))


def test_a_packed_model_cannot_be_saved(tmp_path):
    folder, _ = compressed(tmp_path / "in", llama())
    model = bitline.load_model(folder)
    with pytest.raises(bitline.BitlineError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plain_checkpoint_has_no_quantized_layer(tmp_path):
    dense = llama()
    dense.save_pretrained(tmp_path)
    model = bitline.load_model(tmp_path, dtype=torch.float32)
    assert plan(model) == [] and torch.equal(logits(model), logits(dense))


def test_missing_parameter_is_an_error_not_random(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    rewrite(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(bitline.CheckpointError, match=r"lacks 1 of the model's tensors.*model\.norm\.weight"):
        bitline.load_model(folder)


def test_missing_quantized_layer_is_an_error(tmp_path):
    folder, _ = compressed(tmp_path, llama())

    def drop(tensors):
        for key in [k for k in tensors if "layers.1.mlp.up_proj" in k]:
            del tensors[key]

    rewrite(folder, drop)
    with pytest.raises(bitline.CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        bitline.load_model(folder)


def test_layer_without_a_module_is_an_error(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    rewrite(folder, lambda t: t.update({k.replace("rs.1.", "rs.7."): v.clone() for k, v in t.items() if "layers.1." in k}))
    with pytest.raises(bitline.CheckpointError, match=r"no module for a quantized layer.*layers\.7"):
        bitline.load_model(folder)


def test_unused_tensor_is_logged(tmp_path, caplog):
    folder, _ = compressed(tmp_path, llama())
    rewrite(folder, lambda t: t.update({"stray.weight": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING, "bitline"):
        bitline.load_model(folder)
    assert "stray.weight" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128, "head_dim": 16}, "different shape"),
        ({"model_type": "no_such_model"}, "cannot make a model configuration"),
        ({"num_hidden_layers": 5}, "lacks"),
        ({"vocab_size": 50}, "different shape"),
        ({"num_attention_heads": 0}, "causal language model|configuration"),
        ({"hidden_act": "no_such_act"}, "causal language model|configuration"),
    ],
)
def test_config_of_another_model(tmp_path, change, message):
    folder, _ = compressed(tmp_path, llama(), config=change)
    with pytest.raises(bitline.CheckpointError, match=message):
        bitline.load_model(folder)


def test_unknown_method_is_an_error_here(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["quant_method"] = "mystery"
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(bitline.CheckpointError, match="mystery"):
        bitline.load_model(folder)


def test_quantized_tensors_without_a_config_are_an_error(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(bitline.CheckpointError):
        bitline.load_model(folder)


def test_unavailable_device(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(bitline.PlatformError):
        bitline.load_model(folder, device="cuda")


def test_quant_embedding_looks_up_rows():
    weight = bitline.quantize(torch.randn(20, 64), "W4A16", group_size=32)
    table = QuantEmbedding(weight, torch.float32, "cpu")
    ids = torch.tensor([[3, 0], [19, 3]])
    assert torch.equal(table(ids), torch.nn.functional.embedding(ids, weight.dequantize()))
    assert table(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 64)
    packed = [table.get_buffer(n) for n in table._names]
    torch.library.opcheck(torch.ops.bitline.embedding.default, (ids, packed, table.spec.key, "float32"))


def test_two_threads_load_two_dtypes(tmp_path):
    import threading

    folder, _ = compressed(tmp_path, llama())
    dtypes = [torch.bfloat16, torch.float16, torch.float32] * 2
    models = {}

    def load(i):
        models[i] = bitline.load_model(folder, dtype=dtypes[i])

    threads = [threading.Thread(target=load, args=(i,)) for i in range(len(dtypes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.get_default_dtype() == torch.float32
    for i, dtype in enumerate(dtypes):
        assert {p.dtype for p in models[i].parameters()} == {dtype}
        assert logits(models[i]).isfinite().all()


def test_ids_out_of_range_are_refused():
    table = QuantEmbedding(bitline.quantize(torch.randn(20, 64), "W4A16", group_size=32), torch.float32, "cpu")
    for ids in (-1, 20, -100):
        with pytest.raises(bitline.InputError, match=r"expected 0\.\.19"):
            table(torch.tensor([3, ids]))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
def test_invalid_dtype(tmp_path, dtype):
    folder, _ = compressed(tmp_path, llama())
    with pytest.raises(bitline.InputError, match="dtype"):
        bitline.load_model(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["bogus", "xpu"])
def test_invalid_device(tmp_path, device):
    folder, _ = compressed(tmp_path, llama())
    with pytest.raises(bitline.PlatformError):
        bitline.load_model(folder, device=device)


def test_transformers_methods_disabled_by_packed_layers(tmp_path):
    folder, dense = compressed(tmp_path, llama(tie_word_embeddings=True))
    model = bitline.load_model(folder, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
    with pytest.raises(bitline.BitlineError, match="embeddings resized"):
        model.resize_token_embeddings(200)
    model.tie_weights()
    assert torch.equal(logits(model), logits(dense))


def test_weight_info_has_facts_and_no_values(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    model = bitline.load_model(folder, dtype=torch.float32)
    for layer in (model.model.layers[0].mlp.up_proj, copy.deepcopy(model).model.layers[0].mlp.up_proj):
        assert layer.weight.dtype == torch.float32 and layer.weight.shape == (160, 64) and layer.weight.device.type == "cpu"
        assert layer.weight._layer is layer and "weight" not in layer.state_dict()
        with pytest.raises(bitline.InputError, match="packed layer"):
            torch.nn.functional.linear(torch.randn(1, 64), layer.weight)

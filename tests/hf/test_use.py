"""from_pretrained's other arguments: classes, devices, experts implementations, saving, verification; and what is refused."""

import json
import logging

import pytest
import torch
import transformers
from loading import IDS, logits, through_transformers
from safetensors.torch import load_file, save_file

import bitline
import bitline.hf
from bitline.linear import QuantLinear
from bitline.model import verify
from bitline.model.plan import quant_linears
from tiny import compressed, llama, rewrite

F32 = torch.float32


@pytest.fixture
def folder(tmp_path):
    return compressed(tmp_path / "model", llama())[0]


# ---- the door --------------------------------------------------------------------------------------------------------------


def test_install_and_uninstall(folder):
    original = transformers.modeling_utils.get_hf_quantizer.bitline_original
    bitline.hf.install()
    assert bitline.hf.is_installed()
    bitline.hf.uninstall()
    bitline.hf.uninstall()
    assert transformers.modeling_utils.get_hf_quantizer is original and not bitline.hf.is_installed()
    with pytest.raises(ValueError, match="quantized with"):
        through_transformers(folder)


def test_without_the_door_a_config_without_a_quantization_config(folder):
    bitline.hf.uninstall()
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = through_transformers(folder, config=config, dtype=F32)
    assert torch.equal(logits(model), logits(bitline.load_model(folder, dtype=F32)))


def test_other_quantization_configs_are_left_to_transformers(folder, tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not list(quant_linears(model)) and not getattr(model, "is_quantized", False)
    with pytest.raises((ImportError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=transformers.AwqConfig())


def test_a_dict_is_a_config(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=F32, quantization_config={"quant_method": "bitline", "policy": {"kernel": "ReferenceLinearKernel"}}
    )
    assert {layer.choice.best.name for _, layer in quant_linears(model)} == {"ReferenceLinearKernel"}


def test_config_round_trip():
    layer = bitline.LinearSpec(64, 32, bitline.types.uint4b8, (1, 32), scale_dtype=torch.bfloat16)
    policy = bitline.Policy(kernel="ReferenceLinearKernel", disabled=frozenset({"B", "A"}), m=(1, 8), experts=(layer,))
    config = bitline.hf.BitlineConfig(policy, dtype=torch.bfloat16, merge=False, verify=True)
    again = bitline.hf.BitlineConfig.from_dict(json.loads(config.to_json_string()))
    assert again.policy == policy and again.dtype == torch.bfloat16 and again.to_dict() == config.to_dict()
    assert bitline.hf.BitlineConfig(dtype="float16").dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 4}, bitline.InputError, "no such argument.*bits"),
        ({"dtype": "int8"}, bitline.InputError, "floating-point"),
        ({"dtype": "no_such"}, bitline.InputError, "floating-point"),
        ({"policy": "fastest"}, bitline.NoKernelError, "unknown policy"),
        ({"policy": {"kernels": "x"}}, bitline.InputError, "no such field"),
        ({"quant_method": "gptq"}, bitline.InputError, "quant_method 'gptq'"),
    ],
)
def test_config_errors(options, error, message):
    with pytest.raises(error, match=message):
        bitline.hf.BitlineConfig(**options)


def test_dtypes(folder):
    assert through_transformers(folder, dtype="auto").dtype == F32  # the config's
    assert through_transformers(folder, config_options={"dtype": "bfloat16"}).dtype == torch.bfloat16
    with pytest.raises(bitline.InputError, match="floating-point"):
        through_transformers(folder, dtype=torch.int8)


# ---- classes ---------------------------------------------------------------------------------------------------------------


def test_base_class(folder):
    base = through_transformers(folder, transformers.AutoModel, dtype=F32)
    reference = bitline.load_model(folder, dtype=F32).model
    with torch.inference_mode():
        assert torch.equal(base(IDS).last_hidden_state, reference(IDS).last_hidden_state)


def test_base_class_leaves_a_quantized_head_out(tmp_path, caplog):
    folder, _ = compressed(tmp_path, llama(), skip=())
    with caplog.at_level(logging.WARNING, "bitline"):
        base = through_transformers(folder, transformers.AutoModel, dtype=F32)
    assert "lm_head" in caplog.text and "LlamaModel" in caplog.text
    assert len(list(quant_linears(base))) == 14


def test_new_head(folder, caplog):
    with caplog.at_level(logging.WARNING, "bitline"):
        model = through_transformers(folder, transformers.AutoModelForSequenceClassification, dtype=F32, num_labels=3)
    assert "score.weight: newly initialized" in caplog.text
    assert 0 < model.score.weight.std() < 2 and logits(model).shape == (1, 3)
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(bitline.CheckpointError, match=r"lacks 1 of the model's tensors.*model\.norm\.weight"):
        through_transformers(folder, transformers.AutoModelForSequenceClassification)


@pytest.mark.parametrize(
    ("name", "auto", "changes"),
    [
        ("LlamaForSequenceClassification", "AutoModelForSequenceClassification", {"num_labels": 3}),
        ("LlamaForTokenClassification", "AutoModelForTokenClassification", {"num_labels": 3}),
        ("LlamaForQuestionAnswering", "AutoModelForQuestionAnswering", {}),
    ],
)
def test_other_heads_of_the_files(tmp_path, name, auto, changes):
    torch.manual_seed(0)
    dense = getattr(transformers, name)(llama(**changes).config).float().eval()
    folder, dense = compressed(tmp_path, dense, skip=("score", "qa_outputs"))
    model = through_transformers(folder, getattr(transformers, auto), dtype=F32, policy=REFERENCE)
    with torch.inference_mode():
        for mine, reference in zip(model(IDS).to_tuple()[:2], dense(IDS).to_tuple()[:2], strict=False):
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine, reference)


REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")


def test_encoder_decoder(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=160,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
    )
    folder, dense = compressed(tmp_path, transformers.T5ForConditionalGeneration(config).float().eval())
    model = through_transformers(folder, transformers.AutoModelForSeq2SeqLM, dtype=F32, policy=REFERENCE)
    with torch.inference_mode():
        outputs = [m(input_ids=IDS, decoder_input_ids=IDS).logits for m in (model, dense)]
        tokens = [m.generate(IDS, max_new_tokens=5, do_sample=False) for m in (model, dense)]
    assert torch.equal(*outputs) and torch.equal(*tokens)
    assert isinstance(model.encoder.block[0].layer[0].SelfAttention.q, QuantLinear)


def test_encoder(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    folder, dense = compressed(tmp_path, transformers.BertForMaskedLM(config).float().eval(), skip=("cls",))
    model = through_transformers(folder, transformers.AutoModelForMaskedLM, dtype=F32, policy=REFERENCE)
    assert torch.equal(logits(model), logits(dense)) and len(list(quant_linears(model))) == 12


def test_image_text_model(tmp_path):
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=llama().config, image_token_id=99, vision_feature_layer=-1
    )
    dense = transformers.LlavaForConditionalGeneration(config).float().eval()
    folder, dense = compressed(tmp_path, dense, skip=("lm_head", "vision", "multi_modal"))
    model = through_transformers(folder, transformers.AutoModelForImageTextToText, dtype=F32, policy=REFERENCE)
    ids, pixels = torch.tensor([[1, 99, 99, 99, 99, 5, 7]]), torch.randn(1, 3, 16, 16)
    with torch.inference_mode():
        outputs = [m(input_ids=ids, pixel_values=pixels).logits for m in (model, dense)]
    assert torch.equal(*outputs) and len(list(quant_linears(model))) == 14


# ---- devices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device_map",
    ["auto", "cpu", "sequential", {"": "cpu"}, {"model": "cpu", "lm_head": torch.device("cpu")}, torch.device("cpu")],
)
def test_device_maps(folder, device_map):
    model = through_transformers(folder, dtype=F32, device_map=device_map)
    assert torch.equal(logits(model), logits(bitline.load_model(folder, dtype=F32)))


def test_device_context(folder):
    with torch.device("cpu"):
        model = through_transformers(folder, dtype=F32)
    assert torch.equal(logits(model), logits(bitline.load_model(folder, dtype=F32)))


def test_sizes_of_auto_are_the_packed_ones(folder):
    from bitline.hf.quantizer import BitlineQuantizer

    quantizer = BitlineQuantizer(bitline.hf.BitlineConfig())
    model = bitline.model.load.make_meta_model(
        transformers.AutoConfig.from_pretrained(folder), F32, bitline.open_checkpoint(folder)
    )
    quantizer.preprocess_model(model, checkpoint_files=[str(folder / "model.safetensors")])
    sizes, _ = transformers.integrations.accelerate.compute_module_sizes(model, quantizer)
    record = bitline.open_checkpoint(folder).layer("model.layers.0.mlp.down_proj")
    assert sizes["model.layers.0.mlp.down_proj"] == record.nbytes > 0
    assert sizes["lm_head"] == 4 * 100 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": {"": "disk"}}, "offloaded to disk"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": "x"}, "offloaded to disk.*lm_head"),
        ({"device_map": "auto", "max_memory": {"cpu": 20000}}, "offloaded to disk"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "offloaded to the CPU"),
        ({"device_map": {"model": "cpu"}}, r"no device for some tensors.*lm_head\.weight"),
    ],
)
def test_refused_device_maps(folder, options, message):
    with pytest.raises(bitline.InputError, match=message):
        through_transformers(folder, dtype=F32, **options)


def test_hooks_of_accelerate_stay(folder):
    from accelerate import dispatch_model
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    from bitline.hf.quantizer import _keep_hooks

    model = through_transformers(folder, dtype=F32)
    reference = logits(model)
    add_hook_to_module(model.lm_head, Counting())
    hooks = {"lm_head": model.lm_head._hf_hook}
    fresh = through_transformers(folder, dtype=F32)
    _keep_hooks(fresh, hooks)
    assert torch.equal(logits(fresh), reference) and Counting.calls == 1
    dispatched = dispatch_model(through_transformers(folder, dtype=F32), {"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(dispatched), reference)


def test_tensor_parallelism_is_refused(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(bitline.InputError, match="tensor parallelism"):
        through_transformers(folder, config=config, distributed_config=transformers.distributed.DistributedConfig())


# ---- files -----------------------------------------------------------------------------------------------------------------


def test_quantized_tensors_without_a_config_are_an_error(folder):
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(bitline.CheckpointError):
        through_transformers(folder)


def test_missing_surplus_and_misshapen_tensors(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(bitline.CheckpointError, match="different shape"):
        through_transformers(folder)
    rewrite(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(bitline.CheckpointError, match=r"model\.norm\.weight"):
        through_transformers(folder)


def test_plain_checkpoint(tmp_path):
    dense = llama()
    dense.save_pretrained(tmp_path)
    model = through_transformers(tmp_path, dtype=F32)
    assert torch.equal(logits(model), logits(dense))


def test_variant_beside_another_checkpoint(folder):
    save_file(load_file(folder / "model.safetensors"), folder / "model.fp16.safetensors", metadata={"format": "pt"})
    with pytest.raises(bitline.CheckpointError):
        through_transformers(folder, variant="fp16")


def test_saved_config_is_the_checkpoints_own(folder, tmp_path):
    model = through_transformers(folder, dtype=F32)
    model.config.save_pretrained(tmp_path / "out")
    saved, own = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (tmp_path / "out", folder))
    assert saved == own
    (folder / "config.json").write_text((tmp_path / "out" / "config.json").read_text())
    again = through_transformers(folder, dtype=F32)
    assert torch.equal(logits(again), logits(model))


def test_weights_are_not_saved(folder, tmp_path):
    model = through_transformers(folder, dtype=F32)
    with pytest.raises(bitline.BitlineError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(bitline.BitlineError, match="cannot become plain"):
        model.dequantize()
    with pytest.raises(bitline.BitlineError, match="embeddings resized"):
        model.resize_token_embeddings(120)


# ---- verification ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [through_transformers, bitline.load_model])
def test_verification(folder, monkeypatch, load):
    checked = []
    original = verify.check_layer
    monkeypatch.setattr(verify, "check_layer", lambda layer, weight, name: checked.append(name) or original(layer, weight, name))
    load(folder, dtype=F32)
    assert not checked
    monkeypatch.setenv("BITLINE_VERIFY", "1")
    model = load(folder, dtype=F32)
    assert sorted(checked) == sorted(name for name, _ in quant_linears(model)) and len(checked) == 14
    wrong = lambda layer, weight, name: original(layer, weight.take_rows(torch.arange(weight.spec.n).flip(0)), name)
    monkeypatch.setattr(verify, "check_layer", wrong)
    with pytest.raises(bitline.VerificationError, match=r"not the reference's.*an error of"):
        load(folder, dtype=F32)
    monkeypatch.setenv("BITLINE_VERIFY", "0")
    load(folder, dtype=F32)

"""LoRA on quantized layers by PEFT: gradients of plain weights, training, checkpointing, saving and loading."""

import copy

import peft
import pytest
import torch
import transformers
from loading import IDS, logits, through_transformers
from torch import nn

import bitline
import bitline.hf
from bitline.hf.lora import LoraQuantLinear
from bitline.linear import QuantLinear
from bitline.model.plan import quant_linears
from tiny import compressed, llama

F32 = torch.float32
BATCH = torch.tensor([[1, 5, 9, 77, 3, 8, 2], [4, 4, 6, 30, 31, 32, 33]])


def plain(model):
    """A copy with every QuantLinear as an nn.Linear of its dequantized weight."""
    model = copy.deepcopy(model)
    for name, layer in list(quant_linears(model)):
        weight = model.bitline_weights[name]()
        linear = nn.Linear(layer.in_features, layer.out_features, bias=weight.bias is not None)
        linear.weight.data = weight.dequantize()
        if weight.bias is not None:
            linear.bias.data = weight.bias.float()
        bitline.model.weight_loader.replace_module(model, name, linear)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def adapted(model, seed=0, **options):
    """The model with random adapters, B included."""
    torch.manual_seed(seed)
    config = bitline.hf.lora_config(model, **({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options))
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return model


def gradients(model):
    model.train()
    model(BATCH, labels=BATCH).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found and all("lora_" in name and grad is not None for name, grad in found.items())
    model.zero_grad()
    return found


@pytest.fixture
def folder(tmp_path):
    return compressed(tmp_path / "model", llama(attention_bias=True))[0]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("scheme", ["weight-only", "head"])
def test_gradients_are_those_of_plain_weights(tmp_path, scheme, merge):
    folder, _ = compressed(tmp_path, llama(), skip=("lm_head",) if scheme == "weight-only" else ())
    model = through_transformers(folder, dtype=F32, config_options={"merge": merge})
    reference = bitline.load_model(folder, dtype=F32)
    mine, theirs = gradients(adapted(model)), gradients(adapted(plain(reference)))
    assert mine.keys() == theirs.keys() and len(mine) == 2 * 14
    for name, grad in theirs.items():
        assert (mine[name] - grad).abs().max() <= 2e-5 * max(1.0, float(grad.abs().max())), name


def test_gradient_checkpointing_changes_nothing(folder):
    model = adapted(through_transformers(folder, dtype=F32))
    before = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    after = gradients(model)
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_training_lowers_the_loss_and_adapters_load_again(folder, tmp_path, dtype):
    model = through_transformers(folder, dtype=dtype)
    before = logits(model)
    packed = {name: [t.clone() for t in layer._packed] for name, layer in quant_linears(model)}
    model = peft.get_peft_model(model, bitline.hf.lora_config(model, r=8, lora_alpha=16, task_type="CAUSAL_LM"))
    assert torch.equal(logits(model), before)  # B starts at zero
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(BATCH, labels=BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    trained = logits(model)
    assert not torch.equal(trained, before)
    for name, layer in quant_linears(model.base_model.model):
        assert all(torch.equal(a, b) for a, b in zip(packed[name.removesuffix(".base_layer")], layer._packed, strict=True))
    model.save_pretrained(tmp_path / "adapter")
    again = bitline.hf.load_adapter(through_transformers(folder, dtype=dtype), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    with again.disable_adapter():
        assert torch.equal(logits(again), before)


def test_adapters_of_transformers_own_integration(folder, tmp_path):
    model = through_transformers(folder, dtype=F32)
    model.add_adapter(bitline.hf.lora_config(model, r=4, init_lora_weights=False))
    trained = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not list((tmp_path / "adapter").glob("model*"))
    again = bitline.hf.load_adapter(through_transformers(folder, dtype=F32), tmp_path / "adapter")
    assert torch.equal(logits(again), trained)


def test_trainer_of_transformers(folder, tmp_path):
    model = through_transformers(folder, dtype=F32)
    model = peft.get_peft_model(model, bitline.hf.lora_config(model, r=4, task_type="CAUSAL_LM"))
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1,
        activation_checkpointing=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in BATCH]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_generation_with_adapters(folder):
    model = adapted(through_transformers(folder, dtype=torch.bfloat16)).eval()
    tokens = model.generate(input_ids=IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    cached = torch.tensor([[*IDS[0].tolist()]])
    for _ in range(6):
        with torch.inference_mode():
            cached = torch.cat((cached, model(cached).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(tokens, cached)


def test_all_linear(folder):
    model = through_transformers(folder, dtype=F32)
    config = bitline.hf.lora_config(model)
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    model = peft.get_peft_model(model, config)
    wrapped = [module for module in model.modules() if isinstance(module, LoraQuantLinear)]
    assert len(wrapped) == 14 and all(isinstance(module.base_layer, QuantLinear) for module in wrapped)
    two = adapted(through_transformers(folder, dtype=F32), target_modules=["q_proj", "v_proj"])
    assert len([module for module in two.modules() if isinstance(module, LoraQuantLinear)]) == 4


def test_experts_are_left_out(tmp_path):
    import forms

    path, _ = forms.FORMS["qwen3 gptq"](tmp_path)
    model = through_transformers(path, dtype=F32)
    mine = adapted(model)
    found = gradients(mine)
    assert found and not any("experts" in name for name in found)


def test_refusals(folder):
    model = through_transformers(folder, dtype=F32)
    with pytest.raises(bitline.InputError, match=r"unquantized weight.*pissa"):
        bitline.hf.lora_config(model, init_lora_weights="pissa")
    with pytest.raises(bitline.InputError, match="no linear layer"):
        bitline.hf.lora_config(nn.ReLU())
    mine = adapted(model)
    with pytest.raises(bitline.BitlineError, match="cannot be merged"):
        mine.merge_and_unload()
    with pytest.raises(bitline.BitlineError, match="cannot be merged"):
        mine.merge_adapter()
    with pytest.raises(ValueError, match="variant"):
        adapted(through_transformers(folder, dtype=F32), use_dora=True)
    unloaded = mine.unload()
    assert torch.equal(logits(unloaded), logits(through_transformers(folder, dtype=F32)))


def test_without_peft(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitline.hf.lora", None)
    with pytest.raises(bitline.BitlineError, match=r"bitline\[peft\]"):
        bitline.hf.lora_config(None)

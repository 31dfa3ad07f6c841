"""What bitline.hf uses of transformers, accelerate and PEFT although it is private: each test names what changed."""

import inspect

import peft
import pytest
import torch
import transformers
from accelerate.hooks import add_hook_to_module
from loading import through_transformers
from peft.tuners.lora.layer import LoraLayer
from transformers import cache_utils, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import bitline.hf
from bitline.hf.doors import _ARGUMENTS
from bitline.hf.quantizer import BitlineQuantizer
from tiny import compressed, llama


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_replaced_function():
    assert parameters(modeling_utils.get_hf_quantizer.bitline_original) == _ARGUMENTS
    source = inspect.getsource(modeling_utils.PreTrainedModel.from_pretrained)
    assert "get_hf_quantizer(" in source and "hf_quantizer.read_header(" in source and "hf_quantizer.get_state_dict(" in source


def test_another_version_is_refused(monkeypatch):
    bitline.hf.uninstall()
    monkeypatch.setattr(modeling_utils, "get_hf_quantizer", lambda config, quantization_config: None)
    with pytest.raises(bitline.BitlineError, match=r"does not know this version of transformers.*install transformers"):
        bitline.hf.install()


def test_the_order_of_hooks(tmp_path, monkeypatch):
    calls = []
    hooks = ("validate_environment", "update_device_map", "update_attn_implementation", "update_dtype",
             "_process_model_before_weight_loading", "_process_model_after_weight_loading")  # fmt: skip
    for name in hooks:
        original = getattr(BitlineQuantizer, name)
        monkeypatch.setattr(BitlineQuantizer, name, lambda *a, _f=original, _n=name, **k: calls.append(_n) or _f(*a, **k))
    through_transformers(compressed(tmp_path, llama())[0])
    assert [*dict.fromkeys(calls)] == ["validate_environment", "update_attn_implementation", *hooks[1:2], *hooks[3:]]


def test_registries():
    assert transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING["bitline"] is BitlineQuantizer
    assert transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING["bitline"] is bitline.hf.BitlineConfig
    assert "bitline" in ALL_EXPERTS_FUNCTIONS


def test_private_parts_of_models():
    model = llama()
    assert model._get_dtype_plan(torch.bfloat16) == {} and isinstance(model.all_tied_weights_keys, dict)
    deepseek = transformers.DeepseekV3ForCausalLM
    assert "e_score_correction_bias" in deepseek._keep_in_fp32_modules_strict
    for name in (
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_load_missing",
        "base_model_prefix",
        "initialize_weights",
    ):
        assert hasattr(model, name), name


def test_cache_layers():
    cache = transformers.DynamicCache(config=llama().config)
    assert [type(layer) for layer in cache.layers] == [cache_utils.DynamicLayer] * 2
    assert not cache.layers[0].is_initialized and cache.offloading is False


def test_private_parts_of_peft_and_accelerate():
    assert parameters(peft.LoraConfig._register_custom_module) == ["self", "mapping"]
    assert {"adapter_name", "r", "lora_alpha", "config"} <= set(parameters(LoraLayer.update_layer))
    assert hasattr(LoraLayer, "_cast_input_dtype") and parameters(add_hook_to_module)[:2] == ["module", "hook"]

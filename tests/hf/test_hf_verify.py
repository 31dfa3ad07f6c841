"""bitline.verify on models of from_pretrained, with and without adapters around their layers."""

import peft
import pytest
import torch
from loading import through_transformers

import bitline
import bitline.hf
from tiny import compressed, llama


@pytest.mark.parametrize("adapters", [False, True])
def test_one_wrong_bit(adapters, tmp_path):
    folder, _ = compressed(tmp_path / "m", llama())
    model = through_transformers(folder, dtype=torch.float32)
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    if adapters:
        model = peft.get_peft_model(model, bitline.hf.lora_config(model, r=4, task_type="CAUSAL_LM"))
    assert len({check.layer for check in bitline.verify(model)}) == 14
    layer._packed[0].view(-1).view(torch.uint8)[3000] ^= 1
    with pytest.raises(bitline.VerificationError, match=r"layers\.1\.mlp\.up_proj.*1 of"):
        bitline.verify(model)

"""The toy kernel and the toy format of the guides are run as they are printed."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitline
from bitline import checkpoint
from bitline.kernels import registry

DOCS = Path(__file__).parents[1] / "docs"


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.S)


def test_toy_kernel_of_the_guide_passes_conformance_and_is_chosen():
    scope: dict = {}
    exec(compile(blocks("adding-a-kernel.md")[0], "adding-a-kernel.md", "exec"), scope)
    toy = scope["ToyInt8LinearKernel"]
    try:
        exec(blocks("adding-a-kernel.md")[1], scope)
        weight = bitline.quantize(torch.randn(48, 70), "W8A8")
        weight = bitline.QuantizedWeight(weight.spec.replace(act=None), weight.codes, weight.scale)
        layer = bitline.QuantLinear(weight, act_dtype=torch.float32, kernel="ToyInt8LinearKernel")
        x = torch.randn(3, 70)
        torch.testing.assert_close(layer(x), x @ weight.dequantize().T)
        verdict = toy.can_implement(bitline.quantize(torch.randn(48, 128), "W4A16").spec)
        assert not verdict and "uint4b8" in verdict.reason and verdict.fix
    finally:
        registry.unregister_kernel("ToyInt8LinearKernel")


def test_toy_format_of_the_guide_reads_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_registered", [])
    scope: dict = {}
    exec(compile(blocks("adding-a-format.md")[0], "adding-a-format.md", "exec"), scope)
    bitline.register_format(scope["ToyReader"])
    codes = torch.randint(-127, 128, (6, 10), dtype=torch.int8)
    scale = torch.rand(6) + 0.1
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "toy"}}))
    save_file({"a.b.toy_codes": codes, "a.b.toy_scale": scale, "norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    opened = bitline.open_checkpoint(tmp_path)
    (record,) = opened.layers()
    assert record.name == "a.b" and opened.dense_names() == ["norm.weight"]
    assert torch.equal(record.weight().dequantize(), codes.float() * scale[:, None])
    save_file({"a.b.toy_codes": codes, "a.b.toy_scale": scale[:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(bitline.CheckpointError, match=r"a\.b\.toy_scale.*found \[5\], expected \[6\]"):
        bitline.open_checkpoint(tmp_path).layers()

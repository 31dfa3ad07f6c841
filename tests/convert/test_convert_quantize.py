"""`bitline quantize`: an unquantized checkpoint rounded to nearest, and what is refused."""

import json

import pytest
import torch

import bitline
from bitline.conversion import quantize_checkpoint
from bitline.errors import BitlineError
from command import bitline as run
from tiny import SETTINGS, llama


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model = llama(attention_bias=True)
    for parameter in model.parameters():
        parameter.data = (torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1)).bfloat16()
        parameter.requires_grad = False
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize(
    ("scheme", "group", "to"),
    [("W4A16", 32, "compressed-tensors"), ("w8a16", -1, "gptq"), ("FP8_DYNAMIC", None, "compressed-tensors"),
     ("W4A16_ASYM", 32, "awq"), ("NVFP4A16", None, "compressed-tensors"), ("W4A16", 32, "gguf")],
)  # fmt: skip
def test_the_result_is_quantizes_weight(plain, tmp_path, scheme, group, to):
    folder, model = plain
    result = tmp_path / ("model.gguf" if to == "gguf" else "model")
    report = quantize_checkpoint(folder, result, scheme=scheme, group_size=group, to=to)
    assert len(report.layers) == 14 and not report.exact and report.source_format == "unquantized"
    loaded = bitline.load_model(result, dtype=torch.float32, policy=bitline.Policy("ReferenceLinearKernel"))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            expected = bitline.quantize(module.weight.detach(), scheme, group_size=group).dequantize()
            assert torch.equal(loaded.bitline_weights[name]().dequantize(), expected), name
            error = (expected - module.weight).norm() / module.weight.float().norm()
            row = next(layer for layer in report.layers if layer.name == name)
            assert row.rms_error == pytest.approx(float(error), rel=1e-4) and row.before == "bfloat16"
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(loaded.get_parameter(name), model.get_parameter(name).float()), name
    with torch.no_grad():
        assert loaded(torch.tensor([[1, 5, 7]])).logits.isfinite().all()


def test_experts_are_quantized_and_routers_are_not(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SETTINGS, **sizes)).save_pretrained(tmp_path / "plain")
    report = quantize_checkpoint(tmp_path / "plain", tmp_path / "result", group_size=32)
    names = {layer.name for layer in report.layers}
    assert len(names) == 2 * (4 + 4 * 3) and not any(name.endswith("mlp.gate") for name in names)
    model = bitline.load_model(tmp_path / "result")
    assert torch.isfinite(model(torch.tensor([[1, 5, 7]])).logits).all()


def test_layers_to_ignore(plain, tmp_path):
    done = run(
        "quantize", plain[0], tmp_path / "r", "--group-size", "32", "--ignore", r"layers\.0\.", "--ignore", "down", "--json"
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and len(report["layers"]) == 6
    assert all("layers.1" in layer["name"] and "down" not in layer["name"] for layer in report["layers"])
    assert len(bitline.open_checkpoint(tmp_path / "r").layers()) == 6


def test_as_text(plain, tmp_path):
    done = run("quantize", plain[0], tmp_path / "r", "--group-size", "32")
    assert done.returncode == 0 and "14 of 14 layers were rounded" in done.stdout and "rms error" in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--scheme", "W4A17"], 2, "unknown scheme"), (["--to", "tar"], 2, "unknown format"),
        (["--scheme", "FP8"], 1, "no data to calibrate"), (["--scheme", "NVFP4"], 1, "no data to calibrate"),
        (["--ignore", "("], 1, "no regular expression"), (["--ignore", "model"], 1, "no linear layer is left"),
        (["--group-size", "0"], 1, "group"), (["--scheme", "W4A16", "--to", "fp8"], 1, "cannot represent"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)  # fmt: skip
def test_refusals(plain, tmp_path, options, code, message):
    done = run("quantize", plain[0], tmp_path / "r", *options)
    assert done.returncode == code and message in " ".join(done.stderr.split()), done
    assert not list(tmp_path.iterdir())


def test_other_sources(plain, tmp_path):
    quantize_checkpoint(plain[0], tmp_path / "r", group_size=32)
    with pytest.raises(BitlineError, match="quantized already"):
        quantize_checkpoint(tmp_path / "r", tmp_path / "s")
    with pytest.raises(BitlineError, match="folder with config"):
        quantize_checkpoint(plain[0] / "model.safetensors", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_weight_that_is_not_finite(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(BitlineError, match=r"layers\.1\.mlp\.up_proj"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / "r", group_size=32)
    assert not (tmp_path / "r").exists()

"""What is written is what other tools read: compressed-tensors and gguf here, GPTQModel and AutoAWQ where they are installed.

For those two interop.json records a run, with the hash of every file: a file that is still the same is still read the same.
"""

import importlib.util
import json

import pytest
import torch
from expected import CHECKPOINTS, LOSSLESS, fixture_with_config
from gguf_models import checkpoint
from record_interop import RECORD, TOOLS, compare
from tools import compressed_tensors, digest, gguf_tensors

import bitline
from bitline.model.transformers_logging import suppress_transformers_logging
from tiny import llama

RECORDED = json.loads(RECORD.read_text())
GGUF_NAMES = {
    "up_proj": "ffn_up", "down_proj": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate",
}  # fmt: skip
_COMPUTES_IN = {torch.float8_e8m0fnu: torch.bfloat16, torch.float8_e4m3fn: torch.bfloat16}


def held_by(to):
    return [name for name, targets in LOSSLESS.items() if to in targets.split()]


@pytest.mark.parametrize("name", held_by("compressed-tensors"))
def test_the_compressed_tensors_package_decompresses_what_we_write(name, tmp_path):
    bitline.convert(CHECKPOINTS / name, tmp_path / "out", to="compressed-tensors")
    theirs = compressed_tensors(tmp_path / "out")
    records = bitline.open_checkpoint(CHECKPOINTS / name).layers()
    assert theirs.keys() == {record.name for record in records}
    written = bitline.open_checkpoint(tmp_path / "out")
    for record in records:
        dtype = written.layer(record.name).spec.scale_dtype
        ours = record.weight().dequantize(_COMPUTES_IN.get(dtype, dtype)).float()
        assert torch.equal(theirs[record.name] + 0.0, ours + 0.0), record.name  # + 0.0: a zero's sign is not its business


@pytest.mark.parametrize("name", held_by("gguf"))
def test_the_gguf_package_dequantizes_what_we_write(name, tmp_path):
    source = fixture_with_config(name, tmp_path / "source")
    report = bitline.convert(source, tmp_path / "out.gguf", to="gguf")
    theirs = gguf_tensors(tmp_path / "out.gguf")
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for record in bitline.open_checkpoint(source).layers():
        _, _, number, _, leaf = record.name.split(".")
        found = theirs[f"blk.{number}.{GGUF_NAMES[leaf]}.weight"]
        if leaf in heads:  # llama.cpp rotates neighbouring rows of each head, transformers rows half a head apart
            n, k = found.shape
            found = found.reshape(heads[leaf], n // heads[leaf] // 2, 2, k).swapaxes(1, 2).reshape(n, k)
        assert torch.equal(found, record.weight().dequantize()), record.name
    assert report.exact


@pytest.mark.parametrize(("to", "name"), [(to, name) for to in TOOLS for name in held_by(to)])
def test_what_other_tools_read_is_what_we_still_write(to, name, tmp_path):
    """The recorded run is about these very bytes. If this fails on purpose, run record_interop.py again."""
    bitline.convert(CHECKPOINTS / name, tmp_path / "out", to=to)
    recorded = RECORDED["files"][to][name]
    layers = len(bitline.open_checkpoint(CHECKPOINTS / name).layers())
    assert recorded["equal_layers"] == dict.fromkeys(TOOLS[to], layers)
    assert recorded["sha256"] == digest(tmp_path / "out")


@pytest.mark.parametrize(("to", "tool"), [(to, tool) for to, tools in TOOLS.items() for tool in tools])
def test_other_tools_where_they_are_installed(to, tool, tmp_path):
    package = {"autoawq": "awq"}.get(tool, tool)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{tool} is not installed")
    for name in held_by(to):
        bitline.convert(CHECKPOINTS / name, tmp_path / name, to=to)
        compare(tmp_path / name, TOOLS[to][tool](tmp_path / name))


def test_transformers_runs_what_we_write(tmp_path):
    """A whole model through transformers and the compressed-tensors package: not a bit of the logits differs."""
    from transformers import AutoModelForCausalLM

    source = checkpoint(tmp_path / "source", llama(hidden_size=128, intermediate_size=256))
    bitline.convert(source, tmp_path / "gptq", to="gptq")
    bitline.convert(tmp_path / "gptq", tmp_path / "ct", to="compressed-tensors")
    ids = torch.arange(1, 40).unsqueeze(0)
    with torch.no_grad(), suppress_transformers_logging():
        ours = bitline.load_model(source, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", dtype=torch.float32)
        assert torch.equal(theirs(ids).logits, ours(ids).logits)

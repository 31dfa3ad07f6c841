"""Other tools dequantize converted files to the same weights: compressed-tensors and gguf always, GPTQModel and AutoAWQ where
they are installed.

For those two interop.json has a recorded run with the hash of every file; files with the same hash need no new run.
"""

import importlib.util
import json

import pytest
import torch
from expected import CHECKPOINTS, LOSSLESS, fixture_with_config
from external_decoders import compressed_tensors, digest, gguf_tensors
from gguf_models import checkpoint
from record_interop import RECORD, TOOLS, compare

import bitline
from bitline.model.transformers_logging import suppress_transformers_logging
from tiny import llama

RECORDED = json.loads(RECORD.read_text())
GGUF_NAMES = {
    "up_proj": "ffn_up", "down_proj": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate",
}  # fmt: skip
_COMPUTES_IN = {torch.float8_e8m0fnu: torch.bfloat16, torch.float8_e4m3fn: torch.bfloat16}


def exact_in(to):
    return [name for name, targets in LOSSLESS.items() if to in targets.split()]


@pytest.mark.parametrize("name", exact_in("compressed-tensors"))
def test_compressed_tensors_package(name, tmp_path):
    bitline.convert(CHECKPOINTS / name, tmp_path / "out", to="compressed-tensors")
    theirs = compressed_tensors(tmp_path / "out")
    records = bitline.open_checkpoint(CHECKPOINTS / name).layers()
    assert theirs.keys() == {record.name for record in records}
    written = bitline.open_checkpoint(tmp_path / "out")
    for record in records:
        dtype = written.layer(record.name).spec.scale_dtype
        ours = record.weight().dequantize(_COMPUTES_IN.get(dtype, dtype)).float()
        assert torch.equal(theirs[record.name] + 0.0, ours + 0.0), record.name  # + 0.0: it does not keep the sign of zero


@pytest.mark.parametrize("name", exact_in("gguf"))
def test_gguf_package(name, tmp_path):
    source = fixture_with_config(name, tmp_path / "source")
    report = bitline.convert(source, tmp_path / "out.gguf", to="gguf")
    theirs = gguf_tensors(tmp_path / "out.gguf")
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for record in bitline.open_checkpoint(source).layers():
        _, _, number, _, leaf = record.name.split(".")
        found = theirs[f"blk.{number}.{GGUF_NAMES[leaf]}.weight"]
        if leaf in heads:  # llama.cpp rotates adjacent rows of each head, transformers rows half a head apart
            n, k = found.shape
            found = found.reshape(heads[leaf], n // heads[leaf] // 2, 2, k).swapaxes(1, 2).reshape(n, k)
        assert torch.equal(found, record.weight().dequantize()), record.name
    assert report.exact


@pytest.mark.parametrize(("to", "name"), [(to, name) for to in TOOLS for name in exact_in(to)])
def test_files_are_those_of_the_recorded_run(to, name, tmp_path):
    """The record holds for these bytes only. After a deliberate change run record_interop.py again."""
    bitline.convert(CHECKPOINTS / name, tmp_path / "out", to=to)
    recorded = RECORDED["files"][to][name]
    layers = len(bitline.open_checkpoint(CHECKPOINTS / name).layers())
    assert recorded["equal_layers"] == dict.fromkeys(TOOLS[to], layers)
    assert recorded["sha256"] == digest(tmp_path / "out")


@pytest.mark.parametrize(("to", "tool"), [(to, tool) for to, tools in TOOLS.items() for tool in tools])
def test_installed_tools(to, tool, tmp_path):
    package = {"autoawq": "awq"}.get(tool, tool)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{tool} is not installed")
    for name in exact_in(to):
        bitline.convert(CHECKPOINTS / name, tmp_path / name, to=to)
        compare(tmp_path / name, TOOLS[to][tool](tmp_path / name))


def test_transformers_runs_the_result(tmp_path):
    """A whole model in transformers with the compressed-tensors package: the logits are equal bit for bit."""
    from transformers import AutoModelForCausalLM

    source = checkpoint(tmp_path / "source", llama(hidden_size=128, intermediate_size=256))
    bitline.convert(source, tmp_path / "gptq", to="gptq")
    bitline.convert(tmp_path / "gptq", tmp_path / "ct", to="compressed-tensors")
    ids = torch.arange(1, 40).unsqueeze(0)
    with torch.no_grad(), suppress_transformers_logging():
        ours = bitline.load_model(source, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", dtype=torch.float32)
        assert torch.equal(theirs(ids).logits, ours(ids).logits)

"""Where Bitline cannot serve a checkpoint in vLLM, it says so before the first token, and never ends a server by its plug-in."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import vllm_models
from engine import engine, rewritten, served

from bitline.errors import BitlineError, CheckpointError, InputError


def test_another_loader_is_refused(checkpoint):
    with pytest.raises(InputError, match="load_format='safetensors'"):
        served(checkpoint("gptq"), quantization="bitline", load_format="safetensors")


def test_a_quantized_layer_that_vllm_has_no_module_for_is_an_error(checkpoint, tmp_path):
    def add(tensors, settings):
        for name in [n for n in tensors if n.startswith("model.layers.1.mlp.up_proj.")]:
            tensors[name.replace("up_proj", "side_proj")] = tensors[name].clone()

    with pytest.raises(CheckpointError, match=r"no modules for 1 of 15 quantized layers.*model.layers.1.mlp.side_proj"):
        served(rewritten(checkpoint("gptq"), tmp_path / "x", add), quantization="bitline")


def test_a_missing_tensor_is_an_error(checkpoint, tmp_path):
    path = rewritten(checkpoint("gptq"), tmp_path / "x", lambda tensors, settings: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        served(path, quantization="bitline")


def test_a_missing_sibling_is_an_error(checkpoint, tmp_path):
    def drop(tensors, settings):
        for name in [n for n in tensors if n.startswith("model.layers.0.self_attn.k_proj.")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"siblings are quantized.*model.layers.0.self_attn.k_proj.weight"):
        served(rewritten(checkpoint("gptq"), tmp_path / "x", drop), quantization="bitline")


def test_layers_of_another_size_are_an_error(checkpoint, tmp_path):
    path = rewritten(checkpoint("gptq"), tmp_path / "x", lambda t, settings: settings.update(intermediate_size=1024))
    with pytest.raises(CheckpointError, match=r"gate_proj.*512 rows"):
        served(path, quantization="bitline")


def test_verification_names_the_layer_that_is_off(checkpoint, monkeypatch):
    from bitline.linear import QuantLinear

    pack = QuantLinear._pack

    def broken(self, weight, device):
        pack(self, dataclasses.replace(weight, scale=weight.scale * 1.5) if weight.spec.n == 1024 else weight, device)

    monkeypatch.setattr(QuantLinear, "_pack", broken)
    monkeypatch.setenv("BITLINE_VERIFY", "1")
    with pytest.raises(BitlineError, match=r"model\.layers\.0\.mlp\.gate_up_proj differs from the reference"):
        served(checkpoint("gptq"), quantization="bitline")


def test_a_gguf_file_gets_a_folder_once(checkpoint):
    from bitline.vllm.gguf_folder import gguf_folder

    file = checkpoint("gguf-q4_0")
    folder = gguf_folder(file)
    assert gguf_folder(file.parent) == folder and (folder / file.name).resolve() == file.resolve()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "tokenizer.json").is_file()
    assert gguf_folder(file, tokenizer=False) != folder


def test_everything_readable_is_served_where_asked_for(checkpoint, monkeypatch):
    """BITLINE_VLLM=all is read when the plug-in registers, so this asks its function."""
    from vllm.engine.arg_utils import EngineArgs

    from bitline.vllm import engine_args

    assert engine_args._is_readable(str(checkpoint("gptq")))
    assert not engine_args._is_readable("an/id")
    args = EngineArgs(model=str(checkpoint("gptq")), quantization="bitline")
    engine_args.prepare(args)
    assert args.load_format == "bitline" and args.model == str(checkpoint("gptq"))


def test_unquantized_checkpoints_load_too(tmp_path):
    path = vllm_models.save(tmp_path / "plain", vllm_models.llama(), {}, set(), None)
    with engine(path, quantization="bitline") as llm:
        assert llm.collective_rpc(lambda worker: type(worker.model_runner.model).__name__) == ["LlamaForCausalLM"]


def run(code, folder, **variables):

    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)


REGISTER = "import logging; logging.basicConfig(level='INFO'); import bitline.vllm; bitline.vllm.register()"


def test_an_unknown_vllm_is_one_error_and_no_exception(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9.0'")
    done = run(REGISTER, tmp_path)
    assert "tested with vLLM 0.32; this is 9.9.0" in done.stderr
    assert "Bitline is off: it does not fit vLLM 9.9.0" in done.stderr


def test_the_plug_in_imports_no_vllm_and_can_be_off(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')")
    run("import bitline.vllm", tmp_path)
    run(REGISTER, tmp_path, BITLINE_VLLM="off")
    assert "expected one of off, kernels, all" in run(REGISTER, tmp_path, BITLINE_VLLM="everything").stderr

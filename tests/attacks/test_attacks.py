"""Every named attack: the right refusal, no code run, no state left behind. README.md lists what is tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import corpus
import corpus_experts  # noqa: F401  (its attacks are in the corpus once it is imported)
import corpus_float  # noqa: F401
import corpus_gguf_types  # noqa: F401
import corpus_memory  # noqa: F401
import corpus_variants  # noqa: F401
import pytest
import torch
from bases import FAMILIES, LAYER, gptq, llama_folder, write
from corpus import ATTACKS, EVIL, TOKENIZERS, Attack, gguf_with_tokenizer
from outcomes import MARGIN, address_space_limit, check_weights, memory_limit, time_limit

import bitline
from bitline.errors import BitlineError, CheckpointError
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.model.tokenizer import encode, load_tokenizer


@pytest.fixture(autouse=True)
def guard():
    with time_limit():
        yield


def use(path: Path, model: bool, oracle: bool = True) -> None:
    """Do everything that a program does with a checkpoint, with memory for its files and 64 MB.

    oracle: check its weights against the oracle, which uses Python's `re` and must not get patterns that backtrack forever.
    """
    with address_space_limit(memory_limit(path)):
        records = bitline.open_checkpoint(path).layers()
        weights = {record.name: record.weight() for record in records}
    assert all(weights[record.name].spec == record.spec for record in records)
    if oracle:
        check_weights(path, weights)
    if model:
        bitline.load_model(path, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))


def check_attack(attack: Attack, folder: Path) -> None:
    """Check the outcome of one attack."""
    path = attack.build(folder)
    try:
        use(path, attack.model, "endless" not in attack.name)
        assert attack.harmless is not False, "it loads"
    except BitlineError as error:
        assert not attack.harmless, error
        assert re.search(attack.says, str(error), re.DOTALL), error
        assert isinstance(error, CheckpointError)
        assert error.file is not None and (error.file == str(path) or Path(error.file).is_relative_to(folder))
        assert attack.file is None or Path(error.file).name == attack.file, error
        assert attack.tensor is None or error.tensor == attack.tensor, error
        assert (error.found or error.expected or error.fix) is not None
        text = str(error)
        assert len(text) < 4000 and text.replace("\n", "").isprintable()
        assert Path(error.file).name[:5] in text and (error.tensor or "")[:200] in text
    assert not list(folder.rglob("owned")) and not Path("owned").exists()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
def test_attack(attack, tmp_path, request):
    if attack.name == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything")
    check_attack(attack, tmp_path)


def test_every_attack_has_its_own_name():
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("base", FAMILIES)
def test_bases_are_valid(base, tmp_path):
    use(write(tmp_path, *FAMILIES[base]()), False)


def test_valid_but_unexpected_data_is_a_warning(tmp_path):
    tensors, config = gptq()
    (record,) = bitline.open_checkpoint(write(tmp_path, tensors, config | {"sym": True})).layers()
    assert "not used" in record.oddities[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
def test_no_attack_allocates_what_a_file_claims(tmp_path):
    """The attacks with `huge` again, models included, in a process limited to 64 MB more address space than at its start."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    expected = {a.name for a in ATTACKS if a.huge}  # in an order that depends on which corpus was imported first
    assert done.returncode == 0 and set(done.stdout.split()) == expected, done.stdout[-500:] + done.stderr[-3000:]


def _huge_attacks_with_little_memory(folder: Path) -> None:
    use(llama_folder(_new(folder, "warm")), True)  # imports and thread pools do not count
    for attack in ATTACKS:
        if attack.huge:
            folder = _new(folder, attack.name)
            with time_limit(), address_space_limit(MARGIN):
                check_attack(attack, folder)
            print(attack.name, flush=True)


def _new(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


# ---- tokenizers ----------------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_the_attacks_is_valid(tmp_path):
    tokenizer = load_tokenizer(bitline.open_checkpoint(gguf_with_tokenizer(tmp_path, {})))
    assert encode(tokenizer, "ab").numel() and tokenizer.decode(encode(tokenizer, "ab")[0]) == "ab"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_in_a_gguf_file(name, tmp_path):
    checkpoint = bitline.open_checkpoint(gguf_with_tokenizer(tmp_path, TOKENIZERS[name]))
    with pytest.raises(CheckpointError, match="no tokenizer that transformers can read") as caught:
        load_tokenizer(checkpoint)
    assert caught.value.file == str(checkpoint.path)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": "[]"}, {"tokenizer.json": "{"}, {"tokenizer.json": "[" * 100_000}, {"tokenizer_config.json": "[]"},
        {"tokenizer.model": "not a model"}, {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'},
    ],
)  # fmt: skip
def test_tokenizer_in_a_folder(files, tmp_path):
    folder = llama_folder(tmp_path)
    for name, content in ({"evil.py": EVIL} | files).items():
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(bitline.open_checkpoint(folder))
    assert not (folder / "owned").exists()


@pytest.mark.parametrize(
    "template", ["{{", "{{ 1 / 0 }}", "{{ messages.x.y.z }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
)
def test_chat_template(template, tmp_path):
    tokenizer = load_tokenizer(bitline.open_checkpoint(gguf_with_tokenizer(tmp_path, {})))
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        encode(tokenizer, "ab", chat=True)


# ---- out of memory -------------------------------------------------------------------------------------------------------


FULL = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", FULL)
def test_out_of_memory_is_reported_and_the_next_load_works(error, tmp_path, monkeypatch):
    folder = llama_folder(tmp_path)
    left = [3]

    def pack(_weight):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return original(_weight)

    original = ReferenceLinearKernel.pack
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceLinearKernel, "pack", staticmethod(pack))
        with pytest.raises(bitline.OutOfMemoryError, match="no memory") as caught:
            use(folder, True)
        assert caught.value.file == str(folder)
    del caught
    use(folder, True)


def test_a_failed_load_leaves_nothing_behind(tmp_path):
    """The same process loads a valid model after every kind of bad one, with the same logits."""
    good = llama_folder(_new(tmp_path, "good"))
    ids = torch.tensor([[1, 5, 9]])

    def logits():
        model = bitline.load_model(good, dtype=torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel"))
        with torch.inference_mode():
            return model(ids).logits

    before = logits()
    for attack in ATTACKS[:: max(1, len(ATTACKS) // 40)]:
        if attack.name != "unreadable":
            check_attack(attack, _new(tmp_path, attack.name))
    assert torch.equal(logits(), before)
    assert LAYER and corpus.PICKLE  # the attacks do not change the corpus itself


if __name__ == "__main__":
    _huge_attacks_with_little_memory(Path(sys.argv[1]))

"""Hostile files: a conversion refuses them as opening them does, or converts unusual but legal ones exactly."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from gguf_models import byte_level_bpe, checkpoint
from outcomes import MARGIN, address_space_limit, memory_limit, time_limit
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

import bitline
from bitline.errors import BitlineError, OutOfMemoryError
from thinning import thinned

for _file in sorted((Path(__file__).parents[1] / "attacks").glob("corpus*.py")):
    importlib.import_module(_file.stem)
from corpus import ATTACKS  # noqa: E402

from tiny import llama  # noqa: E402

OUT_OF_MEMORY = ("MemoryError", "allocate memory", "no memory")  # texts of out-of-memory errors


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """Import and initialize everything first, so that it does not count as memory of a conversion."""
    folder = tmp_path_factory.mktemp("warm")
    bitline.convert(checkpoint(folder / "s", llama()), folder / "m.gguf", to="gguf")
    bitline.convert(folder / "m.gguf", folder / "out", to="gptq")


def converted(path, result, to):
    """Whether the conversion was exact, within 64 MB beside what reading may take; else it was refused with a proper reason."""
    try:
        with time_limit(), address_space_limit(memory_limit(path) + MARGIN):
            assert bitline.convert(path, result, to=to).exact
    except BitlineError as error:
        assert not isinstance(error, OutOfMemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY), error
        assert not result.exists(), "something is left of it"
        return False
    return True


@pytest.mark.parametrize("attack", thinned(ATTACKS, 4), ids=lambda a: a.name)
def test_attack(attack, tmp_path):
    if attack.name == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything")
    (tmp_path / "source").mkdir()
    path = attack.build(tmp_path / "source")
    for to in ("compressed-tensors", *(["gguf"] if attack.model else [])):
        done = converted(path, tmp_path / ("m.gguf" if to == "gguf" else to), to)
        assert done or sorted(p.name for p in tmp_path.iterdir()) in (["source"], ["compressed-tensors", "source"])
    assert not list(tmp_path.rglob("owned")) and not Path("owned").exists()


@pytest.mark.parametrize(
    "lie", [{"vocab_size": 1 << 20}, {"head_dim": 1 << 20}, {"num_attention_heads": 4096, "head_dim": 1 << 16},
            {"num_key_value_heads": 4000, "head_dim": 1 << 20}, {"num_hidden_layers": 4000}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("embedding", [True, False])
def test_wrong_sizes_below_every_limit(lie, embedding, tmp_path):
    """Believing such a config would take hundreds of megabytes, or write a file of another model."""
    folder = checkpoint(tmp_path / "source", llama(vocab_size=264))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | lie))
    byte_level_bpe(folder, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    if not embedding:
        tensors = load_file(folder / "model.safetensors")
        save_file({k: t for k, t in tensors.items() if "embed" not in k and "head" not in k}, folder / "model.safetensors")
    done = converted(folder, tmp_path / "m.gguf", "gguf")
    assert done == ("num_hidden_layers" in lie), (
        "refused if it contradicts the weights; layers may be left out of a part of a model"
    )


def test_gguf_shapes_that_contradict_the_metadata(tmp_path):
    """transformers would not load the result into its parameters."""
    names = {"gguf-feed_forward_length-odd", "gguf-vocab_size-odd", "gguf-token_embd.weight-columns",
             "gguf-blk.0.attn_q.weight-one-dimension", "gguf-output_norm.weight-too-short"}  # fmt: skip
    attacks = [attack for attack in ATTACKS if attack.name in names]
    assert len(attacks) == len(names)
    for attack in attacks:
        (tmp_path / attack.name).mkdir()
        path = attack.build(tmp_path / attack.name)
        with pytest.raises(bitline.CheckpointError, match=r"different shape|does not fit") as caught:
            bitline.convert(path, tmp_path / "out", to="compressed-tensors")
        assert caught.value.tensor and not (tmp_path / "out").exists()


def test_float64_tensors(tmp_path):
    """GGUF's vectors are float32: a float64 vector is refused unless it is exact in float32."""
    folder = checkpoint(tmp_path / "source", llama())
    tensors = load_file(folder / "model.safetensors")
    for value, exact in ((1.5, True), (1 + 2.0**-40, False)):
        changed = tensors | {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], value, dtype=torch.float64)}
        save_file(changed, folder / "model.safetensors")
        assert converted(folder, tmp_path / f"{exact}.gguf", "gguf") == exact
        assert converted(folder, tmp_path / f"{exact}", "gptq")
        assert json.loads((tmp_path / f"{exact}" / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"
        assert load_file(tmp_path / f"{exact}" / "model.safetensors")["model.norm.weight"].dtype == torch.float64

"""Whole GGUF models: the same logits as transformers' own dequantization, from one file and from split files."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf_files import SCALE_BYTES, random_blocks

import bitline
from bitline.errors import CheckpointError
from bitline.model.plan import quant_linears
from bitline.testing.oracle import transformers_gguf_model

HIDDEN, LAYERS, VOCABULARY = 256, 4, 50
SHAPES = {
    "attn_q": HIDDEN, "attn_k": HIDDEN // 2, "attn_v": HIDDEN // 2, "attn_output": HIDDEN, "ffn_gate": HIDDEN, "ffn_up": HIDDEN,
    "ffn_down": HIDDEN,
}  # fmt: skip
KINDS = [kind for kind in SCALE_BYTES if kind not in ("Q1_0", "Q2_0", "Q8_K")]  # what transformers' gguf package dequantizes
REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")


def write_model(path, more=None, **split):
    """A Llama of random blocks, each matrix of another type, in one file or split."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", **split)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    names = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in SHAPES]
    tensors = {name: (KINDS[i % len(KINDS)], SHAPES[name.split(".")[-1]]) for i, name in enumerate(names)}
    for name, (kind, n) in (tensors | {"token_embd": ("IQ4_NL", VOCABULARY), "output": ("Q3_K", VOCABULARY)}).items():
        blocks = random_blocks(kind, n, HIDDEN, rng, edges=False)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
    for name in ["output_norm", *(f"blk.{i}.{norm}" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))]:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, (kind, blocks) in (more or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.inference_mode():
        return model(torch.arange(1, 24).view(1, -1)).logits


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("whole") / "m.gguf")
    return path, logits(bitline.load_model(path, dtype=torch.float32, policy=REFERENCE))


def test_logits_equal_those_of_transformers(whole):
    path, ours = whole
    assert {r.format.removeprefix("gguf ") for r in bitline.open_checkpoint(path).layers()} == set(KINDS)
    assert ours.isfinite().all() and float(ours.std()) > 0
    assert torch.equal(ours, logits(transformers_gguf_model(path, torch.float32)))


def test_a_split_model_is_the_same_model(whole, tmp_path):
    """The files are written by the gguf package."""
    write_model(tmp_path / "m.gguf", split_max_tensors=11)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for path in (tmp_path, files[0]):
        model = bitline.load_model(path, dtype=torch.float32, policy=REFERENCE)
        assert torch.equal(logits(model), whole[1])
    files[2].unlink()
    with pytest.raises(CheckpointError, match="a file of a split model is missing") as caught:
        bitline.load_model(tmp_path)
    assert caught.value.file == str(files[2])


def test_every_layer_finds_a_kernel_in_bfloat16(whole):
    model = bitline.load_model(whole[0], dtype=torch.bfloat16)
    assert len(list(quant_linears(model))) == 7 * LAYERS + 1
    assert logits(model).isfinite().all()


def test_stacked_experts_of_a_model_without_experts_are_refused(tmp_path):
    experts = random_blocks("Q4_K", 6, HIDDEN, np.random.default_rng(0)).reshape(3, 2, -1)
    path = write_model(tmp_path / "m.gguf", {"blk.0.ffn_gate_exps.weight": ("Q4_K", experts)})
    with pytest.raises(CheckpointError, match=r"no module for a quantized layer.*blk\.0\.ffn_gate_exps\.0") as caught:
        bitline.load_model(path)
    assert caught.value.tensor == "blk.0.ffn_gate_exps.0" and caught.value.file == str(path)

"""GGUF against the gguf package's dequantization: every type, stacked experts, biases and factors."""

import sys

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_files import SCALE_BYTES, ggml_values, random_blocks, same, write

from bitline.errors import BitlineError, CheckpointError, WeightError
from bitline.formats.gguf import blocks as gguf_blocks
from bitline.formats.gguf import iq_grids
from bitline.formats.gguf.ggml_types import BLOCK_SIZES, GGML_TYPES, PLAIN_TYPES
from bitline.formats.gguf.reader import READER, records
from bitline.formats.gguf.source import GGUFSource


def test_every_ggml_type_is_covered():
    assert set(SCALE_BYTES) == set(gguf_blocks.BLOCKS)
    known = {t.name: GGML_QUANT_SIZES[t] for t in GGMLQuantizationType}
    ours = {name: sizes for name, *sizes in GGML_TYPES.values()}
    assert known == {name: tuple(sizes) for name, sizes in ours.items() if name != "Q2_0"}  # newer than the package
    assert set(known) - set(gguf_blocks.BLOCKS) - set(PLAIN_TYPES) == {"Q8_1"}


@pytest.mark.parametrize("kind", SCALE_BYTES)
@pytest.mark.parametrize("k", [256, 768])
def test_every_type_is_bit_exact(kind, k, tmp_path):
    raw = random_blocks(kind, 7, k, np.random.default_rng(k))
    if kind == "Q2_0":
        weight = gguf_blocks.to_weight(kind, torch.from_numpy(raw), k)
    else:
        source = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (kind, raw)})
        (layer,) = READER.layers(source)
        assert (layer.name, layer.format, layer.tensors) == ("blk.0.attn_q", f"gguf {kind}", ("blk.0.attn_q.weight",))
        weight = layer.weight()
        assert weight.spec == layer.spec
    assert (weight.spec.n, weight.spec.k) == (7, k)
    expected = ggml_values(raw, kind)
    assert same(weight.dequantize(), expected, kind)
    assert torch.equal(weight.narrow(1, 32, k - 32).dequantize(), expected[:, 32:-32])


@pytest.mark.parametrize("kind", SCALE_BYTES)
def test_every_byte_of_a_block_takes_every_value(kind):
    rng = np.random.default_rng(1)
    kept = random_blocks(kind, 256, 256, rng, edges=False)
    raw = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (kept.shape[1], 1)), axis=1).T.copy()
    nbytes = BLOCK_SIZES[kind][1]
    scales = {b for at in SCALE_BYTES[kind] for b in (at, at + 1)}
    scales |= {"IQ1_M": set(range(49, 56, 2)), "Q8_K": set(range(4)), "MXFP4": {0}, "NVFP4": set(range(4))}.get(kind, set())
    columns = [at for at in range(kept.shape[1]) if at % nbytes in scales]
    raw[:, columns] = kept[:, columns]
    weight = gguf_blocks.to_weight(kind, torch.from_numpy(raw), 256)
    assert same(weight.dequantize(), ggml_values(raw, kind), kind)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_blocks_quantized_by_the_package_are_bit_exact(kind, tmp_path):
    raw = gguf.quants.quantize(np.random.default_rng(0).normal(size=(5, 256)).astype(np.float32), GGMLQuantizationType[kind])
    weight = next(iter(READER.layers(write(tmp_path / "m.gguf", {"w": (kind, raw)})))).weight()
    assert torch.equal(weight.dequantize(), ggml_values(raw, kind))


@pytest.mark.parametrize("kind", SCALE_BYTES)
def test_rows_are_repacked_in_chunks(kind, monkeypatch):
    raw = random_blocks(kind, 11, 512, np.random.default_rng(3))
    monkeypatch.setattr(gguf_blocks.bitstream, "ROW_CHUNK_BYTES", 3 * 512)
    weight = gguf_blocks.to_weight(kind, torch.from_numpy(raw), 512)
    assert same(weight.dequantize(), ggml_values(raw, kind), kind)


def test_an_e8m0_scale_of_255_is_nan():
    """As in the OCP MX specification; ggml computes with 2**128."""
    raw = random_blocks("MXFP4", 2, 64, np.random.default_rng(0), edges=False).reshape(2, 2, 17)
    raw[0, 1, 0] = 255
    values = gguf_blocks.to_weight("MXFP4", torch.from_numpy(raw), 64).dequantize()
    assert bool(values[0, 32:].isnan().all()) and int(values.isnan().sum()) == 32


def test_a_missing_gguf_package_is_reported(monkeypatch):
    raw = torch.from_numpy(random_blocks("IQ3_S", 1, 256, np.random.default_rng(0)))
    iq_grids._codebook.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BitlineError, match=r"IQ3_S needs the gguf package.*pip install"):
        gguf_blocks.to_weight("IQ3_S", raw, 256)
    for kind in ("IQ4_XS", "Q2_K", "TQ1_0", "MXFP4"):
        gguf_blocks.to_weight(kind, torch.from_numpy(random_blocks(kind, 1, 256, np.random.default_rng(0))), 256)


def test_unknown_codebooks_are_refused(monkeypatch):
    iq_grids._codebook.cache_clear()
    monkeypatch.setattr(gguf.quants.IQ2_XS, "grid", np.full((1, 1, 512, 8), 9, np.float32))
    raw = torch.from_numpy(random_blocks("IQ2_XS", 1, 256, np.random.default_rng(0)))
    with pytest.raises(BitlineError, match="codebook of IQ2_XS is not the known one"):
        gguf_blocks.to_weight("IQ2_XS", raw, 256)


def test_plain_tensors_metadata_and_bias(tmp_path):
    rng = np.random.default_rng(0)
    norm, embed = rng.normal(size=5).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float16)
    raw, bias = random_blocks("Q6_K", 4, 256, rng), rng.normal(size=4).astype(np.float32)
    tokens = ["<s>", "é", "", "▁the"]
    source = write(
        tmp_path / "m.gguf",
        {"norm.weight": ("F32", norm), "embed.weight": ("F16", embed), "a.weight": ("Q6_K", raw), "a.bias": ("F32", bias)},
        [("tokens", tokens), ("types", [1, 2, 3]), ("rope", 0.5), ("flag", True), ("nested", [[1, 2], [3]]), ("n", 7)],
    )
    m = source.metadata
    assert m["tokens"] == tokens and list(m["types"]) == [1, 2, 3] and m["rope"] == 0.5 and m["flag"] is True
    assert [list(a) for a in m["nested"]] == [[1, 2], [3]] and m["n"] == 7 and m["general.architecture"] == "llama"
    assert torch.equal(source.read("norm.weight"), torch.from_numpy(norm))
    assert torch.equal(source.read("embed.weight"), torch.from_numpy(embed))
    assert source.tensors["a.weight"].shape == (4, 210) and source.ggml["a.weight"] == ("Q6_K", (4, 256))
    (layer,) = READER.layers(source)
    weight = layer.weight()
    assert layer.tensors == ("a.weight", "a.bias") and torch.equal(weight.bias, torch.from_numpy(bias))
    order = torch.tensor([2, 0, 3, 1])
    rows = weight.take_rows(order)
    assert torch.equal(rows.dequantize(), weight.dequantize()[order]) and torch.equal(rows.bias, weight.bias[order])


def test_writes_to_a_read_tensor_never_reach_the_file(tmp_path):
    source = write(tmp_path / "m.gguf", {"a": ("F32", np.ones(64, np.float32))})
    source.read("a").zero_()
    assert torch.equal(source.read("a"), torch.ones(64))
    assert torch.equal(GGUFSource(tmp_path / "m.gguf").read("a"), torch.ones(64))
    with pytest.raises(CheckpointError, match="no such tensor"):
        source.read("b")


def test_unsupported_tensors_are_named(tmp_path):
    tensors = {"a.weight": ("Q8_1", np.zeros((2, 40), np.uint8)), "ok.weight": ("Q8_0", np.zeros((2, 34), np.uint8))}
    source = write(tmp_path / "m.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"Q8_1 is not supported.*a\.weight.*Q4_K, Q5_K"):
        list(READER.layers(source))
    (good,) = records(source, "ok.weight")
    assert good.spec.k == 32
    for shape in ((34,), (2, 1, 3, 34)):
        source = write(tmp_path / "n.gguf", {"a.weight": ("Q8_0", np.zeros(shape, np.uint8))})
        with pytest.raises(CheckpointError, match=r"not a matrix.*a\.weight.*stacked experts"):
            list(READER.layers(source))


@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4", "IQ2_XS"])
def test_each_of_stacked_experts_is_a_layer(kind, tmp_path):
    rng = np.random.default_rng(0)
    raw = random_blocks(kind, 3 * 5, 256, rng, edges=False).reshape(3, 5, -1)
    bias, factor = rng.normal(size=(3, 5)).astype(np.float32), np.array([1, 0.3, -2], np.float32)
    tensors = {"blk.1.ffn_up_exps.weight": (kind, raw), "blk.1.ffn_up_exps.bias": ("F32", bias)}
    layers = list(READER.layers(write(tmp_path / "m.gguf", tensors)))
    assert [layer.name for layer in layers] == [f"blk.1.ffn_up_exps.{e}" for e in range(3)]
    scaled = list(READER.layers(write(tmp_path / "s.gguf", tensors | {"blk.1.ffn_up_exps.scale": ("F32", factor)})))
    for e, (layer, other) in enumerate(zip(layers, scaled, strict=True)):
        weight, expected = layer.weight(), ggml_values(raw[e], kind)
        assert weight.spec == layer.spec and layer.tensors == tuple(tensors) and layer.nbytes == (raw[0].nbytes + 20)
        assert torch.equal(weight.dequantize(), expected) and torch.equal(weight.bias, torch.from_numpy(bias[e]))
        scaled_weight = other.weight()
        assert scaled_weight.spec == other.spec and len(other.tensors) == 3
        torch.testing.assert_close(scaled_weight.dequantize(), expected * factor[e], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", SCALE_BYTES)
def test_a_factor_is_part_of_the_weight(kind, tmp_path):
    if kind == "Q2_0":
        pytest.skip("the package cannot write it")
    raw = random_blocks(kind, 3, 256, np.random.default_rng(0), edges=False)
    tensors = {
        "a.weight": (kind, raw), "a.scale": ("F32", np.float32([0.37])), "a.input_scale": ("F32", np.float32([0.01])),
    }  # fmt: skip
    (layer,) = READER.layers(write(tmp_path / "m.gguf", tensors))
    weight = layer.weight()
    assert weight.spec == layer.spec and set(layer.tensors) == set(tensors) and "input_scale is not used" in layer.oddities[0]
    torch.testing.assert_close(weight.dequantize(), ggml_values(raw, kind) * 0.37, rtol=1e-6, atol=1e-9)
    tensors["a.scale"] = ("F32", np.float32([np.inf]))
    with pytest.raises(CheckpointError, match=r"tensor a\.scale.*NaN or infinite"):
        next(iter(READER.layers(write(tmp_path / "m.gguf", tensors)))).weight()
    tensors["a.scale"] = ("F32", np.ones(5, np.float32))  # Gemma's router has one per column
    (layer,) = READER.layers(write(tmp_path / "m.gguf", tensors))
    assert "a.scale" not in layer.tensors and "is no factor" in layer.oddities[0]


@pytest.mark.parametrize("kind", SCALE_BYTES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(kind, value):
    """On reading the layer. MXFP4's NaN is valid, NVFP4 has no such scale."""
    raw = random_blocks(kind, 3, 512, np.random.default_rng(0), edges=False)
    blocks = raw.reshape(3, -1, BLOCK_SIZES[kind][1])
    bits = np.float16(value).view(np.uint16)
    for at in SCALE_BYTES[kind]:
        bad = blocks.copy()
        bad[1, 1, at : at + 2] = np.frombuffer(bits.tobytes(), np.uint8)
        with pytest.raises(WeightError, match="1 NaN or infinite values, the first at"):
            gguf_blocks.to_weight(kind, torch.from_numpy(bad.reshape(3, -1)), 512)
    if kind == "IQ1_M":
        blocks[1, 1, 49:57:2] = blocks[1, 1, 49:57:2] & 15 | (bits >> np.arange(0, 16, 4) & 15).astype(np.uint8) << 4
    elif kind == "Q8_K":
        blocks[1, 1, 0:4] = np.frombuffer(np.float32(value).tobytes(), np.uint8)
    if kind in ("IQ1_M", "Q8_K"):
        with pytest.raises(WeightError, match="1 NaN or infinite values, the first at"):
            gguf_blocks.to_weight(kind, torch.from_numpy(blocks.reshape(3, -1)), 512)


def test_bad_scales_and_biases_are_named(tmp_path):
    raw = random_blocks("Q8_0", 3, 32, np.random.default_rng(0))
    raw[1, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match=r"m\.gguf, tensor a\.weight.*NaN or infinite"):
        next(iter(READER.layers(write(tmp_path / "m.gguf", {"a.weight": ("Q8_0", raw)})))).weight()
    four = np.full((3, 36), 128, np.uint8)
    with pytest.raises(CheckpointError, match=r"m\.gguf, tensor a\.weight.*12 bytes above 127"):
        next(iter(READER.layers(write(tmp_path / "m.gguf", {"a.weight": ("NVFP4", four)})))).weight()
    source = write(tmp_path / "b.gguf", {"a.weight": ("Q8_0", raw), "a.bias": ("F32", np.zeros(2, np.float32))})
    with pytest.raises(CheckpointError, match=r"a\.bias.*F32 \[2\].*floats \[3\]"):
        list(READER.layers(source))


def test_take_rows_refuses_shared_scales_and_bad_indices():
    weight = gguf_blocks.to_weight("Q8_0", torch.from_numpy(random_blocks("Q8_0", 4, 64, np.random.default_rng(0))), 64)
    for index in ([4], [-1], []):
        with pytest.raises(WeightError, match="out of range"):
            weight.take_rows(torch.tensor(index, dtype=torch.long))
    from bitline.weight import QuantizedWeight

    spec = weight.spec.replace(block=(2, 32), scale_dtype=torch.float32)
    with pytest.raises(WeightError, match="share scales"):
        QuantizedWeight(spec, weight.codes, torch.ones(2, 2)).take_rows(torch.tensor([1, 0, 3, 2]))

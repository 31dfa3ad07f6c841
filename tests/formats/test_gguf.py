"""GGUF against the gguf package's own decoder, and headers that lie."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitline.errors import CheckpointError, WeightError
from bitline.formats import gguf_blocks
from bitline.formats.gguf import READER, GGUFSource, record

SCALE_BYTES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind, n, k, rng):
    """Every bit random, except that the float16 scales are finite (some negative, some subnormal)."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (n, k // size, nbytes), dtype=np.uint8)
    for at in SCALE_BYTES[kind]:
        scale = rng.normal(size=(n, k // size)).astype(np.float16) * np.float16(2.0) ** rng.integers(-20, 3, (n, k // size))
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(n, -1)


def write(path, tensors, metadata=()):
    """tensors: name -> (kind, array); quantized arrays are raw bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path)


def ggml_values(raw, kind):
    return torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]).copy())


@pytest.mark.parametrize("kind", SCALE_BYTES)
@pytest.mark.parametrize("k", [256, 768])
def test_every_type_is_decoded_to_the_bit(kind, k, tmp_path):
    raw = random_blocks(kind, 7, k, np.random.default_rng(k))
    source = write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (kind, raw)})
    (layer,) = READER.layers(source)
    assert (layer.name, layer.format, layer.tensors) == ("blk.0.attn_q", f"gguf {kind}", ("blk.0.attn_q.weight",))
    weight = layer.weight()
    assert weight.spec == layer.spec
    assert (weight.spec.n, weight.spec.k) == (7, k)
    expected = ggml_values(raw, kind)
    got = weight.dequantize()
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(weight.narrow(1, 32, k - 32).dequantize(), expected[:, 32:-32])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantizes_is_decoded_to_the_bit(kind, tmp_path):
    raw = gguf.quants.quantize(np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32), GGMLQuantizationType[kind])
    weight = next(iter(READER.layers(write(tmp_path / "m.gguf", {"w": (kind, raw)})))).weight()
    assert torch.equal(weight.dequantize(), ggml_values(raw, kind))


def test_rows_are_converted_chunk_by_chunk(monkeypatch):
    raw = random_blocks("Q5_K", 11, 512, np.random.default_rng(3))
    monkeypatch.setattr(gguf_blocks.bits, "ROW_CHUNK_BYTES", 3 * 512)
    weight = gguf_blocks.to_weight("Q5_K", torch.from_numpy(raw), 512)
    assert torch.equal(weight.dequantize(), ggml_values(raw, "Q5_K"))


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
    taken = weight.take_rows(order)
    assert torch.equal(taken.dequantize(), weight.dequantize()[order]) and torch.equal(taken.bias, weight.bias[order])


def test_reading_is_a_private_view_that_never_writes_to_the_file(tmp_path):
    source = write(tmp_path / "m.gguf", {"a": ("F32", np.ones(64, np.float32))})
    source.read("a").zero_()
    assert torch.equal(source.read("a"), torch.ones(64))
    assert torch.equal(GGUFSource(tmp_path / "m.gguf").read("a"), torch.ones(64))
    with pytest.raises(CheckpointError, match="no such tensor"):
        source.read("b")


def test_unsupported_tensors_are_named(tmp_path):
    source = write(
        tmp_path / "m.gguf",
        {
            "a.weight": ("IQ4_XS", np.zeros((2, 136), np.uint8)),
            "experts.weight": ("Q4_K", np.zeros((2, 3, 144), np.uint8)),
            "ok.weight": ("Q8_0", np.zeros((2, 34), np.uint8)),
        },
    )
    with pytest.raises(CheckpointError, match=r"IQ4_XS.*a\.weight.*Q4_K, Q5_K"):
        record(source, "a.weight")
    with pytest.raises(CheckpointError, match=r"expert.*experts\.weight"):
        record(source, "experts.weight")
    with pytest.raises(CheckpointError, match="IQ4_XS"):
        list(READER.layers(source))
    assert record(source, "ok.weight").spec.k == 32


def test_bad_scales_and_biases_are_named(tmp_path):
    raw = random_blocks("Q8_0", 3, 32, np.random.default_rng(0))
    raw[1, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match=r"m\.gguf, tensor a\.weight.*NaN or infinite"):
        next(iter(READER.layers(write(tmp_path / "m.gguf", {"a.weight": ("Q8_0", raw)})))).weight()
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


# ---- headers by hand -----------------------------------------------------------------------------------------------


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name, dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(values=(), tensors=(), data=b"\0" * 256, magic=b"GGUF", version=3, n_values=None, n_tensors=None):
    counts = (len(tensors) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


HUGE = 1 << 62
HOSTILE = {
    "empty": (b"", "too short"),
    "only magic": (b"GGUF", "too short"),
    "magic": (build(magic=b"GGJT"), "not a GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64, "big-endian"),
    "version 1": (build(version=1), "version that is not read.*found 1"),
    "version 0": (build(version=0), "version that is not read"),
    "version 4": (build(version=4), "version that is not read"),
    "tensor count": (build(n_tensors=HUGE), "tensor count cannot be true"),
    "metadata count": (build(n_values=1 << 40), "metadata count cannot be true"),
    "metadata runs out": (build([value("a", 8, text("x" * 60))])[:80], "ends outside"),
    "key length": (build([struct.pack("<QI", HUGE, 4)]), "ends outside"),
    "key bytes": (build([value(b"\xff\xfe", 4, b"\0" * 4)]), "not UTF-8"),
    "key twice": (build([value("a", 4, b"\0" * 4)] * 2), "comes twice.*found a"),
    "value type": (build([value("a", 13, b"\0" * 4)]), "type that GGUF does not have.*found 13"),
    "bool": (build([value("a", 7, b"\x02")]), "not a truth value"),
    "string length": (build([value("a", 8, struct.pack("<Q", (1 << 64) - 1))]), "ends outside"),
    "array length": (build([value("a", 9, struct.pack("<IQ", 6, HUGE))]), "ends outside"),
    "string array length": (build([value("a", 9, struct.pack("<IQ", 8, HUGE))]), "ends outside"),
    "string in array": (build([value("a", 9, struct.pack("<IQQQ", 8, 2, 1 << 30, 0))]), "string 0"),
    "array type": (build([value("a", 9, struct.pack("<IQ", 99, 1))]), "array of a type.*found 99"),
    "nesting": (build([value("a", 9, struct.pack("<IQ", 9, 1) * 9)], data=b"\0" * 999), "nests too deeply"),
    "alignment 0": (build([value("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
    "alignment 24": (build([value("general.alignment", 4, struct.pack("<I", 24))]), "general.alignment"),
    "alignment text": (build([value("general.alignment", 8, text("32"))]), "general.alignment"),
    "alignment huge": (build([value("general.alignment", 4, struct.pack("<I", 1 << 31))], [tensor("t")]), "outside the file"),
    "split": (build([value("split.count", 2, struct.pack("<H", 3))]), "split over several files"),
    "rank 0": (build(tensors=[tensor("t", ())]), "number of dimensions.*found 0"),
    "rank 5": (build(tensors=[tensor("t", (1,) * 5)]), "number of dimensions.*found 5"),
    "rank huge": (build(tensors=[text("t") + struct.pack("<I", 1 << 31)]), "number of dimensions"),
    "dimension 0": (build(tensors=[tensor("t", (32, 0))]), "empty dimension"),
    "product overflows": (build(tensors=[tensor("t", (1 << 32, 1 << 32, 1 << 32, 1 << 32))]), "larger than the file.*tensor t"),
    "block": (build(tensors=[tensor("t", (48, 2), 2)]), "Q4_0 row does not end on a block.*found 48"),
    "unknown type": (build(tensors=[tensor("t", kind=777)]), "tensor t.*type 777"),
    "retired type": (build(tensors=[tensor("t", kind=31)]), "no longer has.*Q4_0_4_4"),
    "offset unaligned": (build(tensors=[tensor("t", offset=4)]), "not aligned"),
    "offset outside": (build(tensors=[tensor("t", offset=1 << 40)]), "outside the file"),
    "offset overflow": (build(tensors=[tensor("t", offset=(1 << 64) - 32)]), "outside the file"),
    "data missing": (build(tensors=[tensor("t", (1016,))], data=b"\0" * 4000), "outside the file.*tensor t"),
    "overlap": (build(tensors=[tensor("t"), tensor("u", offset=96)]), "overlaps t.*tensor u"),
    "tensor twice": (build(tensors=[tensor("t"), tensor("t", offset=128)]), "name comes twice"),
    "tensor name": (build(tensors=[tensor(b"\xff")]), "tensor name is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_named(case, tmp_path):
    data, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFSource(path)
    assert caught.value.file == str(path)


def test_a_missing_file_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot open"):
        GGUFSource(tmp_path / "none.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_good_headers_by_hand(version, tmp_path):
    path = tmp_path / "good.gguf"
    values = [value("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text(b"\xff"))]
    path.write_bytes(build(values, [tensor("t", (4, 2, 3)), tensor("u", (2,), offset=128)], version=version))
    source = GGUFSource(path)
    assert source.read("t").shape == (3, 2, 4) and source.metadata["tokens"] == ["a", "\udcff"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path, data):
    values = [value("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y")), value("b", 6, struct.pack("<f", 1.5))]
    good = bytearray(build(values, [tensor("t.weight", (32, 2), 2), tensor("u", (4,), offset=64)]))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    path = tmp_path / "f.gguf"
    path.write_bytes(good[: data.draw(st.integers(150, len(good)))])
    try:
        source = GGUFSource(path)
        for name in source.tensors:
            source.read(name).sum()
        for layer in READER.layers(source):
            layer.weight().dequantize()
    except CheckpointError:
        pass

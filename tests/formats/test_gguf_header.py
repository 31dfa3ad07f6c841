"""Invalid GGUF headers: each is refused with the reason, and any damage is a CheckpointError."""

import struct

import pytest
from gguf_files import build, tensor, text, value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitline.errors import CheckpointError
from bitline.formats.gguf.reader import READER
from bitline.formats.gguf.source import GGUFSource

HUGE = 1 << 62
HOSTILE = {
    "empty": (b"", "too short"),
    "only magic": (b"GGUF", "too short"),
    "magic": (build(magic=b"GGJT"), "not a GGUF file"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64, "big-endian"),
    "version 1": (build(version=1), "version that is not supported.*found 1"),
    "version 0": (build(version=0), "version that is not supported"),
    "version 4": (build(version=4), "version that is not supported"),
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
    "split": (build([value("split.count", 2, struct.pack("<H", 3))]), "split over several"),
    "rank 0": (build(tensors=[tensor("t", ())]), "number of dimensions.*found 0"),
    "rank 5": (build(tensors=[tensor("t", (1,) * 5)]), "number of dimensions.*found 5"),
    "rank huge": (build(tensors=[text("t") + struct.pack("<I", 1 << 31)]), "number of dimensions"),
    "dimension 0": (build(tensors=[tensor("t", (32, 0))]), "empty dimension"),
    "product overflows": (build(tensors=[tensor("t", (1 << 32, 1 << 32, 1 << 32, 1 << 32))]), "larger than the file.*tensor t"),
    "block": (build(tensors=[tensor("t", (48, 2), 2)]), "Q4_0 row does not end on a block.*found 48"),
    "unknown type": (build(tensors=[tensor("t", kind=777)]), "tensor t.*type 777"),
    "retired type": (build(tensors=[tensor("t", kind=31)]), "has removed.*Q4_0_4_4"),
    "offset unaligned": (build(tensors=[tensor("t", offset=4)]), "not aligned"),
    "offset outside": (build(tensors=[tensor("t", offset=1 << 40)]), "outside the file"),
    "offset overflow": (build(tensors=[tensor("t", offset=(1 << 64) - 32)]), "outside the file"),
    "data missing": (build(tensors=[tensor("t", (1016,))], data=b"\0" * 4000), "outside the file.*tensor t"),
    "overlap": (build(tensors=[tensor("t"), tensor("u", offset=96)]), "overlaps t.*tensor u"),
    "tensor twice": (build(tensors=[tensor("t"), tensor("t", offset=128)]), "name comes twice"),
    "tensor name": (build(tensors=[tensor(b"\xff")]), "tensor name is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_with_the_reason(case, tmp_path):
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

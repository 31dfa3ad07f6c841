"""Packed codes against Python's integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitline import bitstream

BITS = range(1, 9)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))


def codes_of(n, k, bits, seed):
    return torch.randint(1 << bits, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def stream(row, bits):
    """A row as bytes of a little-endian bit stream."""
    value = sum(code << (bits * i) for i, code in enumerate(row))
    return list(value.to_bytes((len(row) * bits + 7) // 8, "little"))


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40)
@given(shape=shapes)
def test_pack_is_a_little_endian_bit_stream(bits, shape):
    n, k, seed = shape
    codes = codes_of(n, k, bits, seed)
    packed = bitstream.pack(codes, bits)
    assert packed.shape == (n, bitstream.row_bytes(k, bits))
    assert packed.tolist() == [stream(row, bits) for row in codes.tolist()]


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40)
@given(shape=shapes)
def test_round_trip_ignores_the_tail_and_strides(bits, shape):
    n, k, seed = shape
    codes = codes_of(n, k, bits, seed)
    packed = bitstream.pack(codes, bits)
    padded = torch.full((n, packed.shape[1] + 3), 0xFF, dtype=torch.uint8)  # strided rows, with bytes past the end
    padded[:, : packed.shape[1]] = packed
    tail = 8 * packed.shape[1] - k * bits
    padded[:, packed.shape[1] - 1] |= (0xFF >> (8 - tail)) << (8 - tail) if tail else 0
    assert torch.equal(bitstream.unpack(padded, bits, k), codes)
    assert torch.equal(bitstream.unpack(padded[:, : packed.shape[1]], bits, k), codes)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40)
@given(shape=shapes, data=st.data())
def test_narrow_and_take(bits, shape, data):
    n, k, seed = shape
    codes = codes_of(n, k, bits, seed)
    packed = bitstream.pack(codes, bits)
    start = data.draw(st.integers(0, k - 1))
    stop = data.draw(st.integers(start + 1, k))
    part = bitstream.narrow(packed, bits, start, stop)
    assert torch.equal(bitstream.unpack(part, bits, stop - start), codes[:, start:stop])
    index = torch.tensor(data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=40)))
    taken = bitstream.take(packed, bits, k, index)
    assert taken.shape[1] == bitstream.row_bytes(len(index), bits)
    assert torch.equal(bitstream.unpack(taken, bits, len(index)), codes[:, index])


@pytest.mark.parametrize("bits", BITS)
def test_high_bits_of_a_byte_are_dropped(bits):
    codes = codes_of(3, 21, bits, 5)
    noisy = codes | (0xFF << bits & 0xFF)
    assert torch.equal(bitstream.pack(noisy, bits), bitstream.pack(codes, bits))


def test_a_byte_aligned_narrow_is_a_view():
    packed = bitstream.pack(codes_of(4, 64, 4, 1), 4)
    assert bitstream.narrow(packed, 4, 2, 64).data_ptr() == packed.data_ptr() + 1
    assert bitstream.narrow(packed, 4, 1, 64).data_ptr() != packed.data_ptr()


@pytest.mark.parametrize("bits", [3, 4])
def test_chunks_of_rows_change_nothing(bits, monkeypatch):
    packed = bitstream.pack(codes_of(23, 50, bits, 2), bits)
    index = torch.randperm(50)
    whole = bitstream.take(packed, bits, 50, index)
    monkeypatch.setattr(bitstream, "ROW_CHUNK_BYTES", 100)
    assert bitstream.rows_per_chunk(50) == 2 and torch.equal(bitstream.take(packed, bits, 50, index), whole)

"""Packed codes against Python's integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitline import bitstream

WIDTHS = range(1, 9)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))


def codes_of(n, k, width, seed):
    return torch.randint(1 << width, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def stream(row, width):
    """A row as bytes of a little-endian bit stream."""
    value = sum(code << (width * i) for i, code in enumerate(row))
    return list(value.to_bytes((len(row) * width + 7) // 8, "little"))


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_pack_is_a_little_endian_bit_stream(width, shape):
    n, k, seed = shape
    codes = codes_of(n, k, width, seed)
    packed = bitstream.pack(codes, width)
    assert packed.shape == (n, bitstream.row_bytes(k, width))
    assert packed.tolist() == [stream(row, width) for row in codes.tolist()]


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes)
def test_round_trip_ignores_the_tail_and_strides(width, shape):
    n, k, seed = shape
    codes = codes_of(n, k, width, seed)
    packed = bitstream.pack(codes, width)
    wide = torch.full((n, packed.shape[1] + 3), 0xFF, dtype=torch.uint8)  # rows that are strided, with bytes past the end
    wide[:, : packed.shape[1]] = packed
    tail = 8 * packed.shape[1] - k * width
    wide[:, packed.shape[1] - 1] |= (0xFF >> (8 - tail)) << (8 - tail) if tail else 0
    assert torch.equal(bitstream.unpack(wide, width, k), codes)
    assert torch.equal(bitstream.unpack(wide[:, : packed.shape[1]], width, k), codes)


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=40, deadline=None)
@given(shape=shapes, data=st.data())
def test_narrow_and_take(width, shape, data):
    n, k, seed = shape
    codes = codes_of(n, k, width, seed)
    packed = bitstream.pack(codes, width)
    start = data.draw(st.integers(0, k - 1))
    stop = data.draw(st.integers(start + 1, k))
    cut = bitstream.narrow(packed, width, start, stop)
    assert torch.equal(bitstream.unpack(cut, width, stop - start), codes[:, start:stop])
    index = torch.tensor(data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=40)))
    taken = bitstream.take(packed, width, k, index)
    assert taken.shape[1] == bitstream.row_bytes(len(index), width)
    assert torch.equal(bitstream.unpack(taken, width, len(index)), codes[:, index])


@pytest.mark.parametrize("width", WIDTHS)
def test_high_bits_of_a_byte_are_dropped(width):
    codes = codes_of(3, 21, width, 5)
    noisy = codes | (0xFF << width & 0xFF)
    assert torch.equal(bitstream.pack(noisy, width), bitstream.pack(codes, width))


def test_a_cut_on_a_byte_is_a_view():
    packed = bitstream.pack(codes_of(4, 64, 4, 1), 4)
    assert bitstream.narrow(packed, 4, 2, 64).data_ptr() == packed.data_ptr() + 1
    assert bitstream.narrow(packed, 4, 1, 64).data_ptr() != packed.data_ptr()


@pytest.mark.parametrize("width", [3, 4])
def test_chunks_of_rows_change_nothing(width, monkeypatch):
    packed = bitstream.pack(codes_of(23, 50, width, 2), width)
    index = torch.randperm(50)
    whole = bitstream.take(packed, width, 50, index)
    monkeypatch.setattr(bitstream, "ROW_CHUNK_BYTES", 100)
    assert bitstream.rows_per_chunk(50) == 2 and torch.equal(bitstream.take(packed, width, 50, index), whole)

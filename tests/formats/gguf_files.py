"""Random GGUF blocks of every type, files of them, and their dequantization by the gguf package."""

import struct

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.formats.gguf.source import GGUFSource

# Byte offsets of the float16 scales in a block of each type; IQ1_M has its one in four nibbles.
SCALE_BYTES = {
    "Q1_0": (0,), "Q2_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_K": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
    "NVFP4": (), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
EDGES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF], np.uint16)  # zeros, subnormal, largest


def random_blocks(kind, n, k, rng, edges=True):
    """Random bits, but for finite scales: moderate ones of both signs and, with edges, float16's limits."""
    size, nbytes = BLOCK_SIZES[kind]
    shape = (n, k // size)
    raw = rng.integers(0, 256, (*shape, nbytes), dtype=np.uint8)

    def scales():
        moderate = (rng.normal(size=shape) * 2.0 ** rng.integers(-12, 3, shape)).astype(np.float16).view(np.uint16)
        return np.where(edges & (rng.random(shape) < 0.3), rng.choice(EDGES, shape), moderate)

    for at in SCALE_BYTES[kind]:
        raw[..., at : at + 2] = scales()[..., None].view(np.uint8)
    if kind == "IQ1_M":
        d = scales()
        for i in range(4):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (d >> 4 * i & 15).astype(np.uint8) << 4
    elif kind == "Q8_K":
        raw[..., 0:4] = rng.normal(size=shape).astype(np.float32)[..., None].view(np.uint8)
    elif kind == "MXFP4":
        raw[..., 0] = rng.choice([0, 1, 2, 127, 254], shape) if edges else rng.integers(100, 140, shape)
    elif kind == "NVFP4":
        raw[..., 0:4] &= 127
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


def slow_values(raw, kind):
    """Types that the package does not dequantize, one number at a time."""
    size, nbytes = BLOCK_SIZES[kind]
    rows = []
    for row in raw:
        values = []
        for block in row.reshape(-1, nbytes):
            data = block.tobytes()
            (d,) = struct.unpack_from("<f" if kind == "Q8_K" else "<e", data)
            if kind == "Q8_K":
                codes = struct.unpack_from("<256b", data, 4)
            else:
                bits, stream = {"Q1_0": 1, "Q2_0": 2}[kind], int.from_bytes(data[2:], "little")
                codes = [stream >> i * bits & (1 << bits) - 1 for i in range(size)]
                codes = [2 * c - 1 if kind == "Q1_0" else c - 1 for c in codes]
            values += [np.float32(d) * np.float32(c) for c in codes]
        rows.append(values)
    return torch.tensor(np.array(rows))


def ggml_values(raw, kind):
    if kind in ("Q1_0", "Q2_0", "Q8_K"):
        return slow_values(raw, kind)
    with np.errstate(over="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]).copy())


def same(got, expected, kind):
    """Bit-equal, except the sign of zero for IQ1_S, where all weights of a block with scale 0 are zero."""
    if kind == "IQ1_S":
        got, expected = got + 0.0, expected + 0.0
    return torch.equal(got.view(torch.int32), expected.view(torch.int32))


# ---- files by hand ---------------------------------------------------------------------------------------------------


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

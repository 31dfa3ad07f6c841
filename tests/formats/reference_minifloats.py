"""Reference decoders of minifloats, one code at a time, and the producers' own weights of fp8, ModelOpt and gpt-oss."""

import hashlib
import json
import math
from pathlib import Path

import torch
from reference_packers import write

from bitline import open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
EXPECTED = json.loads((CHECKPOINTS / "expected_fp8_modelopt.json").read_text())
CASES = [(c, m) for c, modules in EXPECTED.items() for m in modules]


def matches_producer(case, module):
    """Whether a layer is bit-equal to its producer's own dequantization."""
    entry = EXPECTED[case][module]
    found = open_checkpoint(CHECKPOINTS / case).layer(module).weight().dequantize(getattr(torch, entry["dtype"]))
    return hashlib.sha256((found + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == entry["sha256"]


def e4m3(byte):
    """The value of an E4M3 code, as OCP FP8 defines it."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e5m2(byte):
    """The value of a finite E5M2 code."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 2 & 31, byte & 3
    return sign * (mantissa * 2.0**-16 if exponent == 0 else (4 + mantissa) * 2.0 ** (exponent - 17))


def e2m1(code):
    """The value of an E2M1 code."""
    return (-1) ** (code >> 3) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]


def e8m0(byte):
    """The value of an E8M0 code."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def random_bytes(*shape, seed=0, below=256):
    """uint8 of this shape."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def finite_fp8(*shape, seed=0, dtype=torch.float8_e4m3fn):
    """Random FP8 codes without NaN and infinity."""
    top = 0x7F if dtype == torch.float8_e4m3fn else 0x7C
    signs = random_bytes(*shape, seed=seed + 1, below=2) << 7
    return (random_bytes(*shape, seed=seed, below=top) | signs).view(dtype)


def nibbles(row):
    """The codes of a row of bytes, the low nibble first."""
    return [nibble for byte in row for nibble in (byte & 15, byte >> 4)]


def product(codes, scale):
    """float32 [N, K] of codes (numbers, [N][K]) times scale(n, k), each product rounded once."""
    return torch.tensor(
        [[float(c) * scale(n, k) for k, c in enumerate(row)] for n, row in enumerate(codes)], dtype=torch.float64
    ).float()


def one(folder, config, tensors, **how):
    """The only layer of a checkpoint with these tensors."""
    (layer,) = write(folder, config, {"m.proj": tensors}, **how).layers()
    return layer


def shards_make_whole(weight, dim, world=3):
    """Whether the dequantized shards concatenate to the whole, NaN included."""
    joined = torch.cat([weight.shard(dim, rank, world).dequantize() for rank in range(world)], dim)
    return torch.equal(joined.nan_to_num(nan=-77.0), weight.dequantize().nan_to_num(nan=-77.0))

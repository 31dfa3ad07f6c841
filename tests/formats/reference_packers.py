"""Reference packers of GPTQ and AWQ: one code at a time in plain Python, with no code of the readers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bitline import open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
EXPECTED = json.loads((CHECKPOINTS / "expected_gptq_awq.json").read_text())

PLANES = {3: [(0, 2), (2, 1)], 5: [(0, 4), (4, 1)], 6: [(0, 4), (4, 2)], 7: [(0, 4), (4, 2), (6, 1)]}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def matches_producer(case, module):
    """Whether a layer is bit-equal to its producer's own dequantization."""
    entry = EXPECTED[case][module]
    dtype = getattr(torch, entry["dtype"])
    weight = open_checkpoint(CHECKPOINTS / case).layer(module).weight()
    found = weight.dequantize(getattr(torch, entry.get("through", entry["dtype"]))).to(dtype)
    if "file" in entry:
        wanted = load_file(CHECKPOINTS / entry["file"])[module].float()
        return bool((weight.dequantize() - wanted).abs().max() <= 5e-4 * wanted.abs().max())
    return hashlib.sha256((found + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == entry["sha256"]


def stream(codes, bits):
    """Codes as one continuous little-endian bit stream, in uint32."""
    number = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    return [(number >> shift) & 0xFFFFFFFF for shift in range(0, len(codes) * bits, 32)]


def planar(codes, bits):
    """Codes in GPTQModel's bit planes, in uint32: for each 32 codes the low plane first."""
    packed = []
    for block in range(0, len(codes), 32):
        for shift, plane in PLANES[bits]:
            packed += stream([(int(c) >> shift) & ((1 << plane) - 1) for c in codes[block : block + 32]], plane)
    return packed


def interleaved(codes, bits):
    """AWQ: nibble i of each 8 holds column AWQ_ORDER[i]."""
    reordered = [codes[block + column] for block in range(0, len(codes), 8) for column in AWQ_ORDER]
    return stream(reordered, bits)


def as_int32(rows):
    """Rows of uint32 as an int32 tensor."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def minus_one(packed, bits):
    """Zero points as GPTQ v1 stores them: 1 is subtracted from every field of the uint32 at once, so fields borrow."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return [(value - ones) % (1 << 32) for value in packed]


def gptq(codes, zeros, scales, bits, *, groups=None, v1=False, pack=stream):
    """Tensors of one GPTQ layer. codes [K][N], zeros [G][N], scales float16 [G, N]; groups: the g_idx, or None."""
    columns = list(zip(*codes, strict=True))
    rows = []
    for z in zeros:
        if v1 and 32 % bits == 0:
            rows.append(minus_one(pack(z, bits), bits))
        else:
            rows.append(pack([(c - 1) % (1 << bits) for c in z] if v1 else z, bits))
    tensors = {"qweight": as_int32([pack(c, bits) for c in columns]).t().contiguous(), "qzeros": as_int32(rows), "scales": scales}
    if groups is not None:
        tensors["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return tensors


def awq(codes, zeros, scales, bits=4, pack=interleaved):
    """Tensors of one AWQ gemm layer; zeros None omits qzeros."""
    tensors = {"qweight": as_int32([pack(row, bits) for row in codes]), "scales": scales}
    if zeros is not None:
        tensors["qzeros"] = as_int32([pack(row, bits) for row in zeros])
    return tensors


def values(codes, zeros, scales, groups):
    """The weight, float32 [N, K], one element at a time. groups: the group of each k."""
    s = scales.float().numpy()
    weight = np.empty((len(codes[0]), len(codes)), dtype=np.float32)
    for k, row in enumerate(codes):
        for n, code in enumerate(row):
            weight[n, k] = s[groups[k], n] * np.float32(int(code) - int(zeros[groups[k]][n]))
    return torch.from_numpy(weight)


def random_layer(k, n, groups, bits, seed=0, dtype=torch.float16):
    """Codes [k][n], zero points [groups][n] with many 0 and many of the largest value, scales [groups, n]."""
    rng = np.random.default_rng(seed)
    top = (1 << bits) - 1
    zeros = rng.integers(0, top + 1, (groups, n))
    zeros[rng.random((groups, n)) < 0.3] = 0
    zeros[rng.random((groups, n)) < 0.1] = top
    scales = torch.from_numpy(rng.uniform(0.01, 1.0, (groups, n)).astype(np.float32)).to(dtype)
    return rng.integers(0, top + 1, (k, n)).tolist(), zeros.tolist(), scales


def write(folder, config, layers, shards=None, side=None):
    """A checkpoint folder: layers maps a module to its tensors. side: name of the file for the quantization config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{suffix}": t for name, parts in layers.items() for suffix, t in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if side:
        (folder / side).write_text(json.dumps(config))
        (folder / "config.json").write_text("{}")
    else:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(folder)

"""Attacks on GGUF's types, stacked experts, factors and split models. Importing this file adds them to the corpus."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bases import F32, I64, PAIRS, STRING, TYPE_F32, U32, U64, entry, gguf_bytes, model_tensors, pair, q8_0
from corpus import ATTACKS, Attack

W = "blk.0.ffn_up.weight"
Q8_0, Q4_K, NVFP4, MXFP4, IQ2_XS = 8, 12, 40, 39, 17
# Number: name, weights and bytes of a block, and the offsets of its float16 scales.
TYPES: dict[int, tuple[str, int, int, tuple[int, ...]]] = {
    10: ("q2_k", 256, 84, (80, 82)), 11: ("q3_k", 256, 110, (108,)), 16: ("iq2_xxs", 256, 66, (0,)),
    17: ("iq2_xs", 256, 74, (0,)), 18: ("iq3_xxs", 256, 98, (0,)),
    19: ("iq1_s", 256, 50, (0,)), 20: ("iq4_nl", 32, 18, (0,)), 21: ("iq3_s", 256, 110, (0,)),
    22: ("iq2_s", 256, 82, (0,)), 23: ("iq4_xs", 256, 136, (0,)), 29: ("iq1_m", 256, 56, ()), 34: ("tq1_0", 256, 54, (52,)),
    35: ("tq2_0", 256, 66, (64,)), 39: ("mxfp4", 32, 17, ()), 40: ("nvfp4", 64, 36, ()), 41: ("q1_0", 128, 18, (0,)),
    42: ("q2_0", 64, 18, (0,)), 15: ("q8_k", 256, 292, ()),
}  # fmt: skip


def blocks(number: int, n: int = 2, k: int = 256) -> np.ndarray:
    """Random blocks, uint8 [n, blocks, bytes], with valid scales."""
    _, size, nbytes, scales = TYPES[number]
    raw = np.random.default_rng(number).integers(0, 256, (n, k // size, nbytes), dtype=np.uint8)
    one = np.float16([0.01]).view(np.uint8)
    for at in scales:
        raw[..., at : at + 2] = one
    if number == 29:
        raw[..., 49::2] &= 15
    if number == 40:
        raw[..., :4] &= 63
    if number == 39:
        raw[..., 0] = 120
    if number == 15:
        raw[..., :4] = np.float32([0.01]).view(np.uint8)
    return raw


def one(name: str, says: str, number: int, dims: tuple[int, ...], data: bytes, tensor: str | None = W, **facts: Any) -> None:
    """An attack with one quantized tensor."""

    def build(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(gguf_bytes(PAIRS, [entry(W, list(dims), number, 0)], data))
        return path

    ATTACKS.append(Attack(f"gguf-{name}", build, says, tensor, "model.gguf", **facts))


for number, (kind, size, _, scales) in TYPES.items():
    valid = blocks(number)
    one(f"{kind}-valid", ".", number, (256, 2), valid.tobytes(), harmless=True)
    one(f"{kind}-zeros", ".", number, (256, 2), bytes(valid.nbytes), harmless=True)
    one(f"{kind}-half-a-block", "end on a block", number, (256 + size // 2, 1), bytes(4096))
    one(f"{kind}-a-byte-short", "outside the file", number, (256, 2), valid.tobytes()[:-1])
    one(f"{kind}-2^50-rows", "larger than the file", number, (256, 1 << 50), valid.tobytes(), huge=True)
    for at in scales:
        for what, value in (("nan", np.nan), ("inf", np.inf), ("minus-inf", -np.inf)):
            damaged = valid.copy()
            damaged[1, -1, at : at + 2] = np.float16([value]).view(np.uint8)
            one(f"{kind}-{what}-at-{at}", "NaN or infinite", number, (256, 2), damaged.tobytes())

damaged = blocks(29)
damaged[0, 0, 55] |= 0x70
damaged[0, 0, 53] |= 0xC0
one("iq1_m-inf-in-four-nibbles", "NaN or infinite", 29, (256, 2), damaged.tobytes())
damaged = blocks(15)
damaged[0, 0, :4] = np.float32([np.nan]).view(np.uint8)
one("q8_k-nan", "NaN or infinite", 15, (256, 2), damaged.tobytes())
for value in (0x80, 0xFF):
    damaged = blocks(NVFP4)
    damaged[1, 2, 3] = value
    one(f"nvfp4-scale-{value:#x}", "not an unsigned E4M3", NVFP4, (256, 2), damaged.tobytes())
damaged = blocks(NVFP4)
damaged[..., :4] = 0x7F
one("nvfp4-scale-0x7f", ".", NVFP4, (256, 2), damaged.tobytes(), harmless=True)
damaged = blocks(MXFP4)
damaged[..., 0] = 255
one("mxfp4-scale-nan", ".", MXFP4, (256, 2), damaged.tobytes(), harmless=True)
one("q8_1", "Q8_1 is not supported", 9, (32, 2), bytes(80))
one("type-43", "unknown ggml type", 43, (256, 2), bytes(4096))
one("vector-of-blocks", "not a matrix", Q4_K, (256,), bytes(144))
one("four-dimensions-of-blocks", "not a matrix", Q4_K, (256, 1, 1, 1), bytes(144))
one("2^50-experts", "larger than the file", IQ2_XS, (256, 1, 1 << 50), bytes(74), huge=True)
one("1000-experts-of-one-row", ".", Q8_0, (32, 1, 1000), bytes(34_000), harmless=True)


# ---- biases, factors and other tensors of a layer ------------------------------------------------------------------------


def with_tensor(
    name: str, says: str, suffix: str, dims: list[int], kind: int, data: bytes, *, experts: int = 0, **facts: Any
) -> None:
    """An attack with a second tensor, `blk.0.ffn_up.<suffix>`; harmless is True by default."""
    base = W.removesuffix(".weight")

    def build(folder: Path) -> Path:
        shape = [64, 32] if not experts else [64, 32 // experts, experts]
        rows = q8_0(32, 64)
        raw = gguf_bytes(PAIRS, [entry(W, shape, Q8_0, 0), entry(f"{base}.{suffix}", dims, kind, len(rows))], rows + data)
        (folder / "model.gguf").write_bytes(raw)
        return folder / "model.gguf"

    harmless = says == "."
    ATTACKS.append(
        Attack(f"gguf-{name}", build, says, None if harmless else f"{base}.{suffix}", "model.gguf", harmless=harmless, **facts)
    )


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


for what, value in {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}.items():
    with_tensor(f"factor-{what}", "NaN or infinite", "scale", [1], TYPE_F32, floats(value))
    with_tensor(f"factor-of-an-expert-{what}", "NaN or infinite", "scale", [4], TYPE_F32, floats(1, 2, value, 3), experts=4)
for what, value in {"zero": 0.0, "negative": -1.0, "tiny": 1e-45, "huge": 3e38}.items():
    with_tensor(f"factor-{what}", ".", "scale", [1], TYPE_F32, floats(value))
with_tensor("factor-of-each-column", ".", "scale", [64], TYPE_F32, bytes(256))
with_tensor("factor-of-few-experts", ".", "scale", [3], TYPE_F32, bytes(12), experts=4)
with_tensor("factor-an-integer", ".", "scale", [1], 26, bytes(4))
with_tensor("factor-quantized", "not a matrix", "scale", [32], Q8_0, bytes(34))
with_tensor("input-scale-nan", ".", "input_scale", [1], TYPE_F32, floats(np.nan))
with_tensor("bias-of-few-experts", "bias does not fit", "bias", [8, 3], TYPE_F32, bytes(96), experts=4)
with_tensor("bias-of-no-experts", "bias does not fit", "bias", [32], TYPE_F32, bytes(128), experts=4)
with_tensor("bias-of-an-expert-nan", "bias", "bias", [8, 4], TYPE_F32, floats(*[np.nan] * 32), experts=4)


# ---- split models --------------------------------------------------------------------------------------------------------


def part(
    i: int, count: Any = 3, kind: int = U32, no: int | None = None, name: str | None = None, more: tuple[bytes, ...] = ()
) -> bytes:
    """File i of a model of three, with a matrix of its own."""
    numbers = [pair("split.count", kind, count), pair("split.no", U32, i if no is None else no)]
    return gguf_bytes(
        [*(PAIRS if i == 0 else []), *numbers, *more], [entry(name or f"blk.{i}.w.weight", [64, 32], Q8_0, 0)], q8_0(32, 64, i)
    )


def part_name(i: int, count: int = 3) -> str:
    return f"m-{i + 1:05d}-of-{count:05d}.gguf"


def split(name: str, says: str, change: Callable[[Path], Any] = lambda folder: None, file: str | None = None, start: str = "",
          tensor: str | None = None, **facts: Any) -> None:  # fmt: skip
    """An attack that changes a model split into three files. start: the file to open instead of the folder."""

    def build(folder: Path) -> Path:
        for i in range(3):
            (folder / part_name(i)).write_bytes(part(i))
        change(folder)
        return folder / start

    ATTACKS.append(Attack(f"gguf-split-{name}", build, says, tensor, file, **facts))


def put(i: int, **changes: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / part_name(i)).write_bytes(part(i, **changes))


def in_place_of(i: int, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Replace file i by something else."""

    def change(folder: Path) -> None:
        (folder / part_name(i)).unlink()
        make(folder / part_name(i))

    return change


def link_elsewhere(path: Path) -> None:
    """A link to another folder, as in download caches."""
    target = path.parent / "elsewhere" / "x"
    target.parent.mkdir()
    target.write_bytes(part(1))
    path.symlink_to(target)


split("valid", ".", harmless=True)
split("valid-by-name", ".", start=part_name(0), harmless=True)
split("linked", ".", in_place_of(1, link_elsewhere), harmless=True)
split("second-part-opened", "not the first file", file=part_name(1), start=part_name(1))
for i in (1, 2):
    split(f"without-{i}", "a file of a split model is missing", in_place_of(i, lambda path: None), part_name(i))
split("without-the-first", "not the first file", in_place_of(0, lambda path: None), part_name(1))
split("a-folder-for-a-part", "is missing", in_place_of(1, Path.mkdir), part_name(1), start=part_name(0))
split("a-pipe-for-a-part", "is missing", in_place_of(1, os.mkfifo), part_name(1), start=part_name(0))
split("a-link-to-itself", "is missing", in_place_of(2, lambda path: path.symlink_to(path)), part_name(2), start=part_name(0))
split("a-part-twice", "not the one that its name says", in_place_of(2, lambda path: path.symlink_to(part_name(1))), part_name(2))
split("an-empty-part", "too short", in_place_of(2, Path.touch), part_name(2))
split("other-count", "not the one that its name says", put(1, count=4), part_name(1))
split("first-says-more-parts", "split over several", put(0, count=4), part_name(0))
split("first-says-2^60-parts", "split over several", put(0, count=1 << 60, kind=U64), part_name(0), huge=True)
split("first-says-99999-parts", "split over several", put(0, count=99_999), part_name(0))
split("first-says-one", "split over several", put(0, count=1), part_name(0))
split("negative-count", "split over several", put(0, count=-3, kind=I64), part_name(0))
split("count-a-text", "split.count is not a number", put(0, count="3", kind=STRING), part_name(0))
split("count-a-fraction", "split.count is not a number", put(0, count=3.0, kind=F32), part_name(0))
split("number-of-another", "not the one that its name says", put(0, no=1), part_name(0))
split("tensor-in-two-parts", "the same tensor", put(2, name="blk.1.w.weight"), part_name(2), tensor="blk.1.w.weight")
split("too-few-tensors", "do not have all", put(0, more=(pair("split.tensors.count", U32, 4),)), part_name(0))
split("tensor-count-a-text", "not a number", put(0, more=(pair("split.tensors.count", STRING, "3"),)), part_name(0))
split(
    "parts-of-two-models", "different models", put(1, more=(pair("general.architecture", STRING, "x" * 100_000),)), part_name(1)
)
split("another-file-beside", "several GGUF files", lambda folder: (folder / "mmproj.gguf").write_bytes(part(0)))


def quantized_experts(folder: Path) -> Path:
    entries, data = model_tensors()
    data += bytes(-len(data) % 32)
    entries.append(entry(EXPERTS, [64, 8, 4], Q8_0, len(data)))
    (folder / "model.gguf").write_bytes(gguf_bytes(PAIRS, entries, data + q8_0(32, 64)))
    return folder / "model.gguf"


EXPERTS = "blk.0.ffn_up_exps.weight"
ATTACKS.append(
    Attack(
        "gguf-model-with-experts", quantized_experts, "no module for", EXPERTS.replace("weight", "0"), "model.gguf", model=True
    )
)

"""Layers by the name of their scheme: `W4A16:g128`, `FP8_DYNAMIC`, `Q4_K`, `W4A16:channel:act_order`."""

from __future__ import annotations

import re

import torch

from bitline import types
from bitline.errors import InputError
from bitline.rtn import SCHEMES, scheme_spec
from bitline.types import LinearSpec

# Schemes of formats that `bitline.quantize` does not write: weight type and block, scale dtype, kind of zero point, super-block.
_FORMATS: dict[str, LinearSpec] = {
    "Q4_0": LinearSpec(1, 256, types.uint4b8, (1, 32), scale_dtype=torch.float16),
    "Q4_1": LinearSpec(1, 256, types.uint4, (1, 32), scale_dtype=torch.float16, zero="float"),
    "Q8_0": LinearSpec(1, 256, types.int8, (1, 32), scale_dtype=torch.float16),
    "Q4_K": LinearSpec(1, 512, types.uint4, (1, 32), scale_dtype=torch.uint8, zero="float", scale2_block=(1, 256)),
    "Q6_K": LinearSpec(1, 512, types.uint6b32, (1, 16), scale_dtype=torch.int8, scale2_block=(1, 256)),
    "NF4": LinearSpec(1, 256, types.nf4, (1, 64), scale_dtype=torch.float32),
}
_FP8_FORMATS = {  # weight-only, [N, K] -> block
    "FP8A16": lambda n, k: (1, k),
    "FP8A16_BLOCK": lambda n, k: (min(128, n), min(128, k)),
}
NAMES = (*SCHEMES, *_FORMATS, *_FP8_FORMATS)
_SHAPE = re.compile(r"([1-9]\d{0,6})[xX×]([1-9]\d{0,6})")


def parse_shape(text: str) -> tuple[int, int]:
    """N and K of `4096x11008`. Raises InputError."""
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise InputError("not the shape of a layer", found=repr(text), expected="N and K as in 4096x11008")
    return int(found[1]), int(found[2])


def scheme_of(text: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> LinearSpec:
    """The layer of a scheme's text.

    Args:
        text: A preset of `bitline.quantize` (W4A16, FP8_DYNAMIC, …) or a format's type (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, NF4,
            FP8A16, FP8A16_BLOCK), in any case. After colons: `g128` for a group size or `channel` for one scale per row, where
            the preset has a choice; `act_order`; `bias`.
        n: Rows N.
        k: Columns K.
        dtype: act_dtype, and the scales' where the scheme has it from the weight.

    Raises:
        InputError: For an unknown name or word, and a group size that the scheme does not have.
    """
    name, *words = text.strip().split(":")
    upper = name.upper()
    groups = [word for word in words if re.fullmatch(r"g[1-9]\d{0,6}|channel", word)]
    unknown = [word for word in words if word not in (*groups, "act_order", "bias")]
    if unknown or len(groups) > 1 or len(set(words)) < len(words):
        raise InputError(f"not a scheme: {text!r}", found=", ".join(unknown or words),
                         expected="after the name one group (g128, or channel), act_order, bias")  # fmt: skip
    if upper in SCHEMES:
        size = None if not groups else -1 if groups[0] == "channel" else int(groups[0][1:])
        spec = scheme_spec(n, k, upper, size, dtype)
    elif groups or upper not in NAMES:
        expected = "no group size" if upper in NAMES else ", ".join(NAMES)
        raise InputError(f"not a scheme: {text!r}", found=groups[0] if upper in NAMES else repr(name), expected=expected)
    elif upper in _FORMATS:
        spec = _FORMATS[upper].replace(n=n, k=k, act_dtype=dtype)
    else:
        block = _FP8_FORMATS[upper](n, k)
        spec = LinearSpec(n, k, types.float8_e4m3fn, block, scale_dtype=torch.float32, act_dtype=dtype)
    return spec.replace(act_order="act_order" in words, bias="bias" in words)

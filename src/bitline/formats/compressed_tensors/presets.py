"""compressed-tensors' preset schemes: "W4A16", "FP8_DYNAMIC", "NVFP4", …"""

from __future__ import annotations

import re

from bitline.formats.compressed_tensors.args import QuantizationArgs

_PAIR = tuple[QuantizationArgs, QuantizationArgs | None]
_FLOAT_PRESETS: dict[str, _PAIR] = {
    "FP8": (QuantizationArgs(8, "float", strategy="tensor"), QuantizationArgs(8, "float", strategy="tensor")),
    "FP8_DYNAMIC": (
        QuantizationArgs(8, "float", strategy="channel"), QuantizationArgs(8, "float", strategy="token", dynamic=True),
    ),
    "FP8_BLOCK": (
        QuantizationArgs(8, "float", strategy="block", block_structure=[128, 128]),
        QuantizationArgs(8, "float", strategy="group", group_size=128, dynamic=True),
    ),
    "NVFP4": (
        QuantizationArgs(4, "float", strategy="tensor_group", group_size=16),
        QuantizationArgs(4, "float", strategy="tensor_group", group_size=16, dynamic="local"),
    ),
    "MXFP4XFP8": (QuantizationArgs(4, "float", group_size=32), QuantizationArgs(8, "float", group_size=128, dynamic=True)),
    "MXFP4": (QuantizationArgs(4, "float", group_size=32), QuantizationArgs(4, "float", group_size=32, dynamic=True)),
    "MXFP6A8": (
        QuantizationArgs(6, "float", group_size=32),
        QuantizationArgs(8, "float", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
    ),
    "MXFP8": (
        QuantizationArgs(8, "float", group_size=32),
        QuantizationArgs(8, "float", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
    ),
    "NVFP4A16": (QuantizationArgs(4, "float", strategy="tensor_group", group_size=16), None),
    "MXFP4A16": (QuantizationArgs(4, "float", group_size=32), None),
    "MXFP6A16": (QuantizationArgs(6, "float", group_size=32), None),
    "MXFP8A16": (QuantizationArgs(8, "float", group_size=32), None),
}  # fmt: skip


def preset(name: str) -> _PAIR | None:
    """(weights, input_activations) of a preset in any case; None for UNQUANTIZED, ValueError for an unknown name."""
    upper = name.upper()
    if upper == "UNQUANTIZED":
        return None
    if upper in _FLOAT_PRESETS:
        return _FLOAT_PRESETS[upper]
    found = re.fullmatch(r"(?:INT8|W([2-8])A(4|8|16|FP8)(_ASYM)?)", upper)
    if not found:
        raise ValueError(f"{name!r} is not a preset scheme")
    weight_bits, act, asymmetric = int(found[1] or 8), found[2] or "8", bool(found[3])
    # The group size of a preset depends on the release, so it is taken from the scales' shape.
    weights = QuantizationArgs(weight_bits, "int", symmetric=not asymmetric, strategy="group", group_size=128)
    if act == "16":
        return weights, None
    bits, kind = (8, "float") if act == "FP8" else (int(act), "int")
    return weights, QuantizationArgs(bits, kind, strategy="token", dynamic=True)

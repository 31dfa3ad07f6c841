"""The formats that `bitline.convert` writes, by their names."""

from __future__ import annotations

from bitline.conversion.awq import AWQTarget
from bitline.conversion.compressed_tensors import CompressedTensorsTarget
from bitline.conversion.fp8 import FP8Target
from bitline.conversion.gguf.target import GGUFTarget
from bitline.conversion.gptq import GPTQTarget
from bitline.conversion.modelopt import ModelOptTarget
from bitline.conversion.target import Target

TARGETS: dict[str, type[Target]] = {
    "compressed-tensors": CompressedTensorsTarget, "gptq": GPTQTarget, "awq": AWQTarget, "gguf": GGUFTarget, "fp8": FP8Target,
    "modelopt": ModelOptTarget,
}  # fmt: skip

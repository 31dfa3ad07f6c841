"""A layer's quantization scheme as a short text for tables."""

from __future__ import annotations

from bitline.types import ActSpec, LinearSpec

_SHORT = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8 e5m2", "float4_e2m1": "fp4", "float6_e2m3": "fp6 e2m3",
          "float6_e3m2": "fp6 e3m2"}  # fmt: skip


def activation_text(act: ActSpec) -> str:
    """`fp8 token`, `int8 static asym`, `fp4 g16 e4m3`; dynamic unless it says static."""
    granularity = f"g{act.group_size}" if act.group_size else act.granularity
    parts = [_SHORT.get(act.dtype.name, act.dtype.name), granularity if act.dynamic else "static"]
    return " ".join(parts + ([] if act.symmetric else ["asym"]) + ([] if act.scale == "float" else [act.scale]))


def scheme_text(spec: LinearSpec) -> str:
    """`uint4b8 g128`, `fp8 channel, input fp8 token`, `uint4+offset g32 in 1×256`."""
    text = spec.replace(act=None, input_multiplier=False).scheme
    text = _SHORT.get(spec.weight.name, spec.weight.name) + text.removeprefix(spec.weight.name)
    if spec.scale2_block is not None and spec.scale2_block != (spec.n, spec.k):
        text += f" in {spec.scale2_block[0]}×{spec.scale2_block[1]}"
    return text + (f", input {activation_text(spec.act)}" if spec.act else "") + (" scaled" if spec.input_multiplier else "")

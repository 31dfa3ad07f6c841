"""FP8 as DeepSeek, transformers, AutoFP8, Mistral, FBGEMM and AutoRound write it: one code each, and scales that multiply.

`weight_scale_inv` is the inverse of what the quantizer divided by, so it multiplies like `weight_scale` and `scale` do. Only
GPTQModel has the weight divided by it, and says so in weight_scale_semantics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common.expert_stacks import unstacked
from bitline.formats.common.ignored_modules import Hints
from bitline.formats.common.module_tensors import E8M0, FLOATS, NUMBER, Layer
from bitline.formats.gptq_awq.config import AUTO_ROUND
from bitline.formats.io.json_object import invalid_config
from bitline.formats.quant_config import find_quantization, quantization_config
from bitline.types import ActSpec, LinearSpec

FP8 = {
    torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2,
    torch.float8_e4m3fnuz: types.float8_e4m3fnuz,
}  # fmt: skip
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_INPUTS = ("input_scale", "activation_scale", "qscale_act")
_CERTAIN = ("weight_scale_inv", "weight_scale", "qscale_weight")  # other modules have a `scale` too
METHODS = ("fp8", "fbgemm_fp8", "mxfp8")
_TINY = 1e-35  # a divisor below has no float32 reciprocal
_USUAL = (128, 128)  # the block of every file known that does not name its own


class _Config(msgspec.Struct):
    """The keys that matter; a null is what an absent key is. AutoRound's own keys are act_bits and group_size."""

    activation_scheme: Literal["dynamic", "static"] | None = None
    weight_block_size: list[int] | None = None
    group_size: list[int] | int | None = None
    act_bits: int | None = None
    fmt: Literal["e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"] | None = None
    scale_fmt: Literal["ue8m0", "float", "float32", "fp32"] | None = None
    activation_scale_ub: float | None = None
    weight_scale_semantics: Literal["inverse"] | None = None
    quant_method: str = "fp8"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a scale block, None where the config names none."""
        sizes = self.weight_block_size or (self.group_size if isinstance(self.group_size, list) else None)
        if sizes is None:
            return (1, 32) if self.quant_method == "mxfp8" else None
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"weight_block_size is {sizes}, expected two positive sizes")
        return sizes[0], sizes[1]

    def act(self, columns: int | None) -> ActSpec | None:
        """How inputs are quantized. columns: of a weight's scale block, None for a weight without blocks."""
        if (self.act_bits or 16) >= 16 if self.quant_method in AUTO_ROUND else (self.act_bits or 0) >= 16:
            return None  # AutoRound leaves out what is its default
        dtype = types.float8_e5m2 if self.fmt in ("e5m2", "float8_e5m2") else types.float8_e4m3fn
        if self.activation_scheme is None and self.weight_scale_semantics is not None:
            return None  # GPTQModel quantizes weights alone
        if self.activation_scheme == "static":
            return ActSpec(dtype, dynamic=False, granularity="tensor")
        if self.quant_method == "fbgemm_fp8":  # absolute values above the bound saturate
            limit = 1200.0 if self.activation_scale_ub is None else self.activation_scale_ub
            if not 0 < limit < float("inf"):
                raise ValueError(f"activation_scale_ub is {limit}, expected a positive number")
            return ActSpec(dtype, limit=limit)
        if columns is None:
            return ActSpec(dtype)
        # "ue8m0": scales are rounded up to a power of two, which is what MX does with E4M3 but for an absolute maximum of
        # exactly 448 * 2**e, where MX takes the next one.
        powers = self.scale_fmt == "ue8m0" or self.quant_method == "mxfp8"
        return ActSpec(dtype, True, "group", columns, scale="e8m0" if powers else "float")


class FP8Reader:
    """Layer records of fp8 checkpoints, and of AutoRound's in the same layout."""

    name = "fp8"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "fp8", "fbgemm_fp8" and "mxfp8", and AutoRound's FP8 with a packing_format of its own or none."""
        config = quantization_config(source)
        if config.get("quant_method") in AUTO_ROUND:
            packing, floats = config.get("packing_format"), str(config.get("data_type")).startswith("fp")
            return packing == "auto_round:fp8" or (floats and (packing is None or str(packing).endswith(":fp8")))
        return config.get("quant_method") in METHODS

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose `weight` is FP8, or two FP4 codes in a byte under an E8M0 `scale`. No tensor data is read."""
        raw, file = find_quantization(source)
        config = _parse(raw, file)
        hints = Hints([*(config.modules_to_not_convert or ()), *(config.ignored_layers or ())], file)
        label = "auto-round fp8" if raw.get("quant_method") in AUTO_ROUND else config.quant_method
        source = unstacked(source, (*FP8, torch.int8))
        for name, info in source.tensors.items():
            base, dot, suffix = name.rpartition(".")
            weight = source.tensors.get(f"{base}.weight")
            if suffix == "weight" and dot and info.dtype in FP8:
                module = Layer(source, base)
                hints.note(module)
                yield _record(module, config, label, file)
            elif suffix == "weight" and dot and info.dtype == torch.int8 and _fp4_scale(source, base) is not None:
                module = Layer(source, base)
                hints.note(module)
                yield _fp4_record(module, config, label)
            elif suffix in _CERTAIN and (weight is None or weight.dtype not in FP8):
                found = "no weight" if weight is None else f"a weight of {weight.dtype}"
                raise CheckpointError(
                    "scales without codes", file=info.file, tensor=name, found=found, expected=f"{base}.weight in FP8 beside them"
                )


def _parse(raw: Mapping[str, Any], file: Path) -> _Config:
    try:
        config = msgspec.convert(raw, _Config)
        _ = config.block, config.act(None)
    except (msgspec.ValidationError, ValueError) as error:
        raise invalid_config(error, file) from error
    return config


def _record(m: Layer, config: _Config, label: str, file: Path) -> LayerRecord:
    n, k = m.matrix()
    if (zeros := m.find("weight_zp")) is not None:
        raise m.error(zeros, "FP8 weights with zero points are not supported yet", zeros.name, "symmetric weights")
    scale = m.need(SCALES, (*FLOATS, *E8M0))
    block, how = _block(m, scale, n, k, config, file)
    dtype = torch.float8_e8m0fnu if scale.dtype in E8M0 else scale.dtype
    divides = config.weight_scale_semantics == "inverse"
    if divides:
        m.need(SCALES, (torch.float32,))
    act = config.act(min(block[1], k) if how in ("block", "group") else None)
    static = act is not None and not act.dynamic
    if static:
        m.number(_INPUTS)
    elif act is not None and (left := m.find(_INPUTS)) is not None:
        m.oddities.append(f"{left.name.rpartition('.')[2]} is not used: the config says that inputs are scaled dynamically")
    for left_over in (*SCALES, *_INPUTS, "input_scale_ub"):
        m.find(left_over)
    spec = LinearSpec(n, k, FP8[m.main.dtype], block, scale_dtype=dtype, act=act, bias=m.bias(n))

    def build() -> dict[str, Tensor | None]:
        factor = m.read(SCALES).view(dtype).reshape(spec.grid)
        if divides and not bool(((factor.abs() > _TINY) & factor.isfinite()).all()):
            found = f"{float(factor.abs().min())} to {float(factor.abs().max())}"
            raise m.error(scale, "a scale that nothing can be divided by", found, f"more than {_TINY}, and finite")
        return {
            "codes": m.read("weight").view(torch.uint8), "scale": factor.reciprocal() if divides else factor,
            "input_scale": m.read(_INPUTS).reshape(()) if static else None,
        }  # fmt: skip

    return m.record(f"{label} {how}", spec, build, {"scale": SCALES, "input_scale": _INPUTS})


def _block(
    m: Layer, scale: TensorInfo, n: int, k: int, config: _Config, file: Path
) -> tuple[tuple[int, int], Literal["tensor", "channel", "group", "block"]]:
    """The block of one scale, from the config where it names one, else from the shape of the scales."""
    if config.block is not None:
        bn, bk = config.block
        grid = -(-n // bn), -(-k // bk)
        if scale.shape != grid and not (grid == (1, 1) and scale.shape in NUMBER):
            raise m.unfit(scale, n, k, f"{list(grid)}, as blocks of {bn} x {bk} in {file.name} mean")
        return (bn, bk), "block"
    if scale.shape in NUMBER:
        return (n, k), "tensor"
    if scale.shape in ((n,), (n, 1)):
        return (1, k), "channel"
    size = config.group_size
    if isinstance(size, int) and size > 0 and scale.shape in ((n, -(-k // size)), (n * -(-k // size),)):  # AutoRound flattens
        return (1, size), "group"
    grid = -(-n // _USUAL[0]), -(-k // _USUAL[1])
    if scale.shape != grid:
        raise m.unfit(scale, n, k, f"[] (per tensor), [{n}] (per row), or {list(grid)} (blocks of 128 x 128)")
    m.oddities.append("the config names no weight_block_size: blocks of 128 x 128 fit the scales")
    return _USUAL, "block"


def _fp4_scale(source: TensorSource, base: str) -> str | None:
    """The name of the E8M0 scales of two FP4 codes in an int8; None where there are none."""
    for suffix in SCALES:
        info = source.tensors.get(f"{base}.{suffix}")
        if info is not None and info.dtype in E8M0:
            return suffix
    return None


def _fp4_record(m: Layer, config: _Config, label: str) -> LayerRecord:
    """Experts of DeepSeek-V4: two E2M1 codes in an int8, the lower one first, and an E8M0 scale for 32 columns."""
    n, columns = m.matrix()
    k = 2 * columns
    scale = m.need(SCALES, E8M0)
    if scale.shape != (n, -(-k // 32)):
        raise m.unfit(scale, n, k, f"{[n, -(-k // 32)]} (one for 32 columns)")
    act = config.act(min((config.block or _USUAL)[1], k))
    if act is not None and not act.dynamic:
        raise m.error(m.main, "FP4 experts with static activations are not supported yet", "activation_scheme static", "dynamic")
    spec = LinearSpec(n, k, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu, act=act, bias=m.bias(n))

    def build() -> dict[str, Tensor]:
        return {"codes": m.read("weight").view(torch.uint8), "scale": m.read(SCALES).view(torch.float8_e8m0fnu)}

    return m.record(f"{label} fp4", spec, build, {"scale": SCALES})


READER = FP8Reader()

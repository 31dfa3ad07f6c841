"""FP8 as DeepSeek, transformers, AutoFP8, Mistral, FBGEMM and AutoRound write it: one code per byte, scales that multiply.

`weight_scale_inv` is the inverse of the quantizing scale, so it multiplies as `weight_scale` and `scale` do. Only GPTQModel
divides by its scale, and says so in weight_scale_semantics.
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
from bitline.formats.common.expert_stacks import unstack_experts
from bitline.formats.common.ignored_modules import IgnoredModules
from bitline.formats.common.module_tensors import MIN_DIVISOR, ModuleTensors
from bitline.formats.common.scales import E8M0, FLOATS, SCALAR_SHAPES, grid_of
from bitline.formats.common.slices import COLUMNS, ROWS, Layout, byte_axis, scale_axes
from bitline.formats.io.json_object import invalid_config
from bitline.formats.quant_config import AUTO_ROUND_METHODS, find_quantization, quantization_config
from bitline.types import ActSpec, LinearSpec

FP8_TYPES = {
    torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2,
    torch.float8_e4m3fnuz: types.float8_e4m3fnuz,
}  # fmt: skip
METHODS = ("fp8", "fbgemm_fp8", "mxfp8")
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_FP8_ONLY_SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight")  # modules of other kinds may have a `scale`
_INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act")
_DEFAULT_BLOCK = (128, 128)  # of all known files whose config names none
_FBGEMM_LIMIT = 1200.0  # default of activation_scale_ub


class _Config(msgspec.Struct):
    """The keys that matter; null is the same as absent. act_bits and group_size are AutoRound's own."""

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

    @property
    def row_block(self) -> tuple[int, int] | None:
        """The scale block of groups of one row, None where the config names none."""
        return (1, self.group_size) if isinstance(self.group_size, int) and self.group_size > 0 else None

    def act(self, block_k: int | None) -> ActSpec | None:
        """Activation quantization, None for weight-only. block_k: columns of a scale block, None where there are no blocks."""
        if self._is_weight_only():
            return None
        dtype = types.float8_e5m2 if self.fmt in ("e5m2", "float8_e5m2") else types.float8_e4m3fn
        if self.activation_scheme == "static":
            return ActSpec(dtype, dynamic=False, granularity="tensor")
        if self.quant_method == "fbgemm_fp8":  # absolute values above the limit saturate
            limit = _FBGEMM_LIMIT if self.activation_scale_ub is None else self.activation_scale_ub
            if not 0 < limit < float("inf"):
                raise ValueError(f"activation_scale_ub is {limit}, expected a positive number")
            return ActSpec(dtype, limit=limit)
        if block_k is None:
            return ActSpec(dtype)
        # "ue8m0" rounds scales up to a power of two. MX with E4M3 does the same, but for an absolute maximum of exactly
        # 448 * 2**e, where it takes the next power.
        powers_of_two = self.scale_fmt == "ue8m0" or self.quant_method == "mxfp8"
        return ActSpec(dtype, True, "group", block_k, scale="e8m0" if powers_of_two else "float")

    def _is_weight_only(self) -> bool:
        default_bits = 16 if self.quant_method in AUTO_ROUND_METHODS else 0  # AutoRound omits act_bits where it is 16
        is_gptqmodel = self.activation_scheme is None and self.weight_scale_semantics is not None
        return (self.act_bits or default_bits) >= 16 or is_gptqmodel


class FP8Reader:
    """Layer records of fp8 checkpoints, and of AutoRound's in the same layout."""

    name = "fp8"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "fp8", "fbgemm_fp8" and "mxfp8", and AutoRound's FP8 with its own packing_format or none."""
        config = quantization_config(source)
        if config.get("quant_method") in AUTO_ROUND_METHODS:
            packing, is_float = config.get("packing_format"), str(config.get("data_type")).startswith("fp")
            return packing == "auto_round:fp8" or (is_float and (packing is None or str(packing).endswith(":fp8")))
        return config.get("quant_method") in METHODS

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose `weight` is FP8, or two FP4 codes per byte under an E8M0 `scale`. No tensor data is read."""
        raw, file = find_quantization(source)
        config = _parse(raw, file)
        ignored = IgnoredModules([*(config.modules_to_not_convert or ()), *(config.ignored_layers or ())], file)
        label = "auto-round fp8" if raw.get("quant_method") in AUTO_ROUND_METHODS else config.quant_method
        source = unstack_experts(source, (*FP8_TYPES, torch.int8))
        for tensor, info in source.tensors.items():
            name, dot, suffix = tensor.rpartition(".")
            if suffix == "weight" and dot and info.dtype in FP8_TYPES:
                module = ModuleTensors(source, name)
                ignored.warn_if_listed(module)
                yield _fp8_record(module, config, label, file)
            elif suffix == "weight" and dot and info.dtype == torch.int8 and _has_e8m0_scale(source, name):
                module = ModuleTensors(source, name)
                ignored.warn_if_listed(module)
                yield _fp4_record(module, config, label)
            elif suffix in _FP8_ONLY_SCALES:
                _expect_codes(source, tensor)


def _parse(raw: Mapping[str, Any], file: Path) -> _Config:
    try:
        config = msgspec.convert(raw, _Config)
        _ = config.block, config.act(None)
    except (msgspec.ValidationError, ValueError) as error:
        raise invalid_config(error, file) from error
    return config


def _expect_codes(source: TensorSource, scale: str) -> None:
    """An error where a module has FP8 scales and no FP8 weight."""
    weight_name = f"{scale.rpartition('.')[0]}.weight"
    weight = source.tensors.get(weight_name)
    if weight is None or weight.dtype not in FP8_TYPES:
        found = "no weight" if weight is None else f"a weight of {weight.dtype}"
        file = source.tensors[scale].file
        raise CheckpointError("scales without codes", file=file, tensor=scale, found=found, expected=f"{weight_name} in FP8")


# ---- FP8 -----------------------------------------------------------------------------------------------------------------


def _fp8_record(m: ModuleTensors, config: _Config, label: str, file: Path) -> LayerRecord:
    n, k = m.matrix()
    if (zeros := m.find("weight_zp")) is not None:
        raise m.error(zeros, "FP8 weights with zero points are not supported yet", zeros.name, "symmetric weights")
    scale = m.require(SCALES, (*FLOATS, *E8M0))
    block, granularity = _scale_block(m, scale, n, k, config, file)
    dtype = torch.float8_e8m0fnu if scale.dtype in E8M0 else scale.dtype
    divides = config.weight_scale_semantics == "inverse"
    if divides:
        m.require(SCALES, (torch.float32,))
    act = config.act(min(block[1], k) if granularity in ("block", "group") else None)
    static = act is not None and not act.dynamic
    if static:
        m.scalar(_INPUT_SCALES)
    elif act is not None and (unused := m.find(_INPUT_SCALES)) is not None:
        m.warn(f"{unused.name.rpartition('.')[2]} is not used: the config says that activations are scaled dynamically")
    m.leave_unused("input_scale_ub", *(() if static else _INPUT_SCALES))  # the limit is the config's
    spec = LinearSpec(n, k, FP8_TYPES[m.codes.dtype], block, scale_dtype=dtype, act=act, bias=m.has_bias(n))

    def read_fields() -> dict[str, Tensor | None]:
        stored = m.read(SCALES).view(dtype).reshape(spec.grid)
        return {
            "codes": m.read("weight").view(torch.uint8), "scale": _reciprocal(m, scale, stored) if divides else stored,
            "input_scale": m.read(_INPUT_SCALES).reshape(()) if static else None,
        }  # fmt: skip

    layout: Layout = {"weight": (ROWS, COLUMNS), SCALES: scale_axes(spec, scale.shape)}
    again = lambda part: _fp8_record(part, config, label, file)
    stored_as = {"scale": SCALES, "input_scale": _INPUT_SCALES}
    return m.record(f"{label} {granularity}", spec, read_fields, stored_as, layout, again)


def _scale_block(
    m: ModuleTensors, scale: TensorInfo, n: int, k: int, config: _Config, file: Path
) -> tuple[tuple[int, int], Literal["tensor", "channel", "group", "block"]]:
    """The scale block and its granularity, from the config where it names a block, else from the shape of the scales."""
    if config.block is not None:
        grid = grid_of(n, k, config.block)
        if scale.shape != grid and not (grid == (1, 1) and scale.shape in SCALAR_SHAPES):
            bn, bk = config.block
            raise m.scale_shape_error(scale, n, k, f"{list(grid)}, as blocks of {bn} x {bk} in {file.name} mean")
        return config.block, "block"
    if scale.shape in SCALAR_SHAPES:
        return (n, k), "tensor"
    if scale.shape in ((n,), (n, 1)):
        return (1, k), "channel"
    if config.row_block is not None:
        grid = grid_of(n, k, config.row_block)
        if scale.shape in (grid, (grid[0] * grid[1],)):  # AutoRound flattens them
            return config.row_block, "group"
    grid = grid_of(n, k, _DEFAULT_BLOCK)
    if scale.shape != grid:
        raise m.scale_shape_error(scale, n, k, f"[] (per tensor), [{n}] (per row), or {list(grid)} (blocks of 128 x 128)")
    m.warn("the config names no weight_block_size: blocks of 128 x 128 fit the scales")
    return _DEFAULT_BLOCK, "block"


def _reciprocal(m: ModuleTensors, info: TensorInfo, scale: Tensor) -> Tensor:
    if not bool(((scale.abs() > MIN_DIVISOR) & scale.isfinite()).all()):
        found = f"{float(scale.abs().min())} to {float(scale.abs().max())}"
        raise m.error(info, "scales without a float32 reciprocal", found, f"more than {MIN_DIVISOR}, and finite")
    return scale.reciprocal()


# ---- FP4 experts ---------------------------------------------------------------------------------------------------------


def _has_e8m0_scale(source: TensorSource, name: str) -> bool:
    """Whether an int8 weight holds two FP4 codes per byte, which have an E8M0 scale."""
    infos = (source.tensors.get(f"{name}.{suffix}") for suffix in SCALES)
    return any(info is not None and info.dtype in E8M0 for info in infos)


def _fp4_record(m: ModuleTensors, config: _Config, label: str) -> LayerRecord:
    """Experts of DeepSeek-V4: two E2M1 codes in an int8, low nibble first, and an E8M0 scale per 32 columns."""
    n, columns = m.matrix()
    k = 2 * columns
    scale = m.require(SCALES, E8M0)
    if scale.shape != (n, -(-k // 32)):
        raise m.scale_shape_error(scale, n, k, f"{[n, -(-k // 32)]} (one per 32 columns)")
    act = config.act(min((config.block or _DEFAULT_BLOCK)[1], k))
    if act is not None and not act.dynamic:
        what = "FP4 experts with static activations are not supported yet"
        raise m.error(m.codes, what, "activation_scheme static", "dynamic")
    m.leave_unused(*_INPUT_SCALES)
    spec = LinearSpec(n, k, types.float4_e2m1, (1, 32), scale_dtype=torch.float8_e8m0fnu, act=act, bias=m.has_bias(n))

    def read_fields() -> dict[str, Tensor]:
        return {"codes": m.read("weight").view(torch.uint8), "scale": m.read(SCALES).view(torch.float8_e8m0fnu)}

    layout: Layout = {"weight": (ROWS, byte_axis(4)), SCALES: scale_axes(spec, scale.shape)}
    again = lambda part: _fp4_record(part, config, label)
    return m.record(f"{label} fp4", spec, read_fields, {"scale": SCALES}, layout, again)


READER = FP8Reader()

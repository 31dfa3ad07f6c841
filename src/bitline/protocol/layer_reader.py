"""From the parameters of a layer of the field's protocol to the canonical weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.errors import InputError
from bitline.formats.common import act_order, packed_int32
from bitline.protocol.config import (
    Config,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
    NvFp4LinearLayerConfig,
    family_of,
)
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

# What each family calls the parameters of a layer; a kernel's constructor takes other names by keyword.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mp": {
        "w_q": ("qweight", "weight_packed", "weight"), "w_s": ("scales", "weight_scale"),
        "w_zp": ("qzeros", "weight_zero_point"), "w_gidx": ("g_idx", "weight_g_idx"),
    },
    "int8": {
        "w_q": ("weight",), "w_s": ("weight_scale",), "i_s": ("input_scale",), "i_zp": ("input_zero_point",),
        "azp_adj": (),  # column sums, which kernels of the field keep in the layer and ours in what they pack
    },
    "fp8": {
        "w_q": ("weight",), "w_s": ("weight_scale", "weight_scale_inv"), "i_s": ("input_scale",), "i_s_ub": ("input_scale_ub",),
    },
    "nvfp4": {
        "w_q": ("weight", "weight_packed"), "w_s": ("weight_scale",), "w_s2": ("weight_global_scale", "weight_scale_2"),
        "i_s": ("input_global_scale_inv",),
    },
    "mxfp4": {"w_q": ("weight", "weight_packed"), "w_s": ("weight_scale",)},
    "mxfp8": {"w_q": ("weight",), "w_s": ("weight_scale",)},
}  # fmt: skip
NAMES["fp8_block"] = NAMES["fp8"]


class LayerParameters:
    """The parameters of one layer by their roles. names: role -> name, where it is not one that the family knows."""

    def __init__(self, layer: Any, config: Config, names: Mapping[str, str]) -> None:
        self.layer, self.config, self.given = layer, config, names
        self.family = family_of(config)
        unknown = sorted(set(names) - set(NAMES[self.family]))
        if unknown:
            raise InputError("no such role of a parameter", found=", ".join(unknown), expected=", ".join(NAMES[self.family]))

    def name(self, role: str) -> str | None:
        """The name under which the layer has a parameter of this role, None where it has none."""
        candidates = (self.given[role],) if role in self.given else NAMES[self.family].get(role, ())
        return next((n for n in candidates if getattr(self.layer, n, None) is not None), None)

    def find(self, role: str) -> Any:
        """The parameter itself, or None."""
        name = self.name(role)
        return None if name is None else getattr(self.layer, name)

    def need(self, role: str) -> Any:
        """The parameter; an InputError where the layer has none."""
        found = self.find(role)
        if found is None:
            expected = self.given.get(role) or " or ".join(NAMES[self.family][role])
            raise InputError("the layer lacks a parameter", tensor=expected, found=f"a {type(self.layer).__name__}",
                             expected=expected)  # fmt: skip
        return found

    def all(self) -> list[str]:
        """Names of every parameter that the weight is made of."""
        return [name for role in NAMES[self.family] if (name := self.name(role)) is not None]


def read_layer(layer: Any, config: Config, names: Mapping[str, str]) -> QuantizedWeight:
    """The canonical weight of a layer, views of its parameters where they allow it. The layer is not changed.

    A parameter says by `input_dim`, `output_dim` and `packed_dim` what its dimensions are; one that does not is read by
    its shape, and an InputError says where that leaves two readings.
    """
    parameters = LayerParameters(layer, config, names)
    return _READ[parameters.family](parameters, config.to_spec())


def _integers(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    config: Any = p.config
    assert isinstance(config, MPLinearLayerConfig)
    n, k, width = spec.n, spec.k, spec.weight.bits
    codes = _codes(p.need("w_q"), n, k, width, config.weight_type.signed)
    scales = p.need("w_s")
    scale, offset = _grid(scales, spec, "w_s", p)
    zero = None
    if config.zero_points:
        zero = _zero_points(p.need("w_zp"), n, scale.shape[1], width)
    perm, groups = _order(p, spec, scale.shape[1])
    if perm is not None:
        perm = perm.to(codes.device)
        codes = bitstream.take(codes, width, k, perm.long())
    groups = None if groups is None else groups.to(codes.device)
    spec = spec.replace(
        scale_dtype=scale.dtype, act_order=perm is not None, ragged=groups is not None,
        block_offset=(0, offset) if groups is None else (0, 0), block=spec.block,
    )  # fmt: skip
    return QuantizedWeight(spec, codes, scale, zero=zero, perm=perm, group_index=groups)


def _order(p: LayerParameters, spec: LinearSpec, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """(perm, group_index) of a layer's g_idx. One that the config does not speak of is not ignored where it says something."""
    config: Any = p.config
    param = p.need("w_gidx") if config.has_g_idx else p.find("w_gidx")
    g_idx = None if param is None else param.data.cpu()
    if g_idx is None or (g_idx.numel() == 0 and not config.has_g_idx):
        return None, None
    if g_idx.numel() != spec.k:
        raise InputError("g_idx has another length than the layer", tensor=p.name("w_gidx"), found=g_idx.numel(), expected=spec.k)
    if not config.has_g_idx:
        since = g_idx.long() - g_idx[0]  # a rank's part of a regular one starts at a later group
        if not since.any() or torch.equal(since, torch.arange(spec.k) // spec.block[1]):
            return None, None
    try:
        return act_order.gptq_order(g_idx, spec.block[1], groups)
    except ValueError as error:
        raise InputError("g_idx names a group that the layer has no scales of", tensor=p.name("w_gidx"), found=error,
                         expected=f"0 to {groups - 1}", fix="give every rank all scales (input_dim=None)") from error  # fmt: skip


def _codes(param: Any, n: int, k: int, width: int, signed: bool) -> Tensor:
    """Packed int32 words along either dimension, or one signed code a byte, to canonical rows."""
    data: Tensor = param.data
    if data.dtype == torch.int8 and tuple(data.shape) == (n, k):
        values = data + (1 << (width - 1)) if signed else data
        return bitstream.pack(values.view(torch.uint8), width)
    if data.dtype == torch.uint8 and tuple(data.shape) == (n, bitstream.row_bytes(k, width)):
        return data
    packed, along, _ = _orientation(param, n, k, width)
    _ends_on_words(param, k if packed == "input" else n, width)
    if packed == "input":
        words = data if along == 1 else data.t()
        return words.contiguous().view(torch.uint8)[:, : bitstream.row_bytes(k, width)]
    words = data if along == 0 else data.t()  # [K, N/pf]
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8, device=data.device)
    step = max(32, bitstream.rows_per_chunk(k) // 32 * 32)
    for c in range(0, n, step):
        stop = min(c + step, n)
        part = packed_int32.unpack_int32(words[:, c * width // 32 : -(-stop * width // 32)], width, stop - c)
        out[c:stop] = bitstream.pack(part.t().contiguous(), width)
    return out


def _ends_on_words(param: Any, count: int, width: int) -> None:
    """Words of a rank's part can only have been cut from the checkpoint's where every part ends on a word."""
    if getattr(param, "tp_size", 1) > 1 and count * width % 32:
        raise InputError("a rank's part of packed codes ends inside a word", found=f"{count} codes of {width} bits",
                         expected=f"multiples of {Fraction(32, width)}",
                         fix="cut the canonical weight (QuantizedWeight.shard), which may be cut anywhere")  # fmt: skip


def _orientation(param: Any, n: int, k: int, width: int) -> tuple[str, int, int]:
    """(dimension along which codes are packed, input_dim, output_dim) of a matrix of int32 words."""
    data: Tensor = param.data
    if data.dtype != torch.int32 or data.dim() != 2:
        raise InputError("packed codes are a matrix of int32 words", found=f"{list(data.shape)} {data.dtype}")
    by_k, by_n = -(-k * width // 32), -(-n * width // 32)
    shapes = {("input", 1, 0): (n, by_k), ("input", 0, 1): (by_k, n), ("output", 0, 1): (k, by_n), ("output", 1, 0): (by_n, k)}
    dims = {name: getattr(param, name, None) for name in ("input_dim", "output_dim", "packed_dim")}
    fitting = []
    for (packed, along, across), shape in shapes.items():
        said = {"input_dim": along, "output_dim": across, "packed_dim": along if packed == "input" else across}
        if tuple(data.shape) == shape and all(dims[d] in (None, said[d]) for d in dims):
            fitting.append((packed, along, across))
    if len(fitting) != 1:
        raise InputError(
            "packed codes do not fit the layer" if not fitting else "packed codes fit the layer in two ways",
            found=f"{list(data.shape)}, {dims}", expected=" or ".join(str(list(s)) for s in shapes.values()),
            fix="a PackedParameter with input_dim, output_dim and packed_dim",
        )  # fmt: skip
    return fitting[0]


def _grid(param: Any, spec: LinearSpec, role: str, p: LayerParameters) -> tuple[Tensor, int]:
    """Group scales to [N, G], and the columns of the first group that a cut left on another rank."""
    data: Tensor = param.data
    offset = int(getattr(param, "block_offset", (0, 0))[1])
    groups = -(-(spec.k + offset) // spec.block[1])
    if data.dim() == 1:
        data = data.view(-1, 1) if data.numel() == spec.n else data.view(1, -1)
    output_dim = getattr(param, "output_dim", None)
    if output_dim is None:
        rows_first = p.config.has_g_idx if isinstance(p.config, MPLinearLayerConfig) else False
        fits = [d for d in (0, 1) if data.shape[d] == spec.n and (data.shape[1 - d] == groups or rows_first)]
        if not fits:
            raise InputError("scales do not fit the layer", tensor=p.name(role), found=list(data.shape),
                             expected=f"[{spec.n}, {groups}] or [{groups}, {spec.n}]")  # fmt: skip
        if len(fits) == 2:
            raise InputError("scales fit the layer in two ways", tensor=p.name(role), found=list(data.shape),
                             fix="a GroupScaleParameter with input_dim and output_dim")  # fmt: skip
        output_dim = fits[0]
    return (data if output_dim == 0 else data.t()).contiguous(), offset


def _zero_points(param: Any, n: int, groups: int, width: int) -> Tensor:
    """Zero points to uint8 [N, G]: packed along N, or one a byte (signed ones in compressed-tensors' older files)."""
    data: Tensor = param.data
    words = -(-n * width // 32)
    output_dim = getattr(param, "output_dim", None)
    if data.dtype == torch.int32:
        _ends_on_words(param, n, width)
        if output_dim == 0 or (output_dim is None and tuple(data.shape) == (words, groups) != (groups, words)):
            data = data.t()
        if tuple(data.shape) != (groups, words):
            raise InputError(
                "zero points do not fit the layer", found=list(param.data.shape), expected=f"[{groups}, {words}] or transposed"
            )
        return packed_int32.unpack_int32(data, width, n).t().contiguous()
    if tuple(data.shape) == (groups, n) and (output_dim == 1 or groups != n):
        data = data.t()
    if tuple(data.shape) != (n, groups) or data.dtype not in (torch.int8, torch.uint8):
        raise InputError(
            "zero points do not fit the layer", found=f"{list(data.shape)} {data.dtype}", expected=f"[{n}, {groups}]"
        )
    return (data + (1 << (width - 1))).view(torch.uint8) if data.dtype == torch.int8 else data


def _int8(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    config: Any = p.config
    assert isinstance(config, Int8ScaledMMLinearLayerConfig)
    spec, codes = _bytes(p, spec, torch.int8)
    scale, spec = _row_scale(p, spec)
    static: dict[str, Tensor | None] = {"input_scale": None, "input_zero": None}
    if config.is_static_input_scheme:
        zero = None if config.input_symmetric else p.need("i_zp").data
        static["input_scale"], static["input_zero"] = merge_static_ranges(p.need("i_s").data, zero)
    return QuantizedWeight(spec, codes, scale, **static)  # type: ignore[arg-type]


def merge_static_ranges(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One (scale, zero point) for the static int8 ranges of fused layers, [layers] each: it covers them all.

    Symmetric: the largest scale. With zero points: the union of the ranges, whose zero point is rounded to nearest.
    """
    scale = scale.float().reshape(-1)
    if zero is None or scale.numel() == 1:
        return scale.max(), None if zero is None else zero.reshape(-1)[0].to(torch.int32)
    point = zero.float().reshape(-1)
    low, high = ((-128 - point) * scale).min(), ((127 - point) * scale).max()
    merged = (high - low) / 255
    return merged, (-128 - low / merged).round().clamp(-128, 127).to(torch.int32)


def _fp8(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    config: Any = p.config
    assert isinstance(config, FP8ScaledMMLinearLayerConfig)
    spec, codes = _bytes(p, spec, config.weight_quant_key.dtype)
    scales = p.need("w_s")
    if p.family == "fp8_block":
        scale, spec = _block_scale(scales, p, spec)
    elif spec.block[0] == 1 and 1 < spec.block[1] < spec.k:
        scale, at = _grid(scales, spec, "w_s", p)
        spec = spec.replace(block_offset=(0, at), scale_dtype=scale.dtype)
    else:
        scale, spec = _row_scale(p, spec)
    static = None
    if spec.act is not None and not spec.act.dynamic:
        static = p.need("i_s").data.float().max()  # fused layers share one input: its largest range
    elif spec.act is not None and (limit := p.find("i_s_ub")) is not None:
        spec = spec.replace(act=replace(spec.act, limit=float(limit)))
    return QuantizedWeight(spec, codes, scale, input_scale=static)


def _block_scale(param: Any, p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """Scales of blocks, and the spec with the parameter's own blocks: a fused layer's may be fewer rows than the file's."""
    data: Tensor = param.data.t() if getattr(param, "output_dim", 0) == 1 else param.data
    offset: Any = tuple(getattr(param, "block_offset", (0, 0)))
    rows = getattr(param, "block", spec.block)[0]
    if spec.block[0] % rows == 0 and rows < spec.block[0]:
        spec = spec.replace(block=(rows, spec.block[1]))
        data = data[: spec.replace(block_offset=offset).grid[0]]  # the last of the file's blocks may not have been full
    spec = spec.replace(block_offset=offset, scale_dtype=data.dtype)
    if tuple(data.shape) != spec.grid:
        raise InputError("scales do not fit the layer's blocks", tensor=p.name("w_s"), found=list(data.shape),
                         expected=list(spec.grid))  # fmt: skip
    return data.contiguous(), spec


def _bytes(p: LayerParameters, spec: LinearSpec, dtype: torch.dtype) -> tuple[LinearSpec, Tensor]:
    """A weight of one code a byte, [N, K] or a transposed view of it, and the spec with the real shape."""
    param = p.need("w_q")
    data: Tensor = param.data
    if data.dtype != dtype or data.dim() != 2:
        found = f"{list(data.shape)} {data.dtype}"
        raise InputError("the weight has another dtype than its config", tensor=p.name("w_q"), found=found,
                         expected=f"a matrix of {dtype}")  # fmt: skip
    said: Any = getattr(p.config, "weight_shape", None)
    output_dim = getattr(param, "output_dim", None)
    if output_dim is None:  # a layer of the field that keeps [K, N] keeps a transposed view, and does not say so
        view = not data.is_contiguous() and data.t().is_contiguous()
        output_dim = int(view if said is None or said[0] == said[1] else tuple(data.shape) == (said[1], said[0]))
    if output_dim == 1:
        data = data.t()
    if said is not None and tuple(data.shape) != tuple(said):
        raise InputError(
            "the weight has another shape than its config", tensor=p.name("w_q"), found=list(data.shape), expected=list(said)
        )
    n, k = data.shape
    return _reshaped(spec, n, k), data.contiguous().view(torch.uint8)


def _reshaped(spec: LinearSpec, n: int, k: int) -> LinearSpec:
    """The spec of a config that named no shape, for the layer's own."""
    rows = n if spec.block[0] == spec.n else min(spec.block[0], n)
    columns = k if spec.block[1] == spec.k else min(spec.block[1], k)
    return spec.replace(n=n, k=k, block=(rows, columns), scale2_block=None if spec.scale2_block is None else (n, k))


def _row_scale(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """A scale per tensor [1, 1] or per row [N, 1]; those of fused layers [layers] are spread over their rows."""
    data: Tensor = p.need("w_s").data.reshape(-1)
    widths = getattr(p.layer, "logical_widths", None) or []
    if data.numel() not in (1, spec.n) and data.numel() == len(widths) and sum(widths) == spec.n:
        data = data.repeat_interleave(torch.tensor(widths, device=data.device))
    if data.numel() == 1:
        return data.view(1, 1), spec.replace(block=(spec.n, spec.k), scale_dtype=data.dtype)
    if data.numel() != spec.n:
        raise InputError("scales do not fit the layer", tensor=p.name("w_s"), found=data.numel(),
                         expected=f"1 or {spec.n}, or one for each of logical_widths")  # fmt: skip
    return data.view(-1, 1), spec.replace(block=(1, spec.k), scale_dtype=data.dtype)


def _micro(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    """NVFP4, MXFP4 and MXFP8: rows of codes with scales of 16 or 32 columns."""
    data: Tensor = p.need("w_q").data
    codes = data.view(torch.uint8)
    if codes.dim() != 2:
        raise InputError("the weight is no matrix", tensor=p.name("w_q"), found=list(data.shape))
    spec = _reshaped(spec, codes.shape[0], codes.shape[1] * 8 // spec.weight.bits)
    scale: Tensor = p.need("w_s").data
    if scale.dtype == torch.uint8 or scale.dtype == spec.scale_dtype:
        scale = scale.view(spec.scale_dtype)
    if scale.dtype != spec.scale_dtype or tuple(scale.shape) != spec.grid:
        raise InputError("scales do not fit the layer", tensor=p.name("w_s"), found=f"{list(scale.shape)} {scale.dtype}",
                         expected=f"{list(spec.grid)} {spec.scale_dtype}")  # fmt: skip
    coarse = given = None
    if isinstance(p.config, NvFp4LinearLayerConfig):
        coarse, spec = _global_scale(p, spec)
        given = p.find("i_s")
        given = None if given is None or spec.act is None else given.data.float().min()  # a divisor's smallest covers all
    return QuantizedWeight(spec, codes, scale, scale2=coarse, input_scale=given)


def _global_scale(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """The factor of all scales, [1, 1]; where fused layers have their own, [N, 1]: elsewhere the largest serves for all."""
    data: Tensor = p.need("w_s2").data.reshape(-1)  # float64 holds the reciprocal of what a file stores exactly
    widths = getattr(p.layer, "logical_widths", None) or []
    if data.numel() > 1 and not bool((data == data[0]).all()):
        if data.numel() != len(widths) or sum(widths) != spec.n:
            raise InputError("global scales do not fit the layer", tensor=p.name("w_s2"), found=data.numel(),
                             expected="1, or one for each of logical_widths")  # fmt: skip
        rows = data.repeat_interleave(torch.tensor(widths, device=data.device)).view(-1, 1)
        return rows, spec.replace(scale2_block=(1, spec.k))
    return data[:1].view(1, 1), spec


_READ: dict[str, Callable[[LayerParameters, LinearSpec], QuantizedWeight]] = {
    "mp": _integers, "int8": _int8, "fp8": _fp8, "fp8_block": _fp8, "nvfp4": _micro, "mxfp4": _micro, "mxfp8": _micro,
}  # fmt: skip

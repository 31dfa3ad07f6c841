"""From the parameters of a mixed-precision layer (integer codes, group scales) to the canonical weight."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.errors import InputError
from bitline.formats.common import act_order, packed_int32
from bitline.protocol.config import MPLinearLayerConfig
from bitline.protocol.layer_parameters import LayerParameters
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def read_mixed_precision(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    """The weight of a layer of integer codes in any packing of GPTQ, AWQ (de-interleaved) or compressed-tensors."""
    config: Any = p.config
    assert isinstance(config, MPLinearLayerConfig)
    n, k, bits = spec.n, spec.k, spec.weight.bits
    codes = _codes(p.need("w_q"), n, k, bits, config.weight_type.signed)
    scale, offset = group_scales(p, spec)
    zero = _zero_points(p.need("w_zp"), n, scale.shape[1], bits) if config.zero_points else None
    perm, group_index = _column_order(p, spec, scale.shape[1])
    if perm is not None:
        perm = perm.to(codes.device)
        codes = bitstream.take(codes, bits, k, perm.long())
    group_index = None if group_index is None else group_index.to(codes.device)
    spec = spec.replace(
        scale_dtype=scale.dtype, act_order=perm is not None, ragged=group_index is not None,
        block_offset=(0, offset) if group_index is None else (0, 0), block=spec.block,
    )  # fmt: skip
    return QuantizedWeight(spec, codes, scale, zero=zero, perm=perm, group_index=group_index)


def _column_order(p: LayerParameters, spec: LinearSpec, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """(perm, group_index) of a layer's g_idx. A non-trivial g_idx is applied even if the config does not announce one."""
    config: Any = p.config
    param = p.need("w_gidx") if config.has_g_idx else p.find("w_gidx")
    g_idx = None if param is None else param.data.cpu()
    if g_idx is None or (g_idx.numel() == 0 and not config.has_g_idx):
        return None, None
    if g_idx.numel() != spec.k:
        raise InputError("g_idx has another length than K", tensor=p.name("w_gidx"), found=g_idx.numel(), expected=spec.k)
    if not config.has_g_idx:
        relative = g_idx.long() - g_idx[0]  # a shard of a trivial g_idx starts at a later group
        if not relative.any() or torch.equal(relative, torch.arange(spec.k) // spec.block[1]):
            return None, None
    try:
        return act_order.gptq_order(g_idx, spec.block[1], groups)
    except ValueError as error:
        raise InputError("g_idx names a group that the layer has no scales for", tensor=p.name("w_gidx"), found=error,
                         expected=f"0..{groups - 1}", fix="load all scales on every rank: input_dim=None") from error  # fmt: skip


def _codes(param: Any, n: int, k: int, bits: int, signed: bool) -> Tensor:
    """Canonical packed rows, from int32 packed along either dimension, packed bytes, or one signed code per byte."""
    data: Tensor = param.data
    if data.dtype == torch.int8 and tuple(data.shape) == (n, k):
        values = data + (1 << (bits - 1)) if signed else data
        return bitstream.pack(values.view(torch.uint8), bits)
    if data.dtype == torch.uint8 and tuple(data.shape) == (n, bitstream.row_bytes(k, bits)):
        return data
    packed_along, input_dim, _ = _layout(param, n, k, bits)
    _check_shard_boundary(param, k if packed_along == "input" else n, bits)
    if packed_along == "input":
        packed = data if input_dim == 1 else data.t()  # [N, K / pack factor]
        return packed.contiguous().view(torch.uint8)[:, : bitstream.row_bytes(k, bits)]
    packed = data if input_dim == 0 else data.t()  # [K, N / pack factor]
    out = torch.empty(n, bitstream.row_bytes(k, bits), dtype=torch.uint8, device=data.device)
    chunk = max(32, bitstream.rows_per_chunk(k) // 32 * 32)
    for first in range(0, n, chunk):
        stop = min(first + chunk, n)
        columns = packed[:, first * bits // 32 : -(-stop * bits // 32)]
        raw = packed_int32.unpack_int32(columns, bits, stop - first)
        out[first:stop] = bitstream.pack(raw.t().contiguous(), bits)
    return out


def _check_shard_boundary(param: Any, codes: int, bits: int) -> None:
    """Refuse a shard whose codes do not fill its int32: those cannot be a slice of the checkpoint's."""
    if getattr(param, "tp_size", 1) > 1 and codes * bits % 32:
        raise InputError("a shard of packed codes ends inside an int32", found=f"{codes} codes of {bits} bits",
                         expected=f"multiples of {Fraction(32, bits)}",
                         fix="shard the canonical weight, which can be sharded anywhere (QuantizedWeight.shard)")  # fmt: skip


def _layout(param: Any, n: int, k: int, bits: int) -> tuple[str, int, int]:
    """(packed along "input" or "output", input_dim, output_dim) of a matrix of packed int32, by its dimensions or its shape."""
    data: Tensor = param.data
    if data.dtype != torch.int32 or data.dim() != 2:
        raise InputError("packed codes are an int32 matrix", found=f"{list(data.shape)} {data.dtype}")
    packed_k, packed_n = -(-k * bits // 32), -(-n * bits // 32)
    shapes = {
        ("input", 1, 0): (n, packed_k), ("input", 0, 1): (packed_k, n),
        ("output", 0, 1): (k, packed_n), ("output", 1, 0): (packed_n, k),
    }  # fmt: skip
    dims = {name: getattr(param, name, None) for name in ("input_dim", "output_dim", "packed_dim")}
    fitting = []
    for (packed_along, input_dim, output_dim), shape in shapes.items():
        packed_dim = input_dim if packed_along == "input" else output_dim
        layout = {"input_dim": input_dim, "output_dim": output_dim, "packed_dim": packed_dim}
        if tuple(data.shape) == shape and all(dims[d] in (None, layout[d]) for d in dims):
            fitting.append((packed_along, input_dim, output_dim))
    if len(fitting) != 1:
        raise InputError(
            "packed codes do not fit the layer" if not fitting else "packed codes fit the layer in two ways",
            found=f"{list(data.shape)}, {dims}", expected=" or ".join(str(list(s)) for s in shapes.values()),
            fix="a PackedParameter with input_dim, output_dim and packed_dim",
        )  # fmt: skip
    return fitting[0]


def group_scales(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, int]:
    """Group scales, [N, G], and the number of columns of the first group that are on another rank."""
    param = p.need("w_s")
    data: Tensor = param.data
    offset = int(getattr(param, "block_offset", (0, 0))[1])
    groups = -(-(spec.k + offset) // spec.block[1])
    if data.dim() == 1:
        data = data.view(-1, 1) if data.numel() == spec.n else data.view(1, -1)
    output_dim = getattr(param, "output_dim", None)
    if output_dim is None:
        # With act-order a rank may hold the scales of all groups, not only of its own.
        any_count = isinstance(p.config, MPLinearLayerConfig) and p.config.has_g_idx
        fits = [d for d in (0, 1) if data.shape[d] == spec.n and (data.shape[1 - d] == groups or any_count)]
        if not fits:
            raise InputError("scales do not fit the layer", tensor=p.name("w_s"), found=list(data.shape),
                             expected=f"[{spec.n}, {groups}] or [{groups}, {spec.n}]")  # fmt: skip
        if len(fits) == 2:
            raise InputError("scales fit the layer in two ways", tensor=p.name("w_s"), found=list(data.shape),
                             fix="a GroupScaleParameter with input_dim and output_dim")  # fmt: skip
        output_dim = fits[0]
    return (data if output_dim == 0 else data.t()).contiguous(), offset


def _zero_points(param: Any, n: int, groups: int, bits: int) -> Tensor:
    """Zero points, uint8 [N, G], from int32 packed along N, or one per byte (signed in older compressed-tensors files)."""
    data: Tensor = param.data
    packed_n = -(-n * bits // 32)
    output_dim = getattr(param, "output_dim", None)
    if data.dtype == torch.int32:
        _check_shard_boundary(param, n, bits)
        if output_dim == 0 or (output_dim is None and tuple(data.shape) == (packed_n, groups) != (groups, packed_n)):
            data = data.t()
        if tuple(data.shape) != (groups, packed_n):
            raise InputError("zero points do not fit the layer", found=list(param.data.shape),
                             expected=f"[{groups}, {packed_n}] or transposed")  # fmt: skip
        return packed_int32.unpack_int32(data, bits, n).t().contiguous()
    if tuple(data.shape) == (groups, n) and (output_dim == 1 or groups != n):
        data = data.t()
    if tuple(data.shape) != (n, groups) or data.dtype not in (torch.int8, torch.uint8):
        raise InputError(
            "zero points do not fit the layer", found=f"{list(data.shape)} {data.dtype}", expected=f"[{n}, {groups}]"
        )
    return (data + (1 << (bits - 1))).view(torch.uint8) if data.dtype == torch.int8 else data

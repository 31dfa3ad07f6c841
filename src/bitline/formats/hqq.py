"""HQQ: groups of the flattened weight, packed as halves, quarters or tenths of their rows, with zero points that are floats.

Every layer tells its own shape, group size and packing in small tensors beside the codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource, missing_codes
from bitline.formats.common.ignored_modules import left_alone
from bitline.formats.common.module_tensors import FLOATS, NUMBER, Layer
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec, ScalarType

# packing: the type, bits of a stored word, and the shift of each slice of rows, the first of them first
_PACKINGS: dict[str, tuple[ScalarType, int, tuple[int, ...]]] = {
    "8bit_u8": (types.uint8, 8, (0,)), "4bit_u8": (types.uint4, 8, (4, 0)), "2bit_u8": (types.uint2, 8, (6, 4, 2, 0)),
    "1bit_u8": (types.uint1, 8, (7, 6, 5, 4, 3, 2, 1, 0)), "3bit_32": (types.uint3, 32, (27, 24, 21, 18, 15, 12, 9, 6, 3, 0)),
}  # fmt: skip
# What else a layer holds: how it was made, and how it is to be moved about.
_REST = (
    "nbits", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_INTEGERS = (torch.int32, torch.int64, torch.uint8)


class HQQReader:
    """Layer records of HQQ checkpoints."""

    name = "hqq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "hqq"."""
        return find_quantization(source)[0].get("quant_method") == "hqq"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a W_q. Of tensor data only the small tensors that describe it are read."""
        config, file = find_quantization(source)
        left_alone(config, file, "skip_modules")
        if not isinstance(config.get("quant_config", {}), Mapping):
            raise CheckpointError("quant_config is not an object", file=file, field="quant_config",
                                  found=repr(config["quant_config"])[:200])  # fmt: skip
        for name in source.tensors:
            if name.endswith(".W_q"):
                yield _Module(source, name.removesuffix(".W_q")).layer()
            elif name.endswith(".packing") and f"{name.removesuffix('.packing')}.W_q" not in source.tensors:
                raise missing_codes(source.tensors[name], f"{name.removesuffix('.packing')}.W_q")


class _Module(Layer):
    """A module under inspection."""

    def __init__(self, source: TensorSource, base: str) -> None:
        super().__init__(source, base, "W_q")

    def layer(self) -> LayerRecord:
        """The record: W = scale * code - zero * scale, which float32 holds exactly in both parts."""
        n, k = self._shape()
        packing = self._packing()
        scalar, word, shifts = _PACKINGS[packing]
        for suffix in ("quant_scale", "quant_zero"):
            if self.find(suffix) is not None and self._number(suffix):
                raise self.error(
                    self.main, "scales that are quantized themselves are not supported yet", suffix, 0,
                    "quantize the model again with quant_scale and quant_zero false",
                )  # fmt: skip
        axis = self._number("axis")
        if axis not in (0, 1):
            raise self.error(self.need("axis"), "an axis that a matrix has not", axis, "0 or 1")
        whole = self._whole(n * k)
        self.find("group_size")
        size = whole if whole else self._number("group_size") if self.find("group_size") is not None else (n, k)[axis == 1]
        if size < 1 or n * k % size:
            raise self.error(self.main, "groups do not fill the weight", f"groups of {size}", f"a divisor of {n * k}")
        rows = n * k // size if axis == 1 else size  # of the matrix that was packed
        if whole:  # nothing was reshaped
            rows = n
        stored = -(-rows // len(shifts))
        if len(self.main.shape) != 2:
            raise self.error(self.main, "not a matrix of codes", list(self.main.shape), "[rows, columns]")
        if self.main.nbytes != stored * (n * k // rows) * word // 8 or (word == 8 and rows % len(shifts)):
            raise self.error(
                self.main, "codes do not fit their shape", f"{self.main.nbytes} bytes",
                f"{stored * (n * k // rows) * word // 8} for [{n}, {k}] in {packing}",
            )  # fmt: skip
        if axis == 0 and not whole and size != n:
            self.oddities.append("groups cross the rows (axis 0): each weight has a scale and an offset of its own, 8 bytes")
        block = (n, k) if whole else (1, math.gcd(k, size)) if axis == 1 else (n, 1) if size == n else (1, 1)
        self._scales(1 if whole else n * k // size)
        spec = LinearSpec(n, k, scalar, block, zero="float", bias=self.bias(n))
        for suffix in _REST:
            self.find(suffix)

        def build() -> dict[str, Tensor]:
            scale, zero = self._floats()
            offset = -(zero * scale)
            if bool((scale * ((1 << scalar.bits) - 1)).isinf().any()) and not bool(scale.isinf().any()):
                largest, top = float(scale.abs().max()), (1 << scalar.bits) - 1
                raise self.error(
                    self.need(("scale", "zero_scale")), "scales times codes are no float32", largest, f"below 3e38 / {top}"
                )
            if axis == 1 and not whole and block[1] != size:  # groups run over the ends of rows where K is not made of whole ones
                scale, offset = (part.repeat_interleave(size // block[1]) for part in (scale, offset))
            if block == (1, 1):  # row i of the packed matrix is every n * k / size-th weight
                scale, offset = scale.repeat(size), offset.repeat(size)
            codes = _rows(self.read("W_q").reshape(-1).view(torch.uint8 if word == 8 else torch.int32), shifts, spec)
            return {"codes": codes, "scale": scale.view(spec.grid), "offset": offset.view(spec.grid)}

        return self.record(f"hqq {packing}", spec, build, {"scale": ("scale", "zero_scale"), "offset": ("zero", "zero_scale")})

    def _whole(self, count: int) -> int:
        """The number of weights where one scale serves them all (channel_wise false), else 0."""
        info = self.source.tensors.get(f"{self.base}.scale")
        return count if info is not None and info.shape in NUMBER and self._optional("channel_wise") == 0 else 0

    def _scales(self, groups: int) -> None:
        """The headers of scale and zero, or of zero_scale, which holds one after the other."""
        if self.find("scale") is None and self.find("zero_scale") is not None:
            self.need("zero_scale", FLOATS, ((2, groups, 1), (2, 1, groups), (2, groups)))
            return
        for suffix in ("scale", "zero"):
            self.need(suffix, FLOATS, ((groups, 1), (1, groups), (groups,), *(NUMBER if groups == 1 else ())))

    def _floats(self) -> tuple[Tensor, Tensor]:
        """Scales and zero points, float32 [groups]."""
        if self.find("scale") is None:
            zero, scale = self.read("zero_scale").float().flatten(1)
            return scale, zero
        return self.read("scale").float().flatten(), self.read("zero").float().flatten()

    def _shape(self) -> tuple[int, int]:
        info = self.need("shape", _INTEGERS, ((2,),))
        n, k = (int(size) for size in self.read("shape"))
        if not (1 <= n < 1 << 40 and 1 <= k < 1 << 40):
            raise self.error(info, "the shape is not that of a linear layer", [n, k], "[out_features, in_features]")
        return n, k

    def _packing(self) -> str:
        info = self.need("packing", (torch.uint8,))
        text = bytes(self.read("packing").tolist()) if len(info.shape) == 1 and info.nbytes <= 32 else b""
        packing = text.decode("ascii", "replace")
        if packing not in _PACKINGS:
            raise self.error(info, "a packing that is not known", repr(packing), ", ".join(_PACKINGS))
        return packing

    def _optional(self, suffix: str) -> int | None:
        return self._number(suffix) if self.find(suffix) is not None else None

    def _number(self, suffix: str) -> int:
        self.need(suffix, _INTEGERS, ((), (1,)))
        return int(self.read(suffix).reshape(()))


def _rows(words: Tensor, shifts: tuple[int, ...], spec: LinearSpec) -> Tensor:
    """Words, whose fields are slices of the flattened weight, to canonical rows, uint8 [N, ceil(K*bits/8)]: a chunk at a time."""
    n, k, width, count = spec.n, spec.k, spec.weight.bits, words.numel()
    out = torch.empty(n, bitstream.row_bytes(k, width), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        first, last = r * k, min(r + step, n) * k
        parts = []
        for i in range(first // count, -(-last // count)):
            part = words[max(0, first - i * count) : last - i * count]
            parts.append(((part >> shifts[i]) & ((1 << width) - 1)).to(torch.uint8))  # the mask drops the copied sign
        out[r : r + step] = bitstream.pack(torch.cat(parts).view(-1, k), width)
    return out


READER = HQQReader()

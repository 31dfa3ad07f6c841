"""AWQ, versions gemv and gemv_fast (llm-awq): codes in rows of the weight, scales padded to whole words of zero points.

gemv packs every row as one bit stream. gemv_fast takes four rows at a time and moves columns about within blocks of 32, and
its zero points are stored as what they amount to, -scale * zero in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common import packed_int32
from bitline.formats.common.module_tensors import FLOATS, Layer
from bitline.formats.gptq_awq.config import Ints, ModuleSettings
from bitline.formats.gptq_awq.packed_module import modules
from bitline.types import LinearSpec

_ROWS, _RUN, _BLOCK = 4, 64, 32  # gemv_fast: rows side by side, columns of one row in a run, columns that change places
_MOST_PADDING = 64  # groups; producers pad zero points to 1, 2 or 4 words


def records(source: TensorSource, version: str, settings: ModuleSettings, config_file: Path) -> Iterator[LayerRecord]:
    """Every module with a qweight. version: "gemv", "gemv_fast" or "llm-awq". Only headers and symmetric qzeros are read."""
    for base in modules(source):
        module = _Module(source, base, settings.of(base), config_file)
        yield module.gemv() if version == "gemv" else module.gemv_fast(version)


class _Module(Layer):
    """A module under inspection, with what the config says of it."""

    def __init__(self, source: TensorSource, base: str, settings: Ints, config_file: Path) -> None:
        super().__init__(source, base, "qweight")
        self.settings, self.config_file = settings, config_file
        if settings.bits != 4:
            raise self.error(self.main, "this version of AWQ has 4 bits", f"bits = {settings.bits} in {config_file.name}", 4)
        if settings.skip:
            self.oddities.append("the config says that this layer is not quantized, yet its tensors are")

    def gemv(self) -> LayerRecord:
        """qweight int32 [N, K/8], qzeros int32 [N, padded G/8], scales [N, padded G]."""
        n, words = self.matrix("qweight", (torch.int32,))
        size, groups = self._groups(8 * words)
        scales = self.need("scales", FLOATS, tuple((n, padded) for padded in _padded(groups)))
        self.need("qzeros", (torch.int32,), ((n, scales.shape[1] // 8),))
        symmetric = self.settings.symmetric and bool((self._zeros(groups) == 8).all())
        if self.settings.symmetric and not symmetric:
            self.oddities.append("the config says that there are no zero points, but qzeros hold some: they are used")
        spec = LinearSpec(
            n, 8 * words, types.unsigned(4, symmetric=symmetric), (1, size), scale_dtype=scales.dtype,
            zero="none" if symmetric else "int", bias=self.bias(n),
        )  # fmt: skip

        def build() -> dict[str, Tensor | None]:
            scale = self._cut(self.read("scales"), groups)
            zero = None if symmetric else self._zeros(groups)
            return {"codes": self.read("qweight").view(torch.uint8), "scale": scale, "zero": zero}

        return self.record("awq gemv", spec, build, {"scale": "scales", "zero": "qzeros"})

    def gemv_fast(self, version: str) -> LayerRecord:
        """qweight int16 [N/4, K], scales and qzeros (llm-awq: scaled_zeros) [padded G, N], the latter to be added."""
        quarter, k = self.matrix("qweight", (torch.int16,))
        n = _ROWS * quarter
        if k % _RUN:
            raise self.error(self.main, f"{version} packs {_RUN} columns at a time", f"{k} columns", f"a multiple of {_RUN}")
        size, groups = self._groups(k)
        scales = self.need("scales", FLOATS, tuple((padded, n) for padded in _padded(groups)))
        zeros = "scaled_zeros" if self.find("scaled_zeros") is not None else "qzeros"
        self.need(zeros, (scales.dtype,), (scales.shape,))
        spec = LinearSpec(n, k, types.uint4, (1, size), scale_dtype=scales.dtype, zero="float", bias=self.bias(n))

        def build() -> dict[str, Tensor]:
            scale = self._cut(self.read("scales").t(), groups)
            offset = self.read(zeros).t()[:, :groups].contiguous()
            return {"codes": fast_codes(self.read("qweight")), "scale": scale, "offset": offset}

        return self.record(f"awq {version}", spec, build, {"scale": "scales", "offset": zeros})

    def _groups(self, k: int) -> tuple[int, int]:
        size = k if self.settings.group_size == -1 else self.settings.group_size
        return size, -(-k // size)

    def _zeros(self, groups: int) -> Tensor:
        """qzeros as zero points uint8 [N, G]."""
        return packed_int32.unpack_int32(self.read("qzeros"), 4, groups).contiguous()

    def _cut(self, scales: Tensor, groups: int) -> Tensor:
        """Scales [N, padded G] without the padding, whose zeros are the one trace of how many groups there really are."""
        used = scales[:, :groups].contiguous()
        if bool(scales[:, groups:].any()) or not bool(used[:, -1].any()):
            info: TensorInfo = self.source.tensors[f"{self.base}.scales"]
            really = int(scales.any(0).nonzero().max()) + 1 if bool(scales.any()) else 0
            raise self.error(
                info, "the tensors and the config disagree about groups", f"{really} groups with scales",
                f"{groups}, as group_size = {self.settings.group_size} in {self.config_file.name} means",
            )  # fmt: skip
        return used


def _padded(groups: int) -> range:
    """How many scales so many groups may have: padded to whole words of zero points, and to some words more."""
    least = -(-groups // 8) * 8
    return range(least, least + _MOST_PADDING, 8)


def fast_codes(words: Tensor) -> Tensor:
    """gemv_fast's words, int16 [N/4, K], to canonical rows, uint8 [N, K/2].

    The codes of four words are 16 successive ones of a row, and runs of 64 codes take turns among the four rows. Within 32
    columns the stored order is (b, c, a) for column 8a + 2b + c, with a and b of 4 and c of 2.
    """
    quarter, k = words.shape
    out = torch.empty(_ROWS * quarter, k // 2, dtype=torch.uint8)
    step = bitstream.rows_per_chunk(_ROWS * k)
    for r in range(0, quarter, step):
        part = bitstream.unpack(words[r : r + step].contiguous().view(torch.uint8), 4, _ROWS * k)
        rows = part.reshape(-1, k // _RUN, _ROWS, _RUN).transpose(1, 2).reshape(-1, k // _BLOCK, 4, 2, 4)
        columns = rows.permute(0, 1, 4, 2, 3).reshape(-1, k)
        out[_ROWS * r : _ROWS * r + columns.shape[0]] = bitstream.pack(columns, 4)
    return out

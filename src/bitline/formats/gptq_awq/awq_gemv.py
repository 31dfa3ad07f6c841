"""AWQ gemv and gemv_fast (llm-awq): codes in rows of the weight, scales padded to whole int32 of zero points.

gemv packs every row as one bit stream. gemv_fast interleaves four rows and permutes columns within blocks of 32; its zero
points are stored as offsets, -scale * zero in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common import packed_int32
from bitline.formats.common.ignored_modules import IGNORED_WARNING
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS
from bitline.formats.common.slices import ROWS, Axis, Layout, uncut_columns
from bitline.formats.gptq_awq.config import ModuleSettings, SettingsByModule
from bitline.formats.gptq_awq.packed_module import modules_with_qweight
from bitline.types import LinearSpec

# gemv_fast: interleaved rows, successive columns of one row, and columns that are permuted together.
_ROWS, _RUN, _BLOCK = 4, 64, 32
_MAX_PADDING = 64  # groups; producers pad zero points to 1, 2 or 4 int32


def records(source: TensorSource, version: str, settings: SettingsByModule, config_file: Path) -> Iterator[LayerRecord]:
    """Every module with a qweight. version: "gemv", "gemv_fast" or "llm-awq". Only headers and symmetric qzeros are read."""
    for name in modules_with_qweight(source):
        module = _GemvModule(source, name, settings.find(name), config_file)
        yield module.gemv() if version == "gemv" else module.gemv_fast(version)


class _GemvModule(ModuleTensors):
    """A module with its settings from the config."""

    def __init__(self, source: TensorSource, name: str, settings: ModuleSettings, config_file: Path) -> None:
        super().__init__(source, name, "qweight")
        self.settings, self.config_file = settings, config_file
        if settings.bits != 4:
            raise self.error(self.codes, "this version of AWQ has 4 bits", f"bits = {settings.bits} in {config_file.name}", 4)
        if settings.ignored:
            self.warn(IGNORED_WARNING)

    def gemv(self) -> LayerRecord:
        """qweight int32 [N, K/8], qzeros int32 [N, padded G/8], scales [N, padded G]."""
        n, packed_columns = self.matrix("qweight", (torch.int32,))
        k = 8 * packed_columns
        block = self.settings.scale_block(k)
        groups = -(-k // block[1])
        scales = self.require("scales", FLOATS, tuple((n, padded) for padded in _padded_groups(groups)))
        self.require("qzeros", (torch.int32,), ((n, scales.shape[1] // 8),))
        symmetric = self.settings.symmetric and bool((self._zeros(groups) == 8).all())
        if self.settings.symmetric and not symmetric:
            self.warn("the config says that there are no zero points, but qzeros hold some: they are used")
        spec = LinearSpec(
            n, k, types.unsigned(4, symmetric=symmetric), block, scale_dtype=scales.dtype,
            zero="none" if symmetric else "int", bias=self.has_bias(n),
        )  # fmt: skip

        def read_fields() -> dict[str, Tensor | None]:
            scale = self._without_padding(self.read("scales"), k, groups)
            zero = None if symmetric else self._zeros(groups)
            return {"codes": self.read("qweight").view(torch.uint8), "scale": scale, "zero": zero}

        layout: Layout = {"qweight": (ROWS, uncut_columns(spec)), "scales": (ROWS, None), "qzeros": (ROWS, None)}
        stored_as = {"scale": "scales", "zero": "qzeros"}
        return self.record("awq gemv", spec, read_fields, stored_as, layout, lambda part: part.gemv())

    def gemv_fast(self, version: str) -> LayerRecord:
        """qweight int16 [N/4, K], scales and qzeros (llm-awq: scaled_zeros) [padded G, N], the latter offsets to add."""
        quarter, k = self.matrix("qweight", (torch.int16,))
        n = _ROWS * quarter
        if k % _RUN:
            raise self.error(self.codes, f"{version} packs {_RUN} columns at a time", f"{k} columns", f"a multiple of {_RUN}")
        block = self.settings.scale_block(k)
        groups = -(-k // block[1])
        scales = self.require("scales", FLOATS, tuple((padded, n) for padded in _padded_groups(groups)))
        zeros = "scaled_zeros" if self.find("scaled_zeros") is not None else "qzeros"
        self.require(zeros, (scales.dtype,), (scales.shape,))
        spec = LinearSpec(n, k, types.uint4, block, scale_dtype=scales.dtype, zero="float", bias=self.has_bias(n))

        def read_fields() -> dict[str, Tensor]:
            scale = self._without_padding(self.read("scales").t(), k, groups)
            offset = self.read(zeros).t()[:, :groups].contiguous()
            return {"codes": repack_gemv_fast(self.read("qweight")), "scale": scale, "offset": offset}

        layout: Layout = {"qweight": (Axis(0, _ROWS), uncut_columns(spec)), "scales": (None, ROWS), zeros: (None, ROWS)}
        stored_as = {"scale": "scales", "offset": zeros}
        return self.record(f"awq {version}", spec, read_fields, stored_as, layout, lambda part: part.gemv_fast(version))

    def _zeros(self, groups: int) -> Tensor:
        """qzeros as zero points uint8 [N, G]."""
        return packed_int32.unpack_int32(self.read("qzeros"), 4, groups).contiguous()

    def _without_padding(self, scales: Tensor, k: int, groups: int) -> Tensor:
        """Scales [N, padded G] to [N, G]. That the padding is zero is the only evidence of how many groups there are."""
        used = scales[:, :groups].contiguous()
        if bool(scales[:, groups:].any()) or not bool(used[:, -1].any()):
            info: TensorInfo = self.source.tensors[f"{self.name}.scales"]
            nonzero_groups = int(scales.any(0).nonzero().max()) + 1 if bool(scales.any()) else 0
            raise self.error(
                info, "the tensors and the config disagree about groups", f"{nonzero_groups} groups with scales",
                self.settings.expected_groups(k, self.config_file),
            )  # fmt: skip
        return used


def _padded_groups(groups: int) -> range:
    """The numbers of scales per row that `groups` may be padded to: whole int32 of zero points, and some more."""
    least = -(-groups // 8) * 8
    return range(least, least + _MAX_PADDING, 8)


def repack_gemv_fast(packed: Tensor) -> Tensor:
    """gemv_fast's qweight, int16 [N/4, K], to canonical rows, uint8 [N, K/2].

    Four int16 are 16 successive codes of a row, and runs of 64 codes of the four rows follow each other. Within 32 columns
    the stored order is (b, c, a) for column 8a + 2b + c, with a and b of 4 and c of 2.
    """
    quarter, k = packed.shape
    out = torch.empty(_ROWS * quarter, k // 2, dtype=torch.uint8)
    step = bitstream.rows_per_chunk(_ROWS * k)
    for r in range(0, quarter, step):
        codes = bitstream.unpack(packed[r : r + step].contiguous().view(torch.uint8), 4, _ROWS * k)
        rows = codes.reshape(-1, k // _RUN, _ROWS, _RUN).transpose(1, 2).reshape(-1, k // _BLOCK, 4, 2, 4)
        columns = rows.permute(0, 1, 4, 2, 3).reshape(-1, k)
        out[_ROWS * r : _ROWS * r + columns.shape[0]] = bitstream.pack(columns, 4)
    return out

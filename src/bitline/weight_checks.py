"""Validation of a canonical weight: its tensors against its spec and against each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitline import bitstream, native
from bitline.errors import WeightError
from bitline.types import LinearSpec

_FINITE = ("scale", "scale2", "offset", "offset2", "input_scale", "input_multiplier", "bias")


class WeightChecks:
    """The checks of one weight; each raises a WeightError that names the field.

    fields: the fields of a QuantizedWeight by name. origin: the tensor's name in the checkpoint, for the message.
    """

    def __init__(self, spec: LinearSpec, fields: Mapping[str, Tensor | None], origin: str) -> None:
        self.spec, self.fields, self.origin = spec, fields, origin

    def check_structure(self) -> None:
        """Which tensors are present, their shapes and dtypes. Works on meta tensors."""
        s = self.spec
        self._expect("codes", (s.n, bitstream.row_bytes(s.k, s.weight.bits)), torch.uint8)
        grid = self._check_scales()
        self._check_zero_points(grid)
        self._check_second_level()
        self._expect_presence("perm", s.act_order, f"act_order={s.act_order}")
        for name in ("perm", "group_index"):
            if self.fields[name] is not None:
                self._expect(name, (s.k,), torch.int32)
        self._check_input_and_bias()

    def check_values(self) -> None:
        """Finite floats, and zero points, permutation and group index within their ranges."""
        for name in _FINITE:
            self._check_finite(name)
        s = self.spec
        input_scale, zero = self.fields["input_scale"], self.fields["zero"]
        if input_scale is not None and not float(input_scale) > 0:
            raise self._error("input_scale", float(input_scale), "a positive number")
        if zero is not None and int(zero.max()) >= 1 << s.weight.bits:
            raise self._error("zero", f"up to {int(zero.max())}", f"0..{(1 << s.weight.bits) - 1}")
        perm, group_index, scale = self.fields["perm"], self.fields["group_index"], self.fields["scale"]
        if perm is not None and not _is_permutation(perm.long()):
            raise self._error("perm", "repeated or missing columns", f"a permutation of 0..{s.k - 1}")
        if group_index is not None and scale is not None:
            groups = scale.shape[1]
            if bool((group_index[1:] < group_index[:-1]).any()) or int(group_index[0]) < 0 or int(group_index[-1]) >= groups:
                raise self._error("group_index", "decreasing or out of range", f"non-decreasing within 0..{groups - 1}")

    def _check_scales(self) -> tuple[int, int]:
        """The scale grid, which is the scale tensor's where groups are ragged."""
        s, grid, scale = self.spec, self.spec.grid, self.fields["scale"]
        if s.ragged and s.scale2_block is not None:
            raise self._error("scale2", "present", "absent: a ragged weight has one level of scales")
        self._expect_presence("group_index", s.ragged, f"ragged={s.ragged}")
        if s.ragged and scale is not None:
            grid = (grid[0], scale.shape[-1] if scale.dim() == 2 else 0)
        self._expect("scale", grid, s.scale_dtype)
        return grid

    def _check_zero_points(self, grid: tuple[int, int]) -> None:
        s = self.spec
        for name, kind in (("zero", "int"), ("offset", "float")):
            self._expect_presence(name, s.zero == kind, f"zero={s.zero!r} says otherwise")
        if s.zero == "int":
            self._expect("zero", grid, torch.uint8)
        if s.zero == "float":
            self._expect("offset", grid, s.scale_dtype)

    def _check_second_level(self) -> None:
        s, extent = self.spec, (self.spec.n, self.spec.k)
        self._expect_presence("scale2", s.scale2_block is not None, f"block {s.scale2_block}")
        if s.scale2_block is not None:
            self._expect("scale2", self._scale2_grid())
            for size, block, offset, scale2_size in zip(extent, s.block, s.block_offset, s.scale2_block, strict=True):
                if scale2_size < size and (scale2_size % block or offset):
                    raise self._error(
                        "scale2", f"blocks {s.scale2_block} over blocks {s.block}", "whole scale blocks in each scale2 block"
                    )
        if self.fields["offset2"] is not None:
            if self.fields["offset"] is None:
                raise self._error("offset2", "present", "absent: there is no offset")
            if s.scale2_block is None:
                fix = "set scale2_block and scale2 too, or multiply offset2 into offset"
                raise self._error("offset2", "present", "absent: the spec has no scale2_block", fix)
            self._expect("offset2", self._scale2_grid())

    def _check_input_and_bias(self) -> None:
        s = self.spec
        if s.act is not None and not s.act.dynamic and self.fields["input_scale"] is None:
            raise self._error("input_scale", "absent", "present: the activation scheme is static")
        for name in ("input_scale", "input_zero"):
            scalar = self.fields[name]
            if scalar is not None and scalar.numel() != 1:
                raise self._error(name, f"shape {list(scalar.shape)}", "one number")
        for name, present, size in (("input_multiplier", s.input_multiplier, s.k), ("bias", s.bias, s.n)):
            self._expect_presence(name, present, f"{name}={present}")
            if present:
                self._expect(name, (size,))

    def _check_finite(self, name: str) -> None:
        tensor = self.fields[name]
        if tensor is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float8_e8m0fnu:
            return  # E8M0's NaN is a legal shared scale (OCP MX 1.0, 5.4.1) and has to reach the output
        if native.all_finite(tensor):
            return
        bad = ~torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
        if bad.any():
            first = [int(i) for i in bad.nonzero()[0]]
            raise self._error(name, f"{int(bad.sum())} NaN or infinite values, the first at {first}", "finite values")

    def _scale2_grid(self) -> tuple[int, int]:
        assert self.spec.scale2_block is not None
        return self.spec.replace(block=self.spec.scale2_block, block_offset=(0, 0)).grid

    def _expect_presence(self, name: str, present: bool, expected: str) -> None:
        if (self.fields[name] is not None) != present:
            raise self._error(name, "absent" if present else "present", expected)

    def _expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        tensor = self.fields[name]
        if tensor is None or tuple(tensor.shape) != tuple(shape):
            raise self._error(name, "absent" if tensor is None else f"shape {list(tensor.shape)}", f"shape {list(shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise self._error(name, f"dtype {tensor.dtype}", f"dtype {dtype}")

    def _error(self, name: str, found: object, expected: object, fix: str | None = None) -> WeightError:
        return WeightError(
            f"the weight's {name} does not fit its spec {self.spec}", field=name, tensor=self.origin or name,
            found=found, expected=expected, fix=fix,
        )  # fmt: skip


def _is_permutation(index: Tensor) -> bool:
    """Whether int64 [K] holds each of 0..K-1 once."""
    if int(index.min()) < 0 or int(index.max()) >= index.numel():
        return False
    seen = torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    seen[index] = True
    return bool(seen.all())

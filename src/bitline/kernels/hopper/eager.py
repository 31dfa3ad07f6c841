"""Calls of one layer in eager mode: what `launch.run` works out at every call is kept for each shape of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.hopper import launch
from bitline.types import LinearSpec


class Bound:
    """x [..., K] to y [..., N], or None where `launch.run` is to be called.

    That is for a shape that it has not run yet, an x that must be copied first, one of another dtype or device, and a layer
    that takes more than one launch.

    An entry holds addresses of the weight's tensors, which are held here too; one that was moved ends the entries' use.
    """

    def __init__(self, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> None:
        self.given = packed, bias, spec
        self.words, self.dtype, self.index, self.address = packed[0], spec.act_dtype, packed[0].get_device(), packed[0].data_ptr()
        self.new = launch._new()
        self.entries: dict[torch.Size, tuple[Any, ...]] = {}

    def __reduce__(self) -> Any:
        return Bound, self.given  # a copy has its own tensors

    def __call__(self, x: Tensor) -> Tensor | None:
        """See the class."""
        entry = self.entries.get(x.shape)
        if not entry:
            if entry is None:
                self._learn(x)
            return None
        start = x.data_ptr()
        if (
            start & 15 or x.dtype is not self.dtype or x.get_device() != self.index or not x.is_contiguous()
            or self.words.data_ptr() != self.address
        ):  # fmt: skip
            return None
        run, grouped, programs, head, shape, strides, plan, middle, tail = entry
        y: Tensor = self.new(shape, strides, self.dtype)
        stream = launch._raw_stream(self.index)
        if plan is None:
            arguments = (start, *middle, y.data_ptr(), *tail)
        else:
            parts, flags = launch._workspace(x, plan.scratch, stream) if plan.scratch else (0, 0)
            arguments = (*plan.input_maps(start), *middle, *plan.output_maps(y.data_ptr()), parts, flags, *tail)
        if grouped:
            run(programs, 1, 1, stream, *head, arguments)
        else:
            run(programs, 1, 1, stream, *head, *arguments)
        return y

    def _learn(self, x: Tensor) -> None:
        """Make the entry of a shape, where its kernel has been compiled; an empty one where there is none."""
        packed, bias, spec = self.given
        if x.dim() == 0 or x.shape[-1] != spec.k or x.dtype is not self.dtype or x.numel() == 0 or x.get_device() != self.index:
            return
        m, n, k = x.numel() // spec.k, spec.n, spec.k
        plan = launch.plan_of(spec, m, bias is not None, self.index)
        binary = plan.known(self.index)
        if binary is None:
            return
        if len(self.entries) >= 256:
            self.entries.clear()
        words, scale, zero, alpha, perm = packed
        biased = 0 if bias is None else bias.data_ptr()
        if perm.numel() or k % 8 or (k % 64 and plan.pads) or biased % 16:
            self.entries[x.shape] = ()
            return
        middle: tuple[Any, ...]
        tail: tuple[Any, ...]
        maps: Any
        if isinstance(plan, launch._DecodePlan):
            middle = (words.data_ptr(), scale.data_ptr(), zero.data_ptr(), biased, alpha.data_ptr())
            tail, maps = (*(() if plan.scratch else plan.space), m, n, k, *plan.tail), plan if plan.scratch else None
        elif n % 8:
            self.entries[x.shape] = ()
            return
        else:
            middle, tail, maps = plan.weight_maps(words, scale, zero), (biased, alpha.data_ptr(), *plan.tail), plan
        shape = (*x.shape[:-1], n)
        strides = torch.empty(shape, device="meta").stride()
        head = binary.head
        self.entries[x.shape] = (binary.launch, binary.grouped, plan.programs, head, shape, strides, maps, middle, tail)

"""Experts that are stacked in one tensor, seen as a module for each of them: `experts.down_proj` as `experts.down_proj.0`, ….

transformers keeps the experts of a layer as one parameter [E, …]; what belongs to it is named after it, `down_proj_scale_inv`.
Some models (Llama 4, gpt-oss) keep it transposed, [E, in, out], which the shape of its scales tells where they have one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import TensorInfo, TensorSource, check_expert_count

# What follows a stack's name, and what the same part of a module is called.
_PARTS = {
    "_scale_inv": "weight_scale_inv", "_scale": "weight_scale", "_weight_scale_inv": "weight_scale_inv",
    "_weight_scale": "weight_scale", "_weight_scale_2": "weight_scale_2", "_input_scale": "input_scale",
    "_activation_scale": "activation_scale", "_bias": "bias", "_pre_quant_scale": "pre_quant_scale",
}  # fmt: skip
_OWN = ("weight", "weight_packed")  # a stack may also be a module's own tensor, [E, N, K]
_TRANSPOSED = ("llama4", "gpt_oss")  # model types that keep their experts as [E, in, out]
_SCALES = ("weight_scale", "weight_scale_inv")


class Stacks:
    """A source in which the parts of each expert are tensors of their own, slices of the stacks. The rest is as it was.

    codes: dtypes of what a stack of codes may be. An entry of `tensors` keeps the name of the file's own tensor.
    """

    def __init__(self, source: TensorSource, codes: tuple[torch.dtype, ...]) -> None:
        self._source, self.path, self.config = source, source.path, source.config
        self.metadata: Mapping[str, Any] = getattr(source, "metadata", {})
        self._at: dict[str, tuple[str, int | None, bool]] = {}  # our name to the file's, the expert, and whether to transpose
        self._tensors: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._tensors
        self._modules: dict[str, list[str]] = {}
        for name in source.tensors:
            self._modules.setdefault(name.rpartition(".")[0], []).append(name)
        taken: set[str] = set()
        for name, info in source.tensors.items():
            if info.dtype in codes and len(info.shape) == 3 and name not in taken and self._may_be_stack(name):
                taken |= self._expand(name, info)
            elif name not in taken:
                self._tensors[name] = info
        for name in taken:
            self._tensors.pop(name, None)

    def _may_be_stack(self, name: str) -> bool:
        """Not a part of a stack, nor one of a module that has codes: a bias or an order of three dimensions is no stack."""
        base, _, last = name.rpartition(".")
        return last in _OWN or not (name.endswith(tuple(_PARTS)) or any(f"{base}.{own}" in self._source.tensors for own in _OWN))

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """A tensor of the file, or an expert's slice of one (or their first rows); a view where it is not transposed."""
        real, expert, turned = self._at.get(name, (name, None, False))
        if expert is None and not turned:
            return self._source.read(real, rows)
        data = self._source.read(real)
        if expert is not None:
            data = data[expert]
        data = data.t().contiguous() if turned else data
        return data if rows is None else data[:rows]

    def _expand(self, name: str, info: TensorInfo) -> set[str]:
        """Enter the parts of every expert of a stack; the names that they stand for."""
        base, _, last = name.rpartition(".")
        own = last in _OWN
        if own:
            parts = {n.removeprefix(f"{base}."): n for n in self._modules[base]}
        else:
            base = name
            parts = {"weight": name, **{s: name + n for n, s in _PARTS.items() if name + n in self._source.tensors}}
        experts = info.shape[0]
        check_expert_count(info, experts)
        if not experts or not all(self._fits(s, self._source.tensors[real], experts) for s, real in parts.items()):
            self._tensors[name] = info  # no stack of experts: the reader says what is wrong with it
            return set()
        scale = next((self._source.tensors[parts[s]] for s in _SCALES if s in parts), None)
        turned = self._turned(info, scale)
        for e in range(experts):
            for suffix, real in parts.items():
                self._slice(
                    f"{base}.{e}.{suffix}", self._source.tensors[real], e, experts, turned and suffix in ("weight", *_SCALES)
                )
        return set(parts.values())

    def _fits(self, suffix: str, info: TensorInfo, experts: int) -> bool:
        """Whether a part has something for each expert, or one number or vector of columns for all."""
        return info.shape[:1] == (experts,) or math.prod(info.shape) == 1 or suffix in ("weight_shape", "pre_quant_scale")

    def _slice(self, name: str, info: TensorInfo, expert: int, experts: int, turned: bool) -> None:
        """One part of one expert: its slice, or the whole of what all experts share."""
        # weight_shape is [N, K] or [E, N, K], one for all, or a row for each.
        whole = name.endswith(".weight_shape") and len(info.shape) == 1
        stacked = info.shape[:1] == (experts,) and not whole and not (info.shape == (1,) and experts == 1)
        shape, nbytes = (info.shape[1:], info.nbytes // experts) if stacked else (info.shape, info.nbytes // experts)
        turned = turned and len(shape) == 2 and shape[1] != 1
        self._tensors[name] = TensorInfo(info.name, info.dtype, shape[::-1] if turned else shape, info.file, nbytes)
        self._at[name] = (info.name, expert if stacked else None, turned)

    def _turned(self, codes: TensorInfo, scale: TensorInfo | None) -> bool:
        """Whether a stack is [E, in, out], by the shape of its scales or, where they have none, by the model's type."""
        experts, rows, columns = codes.shape
        said = str(self.config.get("model_type", "")).startswith(_TRANSPOSED)
        if scale is None or rows == 0 or columns == 0:
            return said
        shape = scale.shape[1:] if scale.shape[:1] == (experts,) else scale.shape
        flat = tuple(size for size in shape if size != 1)
        if len(flat) == 1:  # a scale for each row of the weight
            fits, turns = flat[0] == rows, flat[0] == columns
        elif len(flat) == 2 and codes.dtype == torch.uint8:  # two codes in a byte, along the input
            fits = flat[0] == rows and (2 * columns) % flat[1] == 0
            turns = flat[1] == columns and (2 * rows) % flat[0] == 0
        else:
            fits, turns = True, said
        if fits and turns and said and len(flat) == 1:
            raise CheckpointError(
                "stacked experts of which it cannot be told which side is the input", file=codes.file, tensor=codes.name,
                found=f"{list(codes.shape)} with scales {list(scale.shape)}", expected="sides of different lengths",
            )  # fmt: skip
        return said if fits == turns else turns


def unstacked(source: TensorSource, codes: tuple[torch.dtype, ...]) -> TensorSource:
    """The source itself, or one in which stacked experts are modules."""
    if any(info.dtype in codes and len(info.shape) == 3 for info in source.tensors.values()):
        return Stacks(source, codes)
    return source

"""Experts stacked in one tensor, presented as one module per expert: `experts.down_proj` as `experts.down_proj.0`, ….

transformers keeps the experts of a MoE layer as one parameter [E, N, K]; its scales and biases are named after it
(`down_proj_scale_inv`). Some models (Llama 4, gpt-oss) store it transposed, [E, K, N], which the shape of the scales shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import Range, TensorInfo, TensorSource, check_expert_count

# Suffix of a stacked parameter's name, and the name of the same tensor in a module.
_SUFFIXES = {
    "_scale_inv": "weight_scale_inv", "_scale": "weight_scale", "_weight_scale_inv": "weight_scale_inv",
    "_weight_scale": "weight_scale", "_weight_scale_2": "weight_scale_2", "_input_scale": "input_scale",
    "_activation_scale": "activation_scale", "_bias": "bias", "_pre_quant_scale": "pre_quant_scale",
}  # fmt: skip
_MODULE_CODES = ("weight", "weight_packed")  # a stack may also be a module's own tensor, [E, N, K]
_TRANSPOSED_MODELS = ("llama4", "gpt_oss")  # model types that store [E, K, N]
_SCALES = ("weight_scale", "weight_scale_inv")


class ExpertStacks:
    """A source in which each expert of a stack has tensors of its own, slices of the stacks; other tensors are unchanged.

    codes: the dtypes of stacked codes. An entry of `tensors` keeps the name of the tensor in the file.
    """

    def __init__(self, source: TensorSource, codes: tuple[torch.dtype, ...]) -> None:
        self._source, self.path, self.config = source, source.path, source.config
        self.metadata: Mapping[str, Any] = getattr(source, "metadata", {})
        # Name of a slice: the tensor in the file, the expert (None for a shared tensor), and whether to transpose.
        self._slices: dict[str, tuple[str, int | None, bool]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self.tensors: Mapping[str, TensorInfo] = self._tensors
        self._modules: dict[str, list[str]] = {}
        for name in source.tensors:
            self._modules.setdefault(name.rpartition(".")[0], []).append(name)
        stacked: set[str] = set()
        for name, info in source.tensors.items():
            if info.dtype in codes and len(info.shape) == 3 and name not in stacked and self._may_be_stack(name):
                stacked |= self._unstack(name, info)
            elif name not in stacked:
                self._tensors[name] = info
        for name in stacked:
            self._tensors.pop(name, None)

    @property
    def reads(self) -> set[str]:
        """Names of the tensors in the file that were read."""
        return self._source.reads

    def _may_be_stack(self, name: str) -> bool:
        """Whether a tensor may be stacked codes, and not the scale or bias of a stack or of a module that has codes."""
        module, _, last = name.rpartition(".")
        has_codes = any(f"{module}.{codes}" in self._source.tensors for codes in _MODULE_CODES)
        return last in _MODULE_CODES or not (name.endswith(tuple(_SUFFIXES)) or has_codes)

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """A tensor, or the first rows of it; for a slice of a stack a view unless it is transposed."""
        stored, expert, transposed = self._slices.get(name, (name, None, False))
        if expert is None and not transposed:
            return self._source.read(stored, rows)
        data = self._source.read(stored)
        if expert is not None:
            data = data[expert]
        data = data.t().contiguous() if transposed else data
        return data if rows is None else data[:rows]

    def read_part(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """A part of a tensor, one range for each dimension of `tensors[name].shape`."""
        stored, expert, transposed = self._slices.get(name, (name, None, False))
        in_file = list(ranges[::-1] if transposed else ranges)
        if expert is not None:
            in_file.insert(0, (expert, expert + 1))
        data = self._source.read_part(stored, in_file)
        data = data if expert is None else data[0]
        return data.t().contiguous() if transposed else data

    def _unstack(self, name: str, info: TensorInfo) -> set[str]:
        """Add the tensors of every expert of a stack. Returns the names of the tensors in the file that they replace."""
        module, _, last = name.rpartition(".")
        if last in _MODULE_CODES:
            stored = {n.removeprefix(f"{module}."): n for n in self._modules[module]}
        else:
            module = name
            stored = {"weight": name, **{s: name + n for n, s in _SUFFIXES.items() if name + n in self._source.tensors}}
        experts = info.shape[0]
        check_expert_count(info, experts)
        if not experts or not all(self._fits(s, self._source.tensors[tensor], experts) for s, tensor in stored.items()):
            self._tensors[name] = info  # not a stack of experts: the reader says what is wrong with it
            return set()
        scale = next((self._source.tensors[stored[s]] for s in _SCALES if s in stored), None)
        transposed = self._is_transposed(info, scale)
        for expert in range(experts):
            for suffix, tensor in stored.items():
                transpose = transposed and suffix in ("weight", *_SCALES)
                self._add_slice(f"{module}.{expert}.{suffix}", self._source.tensors[tensor], expert, experts, transpose)
        return set(stored.values())

    def _fits(self, suffix: str, info: TensorInfo, experts: int) -> bool:
        """Whether a tensor has an entry per expert, or is shared by all of them."""
        return info.shape[:1] == (experts,) or math.prod(info.shape) == 1 or suffix in ("weight_shape", "pre_quant_scale")

    def _add_slice(self, name: str, info: TensorInfo, expert: int, experts: int, transposed: bool) -> None:
        """Add one tensor of one expert: its slice, or all of a shared one."""
        # weight_shape is one [N, K] or [E, N, K] for all experts, or a row for each.
        shared_shape = name.endswith(".weight_shape") and len(info.shape) == 1
        stacked = info.shape[:1] == (experts,) and not shared_shape and not (info.shape == (1,) and experts == 1)
        shape, nbytes = (info.shape[1:], info.nbytes // experts) if stacked else (info.shape, info.nbytes // experts)
        transposed = transposed and len(shape) == 2 and shape[1] != 1
        self._tensors[name] = TensorInfo(info.name, info.dtype, shape[::-1] if transposed else shape, info.file, nbytes)
        self._slices[name] = (info.name, expert if stacked else None, transposed)

    def _is_transposed(self, codes: TensorInfo, scale: TensorInfo | None) -> bool:
        """Whether a stack is [E, K, N], by the shape of its scales or, where they fit both, by the model's type."""
        experts, rows, columns = codes.shape
        by_model = str(self.config.get("model_type", "")).startswith(_TRANSPOSED_MODELS)
        if scale is None or rows == 0 or columns == 0:
            return by_model
        shape = scale.shape[1:] if scale.shape[:1] == (experts,) else scale.shape
        sizes = tuple(size for size in shape if size != 1)
        if len(sizes) == 1:  # per channel
            fits, fits_transposed = sizes[0] == rows, sizes[0] == columns
        elif len(sizes) == 2 and codes.dtype == torch.uint8:  # two codes in a byte, along K
            fits = sizes[0] == rows and (2 * columns) % sizes[1] == 0
            fits_transposed = sizes[1] == columns and (2 * rows) % sizes[0] == 0
        else:
            fits, fits_transposed = True, by_model
        if fits and fits_transposed and by_model and len(sizes) == 1:
            raise CheckpointError(
                "stacked experts whose input dimension is ambiguous", file=codes.file, tensor=codes.name,
                found=f"{list(codes.shape)} with scales {list(scale.shape)}", expected="N and K of different sizes",
            )  # fmt: skip
        return by_model if fits == fits_transposed else fits_transposed


def unstack_experts(source: TensorSource, codes: tuple[torch.dtype, ...]) -> TensorSource:
    """The source itself, or one in which stacked experts are modules. codes: the dtypes of stacked codes."""
    if any(info.dtype in codes and len(info.shape) == 3 for info in source.tensors.values()):
        return ExpertStacks(source, codes)
    return source

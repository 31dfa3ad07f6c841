"""Layers of which each rank has a part and whose ranks exchange something. Column-parallel layers are plain layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline.act_quant import dynamic_scale, encode, fake_quantize
from bitline.parallel.group import TensorParallel
from bitline.quantized_input import QuantizedInput
from bitline.types import ActSpec


class SharedScales:
    """Quantization of activations whose columns are spread over ranks, as of a whole row.

    Args:
        tp: The ranks.
        act: A dynamic scheme whose scales columns of several ranks share.
        parts: Columns of each rank.
        input_scale: Of schemes with a global scale.
    """

    def __init__(self, tp: TensorParallel, act: ActSpec, parts: Sequence[int], input_scale: Tensor | None = None) -> None:
        self.tp, self.act, self.parts, self.input_scale = tp, act, list(parts), input_scale

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [M, K of this rank] with one scale per row or per tensor: (codes, scale [M, 1] or [1, 1], zero point or None)."""
        values = x.float()
        low, high = values.amin(-1), values.amax(-1)
        if self.act.granularity == "tensor":
            low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
        bounds = self.tp.max(torch.stack((-low, high)))
        scale, zero = dynamic_scale(torch.stack((-bounds[0], bounds[1]), -1), self.act)
        return encode(values, self.act, scale, zero), scale, zero

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x [M, K of this rank], quantized and dequantized, in x's dtype."""
        if x.shape[0] == 0:
            return x
        if self.act.granularity != "group":
            codes, scale, zero = self.quantize(x)
            return ((codes.float() if zero is None else codes.float() - zero) * scale).to(x.dtype)
        whole = fake_quantize(self.tp.concatenate(x, self.parts), self.act, self.input_scale)
        start = sum(self.parts[: self.tp.rank])
        return whole[:, start : start + self.parts[self.tp.rank]].to(x.dtype)


class RowParallel(nn.Module):
    """y = the sum over ranks of a linear layer on this rank's columns. A bias is rank 0's.

    Args:
        linear: x [..., K of this rank] -> [..., N].
        tp: The ranks.
        scales: Quantizes x with all ranks; `linear` then takes a QuantizedInput, or is weight-only.
        bias: [N], added to the sum; where there are `scales`.
    """

    bias: Tensor | None

    def __init__(
        self, linear: nn.Module, tp: TensorParallel, scales: SharedScales | None = None, bias: Tensor | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.linear, self.tp, self.scales = linear, tp, scales
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K of this rank] -> y [..., N], the same on every rank."""
        if self.scales is None:
            return self.tp.sum(self.linear(x))
        rows = x.reshape(-1, x.shape[-1])
        y = self.tp.sum(self._product(rows, self.scales), torch.float32)
        if self.bias is not None:
            y += self.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def _product(self, rows: Tensor, scales: SharedScales) -> Tensor:
        """This rank's part of y [M, N]."""
        linear: Any = self.linear
        if rows.shape[0] == 0 or scales.act.granularity == "group":
            return linear(scales.fake_quantize(rows))
        codes, scale, zero = scales.quantize(rows)
        if linear.spec.act is not None:
            return linear(QuantizedInput(codes, scale.view(-1), None if zero is None else zero.view(-1)))
        whole = codes.float() if zero is None else codes.float() - zero  # at most 255: exact in 16 bits
        return linear(whole.to(rows.dtype)).float() * scale


class QuantizedGate:
    """What lies between an expert's projections, with its result quantized by all ranks.

    gate: x [M, 2 I or I of this rank] -> [M, I of this rank]. scales: of each expert.
    """

    def __init__(self, gate: Callable[[Tensor], Tensor], scales: Sequence[SharedScales]) -> None:
        self.gate, self.scales = gate, scales

    def of_expert(self, expert: int, x: Tensor) -> Tensor:
        """`gate`'s result, quantized for an expert's second projection."""
        return self.scales[expert].fake_quantize(self.gate(x))


class VocabParallelEmbedding(nn.Module):
    """Rows [start, stop) of a table on this rank; a token's row comes from the rank that has it."""

    def __init__(self, embedding: nn.Module, tp: TensorParallel, start: int, stop: int) -> None:
        super().__init__()
        self.embedding, self.tp, self.start, self.stop = embedding, tp, start, stop

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., K], the same on every rank."""
        if ids.numel() == 1 and ids.device.type == "cpu":
            token = int(ids)
            row = self.embedding(ids - self.start if self.start <= token < self.stop else torch.zeros_like(ids))
            return self.tp.sum(row if self.start <= token < self.stop else torch.zeros_like(row))
        mine = (ids >= self.start) & (ids < self.stop)
        rows = self.embedding(torch.where(mine, ids - self.start, 0))
        return self.tp.sum(rows.where(mine.unsqueeze(-1), 0.0))


class GatherOutput(nn.Module):
    """A column-parallel layer whose whole output every rank needs: the head, or query and key where a norm spans all heads.

    sizes: rows of each rank.
    """

    def __init__(self, linear: nn.Module, tp: TensorParallel, sizes: list[int]) -> None:
        super().__init__()
        self.linear, self.tp, self.sizes, self.start = linear, tp, sizes, sum(sizes[: tp.rank])
        self._gathers = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], the same on every rank."""
        y: Tensor = self.linear(x)
        return self.tp.concatenate(y, self.sizes) if self._gathers else y

    @contextlib.contextmanager
    def own_rows(self) -> Iterator[None]:
        """`forward` returns this rank's rows alone: [..., N of this rank], from row `start` on."""
        self._gathers = False
        try:
            yield
        finally:
            self._gathers = True


class SplitInput(nn.Module):
    """A row-parallel layer that gets the whole input and takes this rank's columns [start, stop) of it."""

    def __init__(self, layer: RowParallel, start: int, stop: int) -> None:
        super().__init__()
        self.layer, self.start, self.stop = layer, start, stop

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> y [..., N], the same on every rank."""
        y: Tensor = self.layer(x[..., self.start : self.stop])
        return y

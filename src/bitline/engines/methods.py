"""The part of a layer method that engines share: read a layer's canonical weights, cut this rank's part, pack and run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitline.engines import packed_layer
from bitline.engines.cuts import Band, Part, bands, columns, merged, misfit, narrow
from bitline.engines.model_weights import ModelWeights
from bitline.model.embedding import OP as LOOKUP
from bitline.model.embedding import QuantEmbedding
from bitline.types import dtype_name
from bitline.weight import QuantizedWeight


class PackedLinear:
    """A linear layer of one or several fused layers of the checkpoint, of which at least one is quantized.

    weights: the checkpoint. names: the layers in it, in the order of the rows. An engine's method says how its ranks cut the
    layer: `bands`, `rank`, `added_bias`.
    """

    weights: ModelWeights
    names: Sequence[str]

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **_attributes: Any,
    ) -> None:  # fmt: skip
        """Remember the layer's shape on this rank. There are no parameters for the engine to load."""
        shape: Any = layer
        shape.bitline_columns, shape.bitline_rows = input_size_per_partition, list(output_partition_sizes)
        shape.bitline_dtype, shape.bitline_device = params_dtype, torch.get_default_device()
        layer.register_parameter("weight", None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the layer's weights, cut this rank's part, and pack it."""
        parts, biases = self._rank_parts(layer)
        self._set_bias(layer, biases)
        packed_layer.pack(
            layer, merged(parts, layer.bitline_dtype), self.added_bias(layer), dtype=layer.bitline_dtype,
            device=layer.bitline_device, name=getattr(layer, "prefix", "") or self.names[0], engine=self.weights.engine,
        )  # fmt: skip

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> y [..., N]."""
        return packed_layer.run(layer, x, bias)

    def bands(self, layer: Any) -> list[Band]:
        """The layer's rows as the engine's ranks cut them."""
        raise NotImplementedError

    def rank(self, layer: Any) -> tuple[int, int]:
        """(rank, size) of the group that cuts the layer."""
        raise NotImplementedError

    def added_bias(self, layer: Any) -> Tensor | None:
        """The bias that this rank adds: none where the model adds it later, or another rank of a row-parallel layer does."""
        raise NotImplementedError

    def _rank_parts(self, layer: Any) -> tuple[list[Part], list[Tensor | None]]:
        """This rank's matrices of the fused layers, and the biases that belong to them."""
        weights, own = self.weights, self.bands(layer)
        wholes = ((n, weights.weight(n) if n in weights.records else weights.dense_weight(n)) for n in self.names)
        parts: list[Part] = []
        biases: list[Tensor | None] = []
        for whole, band in zip(bands(wholes, [band.whole for band in own], weights), own, strict=True):
            start = band.start(self.names[0])
            part = narrow(whole, 0, start, start + band.own)
            biases.append(part.bias if isinstance(part, QuantizedWeight) else None)
            part = part.with_bias(None) if isinstance(part, QuantizedWeight) else part
            parts.append(columns(part, layer.bitline_columns, *self.rank(layer), self.names[0], weights))
        return parts, biases

    def _set_bias(self, layer: Any, biases: Sequence[Tensor | None]) -> None:
        """Fill the layer's bias from those that belong to quantized layers; the engine has loaded all others."""
        if getattr(layer, "bias", None) is None:
            if any(b is not None and bool(b.any()) for b in biases):  # old GPTQ files have zeros for models without biases
                raise misfit(self.weights, self.names[0], "a bias", "a layer without one")
            return
        row = 0
        for bias, rows in zip(biases, layer.bitline_rows, strict=True):
            if bias is not None:
                layer.bias.data[row : row + rows] = bias.to(layer.bias.device, layer.bias.dtype)
            row += rows


class PackedTable:
    """A quantized embedding, which is dequantized row by row, or a quantized output layer.

    weights: the checkpoint. name: the layer in it. tied: the model's output layer is its embedding.
    """

    weights: ModelWeights
    name: str
    tied: bool

    def __init__(self, weights: ModelWeights, name: str, *, tied: bool) -> None:
        self.weights, self.name, self.tied = weights, name, tied

    def create_weights(self, layer: Any, *_sizes: Any, params_dtype: torch.dtype, **_attributes: Any) -> None:
        """Remember the dtype. There are no parameters for the engine to load."""
        layer.bitline_dtype, layer.bitline_device = params_dtype, torch.get_default_device()

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """ids [...] -> [..., K]."""
        return cast(Tensor, LOOKUP(ids, *layer.bitline_lookup))

    def pack_rows(self, layer: Any, weight: QuantizedWeight, bias: Tensor | None, *, is_head: bool) -> None:
        """Keep this rank's rows for look-ups, for products, or for both where an output layer is tied to the table."""
        if not is_head:
            table = QuantEmbedding(weight, layer.bitline_dtype, layer.bitline_device)
            # Plain values, since a compiler that traces a look-up cannot trace the spec's own cache.
            layer.bitline_lookup = (list(table.buffers()), table.spec.key, dtype_name(layer.bitline_dtype))
        if is_head or self.tied:
            packed_layer.pack(
                layer, [weight], bias, dtype=layer.bitline_dtype, device=layer.bitline_device, name=self.name,
                engine=self.weights.engine,
            )  # fmt: skip

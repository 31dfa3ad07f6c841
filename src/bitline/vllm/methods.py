"""vLLM's layer methods over the canonical weights of a checkpoint: each rank cuts its part of them, then packs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from bitline.engines import packed_layer
from bitline.engines.cuts import Band, misfit
from bitline.engines.methods import PackedLinear, PackedTable
from bitline.engines.model_weights import ModelWeights
from bitline.linear import QuantLinear
from bitline.model.weight_info import WeightInfo


@register_weight_loader_v2_supported_method
class BitlineLinearMethod(PackedLinear, LinearMethodBase):
    """A linear layer of one or several fused layers of the checkpoint, of which at least one is quantized.

    weights: the checkpoint. names: the layers in it, in the order of the rows.
    """

    def __init__(self, weights: ModelWeights, names: Sequence[str]) -> None:
        self.weights, self.names = weights, names

    def create_weights(self, layer: Any, *shape: Any, **attributes: Any) -> None:
        """Remember the layer's shape on this rank. vLLM's models take a `weight` of None for a tensor."""
        super().create_weights(layer, *shape, **attributes)
        del layer.weight

    def bands(self, layer: Any) -> list[Band]:
        """The layer's rows. vLLM's own sizes count key and value heads that ranks share repeatedly."""
        if isinstance(layer, QKVParallelLinear):
            value_size, kv = getattr(layer, "v_head_size", layer.head_size), layer.total_num_kv_heads
            widths = [layer.total_num_heads * layer.head_size, kv * layer.head_size, kv * value_size]
        else:
            widths = list(getattr(layer, "output_sizes", None) or [layer.output_size])
        return [Band(whole, own, *self.rank(layer)) for whole, own in zip(widths, layer.bitline_rows, strict=True)]

    def rank(self, layer: Any) -> tuple[int, int]:
        """(rank, size) of tensor parallelism."""
        return layer.tp_rank, layer.tp_size

    def added_bias(self, layer: Any) -> Tensor | None:
        """The bias that this rank adds."""
        return added_bias(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the layer's weights, cut this rank's part, and pack it."""
        super().process_weights_after_loading(layer)
        part, *others = layer.bitline_parts
        if isinstance(part, QuantLinear) and not others:  # latent attention asks for the weight's device and dtype
            layer.__dict__["weight"] = WeightInfo(part)


class BitlineEmbeddingMethod(PackedTable, QuantizeMethodBase):
    """A quantized embedding, which is dequantized row by row, or a quantized output layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read this rank's rows of the table."""
        if getattr(layer, "bitline_tied_to", None):
            return
        shard = layer.shard_indices
        weight = self.weights.weight(self.name)
        start, stop = shard.org_vocab_start_index, min(shard.org_vocab_end_index, weight.spec.n)
        if stop <= start:
            found, expected = f"{weight.spec.n} rows", f"rows from {start} for rank {layer.tp_rank}"
            raise misfit(self.weights, self.name, found, expected)
        weight = weight.with_bias(None).narrow(0, start, stop)
        self.pack_rows(layer, weight, added_bias(layer), is_head=isinstance(layer, ParallelLMHead))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> logits of this rank's part of the vocabulary, padded as vLLM pads it."""
        layer = layer.bitline_tied_to[0] if getattr(layer, "bitline_tied_to", None) else layer
        y = packed_layer.run(layer, x, None)
        missing = layer.num_embeddings_per_partition - y.shape[-1] if layer.tp_size > 1 else 0
        y = nn.functional.pad(y, (0, missing)) if missing else y
        return y if bias is None or getattr(layer, "bitline_has_bias", False) else y + bias[: y.shape[-1]]

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> Any:
        """Let an output layer run on the embedding's packed weight."""
        layer.bitline_tied_to = (embed_tokens,)
        return layer


def added_bias(layer: Any) -> Tensor | None:
    """The bias that vLLM adds on this rank: none where the model adds it later, or another rank of a row-parallel layer does."""
    bias: Tensor | None = getattr(layer, "bias", None)
    if bias is None or getattr(layer, "skip_bias_add", False):
        return None
    if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
        return None
    return bias.data

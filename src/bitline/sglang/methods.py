"""SGLang's layer methods over the canonical weights of a checkpoint: each rank cuts its part of them, then packs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import Tensor, nn

from bitline.engines import packed_layer
from bitline.engines.cuts import Band, misfit
from bitline.engines.methods import PackedLinear, PackedTable
from bitline.errors import BitlineError
from bitline.sglang.weights import CheckpointWeights


class BitlineLinearMethod(PackedLinear, LinearMethodBase):
    """A linear layer of one or several fused layers of the checkpoint, of which at least one is quantized.

    weights: the checkpoint. names: the layers in it, in the order of the rows.
    """

    weights: CheckpointWeights

    def __init__(self, weights: CheckpointWeights, names: Sequence[str]) -> None:
        self.weights, self.names = weights, names

    def create_weights(self, *shape: Any, **attributes: Any) -> None:
        """Remember the layer's shape on this rank. There are no parameters for SGLang to load."""
        self.weights.used.update(self.names)
        super().create_weights(*shape, **attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the layer's weights, cut this rank's part, and pack it."""
        _check_filtered(self.weights, self.names[0])
        _check_whole(layer, self.weights, self.names[0])
        super().process_weights_after_loading(layer)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """Refuse: a packed layer has no parameters that could take other weights."""
        _refuse_reload(self.names[0])

    def bands(self, layer: Any) -> list[Band]:
        """The layer's rows. SGLang's own sizes count key and value heads that ranks share repeatedly."""
        rank, size = self.rank(layer)
        if not isinstance(layer, QKVParallelLinear):
            widths = getattr(layer, "output_sizes", None) or [layer.output_size]
            return [Band(whole, own, rank, size) for whole, own in zip(widths, layer.bitline_rows, strict=True)]
        kv, q = get_group_rank_size(layer.kv_tp_group), layer.total_num_heads * layer.head_size
        heads, (own_q, own_k, own_v) = layer.total_num_kv_heads, layer.bitline_rows
        key, value = Band(heads * layer.head_size, own_k, *kv), Band(heads * layer.v_head_size, own_v, *kv)
        return [Band(q, own_q, rank, size), key, value]

    def rank(self, layer: Any) -> tuple[int, int]:
        """(rank, size) of the layer's own group."""
        return cast(tuple[int, int], get_group_rank_size(layer.tp_group))

    def added_bias(self, layer: Any) -> Tensor | None:
        """The bias that this rank adds: none where the model adds it, or the first rank of a row-parallel layer."""
        is_cut_along_input = layer.bitline_columns != layer.input_size
        if layer.bias is None or layer.skip_bias_add or (is_cut_along_input and self.rank(layer)[0] > 0):
            return None
        return cast(Tensor, layer.bias.data)


class BitlineEmbeddingMethod(PackedTable, QuantizeMethodBase):
    """A quantized embedding, which is dequantized row by row, or a quantized output layer."""

    weights: CheckpointWeights

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **attributes: Any) -> None:
        """Remember the dtype. The empty weight tells SGLang's logits that this layer has a method of its own."""
        self.weights.used.add(self.name)
        super().create_weights(layer, *sizes, params_dtype=params_dtype, **attributes)
        layer.register_parameter("weight", nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read this rank's rows of the table."""
        _check_filtered(self.weights, self.name)
        _check_whole(layer, self.weights, self.name)
        weight = self.weights.weight(self.name).with_bias(None)
        shard = layer.shard_indices
        start, stop = shard.org_vocab_start_index, shard.org_vocab_end_index
        if weight.spec.n != layer.org_vocab_size or layer.num_embeddings != layer.org_vocab_size or stop <= start:
            raise misfit(self.weights, self.name, f"{weight.spec.n} rows, of which this rank has {start} to {stop}",
                         f"{layer.num_embeddings} rows, none of them added, and at least one for each rank")  # fmt: skip
        self.pack_rows(layer, weight.narrow(0, start, stop), None, is_head=isinstance(layer, ParallelLMHead))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> logits of this rank's part of the vocabulary, padded as SGLang pads it."""
        y = packed_layer.run(layer, x, None)
        y = nn.functional.pad(y, (0, layer.num_embeddings_per_partition - y.shape[-1]))
        return y if bias is None else y + bias

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """Refuse: a packed layer has no parameters that could take other weights."""
        _refuse_reload(self.name)


def _check_filtered(weights: CheckpointWeights, name: str) -> None:
    if not weights.filtered:
        raise BitlineError(
            "SGLang loaded a checkpoint without Bitline's filter of its tensors", file=weights.path, tensor=name,
            fix="leave --load-format and options that overlap loading out; see SGLang's log for 'Failed to apply hooks'",
        )  # fmt: skip


def _check_whole(layer: Any, weights: CheckpointWeights, name: str) -> None:
    if getattr(layer, "use_presharded_weights", False):
        raise BitlineError(
            "quantization='bitline' cuts each rank's part itself; SGLang's model expects files that are cut already",
            file=weights.path, tensor=name, fix="leave --quantization out, so that SGLang's own method runs the model",
        )  # fmt: skip


def _refuse_reload(name: str) -> None:
    raise BitlineError("weights of quantization='bitline' cannot be updated in place", tensor=name,
                       fix="start a server with the other checkpoint")  # fmt: skip

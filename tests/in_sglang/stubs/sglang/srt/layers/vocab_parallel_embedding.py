from dataclasses import dataclass

import torch

from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import _resolve_linear_group
from sglang.srt.layers.quantization.base_config import method_has_implemented_embedding
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

DEFAULT_VOCAB_PADDING_SIZE = 64


@dataclass
class VocabParallelEmbeddingShardIndices:
    org_vocab_start_index: int
    org_vocab_end_index: int


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        *,
        params_dtype=None,
        output_dtype=None,
        org_num_embeddings=None,
        padding_size=DEFAULT_VOCAB_PADDING_SIZE,
        quant_config=None,
        prefix="",
        enable_tp=True,
        use_attn_tp_group=False,
        use_presharded_weights=False,
    ):
        super().__init__()
        self.quant_config = quant_config
        tp_rank, self.tp_size = get_group_rank_size(_resolve_linear_group("tp"))
        self.num_embeddings = num_embeddings
        self.org_vocab_size = org_num_embeddings or num_embeddings
        step = padding_size * self.tp_size
        self.num_embeddings_padded = (self.org_vocab_size + step - 1) // step * step
        self.num_embeddings_per_partition = self.num_embeddings_padded // self.tp_size
        start = tp_rank * self.num_embeddings_per_partition
        ends = [min(at, self.org_vocab_size) for at in (start, start + self.num_embeddings_per_partition)]
        self.shard_indices = VocabParallelEmbeddingShardIndices(*ends)
        self.embedding_dim = embedding_dim
        method = quant_config.get_quant_method(self, prefix=prefix) if quant_config is not None else None
        self.quant_method = method or UnquantizedEmbeddingMethod()
        if type(self) is VocabParallelEmbedding and not method_has_implemented_embedding(type(self.quant_method)):
            raise NotImplementedError
        self.quant_method.create_weights(
            self,
            self.embedding_dim,
            [self.num_embeddings_per_partition],
            self.embedding_dim,
            self.num_embeddings_padded,
            params_dtype=params_dtype or torch.get_default_dtype(),
            weight_loader=None,
        )


class ParallelLMHead(VocabParallelEmbedding):
    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        *,
        bias=False,
        params_dtype=None,
        org_num_embeddings=None,
        padding_size=DEFAULT_VOCAB_PADDING_SIZE,
        quant_config=None,
        prefix="",
        enable_tp=True,
        use_attn_tp_group=False,
        use_presharded_weights=False,
    ):
        super().__init__(
            num_embeddings, embedding_dim, org_num_embeddings=org_num_embeddings, quant_config=quant_config, prefix=prefix
        )
        # On a CPU with AMX.
        if hasattr(self, "weight") and self.weight.dtype in [torch.bfloat16, torch.float16]:
            self.stub_packed_for_amx = True
        self.register_parameter("bias", None)

"""Tensor parallelism on torch.distributed: each rank packs its cut of the canonical weight."""

from bitline.parallel.group import TensorParallel
from bitline.parallel.layers import GatherOutput, RowParallel, SplitInput, VocabParallelEmbedding

__all__ = ["GatherOutput", "RowParallel", "SplitInput", "TensorParallel", "VocabParallelEmbedding"]

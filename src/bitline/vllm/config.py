"""quantization="bitline": any checkpoint that Bitline reads, served from its canonical weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from bitline.engines.config import AnyCheckpoint
from bitline.engines.model_weights import ModelWeights
from bitline.errors import InputError
from bitline.vllm.engine import VLLM
from bitline.vllm.experts import BitlineExpertsMethod
from bitline.vllm.methods import BitlineEmbeddingMethod, BitlineLinearMethod


class BitlineConfig(AnyCheckpoint, QuantizationConfig):
    """vLLM's quantization config of a checkpoint that Bitline reads. Which layers are quantized is read from the files."""

    weights: ModelWeights

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitlineConfig:
        """The config itself is read with the checkpoint."""
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Remember the checkpoint; the files are opened in the process that loads the model."""
        self.weights = ModelWeights(VLLM, Path(model_name))
        self.read_ties(hf_config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the checkpoint's layers as vLLM renames its tensors."""
        self.weights = ModelWeights(VLLM, self.weights.path, [*self.weights.mappers, hf_to_vllm_mapper])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Bitline's method for a layer of which the checkpoint has a quantized part, else vLLM's for unquantized ones.

        Raises:
            BitlineError: For experts that do not run on Bitline, and where another loader than Bitline's would read the
                checkpoint.
        """
        _check_loader()
        names = self._parts(prefix)
        found = [name for name in names if name in self.weights.records]
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(layer, names[0])
        if isinstance(layer, LinearBase):
            if not found or isinstance(layer, GateLinear):  # what a router chooses is discrete: the loader dequantizes it
                return UnquantizedLinearMethod()
            self.weights.used.update(found)
            return BitlineLinearMethod(self.weights, names)
        return self._experts_method(layer, prefix) if isinstance(layer, RoutedExperts) else None

    def _parts(self, prefix: str) -> list[str]:
        """The checkpoint's layers of a module: itself, or those that vLLM fuses into it."""
        if prefix in self.weights.records:
            return [prefix]
        stem, dot, leaf = prefix.rpartition(".")
        return [f"{stem}{dot}{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]

    def _embedding_method(self, layer: nn.Module, name: str) -> QuantizeMethodBase | None:
        """A quantized table or output layer; the table's where the model ties both."""
        name = self.weights.table_name(name, is_head=isinstance(layer, ParallelLMHead), tied=self.tied)
        if name not in self.weights.records:
            return None
        self.weights.used.add(name)
        return BitlineEmbeddingMethod(self.weights, name, tied=self.tied)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        """The method of quantized experts; None for unquantized ones."""
        method = BitlineExpertsMethod(self.weights, layer, prefix)
        layers = method.layers()
        self.weights.used.update(layers)
        return method if layers else None


def _check_loader() -> None:
    """Only Bitline's loader leaves quantized tensors to Bitline and checks that none is left over."""
    config = get_current_vllm_config_or_none()
    if config is not None and config.load_config.load_format != "bitline":
        raise InputError("quantization='bitline' needs Bitline's loader", found=f"load_format={config.load_config.load_format!r}",
                         expected="load_format='bitline'", fix="leave load_format out")  # fmt: skip

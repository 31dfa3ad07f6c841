"""quantization="bitline": any checkpoint folder that Bitline reads, served from its canonical weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, MergedColumnParallelRepeatedLinear, QKVParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import nn

from bitline.engines.config import AnyCheckpoint
from bitline.errors import BitlineError, CheckpointError, InputError
from bitline.sglang.engine import SGLANG
from bitline.sglang.methods import BitlineEmbeddingMethod, BitlineLinearMethod
from bitline.sglang.weights import CheckpointWeights

# What SGLang's loaders fuse where a model class declares nothing (`STANDARD_STACKED_MAPPING` of its auto_loader).
STANDARD = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
_FUSED = (QKVParallelLinear, MergedColumnParallelLinear, MergedColumnParallelRepeatedLinear)
_READ_BY_MODELS = ("kv_b_proj", "kc_b_proj")  # latent attention of SGLang multiplies by the weight itself


class BitlineConfig(AnyCheckpoint, QuantizationConfig):
    """SGLang's quantization config of a checkpoint that Bitline reads. Which layers are quantized is read from the files."""

    def __init__(self, packed_modules_mapping: dict[str, list[str]] | None = None) -> None:
        super().__init__()
        self.packed_modules_mapping = dict(packed_modules_mapping or {})
        self.declared: dict[str, list[str]] = {}
        self.mappers: list[Any] = []
        self.weights: CheckpointWeights | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BitlineConfig:
        """The config itself is read with the checkpoint; SGLang adds the model's fused layers to it."""
        return cls(config.get("packed_modules_mapping"))

    def get_scaled_act_names(self) -> list[str]:
        """None."""
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the checkpoint's layers as SGLang renames its tensors."""
        self.mappers.append(_Names(hf_to_sglang_mapper))

    def open(self, path: Path, hf_config: Any, packed_modules: dict[str, list[str]]) -> None:
        """Read a checkpoint's headers. packed_modules: fused layers that the model class declares, with their parts.

        Raises CheckpointError for a folder that `bitline.open_checkpoint` does not open, or without a quantized layer.
        """
        self.read_ties(hf_config)
        self.declared = packed_modules
        self.weights = CheckpointWeights(SGLANG, path, self.mappers)
        if self.weights.checkpoint.is_gguf:
            raise InputError("quantization='bitline' serves folders with safetensors in SGLang", found=f"GGUF in {path}",
                             fix="serve a GGUF file with vLLM, or run it with bitline.load_model")  # fmt: skip
        if not self.weights.records:
            raise CheckpointError("the checkpoint has no quantized layer", file=path, fix="leave --quantization out")

    @property
    def checkpoint(self) -> CheckpointWeights:
        """The opened checkpoint; a BitlineError where SGLang has not run Bitline's hooks."""
        if self.weights is None:
            raise BitlineError(
                "SGLang made layers before Bitline had opened the checkpoint", found="hooks that were not applied",
                fix="see SGLang's log for 'Failed to apply hooks'; this release may not fit, see docs/sglang.md",
            )  # fmt: skip
        return self.weights

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Bitline's method for a layer of which the checkpoint has a quantized part, else SGLang's for unquantized ones.

        Raises:
            BitlineError: For experts, for a fused layer whose parts are not known, and for a layer that SGLang's model reads
                in its own way.
        """
        records = self.checkpoint.records
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(layer, prefix)
        if isinstance(layer, LinearBase):
            names = self._parts(layer, prefix)
            if not any(name in records for name in names):
                return UnquantizedLinearMethod()
            self._check_runs(layer, prefix)
            return BitlineLinearMethod(self.checkpoint, names)
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # here, as in SGLang: its modules import each other

        if isinstance(layer, FusedMoE):
            self._refuse_experts(prefix)
        return None

    def _parts(self, layer: nn.Module, prefix: str) -> list[str]:
        """The checkpoint's layers of a module: itself, or those that SGLang fuses into it."""
        if prefix in self.checkpoint.records or self.checkpoint.has_dense(prefix):
            return [prefix]
        stem, dot, leaf = prefix.rpartition(".")
        known = {**STANDARD, **self.declared, **self.packed_modules_mapping}.get(leaf)
        if known is None and isinstance(layer, _FUSED):
            self._refuse_unknown_fusion(stem, prefix)
        return [f"{stem}{dot}{part}" for part in known or [leaf]]

    def _refuse_unknown_fusion(self, stem: str, prefix: str) -> None:
        siblings = [name for name in self.checkpoint.records if name.rpartition(".")[0] == stem]
        if siblings:
            raise BitlineError(
                "Bitline does not know which layers SGLang's model fuses into this one", file=self.checkpoint.path, tensor=prefix,
                found=f"no entry in packed_modules_mapping, and quantized layers beside it: {', '.join(siblings[:5])}",
                fix="add the layer to the model class's packed_modules_mapping, or leave --quantization out",
            )  # fmt: skip

    def _check_runs(self, layer: nn.Module, prefix: str) -> None:
        leaf = prefix.rpartition(".")[2]
        if leaf in _READ_BY_MODELS:
            problem = "SGLang's latent attention reads this layer's weight itself, and it is quantized"
        elif isinstance(layer, MergedColumnParallelRepeatedLinear):
            problem = "SGLang's MergedColumnParallelRepeatedLinear does not run quantized"
        else:
            return
        raise BitlineError(problem, file=self.checkpoint.path, tensor=prefix,
                           fix="leave --quantization out, so that SGLang's own method runs the model")  # fmt: skip

    def _refuse_experts(self, prefix: str) -> None:
        stem = prefix.removesuffix(".experts")
        if any(name.startswith(f"{stem}.") and ".experts" in name for name in self.checkpoint.records):
            raise BitlineError(
                "quantized experts do not run in SGLang by quantization='bitline'", file=self.checkpoint.path, tensor=prefix,
                fix="leave --quantization out, so that SGLang's own methods run the experts, or use bitline.load_model",
            )  # fmt: skip

    def _embedding_method(self, layer: nn.Module, name: str) -> QuantizeMethodBase | None:
        """A quantized table or output layer; the table's where the model ties both."""
        name = self.checkpoint.table_name(name, is_head=isinstance(layer, ParallelLMHead), tied=self.tied)
        return BitlineEmbeddingMethod(self.checkpoint, name, tied=self.tied) if name in self.checkpoint.records else None


class _Names:
    """SGLang's renaming with the method that `ModelWeights` calls."""

    def __init__(self, mapper: Any) -> None:
        self.mapper = mapper

    def map_name(self, name: str) -> str | None:
        renamed: list[str] = self.mapper.apply_list([name])
        return renamed[0] if renamed else None

"""load_format="bitline": vLLM loads the tensors that belong to no quantized layer, Bitline the others, and none may be left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import PPMissingLayer

from bitline.engines.model_weights import ModelWeights
from bitline.errors import BitlineError
from bitline.vllm.engine import VLLM
from bitline.vllm.experts import BitlineExpertsMethod
from bitline.vllm.methods import BitlineEmbeddingMethod, BitlineLinearMethod

_METHODS = (BitlineLinearMethod, BitlineEmbeddingMethod, BitlineExpertsMethod)


class BitlineModelLoader(BaseModelLoader):
    """Loads a checkpoint that `bitline.open_checkpoint` opens: safetensors or GGUF."""

    def __init__(self, load_config: LoadConfig) -> None:
        if load_config.model_loader_extra_config:
            raise BitlineError("load_format='bitline' has no settings", found=load_config.model_loader_extra_config,
                               fix="leave model_loader_extra_config out")  # fmt: skip
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: the engine's arguments name a local folder by then."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load all unquantized tensors; a parameter that no file holds, and a quantized layer without a module, is an error."""
        weights, target = weights_of(model, model_config), cast(Any, model)
        loaded = target.load_weights(self._dense(model, model_config, weights))
        weights.check_all_used({name for name, m in model.named_modules() if isinstance(m, PPMissingLayer)})
        if loaded is not None:
            loaded = loaded | _own_biases(model)
        DefaultModelLoader.track_weights_loading(self, model, loaded, quantized=True)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """What vLLM asks for to reload a model: its unquantized tensors. Quantized layers are then packed again in place."""
        old = weights_of(model, model_config)
        weights = ModelWeights(VLLM, Path(model_config.model), old.mappers)
        yield from self._dense(model, model_config, weights)
        modules: list[Any] = list(model.modules())
        for module in modules:
            method = getattr(module, "quant_method", None)
            if isinstance(method, _METHODS):
                method.weights = weights
                method.process_weights_after_loading(module)

    def _dense(self, model: nn.Module, model_config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
        is_gguf = weights.checkpoint.is_gguf  # GGUF stores norms and biases in float32, whatever the model's dtype is
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        packed = {name for method in methods if isinstance(method, BitlineLinearMethod) for name in method.names}
        of_experts = {name for method in methods if isinstance(method, BitlineExpertsMethod) for name in method.tensors(weights)}
        for name, tensor in weights.dense_tensors(packed, of_experts):
            yield name, tensor.to(model_config.dtype) if is_gguf else tensor
        for name, dtype in _unquantized_in_vllm(model).items():
            if name in weights.records and name not in weights.used:
                yield weights.dequantized(name, dtype)


def weights_of(model: nn.Module, model_config: ModelConfig) -> ModelWeights:
    """The checkpoint that a model's layers read; another one where none of them is quantized."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, _METHODS):
            return method.weights
    return ModelWeights(VLLM, Path(model_config.model))


def _unquantized_in_vllm(model: nn.Module) -> dict[str, torch.dtype]:
    """Linear layers that vLLM's model runs unquantized, as routers, with the dtypes of their weights."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, LinearBase))
    return {name: module.weight.dtype for name, module in linear if isinstance(module.quant_method, UnquantizedLinearMethod)}


def _own_biases(model: nn.Module) -> set[str]:
    """Parameters that Bitline fills when it packs a layer: biases that belong to quantized layers."""
    found = set()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BitlineLinearMethod) and getattr(module, "bias", None) is not None:
            records = [method.weights.records[n] for n in method.names if n in method.weights.records]
            if len(records) == len(method.names) and all(record.spec.bias for record in records):
                found.add(f"{name}.bias")
    return found

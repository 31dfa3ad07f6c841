"""Where Bitline joins SGLang's loading: the checkpoint's path, the tensors that SGLang loads, and updates of a running model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitline.errors import InputError
from bitline.model import hub
from bitline.sglang.config import BitlineConfig
from bitline.sglang.methods import BitlineEmbeddingMethod, BitlineLinearMethod
from bitline.sglang.weights import CheckpointWeights

LOAD_FORMATS = ("auto", "safetensors")
_FILES = ("*.json", "*.safetensors")


def open_checkpoint(original: Callable[..., Any], model_config: Any, load_config: Any, *args: Any, **options: Any) -> Any:
    """Around SGLang's `_get_quantization_config`: Bitline's config learns the folder and the model's fused layers."""
    config = original(model_config, load_config, *args, **options)
    if isinstance(config, BitlineConfig):
        _check_load_format(load_config)
        config.open(_local_folder(model_config, load_config), model_config.hf_config, _packed_modules(model_config))
    return config


def load_unquantized(
    original: Callable[..., Any], model: nn.Module, weights: Iterable[tuple[str, Tensor]], *args: Any, **options: Any
) -> Any:
    """Around SGLang's `load_weights_only`: tensors of layers that Bitline reads do not reach the model's `load_weights`."""
    checkpoint = checkpoint_of(model)
    if checkpoint is None:
        return original(model, weights, *args, **options)
    checkpoint.check_all_used(_absent(model))
    result = original(model, _without(weights, checkpoint.own_tensors()), *args, **options)
    checkpoint.filtered = True
    return result


def refuse_update(original: Callable[..., Any], updater: Any, *args: Any, **options: Any) -> Any:
    """Around SGLang's updates of a running model: its packed layers have no parameters that could take other weights."""
    if checkpoint_of(updater.get_model()) is None:
        return original(updater, *args, **options)
    return False, "weights of quantization='bitline' cannot be updated; start a server with the other checkpoint"


def checkpoint_of(model: nn.Module) -> CheckpointWeights | None:
    """The checkpoint that Bitline reads for a model; None where SGLang reads it alone."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BitlineLinearMethod | BitlineEmbeddingMethod):
            return method.weights
        if isinstance(config := getattr(module, "quant_config", None), BitlineConfig):
            return config.checkpoint
    return None


def _without(weights: Iterable[tuple[str, Tensor]], skip: set[str]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in weights if name not in skip)


def _absent(model: nn.Module) -> set[str]:
    """Names of modules that another rank of a pipeline has."""
    from sglang.srt.layers.utils import PPMissingLayer

    return {name for name, module in model.named_modules() if isinstance(module, PPMissingLayer)}


def _check_load_format(load_config: Any) -> None:
    form = getattr(load_config.load_format, "value", load_config.load_format)
    if form not in LOAD_FORMATS:
        raise InputError("quantization='bitline' needs SGLang's default loader", found=f"load_format={form!r}",
                         expected=" or ".join(map(repr, LOAD_FORMATS)), fix="leave --load-format out")  # fmt: skip


def _local_folder(model_config: Any, load_config: Any) -> Path:
    """The folder of the checkpoint; that of a name on the hub is downloaded, or found in the hub's cache."""
    path = Path(model_config.model_path)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError("quantization='bitline' serves folders with safetensors in SGLang", found=path,
                         fix="serve a GGUF file with vLLM, or run it with bitline.load_model")  # fmt: skip
    return hub.download(str(path), _FILES, revision=model_config.revision, cache=load_config.download_dir)


def _packed_modules(model_config: Any) -> dict[str, list[str]]:
    from sglang.srt.model_loader.utils import get_model_architecture

    model_class, _ = get_model_architecture(model_config)
    return dict(getattr(model_class, "packed_modules_mapping", {}))

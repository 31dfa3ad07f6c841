"""load_model: a transformers model whose linear layers run on Bitline, loaded straight from a checkpoint's files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitline import env, memory
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import BitlineError, InputError, OutOfMemoryError
from bitline.model import decode_step
from bitline.model import tune as tuner
from bitline.model.meta_model import (
    check_config_sizes,
    default_dtype,
    make_config,
    make_meta_model,
    set_generation_config,
)
from bitline.model.weight_loader import WeightLoader
from bitline.platform import Platform, as_device
from bitline.select import Policy


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    policy: Policy | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    native_step: bool | None = None,
    tune: bool | float = False,
) -> Any:
    """A transformers causal language model from a checkpoint, every quantized linear layer a QuantLinear.

    path: a folder with config.json and safetensors, or a GGUF file. device: where the model runs. dtype: of activations and
    unquantized weights; by default `meta_model.default_dtype`. policy: how kernels are chosen. progress: called with
    (tensors loaded, tensors in total). native_step: on a CPU in bfloat16, run each decoder layer of a one-token step as one
    native call (`model/decode_step.py`); by default yes, unless `$BITLINE_NO_STEP` is set or the policy asks for batch
    invariance. tune: first time the kernels of each kind of layer that `bitline tune` has not measured here, for at most a minute
    or this many seconds, and keep the times for later loads too; by default nothing is timed.

    The model is built on the meta device, then filled one layer at a time: peak memory is the packed model plus about one
    layer. Every parameter comes from the checkpoint: a missing one, or a quantized layer that the model has no module for, is
    a CheckpointError, never a random weight. Other errors: InputError (dtype), PlatformError (device), OutOfMemoryError.

    `model.bitline_weights[name]()` reads a layer's canonical weight again, for verification or a reload;
    `model.bitline_checkpoint` is the open checkpoint.
    """
    checkpoint = open_checkpoint(path)
    device = as_device(device)
    platform = Platform.detect(device)  # refuses a device that is not here before anything is read
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError("a model's dtype is a floating-point torch.dtype", found=repr(dtype), expected="torch.bfloat16, say")
    dtype = dtype or default_dtype(checkpoint, platform)
    if tune:
        counts = {spec: len(names) for spec, names in tuner.specs_of(checkpoint, dtype).items()}
        tuner.tune(counts, device, policy, tuner.DEFAULT_SECONDS if tune is True else tune, again=False)
    with _load_lock:
        model = _load(checkpoint, device, dtype, policy, progress)
    if native_step is None:
        native_step = not env.no_step() and not Policy.of(policy).batch_invariant
    if native_step and device.type == "cpu" and dtype == torch.bfloat16:
        decode_step.install(model)
    return model


# transformers sets the default dtype and patches initializers process-wide while it builds a model.
_load_lock = threading.RLock()


def _load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    policy: Policy | str | None,
    progress: Callable[[int, int], None] | None,
) -> Any:
    check_config_sizes(checkpoint)
    model = make_meta_model(make_config(checkpoint), dtype, checkpoint)
    loader = WeightLoader(model, checkpoint, device, dtype, policy, progress)
    try:
        loader.load()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" not in str(error):  # torch's CPU allocator raises a plain RuntimeError
            raise
        raise OutOfMemoryError(f"no memory on {device} for the model", file=checkpoint.path) from error
    finally:
        memory.release()
    model.bitline_weights, model.bitline_checkpoint = loader.read_weight, checkpoint
    if loader.quantized:
        _disable_weight_edits(model, checkpoint.path)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    set_generation_config(model, checkpoint)
    return model


def _disable_weight_edits(model: Any, path: Path) -> None:
    """Refuse transformers' methods that expect every layer's weight to be a parameter.

    save_pretrained would silently write a checkpoint without the packed layers.
    """
    model.save_pretrained = functools.partial(_refuse, "be saved", path)
    model.resize_token_embeddings = functools.partial(_refuse, "have its embeddings resized", path)
    model.tie_weights = _tie_nothing


def _refuse(what: str, path: Path, *_args: Any, **_options: Any) -> None:
    raise BitlineError(f"a model that runs on packed weights cannot {what}", file=path,
                       fix="keep or change the checkpoint that it was loaded from")  # fmt: skip


def _tie_nothing(*_args: Any, **_options: Any) -> None:
    """Replaces tie_weights, which looks for parameters that packed layers do not have. The loader has tied them already."""

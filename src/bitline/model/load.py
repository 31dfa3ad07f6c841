"""load_model: a transformers model whose linear layers run on Bitline, loaded straight from a checkpoint's files."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bitline import env, memory
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import BitlineError, OutOfMemoryError
from bitline.host import without_default_device
from bitline.model import decode_step, hub
from bitline.model import tune as tuner
from bitline.model.meta_model import (
    check_config_sizes,
    default_dtype,
    floating_dtype,
    make_config,
    make_meta_model,
    set_generation_config,
)
from bitline.model.verify import verify as verify_loaded
from bitline.model.weight_loader import WeightLoader
from bitline.parallel import TensorParallel
from bitline.platform import Platform, as_device
from bitline.select import Policy
from bitline.version import __version__


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    policy: Policy | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    native_step: bool | None = None,
    merge: bool | None = None,
    tune: bool | float = False,
    verify: bool | None = None,
    tp: Any = None,
) -> Any:
    """A transformers model from a checkpoint, every quantized linear layer a QuantLinear.

    It is the causal language model of the checkpoint's configuration, else the model that its `architectures` names: an encoder,
    an encoder with a decoder, a model of images and text.

    The model is built on the meta device, then filled one layer at a time: peak memory is the packed model plus about one
    layer. Every parameter comes from the checkpoint. `model.bitline_weights[name]()` reads a layer's canonical weight again, for
    verification or a reload; `model.bitline_checkpoint` is the open checkpoint.

    Args:
        path: A folder with config.json and safetensors, a GGUF file, or a name on the Hugging Face hub (`hub.resolve`).
        device: Where the model runs.
        dtype: Of activations and unquantized weights; by default `meta_model.default_dtype`.
        policy: How kernels are chosen, in any form that `Policy.of` accepts.
        progress: Called with (tensors loaded, tensors in total).
        native_step: On a CPU in bfloat16, run all decoder layers of a one-token step as one native call
            (`model/decode_step.py`); by default yes, unless `$BITLINE_NO_STEP` is set or the policy asks for batch invariance.
        merge: Pack layers that get the same input (query, key and value; gate and up) as one where they have one scheme
            (`model/merge.py`): one launch instead of two or three; by default yes on a GPU.
        tune: First time the kernels of each kind of layer that `bitline tune` has not measured here, for at most a minute or
            this many seconds, and keep the times for later loads too; by default nothing is timed.
        verify: Compare every layer with the reference (`model/verify.py`); by default where `$BITLINE_VERIFY` is set.
        tp: Tensor parallelism, each rank calling this: None, "auto" (the ranks that torchrun started), a process group of
            torch.distributed, a DeviceMesh of one dimension, or a `parallel.TensorParallel`. Each rank packs its cut of each
            layer, or whole experts where the TensorParallel says so; logits are the same bits on every rank.

    Raises:
        CheckpointError: For a file that is damaged, a parameter that it lacks, and a quantized layer that the model has no module
            for: no weight is ever random.
        InputError: For a dtype that is not a floating-point one.
        PlatformError: For a device that is not here.
        OutOfMemoryError: Where the device's memory is too small.
        VerificationError: With verify, for a layer that differs from the reference.
    """
    device = as_device(device)
    ranks = TensorParallel.resolve(tp, device)
    checkpoint = open_checkpoint(hub.resolve(path))
    device = as_device(device.type) if ranks is not None and device.type == "cuda" else device
    platform = Platform.detect(device)  # refuses a device that is not here before anything is read
    dtype = default_dtype(checkpoint, platform) if dtype is None else floating_dtype(dtype)
    if tune:
        if ranks is None:
            layers = tuner.specs_to_run(checkpoint, dtype, device, policy, merge)
        else:
            layers = tuner.specs_of(checkpoint, dtype)
        counts = {spec: len(names) for spec, names in layers.items()}
        tuner.tune(counts, device, policy, tuner.DEFAULT_SECONDS if tune is True else tune, again=False)
    if ranks is not None:
        ranks.check_same(_facts(checkpoint, dtype, policy, ranks, merge=merge), device)
        ranks.prepare(device)
    with _load_lock, nullcontext() if ranks is None else ranks.together(device):
        model = _load(checkpoint, device, dtype, policy, progress, merge=merge, tp=ranks)
    if device.type == "cpu":
        install_native_step(model, dtype, policy, native_step)
    if env.verify() if verify is None else verify:
        verify_loaded(model)
    return model


# transformers sets the default dtype and patches initializers process-wide while it builds a model.
_load_lock = threading.RLock()


def _load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    policy: Policy | str | None,
    progress: Callable[[int, int], None] | None,
    *,
    merge: bool | None,
    tp: TensorParallel | None,
) -> Any:
    check_config_sizes(checkpoint)
    model = make_meta_model(make_config(checkpoint), dtype, checkpoint)
    fill_model(WeightLoader(model, checkpoint, lambda _name: device, dtype, policy, progress, merge, tp=tp))
    set_generation_config(model, checkpoint)
    return model


def _facts(
    checkpoint: Checkpoint, dtype: torch.dtype, policy: Policy | str | None, ranks: TensorParallel, *, merge: bool | None
) -> dict[str, Any]:  # fmt: skip
    """What ranks that load one model must agree on."""
    infos = sorted((i.name, str(i.dtype), i.shape, i.nbytes) for i in checkpoint.source.tensors.values())
    return {
        "the version of Bitline": __version__, "the version of torch": torch.__version__,
        "the checkpoint's tensors": hashlib.sha256(repr(infos).encode()).hexdigest(),
        "the checkpoint's configuration": repr(sorted(checkpoint.config.items(), key=repr)),
        "the dtype": dtype, "the policy": Policy.of(policy), "merge": merge,
        "expert_parallel": ranks.expert_parallel, "exact_activation_scales": ranks.exact_activation_scales,
    }  # fmt: skip


@without_default_device
def fill_model(loader: WeightLoader) -> None:
    """Load all weights into the loader's model and make it one for inference. Errors as of `load_model`."""
    model, checkpoint = loader.model, loader.checkpoint
    load_weights(loader)
    model.bitline_weights, model.bitline_checkpoint = loader.read_weight, checkpoint
    if loader.read_weight:
        disable_weight_edits(model, checkpoint.path)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def load_weights(loader: WeightLoader) -> None:
    """`loader.load`; where the memory is too small an OutOfMemoryError."""
    try:
        with _load_lock:
            loader.load()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" not in str(error):  # torch's CPU allocator raises a plain RuntimeError
            raise
        devices = sorted({str(loader.device_of(name)) for name in loader.required})
        raise OutOfMemoryError(f"no memory on {', '.join(devices)} for the model", file=loader.checkpoint.path) from error
    finally:
        memory.release()


def install_native_step(model: Any, dtype: torch.dtype, policy: Policy | str | None, asked: bool | None) -> None:
    """Give a model on the CPU its native decode step. asked: `native_step` of `load_model`."""
    if asked is None:
        asked = not env.no_step() and not Policy.of(policy).batch_invariant
    if asked and dtype == torch.bfloat16:
        decode_step.install(model)


def disable_weight_edits(model: Any, path: Path) -> None:
    """Refuse transformers' methods that expect every layer's weight to be a parameter.

    save_pretrained would silently write a checkpoint without the packed layers. With adapters it writes these alone.
    """
    model.save_pretrained = functools.partial(_save_adapters, model, path)
    model.resize_token_embeddings = functools.partial(_refuse, "have its embeddings resized", path)
    model.tie_weights = _tie_nothing


def _save_adapters(model: Any, path: Path, *args: Any, **options: Any) -> None:
    """Replaces save_pretrained: the adapters of transformers' own integration of PEFT, else an error."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        _refuse("be saved", path)
    type(model).save_pretrained(model, *args, **options)


def _refuse(what: str, path: Path, *_args: Any, **_options: Any) -> None:
    raise BitlineError(f"a model that runs on packed weights cannot {what}", file=path,
                       fix="keep or change the checkpoint that it was loaded from")  # fmt: skip


def _tie_nothing(*_args: Any, **_options: Any) -> None:
    """Replaces tie_weights, which looks for parameters that packed layers do not have. The loader has tied them already."""

"""A checkpoint's transformers model on the meta device: configuration, sizes, and the buffers that no checkpoint stores."""

from __future__ import annotations

import array
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bitline.checkpoint import Checkpoint
from bitline.errors import BitlineError, CheckpointError, InputError, summary_of
from bitline.model.gguf_metadata import use_parsed_header
from bitline.platform import Platform

# Config keys whose values the files bound: counts of things that have tensors of their own, and widths.
_COUNT_KEYS = re.compile(r"(layers?|blocks?|block_count|depth|heads?|head_count\w*|experts?|expert_count|groups|labels|modules)$")
_WIDTH_KEYS = re.compile(r"(_size|_dim|_rank|n_embd|n_inner|d_model|d_ff|(embedding|feed_forward|key|value)_length)$")


def default_dtype(checkpoint: Checkpoint | None, platform: Platform) -> torch.dtype:
    """The activation dtype where none was asked for, with or without a checkpoint.

    GPU: the checkpoint's own 16-bit dtype, bfloat16 where it names none, float16 on NVIDIA before sm80. CPU: bfloat16 where
    the CPU has instructions for it, or the native core is faster with it (AVX2), else float32.
    """
    if platform.vendor == "cpu":
        native_avx2 = platform.native and "avx2" in platform.features
        return torch.bfloat16 if native_avx2 or platform.features & {"avx512_bf16", "amx", "bf16"} else torch.float32
    if 0 < platform.capability < 80:
        return torch.float16
    config: Mapping[str, Any] = {} if checkpoint is None else checkpoint.config
    named = config.get("dtype") or config.get("torch_dtype")
    return torch.float16 if named == "float16" else torch.bfloat16


def floating_dtype(dtype: Any) -> torch.dtype:
    """A floating-point dtype itself; anything else is an InputError."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError("a model's dtype is a floating-point torch.dtype", found=repr(dtype), expected="torch.bfloat16, say")
    return dtype


def import_transformers() -> Any:
    """The transformers package; a BitlineError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise BitlineError("loading a model needs transformers", fix="pip install 'bitline[models]'") from error
    return transformers


def check_config_sizes(checkpoint: Checkpoint) -> None:
    """Refuse a configuration too large for the checkpoint's files, before transformers allocates modules and lists for it.

    Every layer has a tensor, and every unit of a width has a weight of at least one bit. Both limits are generous, for models
    of which the files hold only a part.
    """
    infos = checkpoint.source.tensors.values()
    limits = (_COUNT_KEYS, max(4096, len(infos))), (_WIDTH_KEYS, max(1 << 20, 8 * sum(info.nbytes for info in infos)))
    file = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
    settings: Any = checkpoint.config
    if checkpoint.is_gguf:
        settings = {k: v for k, v in checkpoint.metadata.items() if not k.startswith(("tokenizer.", "general."))}
    for name, value in _config_numbers(settings):
        for keys, limit in limits:
            if value > limit and keys.search(name):
                raise CheckpointError(
                    "the configuration describes a larger model than these files can hold", file=file, found=f"{name} = {value}",
                    expected=f"at most {limit}, with {len(infos)} tensors", fix="the config does not belong to these tensors",
                )  # fmt: skip


def _config_numbers(settings: Any) -> Iterator[tuple[str, int | float]]:
    """Every number in a configuration with its innermost key, the quantization config aside."""
    pending = [("", settings)]  # no recursion: the file controls the nesting depth
    while pending:
        name, value = pending.pop()
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping):
            pending += [(str(k), v) for k, v in value.items() if k not in ("quantization_config", "compression_config")]
        elif isinstance(value, array.array):
            yield name, max(value, default=0)
        elif isinstance(value, list):
            pending += [(name, v) for v in value]


def make_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of a checkpoint. Any exception that transformers raises becomes a CheckpointError."""
    transformers = import_transformers()
    path = checkpoint.path
    try:
        if checkpoint.is_gguf:
            with use_parsed_header(checkpoint):
                config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            folder = path if path.is_dir() else path.parent
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a malformed configuration
        raise CheckpointError(
            "transformers cannot make a model configuration of this checkpoint", file=path,
            found=summary_of(error),
            expected="a config.json, or GGUF metadata, of an architecture that transformers has",
        ) from error  # fmt: skip
    if checkpoint.is_gguf:
        set_expert_widths(config, checkpoint)
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):  # else transformers would apply its own quantizer
            delattr(config, name)
    config._attn_implementation = None  # may name code on the Hub, which would be fetched and run
    return config


def set_expert_widths(config: Any, checkpoint: Checkpoint) -> None:
    """Experts' widths of a GGUF header, which transformers leaves at its defaults."""
    architecture = checkpoint.metadata.get("general.architecture", "")
    for key, name in (("expert", "moe_intermediate_size"), ("expert_shared", "shared_expert_intermediate_size")):
        width = checkpoint.metadata.get(f"{architecture}.{key}_feed_forward_length")
        if isinstance(width, int) and width > 0 and hasattr(config, name):
            setattr(config, name, width)


def make_meta_model(config: Any, dtype: torch.dtype, checkpoint: Checkpoint) -> Any:
    """The model of a configuration, every parameter on the meta device: its causal language model, else what the
    configuration's `architectures` names (an encoder, an encoder with a decoder, a model of images and text).
    """
    transformers = import_transformers()
    try:
        with torch.device("meta"):
            named = _named_class(config)
            if named is not None:
                model = named._from_config(config, dtype=dtype)
            else:
                # By default trust_remote_code prompts on the terminal whether to run the checkpoint's code.
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # see make_config
        raise CheckpointError(
            "transformers has no model for this configuration", file=checkpoint.path,
            found=f"model_type {getattr(config, 'model_type', None)!r}: {type(error).__name__}: {error}",
        ) from error  # fmt: skip
    keep_in_float32(model, dtype)
    return model


_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # how classes that are causal language models end


def _named_class(config: Any) -> Any:
    """The class that `architectures` names, None where the causal language model of the configuration is to be taken."""
    transformers = import_transformers()
    name = (getattr(config, "architectures", None) or [""])[0]
    found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        return None
    has_causal_model = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if has_causal_model and not getattr(config, "is_encoder_decoder", False) and name.endswith(_GENERATIVE):
        return None
    model_class: Any = found
    return model_class if isinstance(config, model_class.config_class) else None


def keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters and buffers that a class wants in float32 whatever the model's dtype that dtype, on the meta device.

    transformers' `from_pretrained` does the same (a router's correction bias, say); `from_config` does not.
    """
    patterns = [name for name, kept in model._get_dtype_plan(dtype).items() if kept == torch.float32]
    if not patterns:
        return
    kept = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
    for name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None and tensor.is_meta and tensor.is_floating_point() and kept.search(f"{name}.{leaf}"):
                    cast = tensor.detach().to(torch.float32)
                    tensors[leaf] = torch.nn.Parameter(cast) if tensors is module._parameters else cast


def set_generation_config(model: Any, checkpoint: Checkpoint) -> None:
    """Load the folder's generation_config.json, if there is one."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not checkpoint.is_gguf and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = import_transformers().GenerationConfig.from_pretrained(folder)
        except Exception as error:  # see make_config
            raise CheckpointError(
                "generation_config.json cannot be read", file=folder, found=f"{type(error).__name__}: {error}"
            ) from error


def materialize_buffers(model: Any, device_of: Callable[[str], torch.device], checkpoint: Checkpoint) -> None:
    """Allocate buffers still on the meta device (rotary frequencies) and let the model's own initialization compute them.

    A parameter whose `_is_hf_initialized` is False gets transformers' initialization too.
    """
    on_meta = defaultdict(list)
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            on_meta[name.rpartition(".")[0]].append(name.rpartition(".")[2])
    nbytes = sum(b.nbytes for b in model.buffers() if b.device.type == "meta")
    limit = max(1 << 30, sum(info.nbytes for info in checkpoint.source.tensors.values()))
    if nbytes > limit:
        raise CheckpointError(
            "the configuration asks for buffers larger than the checkpoint", file=checkpoint.path, found=f"{nbytes} bytes",
            expected=f"at most {limit}", fix="max_position_embeddings, or another size of the config, may be wrong",
        )  # fmt: skip
    for owner, leaves in on_meta.items():
        module = model.get_submodule(owner)
        for leaf in leaves:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device_of(owner))
    for parameter in model.parameters():
        parameter._is_hf_initialized = getattr(parameter, "_is_hf_initialized", True)
    new = [n.rpartition(".")[0] for n, parameter in model.named_parameters() if not parameter._is_hf_initialized]
    owners = [f"{owner}." for owner in (*on_meta, *new)]
    for name, module in model.named_modules():
        # The initialization of a loaded module may reach into packed layers below it.
        if name and not any(owner.startswith(f"{name}.") for owner in owners):
            module.__dict__["_is_hf_initialized"] = True
    if on_meta or not all(parameter._is_hf_initialized for parameter in model.parameters()):
        model.initialize_weights()

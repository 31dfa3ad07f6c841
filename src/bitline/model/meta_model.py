"""The model that transformers makes of a checkpoint's configuration, before any weight is in it."""

from __future__ import annotations

import array
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint
from bitline.errors import BitlineError, CheckpointError
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.model.gguf_names import header
from bitline.platform import Platform
from bitline.weight import QuantizedWeight

# Numbers in a configuration that the files can hold against it: things that have tensors of their own, and widths.
_COUNTS = re.compile(r"(layers?|blocks?|block_count|depth|heads?|head_count\w*|experts?|expert_count|groups|labels|modules)$")
_WIDTHS = re.compile(r"(_size|_dim|_rank|n_embd|n_inner|d_model|d_ff|(embedding|feed_forward|key|value)_length)$")


def default_dtype(checkpoint: Checkpoint, platform: Platform) -> torch.dtype:
    """What a model computes in unless it is said: the checkpoint's own 16 bits on a GPU, bfloat16 where it names none;
    float16 on NVIDIA GPUs before sm80. On a CPU bfloat16 where it has instructions for it, else float32.
    """
    if platform.vendor == "cpu":
        return torch.bfloat16 if platform.features & {"avx512_bf16", "amx", "bf16"} else torch.float32
    if 0 < platform.capability < 80:
        return torch.float16
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return torch.float16 if named == "float16" else torch.bfloat16


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BitlineError("loading a model needs transformers", fix="pip install 'bitline[models]'") from error
    return transformers


def check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse sizes that no such files can have, before transformers builds lists and layers of that many.

    A layer has a tensor, and a width has a weight for each unit, which takes at least a bit. Both limits are generous:
    parts of a model that these files leave out are small beside them.
    """
    infos = checkpoint.source.tensors.values()
    limits = (_COUNTS, max(4096, len(infos))), (_WIDTHS, max(1 << 20, 8 * sum(info.nbytes for info in infos)))
    file = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
    settings: Any = checkpoint.config
    if checkpoint.is_gguf:
        settings = {k: v for k, v in checkpoint.metadata.items() if not k.startswith(("tokenizer.", "general."))}
    for name, value in _numbers(settings, ""):
        for pattern, limit in limits:
            if value > limit and pattern.search(name):
                raise CheckpointError(
                    "the configuration is of a model that these files cannot hold", file=file, found=f"{name} = {value}",
                    expected=f"at most {limit}, with {len(infos)} tensors", fix="the config does not belong to these tensors",
                )  # fmt: skip


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Every number in a configuration with the name it has there; what describes the quantization is not sizes."""
    waiting = [(name, value)]  # no recursion: the nesting is the file's to choose
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping):
            waiting += [(str(k), v) for k, v in value.items() if k not in ("quantization_config", "compression_config")]
        elif isinstance(value, array.array):
            yield name, max(value, default=0)
        elif isinstance(value, list):
            waiting += [(name, v) for v in value]


def make_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration of a checkpoint; whatever it trips over is a CheckpointError."""
    transformers = _transformers()
    path = checkpoint.path
    try:
        if checkpoint.is_gguf:
            with header(checkpoint):
                config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            folder = path if path.is_dir() else path.parent
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers trips over in a configuration is the configuration's fault
        raise CheckpointError(
            "transformers cannot make a model configuration of this checkpoint", file=path,
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="a config.json, or GGUF metadata, of an architecture that transformers has",
        ) from error  # fmt: skip
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):  # or transformers would load it with its own quantizer's rules on saving
            delattr(config, name)
    config._attn_implementation = None  # a config may name code on the hub here, which would be fetched and run
    return config


def make_skeleton(config: Any, dtype: torch.dtype, checkpoint: Checkpoint) -> Any:
    """The model with every parameter on the meta device."""
    transformers = _transformers()
    try:
        with torch.device("meta"):
            # Left open, trust_remote_code asks on the terminal whether to run the checkpoint's own code.
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # as above
        raise CheckpointError(
            "transformers has no causal language model for this configuration", file=checkpoint.path,
            found=f"model_type {getattr(config, 'model_type', None)!r}: {type(error).__name__}: {error}",
        ) from error  # fmt: skip


def set_generation_config(model: Any, checkpoint: Checkpoint) -> None:
    """Give the model the folder's generation_config.json, where there is one."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not checkpoint.is_gguf and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = _transformers().GenerationConfig.from_pretrained(folder)
        except Exception as error:  # as above
            raise CheckpointError(
                "generation_config.json cannot be read", file=folder, found=f"{type(error).__name__}: {error}"
            ) from error


def fill_buffers(model: Any, device: torch.device, checkpoint: Checkpoint) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) get the values that the model's own initialisation computes."""
    waiting = defaultdict(list)
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            waiting[name.rpartition(".")[0]].append(name.rpartition(".")[2])
    nbytes = sum(b.nbytes for b in model.buffers() if b.device.type == "meta")
    limit = max(1 << 30, sum(info.nbytes for info in checkpoint.source.tensors.values()))
    if nbytes > limit:
        raise CheckpointError(
            "the configuration asks for tables larger than the model", file=checkpoint.path, found=f"{nbytes} bytes",
            expected=f"at most {limit}", fix="max_position_embeddings, or another size of the config, may be wrong",
        )  # fmt: skip
    for owner, leaves in waiting.items():
        module = model.get_submodule(owner)
        for leaf in leaves:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            module.__dict__["_is_hf_initialized"] = True
    if waiting:
        model.initialize_weights()


class SafetensorsNames:
    """Names in the files to names in the model, by transformers' own renaming rules."""

    def __init__(self, model: Any, path: Path) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self.renamings = [r for r in rules if isinstance(r, WeightRenaming)]
        self.converters = [r for r in rules if isinstance(r, WeightConverter)]
        self.prefix, self.state, self.path = model.base_model_prefix, model.state_dict(), path

    def tensor(self, name: str) -> str | None:
        """The model's name of a tensor; one that transformers would fuse with others is a CheckpointError."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if pattern is not None and target != name:
            raise CheckpointError(
                "this architecture stores the tensor fused with others in transformers", file=self.path, tensor=name,
                found=f"becomes {target}", expected="a tensor that keeps its shape",
                fix="models with fused experts are not supported yet",
            )  # fmt: skip
        return target

    def module(self, name: str) -> str:
        """The model's module of a quantized layer."""
        return str(self.tensor(f"{name}.weight")).removesuffix(".weight")

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """A plain tensor as the model holds it: unchanged."""
        return tensor

    def reorder(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """A quantized weight with its rows in the model's order: unchanged."""
        return weight

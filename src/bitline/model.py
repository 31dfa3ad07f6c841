"""load_model: a transformers model whose linear layers run on Bitline, filled straight from a checkpoint's files."""

from __future__ import annotations

import array
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.embedding import QuantEmbedding
from bitline.errors import BitlineError, CheckpointError, OutOfMemoryError
from bitline.formats.base import LayerRecord
from bitline.gguf_bridge import GGUFNames, header
from bitline.linear import QuantLinear
from bitline.platform import Platform
from bitline.select import Choice, Policy
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")

# Numbers in a configuration that the files can hold against it: things that have tensors of their own, and widths.
_COUNTS = re.compile(r"(layers?|blocks?|block_count|depth|heads?|head_count\w*|experts?|expert_count|groups|labels|modules)$")
_WIDTHS = re.compile(r"(_size|_dim|_rank|n_embd|n_inner|d_model|d_ff|(embedding|feed_forward|key|value)_length)$")


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    policy: Policy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """A transformers causal language model from a checkpoint, every quantized linear layer a QuantLinear.

    path: a folder with config.json and safetensors, or a GGUF file. device: where it runs. dtype: of activations and
    of what is not quantized; by default the checkpoint's own where the device is fast in it, see `default_dtype`.
    policy: how kernels are chosen. progress: called with (tensors placed, tensors in all).

    The model is built without memory for its weights, then filled a layer at a time: peak memory is the packed model
    plus about one layer. Every parameter comes from the checkpoint: one that is missing, or a quantized layer that has
    no place, is a CheckpointError, never a random weight. `model.bitline_weights[name]()` reads a layer's canonical
    weight again, for a check or a reload.
    """
    checkpoint = open_checkpoint(path)
    device = torch.device(device)
    Platform.detect(device)  # a device that is not here is refused before anything is read
    _check_sizes(checkpoint)
    config = _config(checkpoint)
    dtype = dtype or default_dtype(config, device)
    model = _skeleton(config, dtype, checkpoint)
    filler = _Filler(model, checkpoint, device, dtype, policy, progress)
    try:
        filler.fill()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" not in str(error):  # how torch says that this machine's memory is full
            raise
        raise OutOfMemoryError(f"no memory on {device} for the model", file=checkpoint.path) from error
    model.bitline_weights, model.bitline_checkpoint = filler.weights, checkpoint
    if filler.quantized:
        model.save_pretrained = functools.partial(_refuse_to_save, checkpoint.path)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _generation_config(model, checkpoint)
    return model


def _refuse_to_save(path: Path, *_args: Any, **_options: Any) -> None:
    """transformers would write a checkpoint without the packed layers, and nothing would say so."""
    raise BitlineError("a model that runs on packed weights cannot be saved", file=path,
                       fix="keep or copy the checkpoint that it was loaded from")  # fmt: skip


def default_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype on a GPU; on a CPU bfloat16 where it has instructions for it, else float32."""
    if device.type != "cpu":
        named = getattr(config, "dtype", None)
        return named if named in (torch.float16, torch.bfloat16) else torch.bfloat16
    features = Platform.detect(device).features
    return torch.bfloat16 if features & {"avx512_bf16", "amx", "bf16"} else torch.float32


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BitlineError("loading a model needs transformers", fix="pip install 'bitline[models]'") from error
    return transformers


def _check_sizes(checkpoint: Checkpoint) -> None:
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


def _config(checkpoint: Checkpoint) -> Any:
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


def _skeleton(config: Any, dtype: torch.dtype, checkpoint: Checkpoint) -> Any:
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


def _generation_config(model: Any, checkpoint: Checkpoint) -> None:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not checkpoint.is_gguf and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = _transformers().GenerationConfig.from_pretrained(folder)
        except Exception as error:  # as above
            raise CheckpointError(
                "generation_config.json cannot be read", file=folder, found=f"{type(error).__name__}: {error}"
            ) from error


class _Filler:
    """Puts every tensor of a checkpoint in its place in a model that has none yet."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        policy: Policy | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.checkpoint, self.device, self.dtype, self.policy = model, checkpoint, device, dtype, policy
        self.progress = progress or (lambda done, total: None)
        self.names: Any = GGUFNames(model, checkpoint) if checkpoint.is_gguf else _SafetensorsNames(model, checkpoint.path)
        self.expected = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self.expected |= {n for n, _ in model.named_buffers() if n in model.state_dict()}
        self.filled: set[str] = set()
        self.quantized: dict[str, LayerRecord] = {}
        self.weights: dict[str, Callable[[], QuantizedWeight]] = {}

    def fill(self) -> None:
        records, dense = self.checkpoint.layers(), self.checkpoint.dense_names()
        total = len(records) + len(dense)
        ignored = []
        for i, name in enumerate(dense):
            if not self._place_dense(name):
                ignored.append(name)
            self.progress(i + 1, total)
        for i, record in enumerate(records):
            self._place_quantized(self.names.module(record.name), record)
            self.progress(len(dense) + i + 1, total)
        self._tie()
        self._finish(ignored)

    def _place_dense(self, name: str) -> bool:
        """Load a tensor that is not quantized; False where the model has no use for it."""
        target = self.names.tensor(name)
        if target is None or target not in self.expected:
            return False
        if target in self.filled:
            info = self.checkpoint.source.tensors[name]
            raise CheckpointError(
                "two tensors for one place in the model", file=info.file, tensor=name, found=f"both are {target}"
            )
        owner, _, leaf = target.rpartition(".")
        module = self.model.get_submodule(owner)
        place = module._parameters.get(leaf) if leaf in module._parameters else module._buffers.get(leaf)
        tensor = self.names.convert(name, self.checkpoint.read(name))
        info = self.checkpoint.source.tensors[name]
        if place is None or tuple(tensor.shape) != tuple(place.shape):
            raise CheckpointError(
                f"the model's {target} has another shape", file=info.file, tensor=name, found=list(tensor.shape),
                expected=None if place is None else list(place.shape), fix="the config does not belong to these tensors",
            )  # fmt: skip
        if place.is_floating_point() and not info.dtype.is_floating_point:
            raise CheckpointError(
                f"the model's {target} is a plain tensor", file=info.file, tensor=name, found=info.dtype, expected=place.dtype,
                fix="the quantization config does not describe this tensor",
            )  # fmt: skip
        value = tensor.to(self.device, place.dtype, copy=True)
        self._set(module, leaf, value, parameter=leaf in module._parameters)
        self.filled.add(target)
        return True

    def _set(self, module: nn.Module, leaf: str, value: Tensor, *, parameter: bool) -> None:
        if parameter:
            value = nn.Parameter(value, requires_grad=False)
            module._parameters[leaf] = value
        else:
            module._buffers[leaf] = value
        value._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark: leave this one alone

    def _place_quantized(self, target: str, record: LayerRecord) -> None:
        info = self.checkpoint.source.tensors[record.tensors[0]]
        try:
            module = self.model.get_submodule(target)
        except AttributeError:
            if self._ignorable(target + ".weight"):
                return
            raise CheckpointError(
                "a quantized layer has no place in the model", file=info.file, tensor=record.name, found=f"module {target}",
                expected="a linear layer of that name", fix="transformers may fuse or rename it for this architecture",
            ) from None  # fmt: skip
        if f"{target}.weight" in self.filled:
            raise CheckpointError(
                "a layer is there twice", file=info.file, tensor=record.name, found=f"{target}.weight and {info.name}",
                expected="one of them",
            )  # fmt: skip
        shape = getattr(getattr(module, "weight", None), "shape", None)
        if not isinstance(module, nn.Linear | nn.Embedding) or shape is None:
            raise CheckpointError(
                "a quantized layer belongs to a module that is no linear layer", file=info.file, tensor=record.name,
                found=type(module).__name__, expected="torch.nn.Linear or torch.nn.Embedding",
            )  # fmt: skip
        if tuple(shape) != (record.spec.n, record.spec.k):
            raise CheckpointError(
                f"the model's {target} has another shape", file=info.file, tensor=record.name,
                found=[record.spec.n, record.spec.k], expected=list(shape), fix="the config does not belong to these tensors",
            )  # fmt: skip
        read = lambda: self.names.reorder(record.name, record.weight())
        weight = read()
        if isinstance(module, nn.Linear):
            bias = module.bias
            if bias is not None and f"{target}.bias" not in self.filled and weight.bias is None:
                raise CheckpointError("a layer's bias is missing", file=info.file, tensor=f"{record.name}.bias")
            weight = weight if bias is None or weight.bias is not None else weight.with_bias(bias.detach())
            new: nn.Module = QuantLinear(weight, act_dtype=self.dtype, device=self.device, policy=self.policy)
            self.filled.add(f"{target}.bias")
        elif type(module) is nn.Embedding:
            new = QuantEmbedding(weight, self.dtype, self.device)
        else:  # a subclass scales or shifts its rows: keep its code, give it a plain table
            table = weight.to(self.device).dequantize(self.dtype)
            self._set(module, "weight", table, parameter=True)
            self.filled.add(f"{target}.weight")
            self.quantized[target] = record
            return
        new.source = (record.name, record.format)  # type: ignore[assignment]
        self.weights[target] = read
        self._replace(target, new)
        self.filled.add(f"{target}.weight")
        self.quantized[target] = record

    def _replace(self, target: str, new: nn.Module) -> None:
        owner, _, leaf = target.rpartition(".")
        setattr(self.model.get_submodule(owner), leaf, new)

    def _tie(self) -> None:
        """Give each tied parameter that the checkpoint does not hold the tensor, or the quantized layer, of its partner."""
        for a, b in dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            for target, source in ((a, b), (b, a)):
                if target in self.filled or source not in self.filled:
                    continue
                owner, leaf = source.rpartition(".")[::2]
                if owner in self.quantized:
                    self._place_quantized(target.rpartition(".")[0], self.quantized[owner])
                else:
                    module, name = self.model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
                    module._parameters[name] = self.model.get_submodule(owner)._parameters[leaf]
                    self.filled.add(target)

    def _finish(self, ignored: list[str]) -> None:
        missing = sorted(self.expected - self.filled)
        missing = [n for n in missing if not _matches(n, getattr(self.model, "_keys_to_ignore_on_load_missing", None))]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of the model's tensors", file=self.checkpoint.path,
                tensor=missing[0], found=f"none of {', '.join(missing[:5])}" + (", …" if len(missing) > 5 else ""),
                expected="every parameter in the files", fix="a shard may be missing, or the config is another model's",
            )  # fmt: skip
        unused = [n for n in ignored if not self._ignorable(n)]
        for name in unused:
            self._check_surplus(name)
        if unused:
            log.warning(
                "%d tensors of %s have no place in the model: %s", len(unused), self.checkpoint.path, ", ".join(unused[:5])
            )
        _fill_buffers(self.model, self.device, self.checkpoint)

    def _check_surplus(self, name: str) -> None:
        """Refuse a tensor of a layer past the model's last one: the model would be the file's first layers only."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None or self.names.tensor(f"{name[: number.start()]}.0.{name[number.end() :]}") not in self.expected:
            return
        config = self.model.config.get_text_config()
        layers, more = (getattr(config, key, 0) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
        if layers and int(number[1]) >= layers + more:  # layers that only predict further tokens are left out on purpose
            raise CheckpointError(
                "the checkpoint has layers that the configuration does not have", file=self.checkpoint.source.tensors[name].file,
                tensor=name, found=f"layer {number[1]}", expected=f"{layers} layers", fix="the config is another model's",
            )  # fmt: skip

    def _ignorable(self, name: str) -> bool:
        patterns = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(k_scale|v_scale|q_scale|kv_scale)$", r"^rope_freqs\."]
        return _matches(name, patterns + list(getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or []))


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())


def _fill_buffers(model: Any, device: torch.device, checkpoint: Checkpoint) -> None:
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


class _SafetensorsNames:
    """Names in the files to names in the model, by transformers' own renaming rules."""

    def __init__(self, model: Any, path: Path) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self.renamings = [r for r in rules if isinstance(r, WeightRenaming)]
        self.converters = [r for r in rules if isinstance(r, WeightConverter)]
        self.prefix, self.state, self.path = model.base_model_prefix, model.state_dict(), path

    def tensor(self, name: str) -> str | None:
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
        return str(self.tensor(f"{name}.weight")).removesuffix(".weight")

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def reorder(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        return weight


@dataclass(frozen=True)
class PlanRow:
    """One distinct kind of quantized layer in a model: its spec, the choice made for it, and the layers that share it."""

    spec: LinearSpec
    format: str
    choice: Choice
    names: tuple[str, ...]
    packed_bytes: int


def plan(model: nn.Module) -> list[PlanRow]:
    """The distinct layers of a loaded model, largest share of the weights first."""
    groups: dict[LinearSpec, list[tuple[str, QuantLinear]]] = defaultdict(list)
    for name, module in quant_linears(model):
        groups[module.spec].append((name, module))
    rows = []
    for spec, members in groups.items():
        names, layers = zip(*members, strict=True)
        rows.append(PlanRow(spec, layers[0].source[1], layers[0].choice, names, sum(m.packed_bytes() for m in layers)))
    return sorted(rows, key=lambda r: -r.spec.n * r.spec.k * len(r.names))


def quant_linears(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """Every QuantLinear of a model with its name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' warnings and progress bars out of a command's output."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()

"""load_model: a transformers model whose linear layers run on Bitline, filled straight from a checkpoint's files."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitline import env, memory
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import BitlineError, CheckpointError, InputError, OutOfMemoryError
from bitline.formats.base import LayerRecord
from bitline.linear import QuantLinear
from bitline.model import decode_step
from bitline.model.embedding import QuantEmbedding
from bitline.model.gguf_names import GGUFNames
from bitline.model.meta_model import (
    SafetensorsNames,
    check_sizes,
    default_dtype,
    fill_buffers,
    make_config,
    make_skeleton,
    set_generation_config,
)
from bitline.platform import Platform, as_device
from bitline.select import Choice, Policy
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    policy: Policy | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    native_step: bool | None = None,
) -> Any:
    """A transformers causal language model from a checkpoint, every quantized linear layer a QuantLinear.

    path: a folder with config.json and safetensors, or a GGUF file. device: where it runs. dtype: of activations and
    of what is not quantized; by default the checkpoint's own where the device is fast in it, see `meta_model.default_dtype`.
    policy: how kernels are chosen. progress: called with (tensors placed, tensors in all). native_step: on a CPU, whether native
    code may do what lies between the linear layers when the model makes one token in bfloat16 (`model/decode_step.py`); by
    default unless `$BITLINE_NO_STEP` is set or the policy asks for batch invariance.

    The model is built without memory for its weights, then filled a layer at a time: peak memory is the packed model
    plus about one layer. Every parameter comes from the checkpoint: one that is missing, or a quantized layer that has
    no place, is a CheckpointError, never a random weight. `model.bitline_weights[name]()` reads a layer's canonical
    weight again, for a check or a reload.
    """
    checkpoint = open_checkpoint(path)
    device = as_device(device)
    platform = Platform.detect(device)  # a device that is not here is refused before anything is read
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError("a model's dtype is a floating torch.dtype", found=repr(dtype), expected="torch.bfloat16, say")
    dtype = dtype or default_dtype(checkpoint, platform)
    with _one_at_a_time:
        model = _load(checkpoint, device, dtype, policy, progress)
    if native_step is None:
        native_step = not env.no_step() and not Policy.of(policy).batch_invariant
    if native_step and device.type == "cpu" and dtype == torch.bfloat16:
        decode_step.install(model)
    return model


# transformers builds a model under a default dtype and initialisers that it sets for the whole process.
_one_at_a_time = threading.RLock()


def _load(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    policy: Policy | str | None,
    progress: Callable[[int, int], None] | None,
) -> Any:
    check_sizes(checkpoint)
    model = make_skeleton(make_config(checkpoint), dtype, checkpoint)
    filler = _Filler(model, checkpoint, device, dtype, policy, progress)
    try:
        filler.fill()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "alloc" not in str(error):  # how torch says that this machine's memory is full
            raise
        raise OutOfMemoryError(f"no memory on {device} for the model", file=checkpoint.path) from error
    finally:
        memory.release()
    model.bitline_weights, model.bitline_checkpoint = filler.weights, checkpoint
    if filler.quantized:
        model.save_pretrained = functools.partial(_refuse, "be saved", checkpoint.path)
        model.resize_token_embeddings = functools.partial(_refuse, "have its embeddings resized", checkpoint.path)
        model.tie_weights = _tied_already
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    set_generation_config(model, checkpoint)
    return model


def _refuse(what: str, path: Path, *_args: Any, **_options: Any) -> None:
    """Saving would write a checkpoint without the packed layers, and nothing would say so."""
    raise BitlineError(f"a model that runs on packed weights cannot {what}", file=path,
                       fix="keep or change the checkpoint that it was loaded from")  # fmt: skip


def _tied_already(*_args: Any, **_options: Any) -> None:
    """Stands in for tie_weights, which looks for parameters that packed layers do not have."""


class _Filler:
    """Puts every tensor of a checkpoint in its place in a model that has none yet."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        policy: Policy | str | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.checkpoint, self.device, self.dtype, self.policy = model, checkpoint, device, dtype, policy
        self.progress = progress or (lambda done, total: None)
        self.names: Any = GGUFNames(model, checkpoint) if checkpoint.is_gguf else SafetensorsNames(model, checkpoint.path)
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
        replace_module(self.model, target, new)
        self.filled.add(f"{target}.weight")
        self.quantized[target] = record

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
        fill_buffers(self.model, self.device, self.checkpoint)

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


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module, a QuantLinear say, in the place of the model's module of that name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())


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

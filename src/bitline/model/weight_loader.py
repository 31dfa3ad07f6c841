"""Fills a model on the meta device from a checkpoint, one layer at a time; every parameter must come from the files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.model.gguf_names import GGUFNameMap
from bitline.model.meta_model import materialize_buffers
from bitline.model.safetensors_names import NameMap, SafetensorsNameMap
from bitline.select import Policy
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")

# Checkpoint tensors that no model needs: computed tables and the scales of a quantized key-value cache.
_OPTIONAL = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(k_scale|v_scale|q_scale|kv_scale)$", r"^rope_freqs\.")


class WeightLoader:
    """Loads a checkpoint into a meta model: unquantized tensors first, then each quantized layer read, packed and placed.

    After `load`, `quantized` maps the model's module names to layer records, and `read_weight` to functions that read a
    layer's canonical weight again.
    """

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
        self.names: NameMap
        self.names = GGUFNameMap(model, checkpoint) if checkpoint.is_gguf else SafetensorsNameMap(model, checkpoint.path)
        self.required = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self.required |= {n for n, _ in model.named_buffers() if n in model.state_dict()}
        self.loaded: set[str] = set()
        self.quantized: dict[str, LayerRecord] = {}
        self.read_weight: dict[str, Callable[[], QuantizedWeight]] = {}

    def load(self) -> None:
        """Fill the model. A missing, surplus or misshapen tensor is a CheckpointError."""
        records, unquantized = self.checkpoint.layers(), self.checkpoint.dense_names()
        total = len(records) + len(unquantized)
        unused = []
        for i, name in enumerate(unquantized):
            if not self._load_unquantized(name):
                unused.append(name)
            self.progress(i + 1, total)
        for i, record in enumerate(records):
            self._load_quantized(self.names.module_name(record.name), record)
            self.progress(len(unquantized) + i + 1, total)
        self._tie_weights()
        self._check_missing()
        self._check_unused(unused)
        materialize_buffers(self.model, self.device, self.checkpoint)

    # ---- unquantized tensors ---------------------------------------------------------------------------------------------

    def _load_unquantized(self, name: str) -> bool:
        """Load one unquantized tensor; False where the model has no parameter or buffer for it."""
        target = self.names.parameter_name(name)
        if target is None or target not in self.required:
            return False
        info = self.checkpoint.source.tensors[name]
        if target in self.loaded:
            raise CheckpointError(
                "two tensors map to one parameter of the model", file=info.file, tensor=name, found=f"both are {target}"
            )
        owner, _, leaf = target.rpartition(".")
        module = self.model.get_submodule(owner)
        meta = module._parameters.get(leaf) if leaf in module._parameters else module._buffers.get(leaf)
        tensor = self.names.convert_tensor(name, self.checkpoint.read(name))
        if meta is None or tuple(tensor.shape) != tuple(meta.shape):
            raise CheckpointError(
                f"the model's {target} has a different shape", file=info.file, tensor=name, found=list(tensor.shape),
                expected=None if meta is None else list(meta.shape), fix="the config does not belong to these tensors",
            )  # fmt: skip
        if meta.is_floating_point() and not info.dtype.is_floating_point:
            raise CheckpointError(
                f"the model's {target} is an unquantized tensor", file=info.file, tensor=name, found=info.dtype,
                expected=meta.dtype, fix="the quantization config does not describe this tensor",
            )  # fmt: skip
        value = tensor.to(self.device, meta.dtype, copy=True)
        self._assign(module, leaf, value, parameter=leaf in module._parameters)
        self.loaded.add(target)
        return True

    def _assign(self, module: nn.Module, leaf: str, value: Tensor, *, parameter: bool) -> None:
        """Replace a meta parameter or buffer by a tensor with data."""
        if parameter:
            value = nn.Parameter(value, requires_grad=False)
            module._parameters[leaf] = value
        else:
            module._buffers[leaf] = value
        value._is_hf_initialized = True  # type: ignore[attr-defined]  # tells transformers not to initialize it again

    # ---- quantized layers ------------------------------------------------------------------------------------------------

    def _load_quantized(self, target: str, record: LayerRecord) -> None:
        """Read one quantized layer and replace the model's module `target` by one that runs on its packed weight."""
        module = self._module_of(target, record)
        if module is None:
            return
        self._check_target(target, module, record)

        def read() -> QuantizedWeight:
            return self.names.permute_rows(record.name, record.weight())

        weight = read()
        if isinstance(module, nn.Linear):
            replacement: nn.Module = self._quant_linear(target, module, record, weight)
        elif type(module) is nn.Embedding:
            replacement = QuantEmbedding(weight, self.dtype, self.device)
        else:  # a subclass of Embedding scales or shifts its rows: keep its forward and give it a dequantized table
            self._assign(module, "weight", weight.to(self.device).dequantize(self.dtype), parameter=True)
            self._mark_quantized(target, record)
            return
        replacement.source = (record.name, record.format)  # type: ignore[assignment]
        self.read_weight[target] = read
        replace_module(self.model, target, replacement)
        self._mark_quantized(target, record)

    def _module_of(self, target: str, record: LayerRecord) -> nn.Module | None:
        """The model's module for a quantized layer; None for a layer that the model may leave out."""
        try:
            module: nn.Module = self.model.get_submodule(target)
        except AttributeError:
            if self._is_optional(target + ".weight"):
                return None
            raise CheckpointError(
                "the model has no module for a quantized layer", file=self._file(record), tensor=record.name,
                found=f"module {target}", expected="a linear layer of that name",
                fix="transformers may fuse or rename it for this architecture",
            ) from None  # fmt: skip
        return module

    def _check_target(self, target: str, module: nn.Module, record: LayerRecord) -> None:
        """Refuse a module that is loaded already, that is neither linear layer nor embedding, or whose shape differs."""
        if f"{target}.weight" in self.loaded:
            raise CheckpointError(
                "two tensors hold the weight of one layer", file=self._file(record), tensor=record.name,
                found=f"{target}.weight and {record.tensors[0]}", expected="one of them",
            )  # fmt: skip
        shape = getattr(getattr(module, "weight", None), "shape", None)
        if not isinstance(module, nn.Linear | nn.Embedding) or shape is None:
            raise CheckpointError(
                "a quantized layer belongs to a module that is neither linear layer nor embedding", file=self._file(record),
                tensor=record.name, found=type(module).__name__, expected="torch.nn.Linear or torch.nn.Embedding",
            )  # fmt: skip
        if tuple(shape) != (record.spec.n, record.spec.k):
            raise CheckpointError(
                f"the model's {target} has a different shape", file=self._file(record), tensor=record.name,
                found=[record.spec.n, record.spec.k], expected=list(shape), fix="the config does not belong to these tensors",
            )  # fmt: skip

    def _quant_linear(self, target: str, module: nn.Linear, record: LayerRecord, weight: QuantizedWeight) -> QuantLinear:
        """Choose a kernel for a linear layer and pack its weight, with the bias that was loaded before or is the weight's own."""
        bias = module.bias
        if bias is not None and f"{target}.bias" not in self.loaded and weight.bias is None:
            raise CheckpointError("a layer's bias is missing", file=self._file(record), tensor=f"{record.name}.bias")
        weight = weight if bias is None or weight.bias is not None else weight.with_bias(bias.detach())
        layer = QuantLinear(weight, act_dtype=self.dtype, device=self.device, policy=self.policy)
        self.loaded.add(f"{target}.bias")
        return layer

    def _mark_quantized(self, target: str, record: LayerRecord) -> None:
        self.loaded.add(f"{target}.weight")
        self.quantized[target] = record

    def _file(self, record: LayerRecord) -> Any:
        return self.checkpoint.source.tensors[record.tensors[0]].file

    # ---- tied weights and what is left over ------------------------------------------------------------------------------

    def _tie_weights(self) -> None:
        """Give each tied parameter that the checkpoint does not store its partner's tensor or quantized layer."""
        for a, b in dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            for target, source in ((a, b), (b, a)):
                if target in self.loaded or source not in self.loaded:
                    continue
                owner, leaf = source.rpartition(".")[::2]
                if owner in self.quantized:
                    self._load_quantized(target.rpartition(".")[0], self.quantized[owner])
                else:
                    module, name = self.model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
                    module._parameters[name] = self.model.get_submodule(owner)._parameters[leaf]
                    self.loaded.add(target)

    def _check_missing(self) -> None:
        """Refuse a checkpoint that lacks a parameter: transformers would leave it at its random initialization."""
        missing = sorted(self.required - self.loaded)
        missing = [n for n in missing if not _matches(n, getattr(self.model, "_keys_to_ignore_on_load_missing", None))]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of the model's tensors", file=self.checkpoint.path,
                tensor=missing[0], found=f"none of {', '.join(missing[:5])}" + (", …" if len(missing) > 5 else ""),
                expected="every parameter in the files", fix="a shard may be missing, or the config is another model's",
            )  # fmt: skip

    def _check_unused(self, names: list[str]) -> None:
        """Log unquantized tensors that the model does not use; those of a layer that the config lacks are an error."""
        unused = [name for name in names if not self._is_optional(name)]
        for name in unused:
            self._check_layer_index(name)
        if unused:
            log.warning(
                "%d tensors of %s are not used by the model: %s", len(unused), self.checkpoint.path, ", ".join(unused[:5])
            )

    def _check_layer_index(self, name: str) -> None:
        """Refuse a tensor of a layer past the model's last one: the model would be a truncation of the checkpoint."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            return
        in_first_layer = f"{name[: number.start()]}.0.{name[number.end() :]}"
        if self.names.parameter_name(in_first_layer) not in self.required:
            return
        config = self.model.config.get_text_config()
        layers, extra = (getattr(config, key, 0) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
        if layers and int(number[1]) >= layers + extra:  # multi-token prediction layers are left out on purpose
            raise CheckpointError(
                "the checkpoint has layers that the configuration does not have", file=self.checkpoint.source.tensors[name].file,
                tensor=name, found=f"layer {number[1]}", expected=f"{layers} layers", fix="the config is another model's",
            )  # fmt: skip

    def _is_optional(self, name: str) -> bool:
        return _matches(name, [*_OPTIONAL, *(getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or [])])


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the model's module of that name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())

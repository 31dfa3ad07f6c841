"""Fills a model on the meta device from a checkpoint, one layer at a time; every parameter must come from the files."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline.checkpoint import Checkpoint
from bitline.errors import CheckpointError
from bitline.experts import QuantExperts
from bitline.formats.base import LayerRecord
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.model.expert_loader import ExpertLoader, ExpertRecords, UnquantizedExperts
from bitline.model.expert_names import DOWN_NAME, top_k_of
from bitline.model.gguf_names import GGUFNameMap
from bitline.model.merge import install, sibling_names
from bitline.model.merge_weights import merge_key, merge_weights
from bitline.model.merged_specs import is_faster
from bitline.model.meta_model import materialize_buffers
from bitline.model.safetensors_names import NameMap, SafetensorsNameMap
from bitline.model.tensor_parallel import ParallelPlan, without_activation_quantization
from bitline.model.weight_info import add_weight_info
from bitline.parallel import TensorParallel
from bitline.platform import Platform
from bitline.select import Policy
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

log = logging.getLogger("bitline")

# Checkpoint tensors that no model needs: computed tables and the scales of a quantized key-value cache.
_OPTIONAL = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(k_scale|v_scale|q_scale|kv_scale)$", r"^rope_freqs\.")


class WeightLoader:
    """Loads a checkpoint into a meta model: unquantized tensors first, then each quantized layer read, packed and placed.

    device_of: where a module runs, by the name of the module or of one of its tensors. merge: pack layers with one input as one
    (`model.merge`); None: those on GPUs. other_head: the model's class is another one than the checkpoint was saved from. Then
    layers and tensors of the checkpoint outside of the base model may be left out, and the model's own parameters there, which
    no file holds, get transformers' initialization; a warning names both. tp: ranks over which layers are cut. names: where the
    model is not transformers'; by default their tables.

    After `load`, `quantized` maps the model's module names to layer records, and `read_weight` to functions that read a layer's
    canonical weight again.
    """

    shape_fix = "the config does not belong to these tensors"

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        device_of: Callable[[str], torch.device],
        dtype: torch.dtype,
        policy: Policy | str | None,
        progress: Callable[[int, int], None] | None,
        merge: bool | None = False,
        other_head: bool = False,
        tp: TensorParallel | None = None,
        names: NameMap | None = None,
    ) -> None:
        self.model, self.checkpoint, self.device_of, self.dtype, self.policy = model, checkpoint, device_of, dtype, policy
        self.merge, self.other_head, self.tp = merge, other_head, tp
        self.parallel: ParallelPlan | None = None
        self.progress = progress or (lambda done, total: None)
        self.names = _names_of(model, checkpoint) if names is None else names
        self.required = required_tensors(model)
        self.loaded: set[str] = set()
        self.quantized: dict[str, LayerRecord] = {}
        self.read_weight: dict[str, Callable[[], QuantizedWeight]] = {}
        self.faster: dict[Hashable, bool] = {}
        self.dense_experts = UnquantizedExperts(checkpoint.path)

    def load(self) -> None:
        """Fill the model. A missing, surplus or misshapen tensor is a CheckpointError."""
        records, unquantized = self.checkpoint.layers(), self.checkpoint.dense_names()
        total = len(records) + len(unquantized)
        self.plan_cuts(records)
        unused = []
        for i, name in enumerate(unquantized):
            if not self._load_unquantized(name):
                unused.append(name)
            self.progress(i + 1, total)
        self.dense_experts.check()
        experts = self._experts(records)
        targets = {record.name: self._target(record) for record in records if record.name not in experts}
        groups = self._siblings(records, targets) if self.merge is not False else {}
        siblings = {target for members in groups.values() for target, _ in members}
        for i, record in enumerate(records):
            target = targets.get(record.name)
            if record.name in experts:
                self._load_experts(experts[record.name])
            elif target in groups:
                self._load_siblings(groups[target])
            elif target is not None and target not in siblings:
                self._load_quantized(target, record)
            self.progress(len(unquantized) + i + 1, total)
        self._tie_weights()
        self._finish(unused)
        if self.parallel is not None:
            self.parallel.finish(self.read_weight)

    def _finish(self, unused: Sequence[str]) -> None:
        """Check what is left over on both sides, and fill the model's computed buffers."""
        self._check_missing()
        self._check_unused(unused)
        materialize_buffers(self.model, self.device_of, self.checkpoint)

    def plan_cuts(self, records: Sequence[LayerRecord], *, experts_only: bool = False) -> None:
        """Plan the cuts of this rank, where there are ranks and it has not been done."""
        if self.tp is not None and self.parallel is None:
            self.parallel = ParallelPlan(self.model, self.tp, self._specs_of_modules(records), experts_only=experts_only)

    def _specs_of_modules(self, records: Sequence[LayerRecord]) -> dict[str, LinearSpec]:
        """The specs of quantized layers by module, of experts those of the second projection by module and number."""
        specs = {}
        for record in records:
            place = self.names.expert_place(record.name, layer=True)
            if place is None:
                specs[self._target(record) or record.name] = record.spec
            elif place.parameter == DOWN_NAME:
                specs[f"{place.module}.{DOWN_NAME}.{place.expert}"] = record.spec
        return specs

    # ---- unquantized tensors ---------------------------------------------------------------------------------------------

    def _load_unquantized(self, name: str) -> bool:
        """Load one unquantized tensor; False where the model has no parameter or buffer for it."""
        place = self.names.expert_place(name, layer=False)
        if place is not None:
            module = self.model.get_submodule(place.module)
            self.loaded.add(self.dense_experts.put(module, place, self.checkpoint.read(name), name, self.device_of(place.module)))
            return True
        try:
            target = self.names.parameter_name(name)
        except CheckpointError:
            if self._is_optional(name):  # fused with others in a layer that the model leaves out
                return False
            raise
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
                expected=None if meta is None else list(meta.shape), fix=self.shape_fix,
            )  # fmt: skip
        if meta.is_floating_point() and not info.dtype.is_floating_point:
            raise CheckpointError(
                f"the model's {target} is an unquantized tensor", file=info.file, tensor=name, found=info.dtype,
                expected=meta.dtype, fix="the quantization config does not describe this tensor",
            )  # fmt: skip
        if self.parallel is not None:
            tensor = self.parallel.tensor(target, tensor)
        value = tensor.to(self.device_of(target), meta.dtype, copy=True)
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

    def _target(self, record: LayerRecord) -> str | None:
        """The name of a quantized layer's module, None where the model leaves the layer out."""
        try:
            return self.names.module_name(record.name)
        except CheckpointError:
            if self._is_optional(f"{record.name}.weight"):
                return None
            raise

    # ---- quantized layers ------------------------------------------------------------------------------------------------

    def _load_quantized(self, target: str, record: LayerRecord) -> None:
        """Read one quantized layer and replace the model's module `target` by one that runs on its packed weight."""
        module = self._module_of(target, record)
        if module is None:
            return
        self._check_target(target, module, record)
        read = functools.partial(self._read, target, record)
        device = self.device_of(target)
        if self._is_linear(module):
            weight = self._with_bias(target, module, record, read())
            self._place(target, record, self._quant_linear(target, weight, device), read)
        elif type(module) is nn.Embedding:
            self._place(target, record, QuantEmbedding(read(), self.dtype, device), read)
        else:  # a router, or a subclass of Embedding that scales or shifts its rows: its own forward on a dequantized matrix
            dtype = module.get_parameter("weight").dtype
            self._assign(module, "weight", read().to(device).dequantize(dtype), parameter=True)
        self._mark_quantized(target, record)

    def runs_packed(self, module: nn.Module) -> bool:
        """Whether a module's quantized weight stays packed; else the module gets it dequantized."""
        return self._is_linear(module) or type(module) is nn.Embedding

    def _is_linear(self, module: nn.Module) -> bool:
        """Whether a QuantLinear takes the place of a module."""
        return isinstance(module, nn.Linear)

    def _read(self, target: str, record: LayerRecord) -> QuantizedWeight:
        """A layer's canonical weight on this rank, rows in the model's order."""
        if self.parallel is None:
            return self.names.permute_rows(record.name, record.weight())
        return self.parallel.read(target, record, self.names.row_order(record.name, record.spec.n))

    def _quant_linear(self, target: str, weight: QuantizedWeight, device: torch.device) -> Any:
        make = lambda w: QuantLinear(w, act_dtype=self.dtype, device=device, policy=self.policy)
        return make(weight) if self.parallel is None else self.parallel.linear(target, weight, make)

    def _place(self, target: str, record: LayerRecord, module: Any, read: Callable[[], QuantizedWeight]) -> None:
        """Replace the model's module `target`."""
        module.source = (record.name, record.format)
        add_weight_info(module)
        self.read_weight[target] = read if module.spec.act == record.spec.act else lambda: without_activation_quantization(read())
        replace_module(self.model, target, module)

    # ---- experts ---------------------------------------------------------------------------------------------------------

    def _experts(self, records: Sequence[LayerRecord]) -> dict[str, ExpertRecords]:
        """The experts module of each layer that is an expert's, by the layer's name."""
        by_module: dict[str, ExpertRecords] = {}
        found: dict[str, ExpertRecords] = {}
        for record in records:
            place = self.names.expert_place(record.name, layer=True)
            if place is not None:
                experts = found[record.name] = by_module.setdefault(place.module, ExpertRecords(place.module))
                experts.add(place, record, self._file(record))
        return found

    def load_experts(self, module: str) -> QuantExperts:
        """Fill one experts module alone, for engines that load the rest of the model themselves. Errors are those of `load`.

        module: the model's name of it, one of `experts`.
        """
        self.plan_cuts(self.checkpoint.layers(), experts_only=True)
        for name in self.dense_of_experts.get(module, ()):
            self._load_unquantized(name)
        self.dense_experts.check()
        self._load_experts(self.experts[module])
        loaded: QuantExperts = self.model.get_submodule(module)
        return loaded

    def load_module(self, module: str) -> nn.Module:
        """Fill one module that has no experts alone, for checks that hold one decoder layer. Errors are those of `load`."""
        inside = f"{module}."
        for name, target in self._dense_targets.items():
            if target.startswith(inside):
                self._load_unquantized(name)
        for target, record in self.layer_targets.items():
            if target.startswith(inside):
                self._load_quantized(target, record)
        if missing := sorted(name for name in self.required - self.loaded if name.startswith(inside)):
            raise CheckpointError("the checkpoint lacks a tensor of the model", file=self.checkpoint.path, tensor=missing[0])
        return self.model.get_submodule(module)

    @functools.cached_property
    def _dense_targets(self) -> dict[str, str]:
        """The model's name of each unquantized tensor that it has under a name of its own."""
        found: dict[str, str] = {}
        for name in self.checkpoint.dense_names():
            with contextlib.suppress(CheckpointError):  # an expert's, or of a layer that the model leaves out
                if (target := self.names.parameter_name(name)) is not None:
                    found[name] = target
        return found

    @functools.cached_property
    def layer_targets(self) -> dict[str, LayerRecord]:
        """The quantized layers by the model's modules, experts aside."""
        plain = [r for r in self.checkpoint.layers() if self.names.expert_place(r.name, layer=True) is None]
        return {target: record for record in plain if (target := self._target(record)) is not None}

    @functools.cached_property
    def experts(self) -> dict[str, ExpertRecords]:
        """The quantized matrices of each experts module that has some."""
        return {found.module: found for found in self._experts(self.checkpoint.layers()).values()}

    @functools.cached_property
    def dense_of_experts(self) -> dict[str, list[str]]:
        """The unquantized tensors of each experts module: matrices, and biases."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.checkpoint.dense_names():
            place = self.names.expert_place(name, layer=False)
            if place is not None:
                found[place.module].append(name)
            elif name.endswith("bias"):
                with contextlib.suppress(CheckpointError):  # of another module, whose names are not checked here
                    found[str(self.names.parameter_name(name)).rpartition(".")[0]].append(name)
        return {module: names for module, names in found.items() if module in self.experts}

    def _load_experts(self, found: ExpertRecords) -> None:
        """Replace an experts module, when the first of its layers comes; the others come with it."""
        shell = self.model.get_submodule(found.module)
        if isinstance(shell, QuantExperts):
            return
        twice = [name for name in found.parameters if f"{found.module}.{name}" in self.loaded]
        if twice:
            record = next(iter(found.parameters[twice[0]].values()))
            raise CheckpointError("some experts of a layer are quantized and others are not", file=self._file(record),
                                  tensor=record.name, found=f"{found.module}.{twice[0]}", expected="all or none")  # fmt: skip
        top_k = top_k_of(self.model.config)
        device = self.device_of(found.module)
        loader = ExpertLoader(shell, found, self.dtype, device, self.policy, top_k, self._file, self.parallel)
        experts = loader.load()
        replace_module(self.model, found.module, experts)
        for name, module in experts.named_modules(prefix=found.module):
            if module in loader.reads:
                self.read_weight[name] = loader.reads[module]
        for name in found.parameters:
            self.loaded |= {f"{found.module}.{name}", f"{found.module}.{name}_bias"}

    # ---- layers with one input -------------------------------------------------------------------------------------------

    def _siblings(
        self, records: Sequence[LayerRecord], targets: Mapping[str, str | None]
    ) -> dict[str, list[tuple[str, LayerRecord]]]:  # fmt: skip
        """Layers that may be merged, under the name of the first one in the checkpoint: (module, record) in the model's order.

        targets: the module of each layer by the layer's name.
        """
        placed = [(target, record) for record in records if (target := targets.get(record.name)) is not None]
        found = dict(placed)
        if len(found) != len(placed):  # two layers for one module are an error, which loading them one by one reports
            return {}
        groups: dict[str, list[tuple[str, LayerRecord]]] = {}
        order = {target: i for i, target in enumerate(found)}
        for name, parent in self.model.named_modules():
            for names in sibling_names(parent):
                children = [f"{name}.{leaf}" if name else leaf for leaf in names]
                members = [(target, found[target]) for target in children if target in found]
                if len(members) > 1 and self._can_merge([target for target, _ in members]):
                    groups[min((target for target, _ in members), key=order.__getitem__)] = members
        return groups

    def _can_merge(self, targets: Sequence[str]) -> bool:
        """Whether these modules are linear layers of one device, where layers are to be merged."""
        if any(type(self.model.get_submodule(target)) is not nn.Linear for target in targets):
            return False
        first, *others = {self.device_of(target) for target in targets}
        return not others and (self.merge is True or first.type != "cpu")

    def _load_siblings(self, members: Sequence[tuple[str, LayerRecord]]) -> None:
        """Load layers with one input: those with one scheme as one layer, the others one by one."""
        by_key: dict[Hashable, list[tuple[str, LayerRecord, QuantizedWeight]]] = {}
        for target, record in members:
            module = self._module_of(target, record)
            assert isinstance(module, nn.Linear)
            self._check_target(target, module, record)
            weight = self._with_bias(target, module, record, self._read(target, record)).with_act_dtype(self.dtype)
            key = merge_key(weight.spec)
            by_key.setdefault(target if key is None else key, []).append((target, record, weight))
        for same in by_key.values():
            if len(same) == 1 or not self._load_merged(same):
                for target, record, _weight in same:
                    self._load_quantized(target, record)

    def _load_merged(self, members: Sequence[tuple[str, LayerRecord, QuantizedWeight]]) -> bool:
        """Load layers of one scheme as one; False where they cannot be merged, or are estimated to be faster apart."""
        targets, records, weights = zip(*members, strict=True)
        merged = merge_weights(weights)
        device = self.device_of(targets[0])
        if merged is None or not self._is_faster(merged, weights, device):
            return False
        layer = QuantLinear(merged, act_dtype=self.dtype, device=device, policy=self.policy)
        layer.source = (" + ".join(r.name for r in records), records[0].format)
        owner = targets[0].rpartition(".")[0]
        parent = self.model.get_submodule(owner)
        leaves = tuple(target.rpartition(".")[2] for target in targets)
        leaf = install(parent, leaves, [w.spec.n for w in weights], layer)
        reads = [functools.partial(self._read, target, record) for target, record in zip(targets, records, strict=True)]
        self.read_weight[f"{owner}.{leaf}" if owner else leaf] = functools.partial(_read_merged, reads)
        for target, record, read in zip(targets, records, reads, strict=True):
            parent.get_submodule(target.rpartition(".")[2]).source = (record.name, record.format)
            self.read_weight[target] = read
            self._mark_quantized(target, record)
        return True

    def _is_faster(self, merged: QuantizedWeight, weights: Sequence[QuantizedWeight], device: torch.device) -> bool:
        """`is_faster`, which is the same for all layers of these specs."""
        parts = tuple(w.spec for w in weights)
        key = merged.spec, parts, device
        if key not in self.faster:
            self.faster[key] = is_faster(merged.spec, parts, Platform.detect(device), Policy.of(self.policy))
        return self.faster[key]

    def _module_of(self, target: str, record: LayerRecord) -> nn.Module | None:
        """The model's module for a quantized layer; None for a layer that the model may leave out."""
        try:
            module: nn.Module = self.model.get_submodule(target)
        except AttributeError:
            if self._is_optional(target + ".weight") or self._is_left_out(record.name):
                return None
            raise CheckpointError(
                "the model has no module for a quantized layer", file=self._file(record), tensor=record.name,
                found=f"module {target}", expected="a linear layer of that name",
                fix="transformers may fuse or rename it for this architecture",
            ) from None  # fmt: skip
        return module

    def _check_target(self, target: str, module: nn.Module, record: LayerRecord) -> None:
        """Refuse a module that is loaded already, that has no weight matrix, or whose shape differs."""
        if f"{target}.weight" in self.loaded:
            raise CheckpointError(
                "two tensors hold the weight of one layer", file=self._file(record), tensor=record.name,
                found=f"{target}.weight and {record.tensors[0]}", expected="one of them",
            )  # fmt: skip
        shape = getattr(getattr(module, "weight", None), "shape", None)
        if shape is None or len(shape) != 2:
            raise CheckpointError(
                "a quantized layer belongs to a module without a weight matrix", file=self._file(record), tensor=record.name,
                found=type(module).__name__, expected="a linear layer, an embedding or a router",
            )  # fmt: skip
        if tuple(shape) != (record.spec.n, record.spec.k):
            raise CheckpointError(
                f"the model's {target} has a different shape", file=self._file(record), tensor=record.name,
                found=[record.spec.n, record.spec.k], expected=list(shape), fix=self.shape_fix,
            )  # fmt: skip

    def _with_bias(self, target: str, module: nn.Module, record: LayerRecord, weight: QuantizedWeight) -> QuantizedWeight:
        """A linear layer's weight with the bias that was loaded before or is the weight's own."""
        bias = module._parameters.get("bias")
        if bias is not None and f"{target}.bias" not in self.loaded and not record.spec.bias:
            raise CheckpointError("a layer's bias is missing", file=self._file(record), tensor=f"{record.name}.bias")
        self.loaded.add(f"{target}.bias")
        if self.parallel is not None and not self.parallel.keeps_bias(target):
            return weight.with_bias(None)
        return weight if bias is None or weight.bias is not None else weight.with_bias(bias.detach())

    def _mark_quantized(self, target: str, record: LayerRecord) -> None:
        self.loaded.add(f"{target}.weight")
        self.quantized[target] = record

    def _file(self, record: LayerRecord) -> Any:
        return self.checkpoint.source.tensors[record.tensors[0]].file

    # ---- tied weights and what is left over ------------------------------------------------------------------------------

    def _tie_weights(self) -> None:
        """Give each tied parameter that the checkpoint does not store its partner's tensor or quantized layer."""
        for a, b in self._tied_pairs():
            for target, source in ((a, b), (b, a)):
                if target in self.loaded or source not in self.loaded:
                    continue
                owner, leaf = source.rpartition(".")[::2]
                if owner in self.quantized:
                    self._load_quantized(target.rpartition(".")[0], self.quantized[owner])
                else:
                    module, name = self.model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
                    module._parameters[name] = self._on(self.device_of(target), self.model.get_submodule(owner)._parameters[leaf])
                    self.loaded.add(target)

    def _tied_pairs(self) -> Sequence[tuple[str, str]]:
        """Names of parameters that are one."""
        return [*dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items()]

    @staticmethod
    def _on(device: torch.device, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """The parameter itself on its own device, a copy on another one."""
        if parameter is None or parameter.device == device:
            return parameter
        return nn.Parameter(parameter.detach().to(device), requires_grad=False)

    def _check_missing(self) -> None:
        """Refuse a checkpoint that lacks a parameter: transformers would leave it at its random initialization."""
        missing = sorted(self.required - self.loaded)
        missing = [n for n in missing if not _matches(n, getattr(self.model, "_keys_to_ignore_on_load_missing", None))]
        if self.other_head:
            missing = self._initialize_head(missing)
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of the model's tensors", file=self.checkpoint.path,
                tensor=missing[0], found=f"none of {', '.join(missing[:5])}" + (", …" if len(missing) > 5 else ""),
                expected="every parameter in the files", fix="a shard may be missing, or the config is another model's",
            )  # fmt: skip

    def _initialize_head(self, names: list[str]) -> list[str]:
        """Allocate those of the missing parameters that are outside of the base model, for transformers' initialization of them.
        Returns the others.
        """
        prefix = f"{self.model.base_model_prefix}."
        base = self.model.base_model is self.model
        head = [] if base else [name for name in names if not name.startswith(prefix)]
        for name in head:
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            tensors: Any = module._parameters if leaf in module._parameters else module._buffers
            empty = torch.zeros_like(tensors[leaf], device=self.device_of(name))
            tensors[leaf] = nn.Parameter(empty, requires_grad=False) if leaf in module._parameters else empty
            tensors[leaf]._is_hf_initialized = False
        if head:
            log.warning("%s has no %s: newly initialized, to be trained", self.checkpoint.path, ", ".join(head[:5]))
        return [name for name in names if name not in head]

    def _is_left_out(self, name: str) -> bool:
        """Whether a layer of the checkpoint belongs to the head of another class than the model's."""
        first = name.partition(".")[0]
        if not self.other_head or first == self.model.base_model_prefix or first in self.model.base_model._modules:
            return False
        log.warning("%s of %s is not used by %s", name, self.checkpoint.path, type(self.model).__name__)
        return True

    def _check_unused(self, names: Sequence[str]) -> None:
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


def required_tensors(module: nn.Module) -> set[str]:
    """Names of all parameters and of the buffers that a state dict has."""
    kept = module.state_dict()
    buffers = {name for name, _ in module.named_buffers() if name in kept}
    return buffers | {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _names_of(model: Any, checkpoint: Checkpoint) -> NameMap:
    """The names of a transformers model."""
    return GGUFNameMap(model, checkpoint) if checkpoint.is_gguf else SafetensorsNameMap(model, checkpoint.path)


def _read_merged(reads: Sequence[Callable[[], QuantizedWeight]]) -> QuantizedWeight:
    """The canonical weight of a merged layer."""
    merged = merge_weights([read() for read in reads])
    assert merged is not None  # it was merged when it was loaded
    return merged


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the model's module of that name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(p, name) for p in patterns or ())

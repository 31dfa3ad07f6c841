"""replace_linears: the linear layers of any torch module on a checkpoint's packed weights, matched by name."""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import CheckpointError, InputError
from bitline.formats.base import LayerRecord
from bitline.host import without_default_device
from bitline.model import hub
from bitline.model.load import disable_weight_edits, load_weights
from bitline.model.merge import MergedRows
from bitline.model.meta_model import floating_dtype
from bitline.model.module_snapshot import unchanged_on_error
from bitline.model.renamed_names import Rename, RenamedNameMap
from bitline.model.weight_loader import WeightLoader
from bitline.packed_module import PackedModule
from bitline.platform import Platform, as_device
from bitline.select import Policy

_NAMES_FIX = "prefix= for a part of the checkpoint, rename= for other names (None leaves one out), strict=False for what matches"


@dataclass(frozen=True)
class Replaced:
    """What `replace_linears` did.

    Attributes:
        layers: Modules that are now a QuantLinear or QuantEmbedding, or rows of a merged one.
        dequantized: Modules that kept their own forward and got a dequantized weight.
        tensors: Parameters and buffers that were loaded unquantized.
        kept: Parameters and buffers that no file has, which are what they were.
        unused: Layers and tensors of the checkpoint, by its names, that were left out.
    """

    layers: tuple[str, ...]
    dequantized: tuple[str, ...]
    tensors: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]


@without_default_device
def replace_linears(
    module: nn.Module,
    checkpoint: Checkpoint | str | Path,
    *,
    prefix: str = "",
    rename: Rename | None = None,
    tensors: bool = True,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    policy: Policy | str | None = None,
    merge: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Replaced:
    """Run the linear layers of any torch module on a checkpoint's packed weights, in place.

    Each quantized layer of the checkpoint takes the place of the nn.Linear of its name, as a QuantLinear, or of the nn.Embedding,
    as a table that dequantizes the rows it looks up. The other tensors are loaded into the parameters and buffers of their names.
    For models that transformers has no architecture for; `load_model` is for those that it has.

    The module may be on the meta device, which keeps memory at the packed layers plus one; else the old weights stay until all
    new ones are there. Where an error is raised, nothing has changed. Tensors are taken as the file has them: a GGUF file's with
    the changes of llama.cpp's converter, such as the row order of `attn_q` and `attn_k` of Llama.
    `module.bitline_weights[name]()` reads a layer's canonical weight again; `bitline.verify(module)` compares all layers.

    A subclass of nn.Linear or nn.Embedding with a forward of its own, and the output projection of nn.MultiheadAttention, whose
    forward reads its weight, get a dequantized weight instead. `module.training` stays; loaded parameters do not require grad.

    Args:
        module: Any module; not itself the linear layer to replace.
        checkpoint: An open checkpoint, or what `load_model` takes: a folder, a file, a name on the Hugging Face hub.
        prefix: The checkpoint's name of the module; tensors outside of it are left out.
        rename: What to make of a tensor's name, without the prefix, "<layer>.weight" for a quantized layer: a function that
            returns the module's name, or None to leave it out; or a mapping of prefixes, such as {"transformer.h": "blocks"}.
        tensors: Load unquantized tensors too. False: quantized layers and their biases alone.
        strict: Every name has to match: each layer of the checkpoint, and with `tensors` each of its tensors and each parameter
            and persistent buffer of the module. False: what does not match stays as it is.
        device: Where the module is moved and runs; by default each part where it is, the CPU for the meta device.
        dtype: Of activations and floating-point tensors; by default the module's own.
        policy: How kernels are chosen, in any form that `Policy.of` accepts.
        merge: As in `load_model`: layers with one input as one, by default on a GPU.
        progress: Called with (tensors done, tensors in total).

    Returns:
        The names of what was replaced, loaded, kept and left out.

    Raises:
        CheckpointError: For a file that is damaged; names that do not match; shapes that differ; a layer whose module is no
            linear layer or has hooks; tensors on the meta device that no file has.
        InputError: For arguments of another kind, and linear layers of several dtypes where `dtype` does not say which.
        PlatformError: For a device that is not here.
        OutOfMemoryError: Where the device's memory is too small.
    """
    _check_module(module)
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(hub.resolve(checkpoint))
    target = None if device is None else as_device(device)
    if target is not None:
        Platform.detect(target)  # refuses a device that is not here
    asked = None if dtype is None else floating_dtype(dtype)
    names = RenamedNameMap(prefix, rename)
    loader = _ModuleLoader(module, opened, names, target, asked, policy, merge, progress, tensors=tensors, strict=strict)
    with unchanged_on_error(module):
        loader.match()
        load_weights(loader)
        changed: Any = module
        changed.bitline_weights = {**module.__dict__.get("bitline_weights", {}), **loader.read_weight}
        changed.bitline_checkpoint = opened
        if hasattr(module, "save_pretrained"):
            disable_weight_edits(module, opened.path)
    return loader.result()


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise InputError("replace_linears changes a torch module", found=type(module).__name__, expected="torch.nn.Module")
    if lazy := [name for name, tensor in module.named_parameters() if is_lazy(tensor)]:
        raise InputError("a lazy module has no shapes yet", tensor=lazy[0], fix="run it once on an example input")


class _ModuleLoader(WeightLoader):
    """Loads what matches into a module that has tensors already: those that a file has are first replaced by meta tensors."""

    shape_fix = "the module is of another size, or the name is another layer's"

    def __init__(
        self, module: nn.Module, checkpoint: Checkpoint, names: RenamedNameMap, device: torch.device | None,
        dtype: torch.dtype | None, policy: Policy | str | None, merge: bool | None, progress: Callable[[int, int], None] | None,
        *, tensors: bool, strict: bool,
    ) -> None:  # fmt: skip
        self.with_tensors, self.strict, self.device, self.asked = tensors, strict, device, dtype
        self.places = _devices_of(module)
        super().__init__(module, checkpoint, self._device_of, torch.float32, policy, progress, merge, names=names)
        packed = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, PackedModule))
        self.required = {name for name in self.required if not name.startswith(packed)}
        self.layers: dict[str, str] = {}  # the module's name by the checkpoint's
        self.matched: dict[str, str] = {}  # a parameter's by an unquantized tensor's
        self.unused: list[str] = []
        self.kept_biases: set[str] = set()
        self.tied = _tied(module)

    def _device_of(self, name: str) -> torch.device:
        found = self.device or self.places.get(name) or self.places.get(f"{name}.weight")
        return torch.device("cpu") if found is None or found.type == "meta" else found

    # ---- what goes where -------------------------------------------------------------------------------------------------

    def match(self) -> None:
        """Decide what goes where, and prepare the module for it."""
        self._match_layers()
        self._match_tensors()
        self._check_parameters()
        self.dtype = self._act_dtype()
        self._prepare()

    def _match_layers(self) -> None:
        """Find the module of each quantized layer."""
        modules, lost = dict(self.model.named_modules(remove_duplicate=False)), []
        for record in self.checkpoint.layers():
            target = self.names.module_name(record.name)
            if target is not None and target in modules:
                self._check_kind(target, modules[target], record)
                self.layers[record.name] = target
                continue
            self.unused.append(record.name)
            if target is not None:
                lost.append((record.name, target))
        if not self.layers or (lost and self.strict):
            linears = [name for name, part in modules.items() if isinstance(part, nn.Linear | nn.Embedding)]
            raise self._unmatched("quantized layers of the checkpoint have no module", lost, linears)

    def _match_tensors(self) -> None:
        """Find the parameter of each unquantized tensor that is to be loaded."""
        biases, lost = {f"{target}.bias" for target in self.layers.values()}, []
        for name in self.checkpoint.dense_names():
            target = self.names.parameter_name(name)
            if target in self.required and (self.with_tensors or target in biases):
                self.matched[name] = str(target)
                continue
            self.unused.append(name)
            if target is not None and self.with_tensors and not self._is_optional(name):
                lost.append((name, target))
        if lost and self.strict:
            raise self._unmatched("tensors of the checkpoint have no parameter in the module", lost, sorted(self.required))

    def _unmatched(self, what: str, lost: Sequence[tuple[str, str]], candidates: Sequence[str]) -> CheckpointError:
        """The error about names of the checkpoint, (its own, the module's), that match nothing; none where no layer is left."""
        if not lost:
            return CheckpointError("no quantized layer to replace a linear layer by", file=self.checkpoint.path,
                                   found="no quantized layer in the checkpoint, or none with this prefix and rename",
                                   fix=_NAMES_FIX)  # fmt: skip
        named = ", ".join(name if name == target else f"{name} (as {target})" for name, target in lost[:5])
        near = difflib.get_close_matches(lost[0][1], candidates, 1, 0.3)
        return CheckpointError(
            f"{len(lost)} {what}", file=self.checkpoint.path, tensor=lost[0][0], found=named + (", …" if len(lost) > 5 else ""),
            expected=f"names such as {near[0]}" if near else f"one of {len(candidates)} names in the module", fix=_NAMES_FIX,
        )  # fmt: skip

    def _check_kind(self, target: str, part: nn.Module, record: LayerRecord) -> None:
        """Refuse a module that cannot be replaced."""
        found, fix = "", None
        if not target:
            found, fix = "the module itself", "QuantLinear(checkpoint.layer(name).weight()) makes one"
        elif isinstance(part, PackedModule | MergedRows):
            found, fix = "a packed layer already", "start from a new module, or `QuantLinear.reload` it"
        elif not isinstance(part, nn.Linear | nn.Embedding):
            found, fix = type(part).__name__, "make it an nn.Linear, or leave the layer out by rename"
        elif isinstance(part, nn.Embedding) and part.max_norm is not None:
            found, fix = "an nn.Embedding that changes its rows (max_norm)", "leave the layer out by rename"
        elif record.spec.input_multiplier and not self._is_linear(part):
            found, fix = f"{type(part).__name__}, whose own forward knows of no input multiplier", "make it an nn.Linear"
        elif part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or "forward" in part.__dict__:
            found, fix = (
                "hooks, or a forward on the instance, which the packed layer would not have",
                "remove them, add them after",
            )
        if found:
            raise CheckpointError(
                "a quantized layer's module cannot be replaced", file=self._file(record), tensor=record.name,
                found=f"{target or 'no name'}: {found}", expected="an nn.Linear or nn.Embedding inside of the module", fix=fix,
            )  # fmt: skip

    def _check_parameters(self) -> None:
        """Refuse parameters that no file has, where all have to match, and tensors without values."""
        given = {*self.matched.values(), *self._of_layers()}
        given |= {name for names in self.tied if given & {*names} for name in names}
        if not (self.strict and self.with_tensors):
            return
        kept = sorted(self.required - given)
        meta = sorted(name for name, place in self.places.items() if place.type == "meta" and name not in given)
        for names, what, fix in (
            (kept, "parameters of the module are in no file", _NAMES_FIX),
            (meta, "tensors on the meta device are in no file", "build the module on a real device"),
        ):
            if names:
                raise CheckpointError(
                    f"{len(names)} {what}", file=self.checkpoint.path, tensor=names[0],
                    found=f"none of {', '.join(names[:5])}" + (", …" if len(names) > 5 else ""),
                    expected="a tensor of each name", fix=fix,
                )  # fmt: skip

    def _of_layers(self) -> Iterator[str]:
        """Names of the parameters that go with the modules of quantized layers."""
        for record in self.checkpoint.layers():
            if (target := self.layers.get(record.name)) is not None:
                yield f"{target}.weight"
                if record.spec.bias:
                    yield f"{target}.bias"

    def _act_dtype(self) -> torch.dtype:
        """What was asked for, else the dtype of the linear layers that are replaced."""
        if self.asked is not None:
            return self.asked
        found = {self.model.get_parameter(f"{target}.weight").dtype for target in self.layers.values()}
        if len(found) > 1:
            raise InputError("the layers to replace have several dtypes", found=", ".join(sorted(map(str, found))),
                             fix="dtype= says which one activations have")  # fmt: skip
        return found.pop()

    def _prepare(self) -> None:
        """Give every tensor the dtype and device that were asked for; those that a file has become meta tensors."""
        loads, moved = {*self.matched.values(), *self._of_layers()}, dict[int, Tensor]()
        for owner, part in self.model.named_modules(remove_duplicate=False):
            if isinstance(part, PackedModule):
                continue
            for leaf, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is None:
                    continue
                name = f"{owner}.{leaf}" if owner else leaf
                if id(tensor) not in moved:
                    moved[id(tensor)] = self._moved(tensor, "meta" if name in loads else self._device_of(name))
                tables: Any = part._parameters if leaf in part._parameters else part._buffers
                tables[leaf] = moved[id(tensor)]
        if not self.strict:
            self._keep_biases(loads)

    def _keep_biases(self, loads: set[str]) -> None:
        """Let packed layers have the module's own bias where no file has one."""
        for target in self.layers.values():
            bias = self.model.get_submodule(target)._parameters.get("bias")
            if bias is not None and not bias.is_meta and f"{target}.bias" not in loads:
                self.kept_biases.add(f"{target}.bias")
        self.loaded |= self.kept_biases

    def _moved(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor on a device in the dtype that was asked for; the tensor itself where it is so already."""
        if tensor.is_meta and str(device) != "meta":  # no values to move: allowed where names need not match
            device = "meta"
        dtype = self.asked if self.asked is not None and tensor.is_floating_point() else tensor.dtype
        moved = tensor.detach().to(device, dtype)
        if moved.device == tensor.device and moved.dtype == tensor.dtype:
            return tensor
        return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved

    # ---- how the loader differs for a module that is not transformers' ------------------------------------------------------

    def _target(self, record: LayerRecord) -> str | None:
        return self.layers.get(record.name)

    def _load_unquantized(self, name: str) -> bool:
        return name in self.matched and super()._load_unquantized(name)

    def _is_linear(self, module: nn.Module) -> bool:
        own = type(module).forward is nn.Linear.forward and not isinstance(module, NonDynamicallyQuantizableLinear)
        return isinstance(module, nn.Linear) and own

    def _tied_pairs(self) -> Sequence[tuple[str, str]]:
        return [pair for names in self.tied for pair in itertools.combinations(names, 2)]

    def _finish(self, unused: Sequence[str]) -> None:
        """Nothing: `match` has checked both sides."""

    def _load_quantized(self, target: str, record: LayerRecord) -> None:
        super()._load_quantized(target, record)
        if target not in self.read_weight and (bias := self._read(target, record).bias) is not None:
            part = self.model.get_submodule(target)
            self._assign(part, "bias", bias.to(self._device_of(target), part.get_parameter("weight").dtype), parameter=True)

    def result(self) -> Replaced:
        """What was done."""
        layers = {name for name in self.quantized if name in self.read_weight}
        kept = (self.required - self.loaded) | self.kept_biases
        return Replaced(
            tuple(sorted(layers)), tuple(sorted(self.quantized.keys() - layers)), tuple(sorted(self.matched.values())),
            tuple(sorted(kept)), tuple(self.unused),
        )  # fmt: skip


def _devices_of(module: nn.Module) -> dict[str, torch.device]:
    """The device of each parameter and buffer."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.device for name, tensor in named}


def _tied(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, tensor in module.named_parameters(remove_duplicate=False):
        found[id(tensor)].append(name)
    return [tuple(names) for names in found.values() if len(names) > 1]

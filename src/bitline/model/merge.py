"""Linear layers of a module that get the same input (query, key and value; gate and up) as one packed layer and one call.

The merged layer is a child of the module that has the siblings. Each sibling is replaced by a `MergedRows`, which returns its
rows of the merged layer's output. Within one call of the parent's forward the siblings share that output, keyed by the identity
and version of their input; outside of one, and where hooks could change the input between them, each computes it anew.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from bitline.linear import QuantLinear
from bitline.quantized_input import QuantizedInput

# Names of siblings in transformers' modules -> the merged layer's name.
SIBLINGS = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13",
    ("query", "key", "value"): "qkv", ("wq", "wk", "wv"): "wqkv",
}  # fmt: skip


class SharedCall:
    """The merged layer, and its last output while the parent's forward runs."""

    def __init__(self, layer: QuantLinear) -> None:
        self.layer = layer
        self.active = False
        self.entry: tuple[Any, Any, Any] | None = None  # input, its version, output

    def __call__(self, x: Any, *, alone: bool) -> Tensor:
        """The merged layer's output for x; alone: neither taken from nor kept for a sibling."""
        if alone or not self.active:
            self.entry = None
            y: Tensor = self.layer(x)
            return y
        version = _version(x)
        entry = self.entry  # read once: another thread may run the same module
        if entry is not None and entry[0] is x and entry[1] == version:
            found: Tensor = entry[2]
            return found
        y = self.layer(x)
        self.entry = (x, version, y)
        return y


def _version(x: Any) -> int:
    """Counts changes in place; 0 where torch does not count them. The source of the parent's forward was checked for them."""
    tensor = x.codes if isinstance(x, QuantizedInput) else x
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class MergedRows(nn.Module):
    """One of the merged layers: x [..., K] -> rows [start, stop) of the merged layer's output, a view.

    Attributes:
        in_features: K.
        out_features: N of this layer.
        source: The layer's name and format in the checkpoint it came from.
    """

    source: tuple[str, str] = ("", "")

    def __init__(self, shared: SharedCall, merged: str, start: int, stop: int) -> None:
        super().__init__()
        self.shared, self.merged, self.start, self.stop = shared, merged, start, stop
        self.in_features, self.out_features = shared.layer.in_features, stop - start

    def forward(self, x: Any) -> Tensor:
        """See the class; x as for QuantLinear."""
        alone = bool(
            self._forward_pre_hooks or self._forward_hooks or _module._global_forward_pre_hooks or _module._global_forward_hooks
        )
        return self.shared(x, alone=alone)[..., self.start : self.stop]

    def extra_repr(self) -> str:
        """For repr: K -> N, and where the rows are."""
        return f"{self.in_features} -> {self.out_features}, rows {self.start} to {self.stop} of {self.merged}"


def install(parent: nn.Module, names: tuple[str, ...], sizes: list[int], layer: QuantLinear) -> str:
    """Make `layer` a child of the parent, and its rows the children of these names; returns the child's name."""
    merged = SIBLINGS.get(names, "_".join(names))
    shared = SharedCall(layer)
    parent.add_module(merged, layer)
    start = 0
    for name, size in zip(names, sizes, strict=True):
        parent.add_module(name, MergedRows(shared, merged, start, start + size))
        start += size
    calls: Any = parent.__dict__.setdefault("_shared_calls", [])
    calls.append(shared)
    parent.__dict__["forward"] = MethodType(_forward, parent)
    return merged


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's forward, in which siblings share a call."""
    for shared in self._shared_calls:
        shared.active, shared.entry = True, None
    if torch.compiler.is_compiling():  # no graph break inside of a try statement could be resumed
        y = type(self).forward(self, *args, **kwargs)
        _end(self._shared_calls)
        return y
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        _end(self._shared_calls)


def _end(calls: list[SharedCall]) -> None:
    for shared in calls:
        shared.active, shared.entry = False, None


# ---- which modules call siblings with one input --------------------------------------------------------------------------


def sibling_names(parent: nn.Module) -> list[tuple[str, ...]]:
    """The children of a module that its forward calls with one input, by `SIBLINGS`."""
    if "forward" in parent.__dict__:
        return []
    cls: Any = type(parent)
    present = [names for names in SIBLINGS if all(name in parent._modules for name in names)]
    return [names for names in present if SIBLINGS[names] not in parent._modules and _share_input(cls, names)]


@functools.cache
def _share_input(cls: Any, names: tuple[str, ...]) -> bool:
    """Whether the forward of a class calls each of these children once, with one variable that does not change in between."""
    try:
        function = inspect.unwrap(cls.forward)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _child(node.func) in names]
    variables = {node.args[0].id for node in calls if len(node.args) == 1 and isinstance(node.args[0], ast.Name)}
    mentions = [node for node in ast.walk(tree) if _child(node) in names]
    if sorted(_child(c.func) for c in calls) != sorted(names) or len(mentions) != len(calls) or len(variables) != 1:
        return False
    if any(len(c.args) != 1 or not isinstance(c.args[0], ast.Name) or c.keywords for c in calls):
        return False
    first, last = (pick((c.lineno, c.col_offset) for c in calls) for pick in (min, max))
    (variable,) = variables
    return not any(_changes(node, variable) and first <= _at(node) <= last for node in ast.walk(tree))


def _child(node: ast.AST) -> str:
    """ "q_proj" for self.q_proj."""
    is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_self and isinstance(node, ast.Attribute) else ""


def _at(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _changes(node: ast.AST, variable: str) -> bool:
    """Whether a node assigns to the variable or its elements, or calls a method of it that works in place."""
    if isinstance(node, ast.Name):
        return node.id == variable and not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Subscript | ast.Attribute) or not isinstance(node.value, ast.Name) or node.value.id != variable:
        return False
    in_place = isinstance(node, ast.Attribute) and node.attr.endswith("_")
    return in_place or not isinstance(node.ctx, ast.Load)

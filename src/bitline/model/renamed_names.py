"""Tensor names of a checkpoint mapped to those of any torch module: a prefix and the caller's renaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from bitline.errors import InputError
from bitline.model.expert_names import ExpertPlace
from bitline.weight import QuantizedWeight

Rename = Mapping[str, str | None] | Callable[[str], str | None]


class RenamedNameMap:
    """NameMap of a module that transformers knows nothing of. Names may differ from the module's; tensors do not.

    prefix: names outside of this module of the checkpoint are left out; it is removed from the others. rename: what becomes of a
    tensor's name then, the quantized layer's being "<layer>.weight": a function, or prefixes by prefixes, of which the longest
    that ends at a dot counts; None leaves it out.
    """

    def __init__(self, prefix: str = "", rename: Rename | None = None) -> None:
        self._prefix = f"{prefix.rstrip('.')}." if prefix else ""
        self._rename = _by_prefix(rename) if isinstance(rename, Mapping) else rename
        if self._rename is not None and not callable(self._rename):
            raise InputError("rename is a function or a mapping of names", found=type(rename).__name__,
                             expected="a function of a tensor's name, or a dict of prefixes")  # fmt: skip

    def parameter_name(self, name: str) -> str | None:
        """The module's name of a tensor, None where it is left out."""
        if not name.startswith(self._prefix):
            return None
        name = name.removeprefix(self._prefix)
        if self._rename is None:
            return name
        found = self._rename(name)
        if not (found is None or isinstance(found, str)):
            raise InputError("rename gives names", tensor=name, found=repr(found), expected="a str, or None to leave it out")
        return found

    def module_name(self, name: str) -> str | None:
        """The module's name of a quantized layer's module, None where it is left out; "" for the module itself."""
        found = self.parameter_name(f"{name}.weight")
        return None if found is None else "" if found == "weight" else found.removesuffix(".weight")

    def expert_place(self, name: str, *, layer: bool) -> ExpertPlace | None:
        """None: an expert is a linear layer like others."""
        return None

    def convert_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def permute_rows(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight itself."""
        return weight

    def row_order(self, name: str, n: int) -> Tensor | None:
        """None: rows are in the file's order."""
        return None


def _by_prefix(table: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """The function of a mapping of prefixes."""
    order = sorted((key.rstrip(".") for key in table), key=len, reverse=True)
    targets = {key.rstrip("."): value for key, value in table.items()}

    def rename(name: str) -> str | None:
        for key in order:
            if not key or name == key or name.startswith(f"{key}."):
                target, rest = targets[key], name[len(key) :].lstrip(".")
                return None if target is None else ".".join(part for part in (target.rstrip("."), rest) if part)
        return name

    return rename

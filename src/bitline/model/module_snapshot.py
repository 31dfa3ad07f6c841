"""Undo of changes to a module's structure: its children, parameters, buffers and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


def snapshot(module: nn.Module) -> Callable[[], None]:
    """What gives a module, and all modules that are in it now, the entries that they have now. It holds their tensors, which must
    not be changed in place.
    """
    saved = [(part, dict(part.__dict__), {name: part.__dict__[name].copy() for name in _TABLES}) for part in module.modules()]

    def restore() -> None:
        for part, attributes, tables in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for name, table in tables.items():
                part.__dict__[name].clear()
                part.__dict__[name].update(table)

    return restore


@contextlib.contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[None]:
    """Restore a module where the block raises."""
    restore = snapshot(module)
    try:
        yield
    except BaseException:
        restore()
        raise

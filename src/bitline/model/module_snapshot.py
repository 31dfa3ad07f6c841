"""Undo of changes to a module's structure: its children, parameters, buffers and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers")


@contextlib.contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[None]:
    """Restore a module, and all modules in it, where the block raises. Tensors themselves must not be changed in place."""
    saved = [
        (part, dict(part.__dict__), {name: dict(part.__dict__[name]) for name in _TABLES}, set(part._non_persistent_buffers_set))
        for part in module.modules()
    ]
    try:
        yield
    except BaseException:
        for part, attributes, tables, non_persistent in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for name, table in tables.items():
                part.__dict__[name].clear()
                part.__dict__[name].update(table)
            part._non_persistent_buffers_set = non_persistent
        raise

"""Which readers there are: registered ones, the built-in ones, and those of installed packages."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bitline import formats
from bitline.formats.base import LayerRecord, Reader, TensorSource

ENTRY_POINTS = "bitline.formats"

registered: list[Reader] = []
plugin_failures: dict[str, str] = {}
log = logging.getLogger("bitline")


def register_format(reader: Reader | type) -> None:
    """Add a reader, an object of the Reader protocol or a class of such objects; it has precedence over the built-in ones.

    One of the same name is replaced. Packages register through entry points of the group "bitline.formats" instead.
    """
    made = _instance(reader)
    registered[:] = [made, *(r for r in registered if r.name != made.name)]


def readers(method: str = "") -> Iterator[Reader]:
    """Registered readers, then the built-in ones, then those of installed packages, imported one by one as needed.

    Built-in is every module under bitline.formats that has a READER. No two of them match the same checkpoint, so their
    order only affects speed: a module named like the method, or in a package of that name, comes first.
    """
    yield from registered
    wanted = method.replace("-", "_")
    for name in sorted(_modules(tuple(formats.__path__)), key=lambda name: (wanted not in name.split("."), name)):
        reader = getattr(importlib.import_module(f"bitline.formats.{name}"), "READER", None)
        if reader is not None:
            yield reader
    for point in entry_points(group=ENTRY_POINTS):
        try:
            yield _PluginReader(point, _instance(point.load()))
        except (Exception, SystemExit) as error:
            _report(point, "load", error)


@functools.cache
def _modules(path: tuple[str, ...]) -> tuple[str, ...]:
    """Names under bitline.formats of the modules that may have a reader."""
    prefix = f"{formats.__name__}."
    found = pkgutil.walk_packages(path, prefix)
    return tuple(module.name.removeprefix(prefix) for module in found if not module.ispkg)


def _instance(reader: Any) -> Reader:
    made = reader() if isinstance(reader, type) else reader
    missing = [name for name in ("name", "matches", "layers") if not hasattr(made, name)]
    if missing:
        raise TypeError(f"{reader!r} is no format reader: it lacks {', '.join(missing)}")
    return made


class _PluginReader:
    """A third-party reader. An exception in its `matches` is reported and means that it does not match."""

    def __init__(self, point: EntryPoint, reader: Reader) -> None:
        self._point, self._reader, self.name = point, reader, str(reader.name)

    def matches(self, source: TensorSource) -> bool:
        try:
            return bool(self._reader.matches(source))
        except (Exception, SystemExit) as error:
            _report(self._point, "look at a checkpoint", error)
            return False

    def layers(self, source: TensorSource) -> Iterable[LayerRecord]:
        return self._reader.layers(source)


def _report(point: EntryPoint, what: str, error: BaseException) -> None:
    plugin_failures[point.name] = f"{type(error).__name__}: {error}"
    log.warning("format plug-in %s (%s) failed to %s: %s", point.name, point.value, what, plugin_failures[point.name])

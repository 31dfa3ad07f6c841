"""Costs of kernels measured on this machine by `bitline tune`: one JSON file for each machine, in the user's cache folder.

The file's name is a hash of what times depend on: the CPU or GPU, its ISA features, the number of threads, and the versions of
Bitline, torch and the packages that kernels use. Its content is not trusted: a file of another machine or schema, or with
anything but positive numbers of seconds, is ignored with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from bitline import env, native
from bitline.platform import Platform, device_name, installed_packages
from bitline.types import LinearSpec
from bitline.version import __version__

log = logging.getLogger("bitline")

SCHEMA = 1
MAX_BYTES = 1 << 24  # of a file
MAX_LAYERS = 4096  # in a file; the layers tuned longest ago are dropped

_M = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=1e-9, le=1e6)]


class LayerTimes(msgspec.Struct, frozen=True):
    """What was measured for one layer.

    Attributes:
        seconds: Seconds of one call, by kernel class name and M.
        failed: Kernels whose result was wrong, or that raised, and how.
    """

    seconds: dict[str, dict[_M, _Seconds]] = msgspec.field(default_factory=dict)
    failed: dict[str, str] = msgspec.field(default_factory=dict)

    def of(self, kernel: str, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """A kernel's seconds at each of these M; () where one was not measured, or the kernel failed."""
        times = self.seconds.get(kernel, {})
        return tuple(times[m] for m in sizes) if kernel not in self.failed and all(m in times for m in sizes) else ()

    def updated(self, new: LayerTimes) -> LayerTimes:
        """These times with newer ones, which replace a kernel's at the same M and its failure."""
        seconds = {k: times for k, times in self.seconds.items() if k not in new.failed}
        seconds |= {k: seconds.get(k, {}) | times for k, times in new.seconds.items()}
        return LayerTimes(seconds, {k: why for k, why in self.failed.items() if k not in new.seconds} | new.failed)


Measurements = Mapping[str, LayerTimes]  # by `key_of` the layer
UNTIMED = LayerTimes()


class _File(msgspec.Struct):
    schema: int
    machine: dict[str, str]
    layers: dict[str, LayerTimes]


_Signature = tuple[int, int, int]  # inode, modification time, size: changes when another process has replaced the file
_lock = threading.Lock()
_known: dict[Path, tuple[_Signature | None, Measurements]] = {}  # what was read or written last


def key_of(spec: LinearSpec) -> str:
    """The key of a layer: its text form, without bias and input multiplier, which change no ranking."""
    return spec.replace(bias=False, input_multiplier=False).key


def machine(platform: Platform) -> dict[str, str]:
    """What the times of a detected platform depend on."""
    packages = dict(installed_packages())
    facts = {"device": device_name(platform.device), "platform": str(dataclasses.replace(platform, packages=frozenset()))}
    if platform.vendor == "cpu":
        facts["isa"] = native.isa() or "none"
        if not platform.interpreted:
            packages.pop("triton", None)
    facts |= {"interpreted": str(platform.interpreted), "bitline": __version__, "torch": str(torch.__version__)}
    return facts | {"packages": ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))}


def path_of(platform: Platform) -> Path:
    """The file of a detected platform, which need not exist."""
    return _path(machine(platform))


def _path(facts: Mapping[str, str]) -> Path:
    return env.cache_dir() / "tuned" / _file_name(tuple(facts.items()))


@functools.lru_cache(maxsize=64)
def _file_name(items: tuple[tuple[str, str], ...]) -> str:
    facts = dict(items)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")[:48]
    return f"{name}-{digest[:16]}.json"


def load(platform: Platform) -> Measurements:
    """The measurements of a platform that `Platform.detect` made; none for any other.

    The file is read again only when it has changed. Raises nothing: without a readable file there are no measurements.
    `$BITLINE_NO_TUNED` ignores it.
    """
    if not platform.device or env.no_tuned():
        return {}
    try:
        facts = machine(platform)
        path = _path(facts)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # no home folder, or the driver fails
        log.debug("no measured costs: %s", error)
        return {}
    return _load(path, facts)


def _load(path: Path, facts: Mapping[str, str]) -> Measurements:
    with _lock:
        signature = _signature(path)
        if path not in _known or _known[path][0] != signature:
            layers: Measurements = {}
            if signature is not None:
                try:
                    layers = _read(path, facts)
                except (OSError, ValueError, RecursionError) as error:
                    log.warning("ignoring the measured costs in %s: %s", path, str(error) or type(error).__name__)
            _known[path] = (signature, layers)
        return _known[path][1]


def _signature(path: Path) -> _Signature | None:
    """None where there is no such file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path, facts: Mapping[str, str]) -> Measurements:
    """The layers of a file. ValueError: it is none of ours, or another machine's."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    try:
        found = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a file of `bitline tune`: {error}") from error
    if found.schema != SCHEMA:
        raise ValueError(f"schema {found.schema}, expected {SCHEMA}")
    if found.machine != facts:
        raise ValueError("it is another machine's")
    return found.layers


def save(platform: Platform, layers: Measurements) -> Path | None:
    """Add measurements to the file of a detected platform, and to what this process knows.

    The file is replaced as a whole, so that no reader sees half of it. Of two processes that write at the same time, the later
    one may drop what the earlier one has added.

    Returns:
        The file; None where it cannot be written, which is logged.
    """
    facts = machine(platform)
    try:
        path = _path(facts)
    except RuntimeError as error:
        log.warning("cannot keep the measured costs: %s", error)
        return None
    merged = dict(_load(path, facts))
    for key, times in layers.items():
        merged[key] = merged.pop(key, UNTIMED).updated(times)  # moved to the end
    merged = dict(list(merged.items())[-MAX_LAYERS:])
    content = msgspec.json.encode(_File(SCHEMA, facts, merged))
    written = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
        written = True
    except OSError as error:
        log.warning("cannot keep the measured costs in %s: %s", path, error)
    with _lock:
        _known[path] = (_signature(path), merged)
    return path if written else None


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

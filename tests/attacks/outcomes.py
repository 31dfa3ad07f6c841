"""The two outcomes that a checkpoint may have: the right weight, or a CheckpointError that says where. Anything else is a bug.

`outcome` reads a checkpoint as a program would, with room for no more than the file and 64 MB, and holds every weight that
loads against the oracle.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import oracle
from oracle_files import Layer, NoReading

import bitline
from bitline.errors import CheckpointError
from bitline.weight import QuantizedWeight

SLACK = 64 << 20  # bytes beside the file itself
GUARD = 60  # seconds after which a checkpoint is said to hang; none takes more than a fraction of one
EXTRAS = ("bias", "input_scale", "input_zero", "input_multiplier")


class Hangs(BaseException):
    """Not an Exception, so that nothing on the way takes it for an error of its own."""


def _hangs(*_: object) -> None:
    raise Hangs


@contextlib.contextmanager
def guarded(seconds: int = GUARD) -> Iterator[None]:
    """Hangs instead of hanging."""
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def within(nbytes: int) -> Iterator[None]:
    """At most this much more address space than there is now (Linux; elsewhere there is no such limit)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    here = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (here + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def room(path: Path) -> int:
    """What reading a checkpoint may take: its files' size and 64 MB."""
    try:
        files = [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()] if path.is_dir() else [path]
        return SLACK + sum(p.stat().st_size for p in files)
    except (OSError, ValueError):  # a path that is none
        return SLACK


def outcome(path: Path) -> CheckpointError | None:
    """None where every layer loads as the right weight, the error where there is one. Else an AssertionError says what."""
    with within(room(path)):
        try:
            records = bitline.open_checkpoint(path).layers()
            weights = {record.name: record.weight() for record in records}
        except CheckpointError as error:
            return error.with_traceback(None)
    assert all(weights[record.name].spec == record.spec for record in records)
    right(path, weights)
    return None


def right(path: Path, weights: dict[str, QuantizedWeight]) -> None:
    """Every layer that the checkpoint has, and each as the oracle reads it."""
    try:
        wanted = oracle.layers(path)
    except NoReading as error:
        assert not weights, f"loads, and has no sound reading: {error}"
        return
    assert weights.keys() == wanted.keys(), f"layers {sorted(weights.keys() ^ wanted.keys())}"
    for name, weight in weights.items():
        _same(name, weight, wanted[name])


def _same(name: str, weight: QuantizedWeight, wanted: Layer) -> None:
    found = weight.dequantize().numpy()
    assert oracle.same(found, wanted.weight, wanted.slack), f"a silent wrong answer: {name} {_differ(found, wanted.weight)}"
    extras = {extra: getattr(weight, extra) for extra in EXTRAS if getattr(weight, extra) is not None}
    assert extras.keys() == wanted.extras.keys(), f"{name} has {sorted(extras)}, not {sorted(wanted.extras)}"
    for extra, tensor in extras.items():
        values = np.asarray(wanted.extras[extra], np.float32).reshape(-1)
        assert np.array_equal(tensor.float().numpy().reshape(-1), values), f"a silent wrong answer: {extra} of {name}"


def _differ(found: np.ndarray, wanted: np.ndarray) -> str:
    if found.shape != wanted.shape:
        return f"is {found.shape}, not {wanted.shape}"
    at = np.argwhere(~((found == wanted) | (np.isnan(found) & np.isnan(wanted))))
    return f"differs in {len(at)} of {found.size}, at {at[0]}: {found[tuple(at[0])]}, not {wanted[tuple(at[0])]}"


def unneeded(path: Path) -> bool:
    """Whether a refusal was not needed: the oracle reads every layer, and all its numbers are finite."""
    try:
        wanted = oracle.layers(path)
    except NoReading:
        return False
    return all(np.isfinite(layer.weight).all() for layer in wanted.values())


def says_where(error: CheckpointError, path: Path, *, tensor: bool = False, place: bool = True) -> None:
    """Hold an error against what it promises to name. tensor: it has to be a tensor; place: that, or a field of a config."""
    text = str(error)
    assert error.file is not None and (error.file == str(path) or Path(error.file).is_relative_to(path)), text
    assert error.found or error.expected or error.fix, text
    assert len(text) < 4000 and text.replace("\n", "").isprintable(), text
    assert "cannot be read as what it says it is" not in text, f"an accident, not a refusal: {text}"
    assert not tensor or error.tensor, f"no tensor: {text}"
    assert not place or error.tensor or error.field, f"neither tensor nor field: {text}"


def arena() -> str | None:
    """A folder in memory for files that live for a millisecond, None where there is no such thing."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, in memory where possible, that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=arena(), prefix="bitline-") as folder:
        yield Path(folder)


def put(file: Path, content: bytes) -> None:
    """A new file in the place of another one, which may still be mapped."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)

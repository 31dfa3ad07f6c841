"""The two outcomes of a checkpoint: the right weight, or a CheckpointError that says where. Anything else is a bug.

`outcome` reads a checkpoint as a program would, with address space for the file and 64 MB, and checks every weight that
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
from oracle_files import Layer, Unreadable

import bitline
from bitline.errors import CheckpointError
from bitline.weight import QuantizedWeight

MARGIN = 64 << 20  # bytes beside the file itself
GUARD = 60  # seconds after which reading counts as a hang; no checkpoint takes more than a fraction of one
EXTRAS = ("bias", "input_scale", "input_zero", "input_multiplier")


class Hangs(BaseException):
    """Not an Exception, so that no except clause swallows it."""


def _hangs(*_: object) -> None:
    raise Hangs


@contextlib.contextmanager
def time_limit(seconds: int = GUARD) -> Iterator[None]:
    """Raise Hangs after this time."""
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def address_space_limit(nbytes: int) -> Iterator[None]:
    """Limit the address space to this much more than now (on Linux; no limit elsewhere)."""
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


def memory_limit(path: Path) -> int:
    """The memory that reading a checkpoint may take: the size of its files and 64 MB."""
    try:
        files = [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()] if path.is_dir() else [path]
        return MARGIN + sum(p.stat().st_size for p in files)
    except (OSError, ValueError):  # not a valid path
        return MARGIN


def outcome(path: Path) -> CheckpointError | None:
    """None where every layer loads as the right weight, else the CheckpointError. An AssertionError for any other outcome."""
    with address_space_limit(memory_limit(path)):
        try:
            records = bitline.open_checkpoint(path).layers()
            weights = {record.name: record.weight() for record in records}
        except CheckpointError as error:
            return error.with_traceback(None)
    assert all(weights[record.name].spec == record.spec for record in records)
    check_weights(path, weights)
    return None


def check_weights(path: Path, weights: dict[str, QuantizedWeight]) -> None:
    """The layers are those that the oracle finds, and each weight is as the oracle reads it."""
    try:
        expected = oracle.layers(path)
    except Unreadable as error:
        assert not weights, f"loads, but the oracle cannot read it: {error}"
        return
    assert weights.keys() == expected.keys(), f"layers {sorted(weights.keys() ^ expected.keys())}"
    for name, weight in weights.items():
        _same(name, weight, expected[name])


def _same(name: str, weight: QuantizedWeight, expected: Layer) -> None:
    found = weight.dequantize().numpy()
    assert oracle.same(found, expected.weight, expected.tolerance), f"a wrong weight: {name} {_differ(found, expected.weight)}"
    extras = {extra: getattr(weight, extra) for extra in EXTRAS if getattr(weight, extra) is not None}
    assert extras.keys() == expected.extras.keys(), f"{name} has {sorted(extras)}, not {sorted(expected.extras)}"
    for extra, tensor in extras.items():
        values = np.asarray(expected.extras[extra], np.float32).reshape(-1)
        assert np.array_equal(tensor.float().numpy().reshape(-1), values), f"a wrong weight: {extra} of {name}"


def _differ(found: np.ndarray, expected: np.ndarray) -> str:
    if found.shape != expected.shape:
        return f"is {found.shape}, not {expected.shape}"
    at = np.argwhere(~((found == expected) | (np.isnan(found) & np.isnan(expected))))
    return f"differs in {len(at)} of {found.size}, at {at[0]}: {found[tuple(at[0])]}, not {expected[tuple(at[0])]}"


def is_unneeded_refusal(path: Path) -> bool:
    """Whether a refusal was unnecessary: the oracle reads every layer, and all values are finite."""
    try:
        expected = oracle.layers(path)
    except Unreadable:
        return False
    return all(np.isfinite(layer.weight).all() for layer in expected.values())


def check_error(error: CheckpointError, path: Path, *, tensor: bool = False, located: bool = True) -> None:
    """Check what an error names. tensor: it must name a tensor. located: it must name a tensor or a config field."""
    text = str(error)
    assert error.file is not None and (error.file == str(path) or Path(error.file).is_relative_to(path)), text
    assert error.found or error.expected or error.fix, text
    assert len(text) < 4000 and text.replace("\n", "").isprintable(), text
    assert "cannot be read as what it says it is" not in text, f"an exception in a reader, not a refusal: {text}"
    assert not tensor or error.tensor, f"no tensor: {text}"
    assert not located or error.tensor or error.field, f"neither tensor nor field: {text}"


def shm_folder() -> str | None:
    """A folder in memory, None where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty temporary folder, in memory where possible."""
    with tempfile.TemporaryDirectory(dir=shm_folder(), prefix="bitline-") as folder:
        yield Path(folder)


def replace_file(file: Path, content: bytes) -> None:
    """Replace a file that may still be mapped."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)

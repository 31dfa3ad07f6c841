"""One module with a `weight` and its scales beside it: the checks of headers that FP8 and ModelOpt have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitline.errors import CheckpointError, WeightError
from bitline.formats._patterns import Effort, Pattern, PatternError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, in_tensor
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
NUMBER = ((), (1,), (1, 1))  # shapes of a single number


class Module:
    """A module under inspection: its tensors by suffix, and what was noticed.

    main: the header of its `weight`. oddities: see LayerRecord.
    """

    def __init__(self, source: TensorSource, base: str) -> None:
        self.source, self.base = source, base
        self.oddities: list[str] = []
        self._used: list[str] = []
        self.main = self.need("weight", None)

    def find(self, *suffixes: str) -> TensorInfo | None:
        """The header of the first of these tensors that is there, noted as used; None where none is."""
        for suffix in suffixes:
            info = self.source.tensors.get(f"{self.base}.{suffix}")
            if info is not None:
                if info.name not in self._used:
                    self._used.append(info.name)
                return info
        return None

    def need(self, suffix: str, dtypes: tuple[torch.dtype, ...] | None, *others: str) -> TensorInfo:
        """The header of a tensor that has to be there under one of its names, with one of these dtypes (None: any)."""
        info = self.find(suffix, *others)
        if info is None:
            raise CheckpointError(
                "a quantized layer lacks a tensor", file=self.source.path, tensor=f"{self.base}.{suffix}",
                expected=" or ".join((suffix, *others)), fix="a shard is missing or the checkpoint was cut: download it again",
            )  # fmt: skip
        if dtypes is not None and info.dtype not in dtypes:
            raise self.error(info, "a tensor has another dtype than its format", info.dtype, " or ".join(map(str, dtypes)))
        return info

    def number(self, suffix: str, *others: str) -> TensorInfo:
        """The header of a float scalar that has to be there."""
        info = self.need(suffix, FLOATS, *others)
        if info.shape not in NUMBER:
            raise self.error(info, "not a single number", list(info.shape), "[] or [1]")
        return info

    def matrix(self) -> tuple[int, int]:
        """The shape of `weight`, which has to be a matrix."""
        if len(self.main.shape) != 2 or 0 in self.main.shape:
            expected = "[rows, columns]; experts that are stacked in one tensor are not supported yet"
            raise self.error(self.main, "not the matrix of a linear layer", list(self.main.shape), expected)
        return self.main.shape[0], self.main.shape[1]

    def vector(self, suffix: str, size: int, what: str) -> TensorInfo | None:
        """The header of an optional float vector of this size; None where it is absent."""
        info = self.find(suffix)
        if info is not None and (info.shape not in ((size,), (1, size)) or info.dtype not in FLOATS):
            raise self.error(info, f"{what} does not fit its weight", f"{info.dtype} {list(info.shape)}", f"floats [{size}]")
        return info

    def unfit(self, info: TensorInfo, n: int, k: int, expected: object) -> CheckpointError:
        """The error about scales of another shape than the weight's."""
        return self.error(info, f"scales do not fit a [{n}, {k}] weight", list(info.shape), expected)

    def read(self, info: TensorInfo, *shape: int) -> Tensor:
        """A tensor's data, in this shape where one is given."""
        data = self.source.read(info.name)
        return data.reshape(shape) if shape else data

    def error(self, info: TensorInfo, what: str, found: object, expected: object) -> CheckpointError:
        """An error about one tensor."""
        return CheckpointError(what, file=info.file, tensor=info.name, found=found, expected=expected)

    def record(
        self, label: str, spec: LinearSpec, build: Callable[[], QuantizedWeight], fields: Mapping[str, TensorInfo | None]
    ) -> LayerRecord:
        """The layer record. fields: the tensors that the fields of the weight come from, for errors."""

        def read() -> QuantizedWeight:
            try:
                return build()
            except WeightError as error:
                raise in_tensor(error, self.main, fields) from error

        nbytes = sum(self.source.tensors[name].nbytes for name in self._used)
        return LayerRecord(self.base, label, spec, tuple(self._used), read, nbytes, tuple(self.oddities))


class Hints:
    """A config's list of modules that were left alone. The tensors decide; what the list says else is an oddity.

    Entries name a module, or one that holds it; `*` and `?` are wildcards, "re:" begins an expression.
    """

    def __init__(self, entries: Iterable[str], file: Path) -> None:
        self._names: set[str] = set()
        self._patterns: list[Pattern] = []
        effort = Effort()
        for entry in dict.fromkeys(entries):
            try:
                if entry.startswith("re:"):
                    self._patterns.append(Pattern(entry[3:], effort))
                elif "*" in entry or "?" in entry:
                    self._patterns.append(Pattern(_glob(entry), effort))
                else:
                    self._names.add(entry)
            except PatternError as error:
                raise CheckpointError(
                    "an entry of the list of modules left alone is no regular expression", file=file, found=f"{entry!r}: {error}"
                ) from error

    def note(self, module: Module) -> None:
        """Add an oddity where the list names a module whose tensors are quantized."""
        parts = module.base.split(".")
        named = any(".".join(parts[: i + 1]) in self._names for i in range(len(parts)))
        if named or any(p.match(module.base) for p in self._patterns):
            module.oddities.append("the config says that this layer is not quantized, yet its tensors are")


def _glob(text: str) -> str:
    """A regular expression for a whole name with wildcards."""
    out = "".join(".*" if c == "*" else "." if c == "?" else f"\\{c}" if not c.isalnum() and c != "_" else c for c in text)
    return f"{out}$"

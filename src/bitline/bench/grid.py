"""Problems in lines of text, in the style of oneDNN's benchdnn: options that hold until they are changed, and shapes.

    # decode and prefill of two schemes
    --mode=C --m=1,16 --scheme=W4A16:g128,FP8_DYNAMIC
    4096x4096 4096x14336
    --m=1..512 --skip-impl=TorchInt4Pack  1024x4096

Words are separated by blanks. A word with `--` sets an option for the rest of its line and of the file; any other word is a shape
NxK, which makes a problem for each scheme and dtype, or the text form of a LinearSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bitline.bench.schemes import parse_shape, scheme_of
from bitline.errors import BitlineError, InputError
from bitline.select import Policy, resolve_names
from bitline.types import LinearSpec, dtype_name

MAX_M = 1 << 16
_MAX_BYTES, _MAX_PROBLEMS = 1 << 22, 100_000  # of a file
_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """What holds for the problems that follow.

    Attributes:
        mode: "C", correctness; "P", performance; "CP", both. Whatever is timed is checked first.
        schemes: Texts of `scheme_of`.
        sizes: Batch sizes M.
        dtypes: Activation dtypes; None: the device's default.
        kernels: Class names of the kernels to run; () for all that can run the layer.
        skipped: Class names of kernels not to run, and whose refusal is no failure.
    """

    mode: str = "P"
    schemes: tuple[str, ...] = ("W4A16",)
    sizes: tuple[int, ...] = (1, 256)
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    kernels: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Problem:
    """A layer to run.

    Attributes:
        spec: The layer.
        options: How to run it; its mode, sizes, kernels and skipped count.
        scheme: The scheme's text; the spec's own where it has no name.
        line: Number of its line in a batch file; 0 elsewhere.
        layers: Names of a checkpoint's layers that have the spec.
    """

    spec: LinearSpec
    options: Options
    scheme: str = ""
    line: int = 0
    layers: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """The problem as a line of a batch file."""
        o = self.options
        words = [f"--mode={o.mode}", f"--m={','.join(map(str, o.sizes))}"]
        words += [f"--kernel={','.join(o.kernels)}"] if o.kernels else []
        words += [f"--skip-impl={','.join(sorted(o.skipped))}"] if o.skipped else []
        if not self.scheme:
            return " ".join([*words, self.spec.key])
        words += [f"--dtype={dtype_name(self.spec.act_dtype)}", f"--scheme={self.scheme}"]
        return " ".join([*words, f"{self.spec.n}x{self.spec.k}"])


def read_grid(path: Path | str, dtype: torch.dtype, options: Options | None = None) -> list[Problem]:
    """The problems of a batch file. Arguments and errors as `parse_grid`, and an InputError for a file that cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError("cannot read the batch file", file=path, found=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise InputError("a batch file is text in UTF-8", file=path, found=f"byte {data[error.start]:#04x}") from error
    if len(data) > _MAX_BYTES:
        raise InputError("the batch file is too large", file=path, expected=f"at most {_MAX_BYTES >> 20} MiB")
    return parse_grid(text, dtype, options, path)


def parse_grid(text: str, dtype: torch.dtype, options: Options | None = None, file: Path | str | None = None) -> list[Problem]:
    """The problems of a batch file's text, in its order.

    Args:
        text: Lines; what follows a `#` is a comment.
        dtype: The activation dtype of `--dtype=auto`.
        options: What holds at the beginning, and again after `--reset`.
        file: Named in errors.

    Raises:
        InputError: For a line that is not valid, with its number; and for a file without a problem.
    """
    first = current = options or Options()
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.partition("#")[0].split():
            try:
                if word == "--reset":
                    current = first
                elif word.startswith("-"):
                    current = with_option(current, word)
                else:
                    problems += problems_of(word, current, dtype, number)
                if len(problems) > _MAX_PROBLEMS:
                    raise InputError("too many problems", expected=f"at most {_MAX_PROBLEMS}")
            except BitlineError as error:
                raise InputError(error.what, file=file, field=f"line {number}", found=error.found or repr(word),
                                 expected=error.expected, fix=error.fix) from error  # fmt: skip
    if not problems:
        raise InputError("a batch file without a problem", file=file, expected="a line with a shape, for example 4096x4096")
    return problems


def with_option(options: Options, word: str) -> Options:
    """The options with one of them changed: `--scheme=W4A16:g128,FP8`. Raises InputError or NoKernelError."""
    name, equals, value = word.partition("=")
    if name not in _OPTIONS or not equals:
        raise InputError("not an option of a batch file", found=repr(word),
                         expected=", ".join([*(f"{known}=…" for known in _OPTIONS), "--reset"]))  # fmt: skip
    field_name, parse = _OPTIONS[name]
    return replace(options, **{field_name: parse(value)})


def problems_of(word: str, options: Options, dtype: torch.dtype, line: int = 0) -> list[Problem]:
    """The problems of a shape NxK, or of a LinearSpec's text form. Raises InputError."""
    if ";" in word:
        return [Problem(_parse_spec(word), options, line=line)]
    n, k = parse_shape(word)
    pairs = [(scheme, act_dtype) for scheme in options.schemes for act_dtype in options.dtypes]
    return [Problem(scheme_of(scheme, n, k, own or dtype), options, scheme, line) for scheme, own in pairs]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes M: `1,16,300`; `1..4096` are 1, 4096 and the powers of two between. Raises InputError."""
    found: dict[int, None] = {}
    for part in _items(text):
        low, dots, high = part.partition("..")
        if not all(p.isascii() and p.isdigit() and 0 < int(p[:9]) <= MAX_M for p in ((low, high) if dots else (low,))):
            expected = f"whole numbers from 1 to {MAX_M}: 1,16,300 or 1..4096"
            raise InputError("not batch sizes M", found=repr(text), expected=expected)
        first, last = int(low), int(high or low)
        if first > last:
            raise InputError("a range of batch sizes M that ends before it begins", found=repr(part), expected=f"{last}..{first}")
        powers = [1 << i for i in range(17) if first <= 1 << i <= last]
        found |= dict.fromkeys([first, *powers, last])
    return tuple(found)


def parse_mode(text: str) -> str:
    """ "C", "P" or "CP". Raises InputError."""
    mode = "".join(sorted(text.upper()))
    if mode not in ("C", "P", "CP"):
        raise InputError("not a mode", found=repr(text), expected="C (correctness), P (performance) or CP")
    return mode


def parse_kernels(text: str) -> tuple[str, ...]:
    """Class names of kernels, named as tables print them; () for `all`. Raises NoKernelError for an unknown one."""
    names = _items(text)
    if names == ["all"]:
        return ()
    return tuple(dict.fromkeys(resolve_names(Policy(kernel=name)).kernel for name in names))


def _parse_skipped(text: str) -> frozenset[str]:
    return frozenset(parse_kernels(text)) if text.strip() not in ("", "none") else frozenset()


def _parse_dtypes(text: str) -> tuple[torch.dtype | None, ...]:
    names = _items(text)
    if unknown := [name for name in names if name not in _DTYPES]:
        raise InputError("not an activation dtype", found=unknown[0], expected=", ".join(_DTYPES))
    return tuple(_DTYPES[name] for name in names)


def _parse_schemes(text: str) -> tuple[str, ...]:
    names = _items(text)
    for name in names:  # 4096 x 4096 is a multiple of every block, so that only the name can be wrong
        scheme_of(name, 4096, 4096)
    return tuple(names)


def _parse_spec(text: str) -> LinearSpec:
    try:
        return LinearSpec.parse(text)
    except (ValueError, KeyError, IndexError) as error:
        raise InputError("not the text form of a LinearSpec", found=repr(text)) from error


def _items(text: str) -> list[str]:
    """The items of a comma-separated list, each once. Raises InputError for an empty list or item."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise InputError("an empty item in a list", found=repr(text), expected="items separated by commas, without blanks")
    return list(dict.fromkeys(items))


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--mode": ("mode", parse_mode), "--scheme": ("schemes", _parse_schemes), "--m": ("sizes", parse_sizes),
    "--dtype": ("dtypes", _parse_dtypes), "--kernel": ("kernels", parse_kernels), "--skip-impl": ("skipped", _parse_skipped),
}  # fmt: skip

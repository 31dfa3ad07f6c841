"""Baselines: what `bitline bench` times beside the kernels, such as another project's operator, on the same weight and input.

A file of baselines is Python that sets `BASELINES`, from names to functions of the weight:

    def scaled_product(weight):
        if weight.spec.weight.name != "int8":
            return None  # not for such layers
        return Baseline([codes, scales], lambda x, codes, scales: their_operator(x, codes, scales))

    BASELINES = {"theirs": scaled_product}
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitline.errors import InputError, summary_of
from bitline.weight import QuantizedWeight

MAX_DEVIATION = 0.05  # others round, and quantize activations, elsewhere than the reference


def _same(x: Any, *_: Any) -> Any:
    return x


@dataclass(frozen=True)
class Baseline:
    """A layer of somebody else's, made from a weight.

    Attributes:
        tensors: What holds the weight; timed calls rotate through copies of it, so that no cache does.
        call: What is timed: call(x, *tensors).
        enter: Applied to x [M, K] before the timed calls: another dtype or layout, or activations quantized in advance.
        leave: leave(result, what `enter` gave), not timed: the output that is compared, whose first M rows are [M, N].
        cuda_graph: Whether a CUDA graph can hold the call.
    """

    tensors: list[Tensor]
    call: Callable[..., Any]
    enter: Callable[[Tensor], Any] = _same
    leave: Callable[[Any, Any], Tensor] = _same
    cuda_graph: bool = True


# Of a weight on the device that is timed; None where the baseline has nothing for such a layer.
Maker = Callable[[QuantizedWeight], "Baseline | None"]


def read_baselines(given: Path | str) -> dict[str, Maker]:
    """The baselines of a Python file, which is run.

    Args:
        given: The file's path; after a colon names, separated by commas, of those to take: `peers.py:zentorch,ark`.

    Raises:
        InputError: For a file that is not there, raises, or has no dict BASELINES of functions; and for an unknown name.
    """
    text, _, wanted = str(given).partition(".py:")
    path = Path(f"{text}.py" if wanted else text)
    if not path.is_file():
        raise InputError("no such file of baselines", file=path, expected="FILE.py, or FILE.py:NAME,NAME")
    try:
        found = runpy.run_path(str(path)).get("BASELINES")
    except Exception as error:  # whatever the file does
        raise InputError("the file of baselines cannot be run", file=path, found=summary_of(error)) from error
    if not isinstance(found, Mapping) or not found or not all(isinstance(n, str) and callable(f) for n, f in found.items()):
        raise InputError("not a file of baselines", file=path, found=f"BASELINES is {type(found).__name__}",
                         expected="a dict BASELINES from names to functions of the weight")  # fmt: skip
    names = [name.strip() for name in wanted.split(",")] if wanted else list(found)
    if unknown := [name for name in names if name not in found]:
        raise InputError("no such baseline", file=path, found=unknown[0], expected=", ".join(found))
    return {name: found[name] for name in names}

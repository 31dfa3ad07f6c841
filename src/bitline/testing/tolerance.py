"""What a kernel's output is compared with, and how far from it the output may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream
from bitline.act_quant import fake_quantize
from bitline.weight import QuantizedWeight

FACTOR = 2.0  # a kernel may be this many times as far from the exact product as torch is in the same dtype


def reference64(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The exact layer: x [M, K] times the weight in float64, bias added. float64 [M, N].

    Where the scheme scales its input, x is scaled and rounded to its dtype first; where it quantizes it, x is then quantized
    and read back, as `activations.fake_quantize` defines.
    """
    values = _input(x, weight).double()
    out = values.new_empty(x.shape[0], weight.spec.n)
    for rows in _row_chunks(weight):
        out[:, rows] = values @ weight.dequantize_rows(rows, torch.float32).double().T
    return out if weight.bias is None else out + weight.bias.double()


def torch_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """torch's own linear on the dequantized weight, everything in x's dtype: the yardstick of a kernel's error. [M, N]."""
    values = _input(x, weight).to(x.dtype)
    out = values.new_empty(x.shape[0], weight.spec.n)
    for rows in _row_chunks(weight):
        bias = None if weight.bias is None else weight.bias[rows].to(x.dtype)
        out[:, rows] = torch.nn.functional.linear(values, weight.dequantize_rows(rows, x.dtype), bias)
    return out


def _input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    act, x = weight.spec.act, weight.scaled_input(x)
    return x if act is None else fake_quantize(x, act, weight.input_scale, weight.input_zero)


def _row_chunks(weight: QuantizedWeight) -> list[slice]:
    n, step = weight.spec.n, bitstream.rows_per_chunk(weight.spec.k)
    return [slice(r, min(r + step, n)) for r in range(0, n, step)]


@dataclass(frozen=True)
class Comparison:
    """The largest error of an output, where it is, and what was allowed."""

    error: float
    allowed: float
    torch_error: float
    at: tuple[int, ...]
    found: float
    expected: float

    @property
    def ok(self) -> bool:
        """True where no element is further off than allowed; a NaN never is."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"worst element {list(self.at)}: got {self.found!r}, exact {self.expected!r}, off by {self.error:.3g}; "
            f"allowed {self.allowed:.3g} (torch in the same dtype is off by {self.torch_error:.3g})"
        )


def compare(out: Tensor, x: Tensor, weight: QuantizedWeight, factor: float = FACTOR) -> Comparison:
    """out [M, N] against `reference64`.

    Allowed is `factor` times the largest error of torch's linear in x's dtype, plus one unit in the last place of the
    largest exact output (torch may be exact by luck where a sum in another order is not).
    """
    exact = reference64(x, weight)
    if out.shape != exact.shape or out.dtype != x.dtype:
        raise AssertionError(f"output is {list(out.shape)} {out.dtype}, expected {list(exact.shape)} {x.dtype}")
    if exact.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, (), 0.0, 0.0)
    torch_error = float((torch_linear(x, weight).double() - exact).abs().max())
    allowed = factor * torch_error + torch.finfo(x.dtype).eps * float(exact.abs().max())
    error = (out.double() - exact).abs()
    error = torch.where(error.isnan(), torch.full_like(error, torch.inf), error)
    m, n = divmod(int(error.argmax()), exact.shape[1])
    return Comparison(float(error[m, n]), allowed, torch_error, (m, n), float(out[m, n]), float(exact[m, n]))


def check(out: Tensor, x: Tensor, weight: QuantizedWeight, factor: float = FACTOR) -> Comparison:
    """`compare`, and an AssertionError that names the worst element where the output is too far off."""
    result = compare(out, x, weight, factor)
    if not result.ok:
        raise AssertionError(f"{weight.spec} with M={x.shape[0]}: {result}")
    return result


def check_exact(out: Tensor, x: Tensor, weight: QuantizedWeight) -> None:
    """For lossless data (`generators.lossless`): every element must be the exact product, bit for bit but for -0."""
    exact = reference64(x, weight)
    rounded = exact.to(x.dtype)
    if not torch.equal(rounded.double(), exact):
        raise ValueError("the data is not lossless: the exact product has no representation in the input dtype")
    if out.shape != exact.shape or out.dtype != x.dtype:
        raise AssertionError(f"output is {list(out.shape)} {out.dtype}, expected {list(exact.shape)} {x.dtype}")
    wrong = ~(out == rounded)
    if wrong.any():
        m, n = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{weight.spec} with M={x.shape[0]} on lossless data: {int(wrong.sum())} of {wrong.numel()} elements differ, "
            f"the first at [{m}, {n}]: got {float(out[m, n])!r}, expected {float(rounded[m, n])!r}"
        )

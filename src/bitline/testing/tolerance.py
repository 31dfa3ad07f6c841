"""Reference outputs in float64, and the tolerances of kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream
from bitline.act_quant import fake_quantize
from bitline.weight import QuantizedWeight

FACTOR = 2.0  # allowed ratio of a kernel's largest error to `baseline_error`


def reference64(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The layer's exact output: x @ W.T + bias in float64.

    Where the weight has an `input_multiplier`, x is first multiplied by it and rounded to its dtype. Where the scheme quantizes
    activations, x is then fake-quantized (`bitline.act_quant.fake_quantize`).

    Args:
        x: [M, K].
        weight: The weight [N, K].

    Returns:
        float64 [M, N].
    """
    values = _input(x, weight).double()
    out = values.new_empty(x.shape[0], weight.spec.n)
    for rows in _row_chunks(weight):
        out[:, rows] = values @ weight.dequantize_rows(rows, torch.float32).double().T
    return out if weight.bias is None else out + weight.bias.double()


def torch_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """torch's linear of the dequantized weight, all in x's dtype, [M, N]: the baseline of a kernel's error."""
    values = _input(x, weight).to(x.dtype)
    out = values.new_empty(x.shape[0], weight.spec.n)
    for rows in _row_chunks(weight):
        bias = None if weight.bias is None else weight.bias[rows].to(x.dtype)
        out[:, rows] = torch.nn.functional.linear(values, weight.dequantize_rows(rows, x.dtype), bias)
    return out


def baseline_error(x: Tensor, weight: QuantizedWeight, exact: Tensor) -> float:
    """The largest error of arithmetic in x's dtype, by which a kernel is measured.

    That of torch's linear; in float32 also that of one accumulator that runs along K, if it is larger. A BLAS that keeps many
    accumulators is closer to the exact sum than float32 has to be, and how many it keeps depends on the CPU.

    Args:
        x: [M, K].
        weight: The weight [N, K].
        exact: `reference64(x, weight)`.
    """
    outputs = [torch_linear(x, weight)] + ([in_order_linear(x, weight)] if x.dtype == torch.float32 else [])
    return max(float((out.double() - exact).abs().max()) for out in outputs)


def in_order_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The layer with one float32 accumulator per output, K in ascending order, [M, N]."""
    values, out = _input(x, weight).float(), x.new_empty(x.shape[0], weight.spec.n, dtype=torch.float32)
    for rows in _row_chunks(weight):
        bias = None if weight.bias is None else weight.bias[rows]
        out[:, rows] = _accumulated_in_order(values, weight.dequantize_rows(rows, torch.float32), bias)
    return out


def _accumulated_in_order(values: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """values [M, K] times w [n, K], float32, with one accumulator per output."""
    out = values.new_zeros(values.shape[0], w.shape[0])
    for column, row in zip(values.T.contiguous(), w.T.contiguous(), strict=True):
        out += torch.outer(column, row)
    return out if bias is None else out + bias.float()


def _input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    act, x = weight.spec.act, weight.scaled_input(x)
    return x if act is None else fake_quantize(x, act, weight.input_scale, weight.input_zero)


def _row_chunks(weight: QuantizedWeight) -> list[slice]:
    n, step = weight.spec.n, bitstream.rows_per_chunk(weight.spec.k)
    return [slice(r, min(r + step, n)) for r in range(0, n, step)]


@dataclass(frozen=True)
class Comparison:
    """An output compared with `reference64`.

    Attributes:
        error: The largest absolute error; infinite for a NaN.
        allowed: The largest allowed error.
        torch_error: The largest error of torch's linear in the same dtype (`baseline_error`).
        at: Index [m, n] of the worst element; () for an empty output.
        found: Its value.
        expected: Its exact value.
        nmse: Sum of squared errors over sum of squared exact values; infinite for a NaN.
        cosine: Cosine of the angle between output and exact output; 0 for a NaN.
    """

    error: float
    allowed: float
    torch_error: float
    at: tuple[int, ...]
    found: float
    expected: float
    nmse: float = 0.0
    cosine: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"worst element {list(self.at)}: got {self.found!r}, exact {self.expected!r}, off by {self.error:.3g}; "
            f"allowed {self.allowed:.3g} (torch in the same dtype is off by {self.torch_error:.3g})"
        )


def compare(out: Tensor, x: Tensor, weight: QuantizedWeight, factor: float = FACTOR) -> Comparison:
    """Compare an output with `reference64`.

    The allowed error is `factor` times `baseline_error`, plus one unit in the last place of the largest exact output (torch can
    be exact by luck where another reduction order is not), as in quack's tests.

    Args:
        out: The kernel's output, [M, N] in x's dtype.
        x: [M, K].
        weight: The weight [N, K].
        factor: Multiple of the baseline's error that is allowed.

    Raises:
        AssertionError: Where `out` has another shape or dtype.
    """
    return Expected.of(x, weight).compare(out, factor)


@dataclass(frozen=True)
class Expected:
    """What the outputs of several kernels for one x are compared with.

    Attributes:
        exact: `reference64` of x and the weight, [M, N].
        baseline: `baseline_error` of x and the weight.
        dtype: x's dtype.
    """

    exact: Tensor
    baseline: float
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor, weight: QuantizedWeight) -> Expected:
        """Args: x, [M, K]; weight, [N, K]."""
        exact = reference64(x, weight)
        return Expected(exact, baseline_error(x, weight, exact) if exact.numel() else 0.0, x.dtype)

    def compare(self, out: Tensor, factor: float = FACTOR) -> Comparison:
        """`compare` of an output, [M, N] in x's dtype. Raises AssertionError where it has another shape or dtype."""
        exact = self.exact
        if out.shape != exact.shape or out.dtype != self.dtype:
            raise AssertionError(f"output is {list(out.shape)} {out.dtype}, expected {list(exact.shape)} {self.dtype}")
        if exact.numel() == 0:
            return Comparison(0.0, 0.0, 0.0, (), 0.0, 0.0)
        allowed = factor * self.baseline + torch.finfo(self.dtype).eps * float(exact.abs().max())
        error = (out.double() - exact).abs()
        error = torch.where(error.isnan(), torch.full_like(error, torch.inf), error)
        m, n = divmod(int(error.argmax()), exact.shape[1])
        sums = _Sums()
        sums.add(out, exact)
        found, expected = float(out[m, n]), float(exact[m, n])
        return Comparison(float(error[m, n]), allowed, self.baseline, (m, n), found, expected, sums.nmse, sums.cosine)


def compare_batches(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weight: QuantizedWeight, ranges: Sequence[tuple[int, int]]
) -> list[Comparison]:  # fmt: skip
    """`compare` of one layer's outputs at several M, with each row of the weight dequantized once.

    Args:
        outputs: The kernel's outputs, [M, N] in the inputs' dtype.
        inputs: [M, K] each.
        weight: The weight [N, K].
        ranges: [start, stop) of the rows of the weight whose outputs count.

    Returns:
        A comparison for each output, without the worst element's place and values.
    """
    dtype, sizes = inputs[0].dtype, [len(x) for x in inputs]
    values = torch.cat([_input(x, weight) for x in inputs])
    sums = [_Sums() for _ in inputs]
    step = bitstream.rows_per_chunk(weight.spec.k)
    for start, stop in ((r, min(r + step, last)) for first, last in ranges for r in range(first, last, step)):
        w = weight.dequantize_rows(slice(start, stop), torch.float32)
        bias = None if weight.bias is None else weight.bias[start:stop]
        exact = values.double() @ w.double().T
        exact = exact if bias is None else exact + bias.double()
        own = [torch.nn.functional.linear(values.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))]
        if dtype == torch.float32:
            own.append(_accumulated_in_order(values.float(), w, bias))
        parts = zip(sums, outputs, exact.split(sizes), zip(*(o.split(sizes) for o in own), strict=True), strict=True)
        for one, out, exact_part, own_parts in parts:
            one.add(out[:, start:stop], exact_part, own_parts)
    return [one.comparison(dtype) for one in sums]


def compare_outputs(out: Tensor, exact: Tensor, *own: Tensor) -> Comparison:
    """Compare an output [M, N] with the exact one, float64, where torch's own outputs in the same dtype are given."""
    sums = _Sums()
    sums.add(out, exact, own)
    return sums.comparison(out.dtype)


class _Sums:
    """What a comparison needs of an output, added up over parts of its columns."""

    def __init__(self) -> None:
        self.error = self.baseline = self.largest = 0.0
        self.squared_error = self.squares = self.product = 0.0

    def add(self, out: Tensor, exact: Tensor, own: Sequence[Tensor] = ()) -> None:
        """Count a part of the output, and torch's own outputs of it."""
        difference = (out.double() - exact).view(-1)
        flat = exact.reshape(-1)
        self.error = max(self.error, _largest(difference))
        self.baseline = max(self.baseline, *(_largest(o.double() - exact) for o in own), 0.0)
        self.largest = max(self.largest, _largest(flat))
        self.squared_error += float(difference.dot(difference))
        self.squares += float(flat.dot(flat))
        self.product += float(difference.dot(flat))

    @property
    def nmse(self) -> float:
        """Infinite for a NaN, and for an error where every exact value is 0."""
        if not math.isfinite(self.squared_error):
            return math.inf
        return self.squared_error / self.squares if self.squares else (math.inf if self.squared_error else 0.0)

    @property
    def cosine(self) -> float:
        """Of the output, which is the exact one plus the difference, and the exact one; 0 for a NaN."""
        if self.squared_error == 0:
            return 1.0
        own = self.squares + 2 * self.product + self.squared_error
        if not math.isfinite(own) or own <= 0 or self.squares == 0:
            return 0.0
        return (self.squares + self.product) / math.sqrt(own) / math.sqrt(self.squares)

    def comparison(self, dtype: torch.dtype) -> Comparison:
        """The comparison of all parts."""
        allowed = FACTOR * self.baseline + torch.finfo(dtype).eps * self.largest
        nothing = (), 0.0, 0.0
        return Comparison(self.error, allowed, self.baseline, *nothing, self.nmse, self.cosine)


def _largest(values: Tensor) -> float:
    """The largest absolute value; infinite for a NaN, 0 for an empty tensor."""
    if values.numel() == 0:
        return 0.0
    low, high = values.aminmax()
    found = max(-float(low), float(high))
    return found if found == found else math.inf


def check(out: Tensor, x: Tensor, weight: QuantizedWeight, factor: float = FACTOR) -> Comparison:
    """Assert that an output is within the tolerance of `compare`.

    Args:
        out: The kernel's output, [M, N] in x's dtype.
        x: [M, K].
        weight: The weight [N, K].
        factor: Multiple of the baseline's error that is allowed.

    Returns:
        The comparison.

    Raises:
        AssertionError: Where it is not, with the worst element.
    """
    result = compare(out, x, weight, factor)
    if not result.ok:
        raise AssertionError(f"{weight.spec} with M={x.shape[0]}: {result}")
    return result


def check_exact(out: Tensor, x: Tensor, weight: QuantizedWeight) -> None:
    """Assert that an output on lossless data is exact: equal to the float64 result in every element.

    Args:
        out: The kernel's output, [M, N] in x's dtype.
        x: [M, K], from `lossless_inputs`.
        weight: The weight [N, K], from `lossless_weight`.

    Raises:
        AssertionError: With the number of wrong elements, and the first one.
        ValueError: Where the exact output is not representable in x's dtype, so that the data is not lossless.
    """
    exact = reference64(x, weight)
    rounded = exact.to(x.dtype)
    if not torch.equal(rounded.double(), exact):
        raise ValueError("the data is not lossless: the input dtype cannot represent the exact output")
    if out.shape != exact.shape or out.dtype != x.dtype:
        raise AssertionError(f"output is {list(out.shape)} {out.dtype}, expected {list(exact.shape)} {x.dtype}")
    wrong = ~(out == rounded)
    if wrong.any():
        m, n = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{weight.spec} with M={x.shape[0]} on lossless data: {int(wrong.sum())} of {wrong.numel()} elements differ, "
            f"the first at [{m}, {n}]: got {float(out[m, n])!r}, expected {float(rounded[m, n])!r}"
        )

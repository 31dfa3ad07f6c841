"""Verification of a conversion: the result is opened as any checkpoint, and every layer compared with the source bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.conversion.output import Output
from bitline.conversion.plan import WrittenLayer
from bitline.conversion.source_model import SourceModel, UnquantizedTensor
from bitline.conversion.tensor_bits import float32_bits, raw_bytes, same_float32, same_values
from bitline.errors import ConversionError
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class RoundingError:
    """The error of a rounded layer, 0 for an exact one.

    max_error: the largest absolute error over the largest weight. rms_error: root mean square of the error over that of the
    weight.
    """

    max_error: float = 0.0
    rms_error: float = 0.0


def verify_result(
    source: SourceModel, output: Output, written: Mapping[str, WrittenLayer], progress: Callable[[str, int, int], None]
) -> dict[str, RoundingError]:
    """Compare the written checkpoint with the source: weights, biases, activation quantization, unquantized tensors.

    Equal means equal bits of the dequantized float32, the sign of zero included; NaN equals NaN. A rounded layer must be what
    it was rounded to. The first difference is a ConversionError. -> the rounding error of each layer.
    """
    result = open_checkpoint(output.path)
    records = {record.name: record for record in result.layers()}
    _compare_layer_names(output, written, result)
    errors: dict[str, RoundingError] = {}
    for i, entry in enumerate(source.entries):
        if isinstance(entry, UnquantizedTensor):
            _compare_unquantized(entry, output, result)
        else:
            name, done = output.output_name(entry.name), written[entry.name]
            weight, row_order = entry.read(), output.row_order(entry.name)
            if done.stored is None:
                _compare_dequantized(weight, name, row_order, result)
                errors[entry.name] = RoundingError()
            else:
                errors[entry.name] = _compare_layer(entry.name, weight, _ReadBack(records[name].weight(), row_order), done)
        progress("prove", i + 1, len(source.entries))
    return errors


@dataclass(frozen=True)
class _ReadBack:
    """A layer of the result. row_order: the source row of each of its rows, int64 [N]; None where the order is the same."""

    weight: QuantizedWeight
    row_order: Tensor | None

    def row_chunks(self) -> Iterator[tuple[Any, Tensor]]:
        """Source rows, and their dequantized values in the result, float32."""
        n, step = self.weight.spec.n, bitstream.rows_per_chunk(self.weight.spec.k)
        for r in range(0, n, step):
            rows = slice(r, min(r + step, n))
            yield (rows if self.row_order is None else self.row_order[rows]), self.weight.dequantize_rows(rows)


# ---- quantized layers ----------------------------------------------------------------------------------------------------


def _compare_layer(name: str, source: QuantizedWeight, found: _ReadBack, done: WrittenLayer) -> RoundingError:
    _compare_activation_fields(name, source, found.weight, done)
    _compare_bias(name, source, found)
    if done.digest:
        return _measure_rounding(name, source, found, done.digest)
    for rows, values in found.row_chunks():
        expected = source.dequantize_rows(rows)
        if not same_float32(expected, values):
            at = (float32_bits(expected) != float32_bits(values)).nonzero()[0].tolist()
            what = f"the weight at row {at[0]} of a chunk, column {at[1]}"
            raise _mismatch(name, what, float(expected[*at]), float(values[*at]))
    return RoundingError()


def _compare_activation_fields(name: str, source: QuantizedWeight, result: QuantizedWeight, done: WrittenLayer) -> None:
    """Shape, activation quantization and its tensors, input factors."""
    stored = done.stored
    assert stored is not None
    _compare(name, "its shape", (source.spec.n, source.spec.k), (result.spec.n, result.spec.k))
    _compare(name, "its activation quantization", stored.act, result.spec.act)
    for field in ("input_scale", "input_zero", "input_multiplier"):
        expected = getattr(source, field)
        if field == "input_multiplier" and not stored.input_multiplier:
            continue  # folded into a weight that was rounded
        if expected is None or (field != "input_multiplier" and stored.act is None):
            continue
        _compare_values(name, field, expected, getattr(result, field))


def _compare_bias(name: str, source: QuantizedWeight, found: _ReadBack) -> None:
    result = found.weight
    if (source.bias is None) != (result.bias is None):
        raise _mismatch(name, "its bias", source.bias is not None, result.bias is not None)
    if source.bias is not None and result.bias is not None:
        bias = source.bias if found.row_order is None else source.bias.index_select(0, found.row_order)
        _compare_values(name, "bias", bias, result.bias)


def _measure_rounding(name: str, source: QuantizedWeight, found: _ReadBack, expected_digest: str) -> RoundingError:
    """Check a rounded layer against its digest, and measure its distance from the source."""
    in_source_order = found.weight if found.row_order is None else found.weight.take_rows(found.row_order.argsort())
    found_digest = digest(in_source_order)
    factors = 1.0 if source.input_multiplier is None or found.weight.spec.input_multiplier else source.input_multiplier.float()
    error = rounding_error((values, source.dequantize_rows(rows) * factors) for rows, values in found.row_chunks())
    if found_digest != expected_digest:
        raise _mismatch(name, "a rounded weight", expected_digest, found_digest)
    return error


def rounding_error(chunks: Iterable[tuple[Tensor, Tensor]]) -> RoundingError:
    """The error of a rounded weight, from chunks of (rounded values, exact values)."""
    max_error, max_weight, error_squares, weight_squares = 0.0, 0.0, 0.0, 0.0
    for values, exact in chunks:
        error = (values - exact).double()
        max_error, max_weight = max(max_error, float(error.abs().max())), max(max_weight, float(exact.abs().max()))
        error_squares += float(error.square().sum())
        weight_squares += float(exact.double().square().sum())
    return RoundingError(
        max_error / max_weight if max_weight else 0.0, (error_squares / weight_squares) ** 0.5 if weight_squares else 0.0
    )


def digest(weight: QuantizedWeight) -> str:
    """SHA-256 of the dequantized float32 weight."""
    return hashlib.sha256(raw_bytes(weight.dequantize())).hexdigest()


def _compare_layer_names(output: Output, written: Mapping[str, WrittenLayer], result: Checkpoint) -> None:
    """The result has the written layers and no others, and its reader notes nothing odd about them."""
    expected = {output.output_name(name) for name, done in written.items() if done.stored is not None}
    _compare("the result", "its quantized layers", expected, {record.name for record in result.layers()})
    oddities = [oddity for record in result.layers() for oddity in record.oddities]
    if oddities:
        raise _mismatch("the result", "what its reader notes", "nothing", oddities[0])


# ---- unquantized tensors -------------------------------------------------------------------------------------------------


def _compare_unquantized(entry: UnquantizedTensor, output: Output, result: Checkpoint) -> None:
    try:
        name = output.output_name(entry.name)
    except KeyError:
        return  # not part of the target format; the report lists it
    expected, row_order = entry.read(), output.row_order(entry.name)
    expected = expected if row_order is None else expected.index_select(0, row_order)
    found = result.read(name)
    if not same_values(expected, found):
        described = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (expected, found)]
        raise _mismatch(entry.name, "an unquantized tensor", *described)


def _compare_dequantized(source: QuantizedWeight, name: str, row_order: Tensor | None, result: Checkpoint) -> None:
    """A layer that was stored unquantized."""
    expected = source.dequantize()
    expected = expected if row_order is None else expected.index_select(0, row_order)
    if not same_float32(expected, result.read(f"{name}.weight").float()):
        raise _mismatch(name, "its unquantized weight", "the dequantized values", "others")
    if source.bias is not None:
        bias = source.bias if row_order is None else source.bias.index_select(0, row_order)
        _compare_values(name, "bias", bias, result.read(f"{name}.bias"))


# ---- differences ---------------------------------------------------------------------------------------------------------


def _compare_values(name: str, field: str, expected: Tensor, found: Tensor | None) -> None:
    if found is None or expected.numel() != found.numel() or not same_float32(_flat(expected), _flat(found)):
        raise _mismatch(name, field, "the source's", "nothing" if found is None else "other values")


def _flat(values: Tensor) -> Tensor:
    return values.to(torch.float32).flatten()


def _compare(name: str, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise _mismatch(name, what, expected, found)


def _mismatch(name: str, what: str, expected: object, found: object) -> ConversionError:
    return ConversionError(
        f"the result did not read back as the source, and was deleted: {what} differs", tensor=name, found=found,
        expected=expected, fix="this is a bug in bitline: please report it with the checkpoint's name",
    )  # fmt: skip

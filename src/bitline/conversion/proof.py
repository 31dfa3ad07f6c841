"""Reading back: every layer of the result against the original's, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.conversion.original import Original, Plain
from bitline.conversion.packing import raw_bytes, same_numbers
from bitline.conversion.plan import Written
from bitline.conversion.sinks import Sink
from bitline.errors import ConversionError
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class Proof:
    """How far a rounded layer is from the original, relative to its largest magnitude and to its root mean square; else 0."""

    max_error: float = 0.0
    rms_error: float = 0.0


def prove(
    original: Original, sink: Sink, written: Mapping[str, Written], progress: Callable[[str, int, int], None]
) -> dict[str, Proof]:
    """Open the result as any checkpoint and compare it with the original: weights, biases, input schemes, plain tensors.

    Equal means equal bits of the dequantized float32, the sign of a zero included; NaN equals NaN. The first difference is a
    ConversionError. A layer that was rounded must be what it was rounded to.
    """
    result = open_checkpoint(sink.path)
    records = {record.name: record for record in result.layers()}
    _same_names(original, sink, written, result)
    proofs: dict[str, Proof] = {}
    for i, item in enumerate(original.items):
        if isinstance(item, Plain):
            _same_plain(item, sink, result)
        else:
            name, done = sink.name_of(item.name), written[item.name]
            source = item.read()
            if done.form is None:
                _same_table(source, name, sink.order_of(item.name), result)
                proofs[item.name] = Proof()
            else:
                found = _Found(records[name].weight(), sink.order_of(item.name))
                proofs[item.name] = _compare(item.name, source, found, done)
        progress("prove", i + 1, len(original.items))
    return proofs


@dataclass(frozen=True)
class _Found:
    """A layer of the result. order: rows of the original in its order."""

    weight: QuantizedWeight
    order: Tensor | None

    def chunks(self) -> Iterator[tuple[Any, Tensor]]:
        """Rows of the original, and what they are in the result, float32."""
        n, step = self.weight.spec.n, bitstream.rows_per_chunk(self.weight.spec.k)
        for r in range(0, n, step):
            rows = slice(r, min(r + step, n))
            yield (rows if self.order is None else self.order[rows]), self.weight.dequantize_rows(rows)


def _compare(name: str, source: QuantizedWeight, found: _Found, done: Written) -> Proof:
    form, result = done.form, found.weight
    assert form is not None
    _same(name, "its shape", (source.spec.n, source.spec.k), (result.spec.n, result.spec.k))
    _same(name, "how its input is quantized", form.act, result.spec.act)
    for part in ("input_scale", "input_zero", "input_multiplier"):
        wanted = getattr(source, part)
        if part == "input_multiplier" and not form.input_multiplier:
            continue  # multiplied into a weight that was rounded
        if wanted is None or (part != "input_multiplier" and form.act is None):
            continue
        _same_values(name, part, wanted, getattr(result, part))
    if (source.bias is None) != (result.bias is None):
        raise _differs(name, "its bias", source.bias is not None, result.bias is not None)
    if source.bias is not None and result.bias is not None:
        bias = source.bias if found.order is None else source.bias.index_select(0, found.order)
        _same_values(name, "bias", bias, result.bias)
    if done.digest:
        return _measured(name, source, found, done.digest)
    for rows, values in found.chunks():
        wanted = source.dequantize_rows(rows)
        if not same_bits(wanted, values):
            at = (_bits(wanted) != _bits(values)).nonzero()[0].tolist()
            raise _differs(name, f"the weight at row {at[0]} of a chunk, column {at[1]}", float(wanted[*at]), float(values[*at]))
    return Proof()


def _measured(name: str, source: QuantizedWeight, found: _Found, wanted: str) -> Proof:
    """A rounded layer: it has to be what it was rounded to, and its distance from the original is measured."""
    hashed, worst, largest, squares, total = hashlib.sha256(), 0.0, 0.0, 0.0, 0.0
    factors = 1.0 if source.input_multiplier is None or found.weight.spec.input_multiplier else source.input_multiplier.float()
    back = None if found.order is None else found.weight.take_rows(found.order.argsort())
    hashed.update(raw_bytes((back or found.weight).dequantize()))
    for rows, values in found.chunks():
        exact = source.dequantize_rows(rows) * factors
        error = (values - exact).double()
        worst, largest = max(worst, float(error.abs().max())), max(largest, float(exact.abs().max()))
        squares, total = squares + float(error.square().sum()), total + float(exact.double().square().sum())
    if hashed.hexdigest() != wanted:
        raise _differs(name, "a rounded weight", wanted, hashed.hexdigest())
    return Proof(worst / largest if largest else 0.0, (squares / total) ** 0.5 if total else 0.0)


def digest(weight: QuantizedWeight) -> str:
    """SHA-256 of the dequantized float32."""
    return hashlib.sha256(raw_bytes(weight.dequantize())).hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal float32 tensors to the bit, where NaN is NaN."""
    if torch.equal(_bits(one), _bits(other)):
        return True
    return bool(((_bits(one) == _bits(other)) | (one.isnan() & other.isnan())).all())


def _same_plain(item: Plain, sink: Sink, result: Checkpoint) -> None:
    try:
        name = sink.name_of(item.name)
    except KeyError:
        return  # the result has no use for it, and the report says so
    wanted, order = item.read(), sink.order_of(item.name)
    wanted = wanted if order is None else wanted.index_select(0, order)
    found = result.read(name)
    if not same_numbers(wanted, found):
        raise _differs(item.name, "a plain tensor", f"{wanted.dtype} {list(wanted.shape)}", f"{found.dtype} {list(found.shape)}")


def _same_table(source: QuantizedWeight, name: str, order: Tensor | None, result: Checkpoint) -> None:
    """A layer that was stored as plain weights."""
    wanted = source.dequantize()
    wanted = wanted if order is None else wanted.index_select(0, order)
    if not same_bits(wanted, result.read(f"{name}.weight").float()):
        raise _differs(name, "its plain weights", "the dequantized ones", "others")
    if source.bias is not None:
        bias = source.bias if order is None else source.bias.index_select(0, order)
        _same_values(name, "bias", bias, result.read(f"{name}.bias"))


def _same_names(original: Original, sink: Sink, written: Mapping[str, Written], result: Checkpoint) -> None:
    wanted = {sink.name_of(name) for name, done in written.items() if done.form is not None}
    _same("the result", "its quantized layers", wanted, {record.name for record in result.layers()})
    oddities = [oddity for record in result.layers() for oddity in record.oddities]
    if oddities:
        raise _differs("the result", "what a reader notices", "nothing odd", oddities[0])


def _same_values(name: str, part: str, wanted: Tensor, found: Tensor | None) -> None:
    if found is None or wanted.numel() != found.numel() or not same_bits(wanted.float().flatten(), found.float().flatten()):
        raise _differs(name, part, "the original's", "nothing" if found is None else "another")


def _same(name: str, what: str, wanted: object, found: object) -> None:
    if wanted != found:
        raise _differs(name, what, wanted, found)


def _differs(name: str, what: str, wanted: object, found: object) -> ConversionError:
    return ConversionError(
        f"the result did not read back as the original, and was deleted: {what} differs", tensor=name, found=found,
        expected=wanted, fix="this is a mistake in bitline: please report it with the checkpoint's name",
    )  # fmt: skip


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)

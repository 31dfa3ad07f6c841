"""convert: read a checkpoint layer by layer, write it in another format, and verify the result by reading it back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.conversion.exact import exact_encoding
from bitline.conversion.gguf.output import GGUFOutput
from bitline.conversion.open_source import source_model
from bitline.conversion.output import Output, cannot_write, check_new_folder, check_new_gguf_file
from bitline.conversion.plan import LayerPlan, WrittenLayer, plan_layers, plan_without_exact
from bitline.conversion.readback import RoundingError, digest, verify_result
from bitline.conversion.reencode import describe_changes, narrow_exactly
from bitline.conversion.refusal import refusal
from bitline.conversion.report import ConversionReport, LayerReport
from bitline.conversion.requantize import requantize
from bitline.conversion.safetensors_output import SafetensorsOutput
from bitline.conversion.source_model import QuantizedLayer, SourceModel
from bitline.conversion.target import NotRepresentable
from bitline.conversion.targets import TARGETS
from bitline.errors import ConversionError, InputError
from bitline.types import dtype_name
from bitline.weight import QuantizedWeight

_DEQUANTIZED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the first that is exact


def convert(
    source: str | os.PathLike[str],
    result: str | os.PathLike[str],
    *,
    to: str,
    lossy: bool = False,
    weights_only: bool = False,
    shard_bytes: int = 5_000_000_000,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConversionReport:
    """Write a quantized checkpoint in another format and verify it by reading every layer back.

    Each layer's dequantized float32 weight is the same bit for bit, or the conversion is refused.

    source: what open_checkpoint opens. result: a new folder, or for `to="gguf"` a new .gguf file. to: a key of TARGETS.
    lossy: round layers that the target cannot represent exactly, instead of refusing them. weights_only: drop activation
    quantization. shard_bytes: the most data in one safetensors file, unless one tensor is larger. progress: called with
    ("write" or "prove", layers and tensors done, in total).

    The result gets its name when it is complete and verified; after an error nothing of it is left. Peak memory is about one
    layer. Errors: InputError for arguments, ConversionError for layers that cannot be represented and for a failed
    verification, CheckpointError for a source that cannot be read.
    """
    path = new_result(result, to)
    checkpoint = _open_quantized(source, to)
    return Conversion(source_model(checkpoint), to, path, lossy, weights_only, shard_bytes, progress).run()


def new_result(result: str | os.PathLike[str], to: str) -> Path:
    """The path of a conversion's result, which must not exist. to: a key of TARGETS. Errors: InputError, ConversionError."""
    if to not in TARGETS:
        raise InputError("unknown format to convert to", found=repr(to), expected=", ".join(TARGETS))
    path = Path(result)
    if "\0" in str(path):
        raise InputError("not a usable name for the output", found=repr(str(path)))
    try:
        (check_new_gguf_file if to == "gguf" else check_new_folder)(path)
    except OSError as error:
        raise cannot_write(error, path) from error
    return path


def _open_quantized(source: str | os.PathLike[str], to: str) -> Checkpoint:
    """The source, which must have quantized layers and not be in the target format already."""
    checkpoint = open_checkpoint(source)
    if to == "gguf" and checkpoint.is_gguf:
        raise InputError("the source is a gguf file already", found=checkpoint.path, fix="copy it")
    if not checkpoint.layers():
        raise ConversionError("nothing to convert: no layer of this checkpoint is quantized", file=checkpoint.path)
    return checkpoint


class Conversion:
    """One conversion: plan every layer from its spec, write, verify, publish, report."""

    def __init__(
        self, source: SourceModel, to: str, result: Path, lossy: bool, weights_only: bool, shard_bytes: int,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:  # fmt: skip
        self.source, self.to, self.result, self.lossy = source, to, result, lossy
        self.shard_bytes, self.progress = shard_bytes, progress or (lambda what, done, total: None)
        self.target = TARGETS[to]()
        self.plans = plan_layers(source, self.target, lossy=lossy, weights_only=weights_only)
        self.written: dict[str, WrittenLayer] = {}
        self.unquantized_bytes = 0

    def run(self) -> ConversionReport:
        """Write and verify; after an error nothing of the result is left."""
        try:
            return self._run()
        except OSError as error:
            raise cannot_write(error, self.result) from error

    def _run(self) -> ConversionReport:
        self._refuse({name: plan.refused for name, plan in self.plans.items() if plan.refused is not None})
        output = self._open_output()
        try:
            copied, left_out = output.write_other_files()
            self._write_entries(output)
            stored = {name: done.stored for name, done in self.written.items() if done.stored is not None}
            if not stored:
                raise ConversionError("no layer would be quantized in the result", file=self.source.checkpoint.path,
                                      expected=f"a layer that {self.to} can represent")  # fmt: skip
            output.finish(stored)
            errors = verify_result(self.source, output, self.written, self.progress)
            output.publish()
        except BaseException:
            output.discard()
            raise
        return self._report(errors, copied, left_out)

    def _refuse(self, refused: dict[str, NotRepresentable]) -> None:
        """Raise if any layer cannot be converted."""
        if refused:
            raise refusal(self.source, self.target, self.plans, refused, lossy=self.lossy)

    def _open_output(self) -> Output:
        if self.to != "gguf":
            return SafetensorsOutput(self.source, self.target, self.result, self.shard_bytes)
        stored = {name: spec for name, plan in self.plans.items() if (spec := plan.stored_spec) is not None}
        return GGUFOutput(self.source, self.target, self.result, stored)

    # ---- writing ---------------------------------------------------------------------------------------------------------

    def _write_entries(self, output: Output) -> None:
        """Write every layer and tensor. Once a layer is refused, the rest are only tried, so that the error names all of them."""
        refused: dict[str, NotRepresentable] = {}
        entries = self.source.entries
        for i, entry in enumerate(entries):
            if isinstance(entry, QuantizedLayer):
                try:
                    self.written[entry.name] = self._write_layer(output, self.plans[entry.name], dry_run=bool(refused))
                except NotRepresentable as error:
                    refused[entry.name] = error
            elif not refused:
                self.unquantized_bytes += output.write_unquantized(entry.name, entry.read())
            self.progress("write", i + 1, len(entries))
        self._refuse(refused)

    def _write_layer(self, output: Output, plan: LayerPlan, *, dry_run: bool) -> WrittenLayer:
        """Write a layer exactly, dequantized, or rounded, whichever its plan allows first."""
        weight = plan.layer.read()
        if plan.stored_specs:
            try:
                exact = exact_encoding(self.target, weight, plan.stored_specs)
                nbytes = 0 if dry_run else output.write_layer(plan.layer, exact)
                return WrittenLayer(plan, exact.spec, tuple(describe_changes(weight.spec, exact.spec)), nbytes)
            except NotRepresentable as error:
                plan_without_exact(plan, error, self.target, lossy=self.lossy)
                if plan.refused is not None:
                    raise plan.refused from error
        if plan.dequantize:
            return self._write_dequantized(output, plan, weight, dry_run=dry_run)
        assert plan.lossy_spec is not None
        rounded = requantize(weight, plan.lossy_spec, self.target.scale_dtypes(plan.lossy_spec))
        nbytes = 0 if dry_run else output.write_layer(plan.layer, rounded)
        return WrittenLayer(plan, rounded.spec, (f"rounded to {rounded.spec.scheme}",), nbytes, digest(rounded))

    def _write_dequantized(self, output: Output, plan: LayerPlan, weight: QuantizedWeight, *, dry_run: bool) -> WrittenLayer:
        """Write an embedding or head as an unquantized tensor, in the first dtype that is exact."""
        values = narrow_exactly(weight.dequantize(), _DEQUANTIZED_DTYPES)
        nbytes = 0
        if not dry_run:
            nbytes = output.write_unquantized(f"{plan.layer.name}.weight", values)
            if weight.bias is not None:
                nbytes += output.write_unquantized(f"{plan.layer.name}.bias", weight.bias)
        return WrittenLayer(plan, None, (f"dequantized to {dtype_name(values.dtype)}",), nbytes)

    # ---- reporting -------------------------------------------------------------------------------------------------------

    def _report(self, errors: dict[str, RoundingError], copied: list[str], left_out: list[str]) -> ConversionReport:
        layers = []
        for name, done in self.written.items():
            record, error = done.plan.layer.record, errors[name]
            after = "plain" if done.stored is None else done.stored.scheme
            layers.append(
                LayerReport(
                    name, (record.spec.n, record.spec.k), record.format, record.spec.scheme, after, done.changes,
                    not done.digest, record.nbytes, done.nbytes, error.max_error, error.rms_error,
                )
            )  # fmt: skip
        path = str(self.source.checkpoint.path)
        return ConversionReport(
            path, str(self.result), self.source.checkpoint.format, self.to, tuple(layers), len(self.source.unquantized),
            self.unquantized_bytes, tuple(copied), tuple(left_out), tuple(self._notes()),
        )  # fmt: skip

    def _notes(self) -> list[str]:
        """What the result does not carry, and what the source's reader noted."""
        quantization = self.source.quantization
        oddities = Counter(oddity for layer in self.source.layers for oddity in layer.record.oddities)
        notes = [f"in the source ({count} layers): {oddity}" for oddity, count in oddities.items()]
        kv_cache = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        if kv_cache and not (self.to == "compressed-tensors" and quantization.get("quant_method") == "compressed-tensors"):
            notes.append("the quantization of the key-value cache is not carried over")
        if self.source.checkpoint.is_gguf:
            notes.append("config.json and the tokenizer are transformers' reading of the gguf file")
        if self.source.checkpoint.format == "mxfp4":
            notes.append("each expert is a module of its own, which transformers does not have: for tools that work on names")
        return notes

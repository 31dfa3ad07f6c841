"""convert: read a checkpoint layer by layer, write it in another format, and prove that it is the same."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from bitline.checkpoint import open_checkpoint
from bitline.conversion.awq import AWQTarget
from bitline.conversion.base import NotExact, Target
from bitline.conversion.compressed_tensors import CompressedTensorsTarget
from bitline.conversion.fp8 import FP8Target
from bitline.conversion.gguf.target import GGUFTarget
from bitline.conversion.gptq import GPTQTarget
from bitline.conversion.modelopt import ModelOptTarget
from bitline.conversion.original import EMBEDDINGS, Layer, Original
from bitline.conversion.plan import Plan, Written
from bitline.conversion.proof import Proof, digest, prove
from bitline.conversion.report import ConversionReport, LayerReport
from bitline.conversion.rewrite import changes, narrowed, rewrite
from bitline.conversion.rounding import rounded
from bitline.conversion.sinks import FolderSink, GGUFSink, Sink, cannot_write, check_file, check_folder, count_kinds
from bitline.conversion.source import original_of
from bitline.errors import BitlineError, ConversionError, InputError
from bitline.types import LinearSpec, dtype_name
from bitline.weight import QuantizedWeight

TARGETS: dict[str, type[Target]] = {
    "compressed-tensors": CompressedTensorsTarget, "gptq": GPTQTarget, "awq": AWQTarget, "gguf": GGUFTarget, "fp8": FP8Target,
    "modelopt": ModelOptTarget,
}  # fmt: skip
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMED = 4  # layers that a refusal names


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
    """Write a quantized checkpoint in another format, and read every layer back: it is the same to the last bit, or an error.

    source: what open_checkpoint opens. result: a new folder, for `to="gguf"` a new .gguf file. to: a key of TARGETS.
    lossy: round layers that the target cannot hold exactly; without it they are refused, with the reason. weights_only: leave
    out how inputs are quantized, where the source says it. shard_bytes: data of one safetensors file, at most, but for a
    larger tensor. progress: called with ("write" or "prove", layers and tensors done, in all).

    The result has its name when it is whole and proven, not before; after an error nothing of it is left. Memory is about
    one layer. Errors: InputError for arguments, ConversionError for layers that cannot be held and for a proof that fails,
    CheckpointError for a source that cannot be read.
    """
    if to not in TARGETS:
        raise InputError("unknown format to convert to", found=repr(to), expected=", ".join(TARGETS))
    path = Path(result)
    if "\0" in str(path):
        raise InputError("the output's name cannot be one", found=repr(str(path)))
    try:
        (check_file if to == "gguf" else check_folder)(path)
    except OSError as error:
        raise cannot_write(error, path) from error
    checkpoint = open_checkpoint(source)
    if to == "gguf" and checkpoint.is_gguf:
        raise InputError("the source is a gguf file already", found=checkpoint.path, fix="copy it")
    if not checkpoint.layers():
        raise ConversionError("nothing to convert: no layer of this checkpoint is quantized", file=checkpoint.path)
    original = original_of(checkpoint)
    conversion = _Conversion(original, to, path, lossy, weights_only, shard_bytes, progress)
    try:
        return conversion.run()
    except OSError as error:
        raise cannot_write(error, path) from error


class _Conversion:
    def __init__(
        self, original: Original, to: str, result: Path, lossy: bool, weights_only: bool, shard_bytes: int,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:  # fmt: skip
        self.original, self.to, self.result, self.lossy, self.weights_only = original, to, result, lossy, weights_only
        self.shard_bytes, self.progress = shard_bytes, progress or (lambda what, done, total: None)
        self.target = TARGETS[to]()
        self.plans = {layer.name: self._plan(layer) for layer in original.layers}
        self.written: dict[str, Written] = {}
        self.plain_bytes = 0

    def run(self) -> ConversionReport:
        self._settle()
        self._refuse_if_needed()
        sink = self._sink()
        try:
            copied, left = sink.others()
            self._write(sink)
            forms = {name: w.form for name, w in self.written.items() if w.form is not None}
            if not forms:
                raise ConversionError("no layer would be quantized in the result", file=self.original.checkpoint.path,
                                      expected=f"a layer that {self.to} can hold")  # fmt: skip
            sink.finish(forms)
            proofs = prove(self.original, sink, self.written, self.progress)
            sink.publish()
        except BaseException:
            sink.discard()
            raise
        return self._report(proofs, copied, left)

    # ---- what is to be done, from headers --------------------------------------------------------------------------------

    def _plan(self, layer: Layer) -> Plan:
        spec = layer.record.spec
        if self.weights_only:
            spec = spec.replace(act=None)
        plan = Plan(layer, spec)
        name = layer.name.rpartition(".")[2]
        if not self.target.embeddings and name in EMBEDDINGS and _is_plain(spec):
            plan.plain = True
            return plan
        try:
            if spec.block_offset != (0, 0):
                raise NotExact("it is a part of a weight, whose first scale block is cut")
            plan.forms = self.target.forms(spec)
        except NotExact as error:
            self._give_way(plan, error)
        return plan

    def _give_way(self, plan: Plan, error: NotExact) -> None:
        """What else to do with a layer that cannot be held as it is: what is exact first."""
        plan.forms = []
        if plan.layer.may_be_plain and _is_plain(plan.spec):
            plan.plain = True
            return
        plan.refused = error
        if self.lossy:
            try:
                plan.fallback = self.target.fallback(plan.spec.replace(block_offset=(0, 0)))
                plan.refused = None
            except NotExact as other:
                plan.refused = other

    def _settle(self) -> None:
        """Make the forms agree with each other."""
        first = {name: p.forms[0] if p.forms else p.fallback for name, p in self.plans.items() if p.forms or p.fallback}
        settled, odd = self.target.settle({name: form for name, form in first.items() if form is not None})
        for name, form in settled.items():
            plan = self.plans[name]
            if plan.forms:
                plan.forms[0] = form
            else:
                plan.fallback = form
        for name, error in odd.items():
            self.plans[name].refused = error

    def _refuse_if_needed(self) -> None:
        refused = {name: plan.refused for name, plan in self.plans.items() if plan.refused is not None}
        if refused:
            raise self._refusal(refused)

    def _refusal(self, refused: dict[str, NotExact]) -> ConversionError:
        names = list(refused)
        reasons = list({re.sub(r"\d+", "", str(error)): str(error) for error in reversed(refused.values())}.values())[::-1]
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        fixes = list(dict.fromkeys(error.fix for error in refused.values() if error.fix))
        able = self._others(names)
        if able:
            holds = "holds" if len(names) <= _NAMED else "should hold"  # as far as it was tried
            listed = " or ".join(filter(None, [", ".join(able[:-1]), able[-1]]))
            fixes.append(f"--to {listed} {holds} {'them' if len(names) > 1 else 'it'} exactly")
        rounding = "--lossy" if not self.lossy and self._can_round(refused) else ""
        if rounding and not any("--lossy" in fix for fix in fixes):
            fixes.append("--lossy rounds the weights again")
        return ConversionError(
            f"{self.to} cannot hold {len(names)} of {len(self.plans)} layers exactly", file=self.original.checkpoint.path,
            tensor=names[0], found=f"{', '.join(names[:_NAMED])}{more}: {'; '.join(reasons[:3])}",
            fix="; or ".join(fixes) or None, layers={name: str(error) for name, error in refused.items()},
        )  # fmt: skip

    def _can_round(self, refused: dict[str, NotExact]) -> bool:
        try:
            return all(self.target.fallback(self.plans[name].spec.replace(block_offset=(0, 0))) is not None for name in refused)
        except NotExact:
            return False

    def _others(self, names: list[str]) -> list[str]:
        """Other formats that hold these layers: by the specs of all layers, and by trying on the first of these."""
        out: list[str] = []
        if any(self.plans[name].spec.block_offset != (0, 0) for name in names):
            return out
        for to, kind in TARGETS.items():
            if to == self.to or (to == "gguf" and self.original.checkpoint.is_gguf):
                continue
            target = kind()
            try:
                if _take_all(target, self.plans.values()):
                    for name in names[:_NAMED]:
                        plan = self.plans[name]
                        exact_form(target, plan.layer.read(), target.forms(plan.spec))
                    out.append(to)
            except (NotExact, BitlineError):
                continue
        return out

    # ---- doing it --------------------------------------------------------------------------------------------------------

    def _sink(self) -> Sink:
        if self.to != "gguf":
            return FolderSink(self.original, self.target, self.result, self.shard_bytes)
        forms = {n: form for n, p in self.plans.items() if (form := p.forms[0] if p.forms else p.fallback) is not None}
        return GGUFSink(self.original, self.target, self.result, count_kinds(forms))

    def _write(self, sink: Sink) -> None:
        refused: dict[str, NotExact] = {}
        items = self.original.items
        for i, item in enumerate(items):
            if isinstance(item, Layer):
                try:
                    self.written[item.name] = self._write_layer(sink, self.plans[item.name], bool(refused))
                except NotExact as error:
                    refused[item.name] = error
            elif not refused:  # once a layer is refused, the others are only read to name all that are
                self.plain_bytes += sink.plain(item.name, item.read())
            self.progress("write", i + 1, len(items))
        if refused:
            raise self._refusal(refused)

    def _write_layer(self, sink: Sink, plan: Plan, only_check: bool) -> Written:
        weight = plan.layer.read()
        if not plan.plain and plan.fallback is None:
            try:
                exact = exact_form(self.target, weight, plan.forms)
                nbytes = 0 if only_check else sink.layer(plan.layer, exact)
                return Written(plan, exact.spec, tuple(changes(weight.spec, exact.spec)), nbytes)
            except NotExact as error:
                self._give_way(plan, error)
                if plan.refused is not None:
                    raise plan.refused from error
        if plan.plain:
            return self._write_plain(sink, plan, weight, only_check)
        assert plan.fallback is not None
        new = rounded(weight, plan.fallback, self.target.scales(plan.fallback))
        nbytes = 0 if only_check else sink.layer(plan.layer, new)
        return Written(plan, new.spec, (f"rounded to {new.spec.scheme}",), nbytes, digest(new))

    def _write_plain(self, sink: Sink, plan: Plan, weight: QuantizedWeight, only_check: bool) -> Written:
        values = narrowed(weight.dequantize(), _PLAIN_DTYPES)
        nbytes = 0
        if not only_check:
            nbytes = sink.plain(f"{plan.layer.name}.weight", values)
            if weight.bias is not None:
                nbytes += sink.plain(f"{plan.layer.name}.bias", weight.bias)
        return Written(plan, None, (f"plain {dtype_name(values.dtype)} weights",), nbytes)

    # ---- saying it -------------------------------------------------------------------------------------------------------

    def _report(self, proofs: dict[str, Proof], copied: list[str], left: list[str]) -> ConversionReport:
        layers = []
        for name, written in self.written.items():
            record, proof = written.plan.layer.record, proofs[name]
            after = "plain" if written.form is None else written.form.scheme
            layers.append(
                LayerReport(
                    name, (record.spec.n, record.spec.k), record.format, record.spec.scheme, after, written.changes,
                    not written.digest, record.nbytes, written.nbytes, proof.max_error, proof.rms_error,
                )
            )  # fmt: skip
        source = str(self.original.checkpoint.path)
        return ConversionReport(
            source, str(self.result), self.original.checkpoint.format, self.to, tuple(layers), len(self.original.plain),
            self.plain_bytes, tuple(copied), tuple(left), tuple(self._notes()),
        )  # fmt: skip

    def _notes(self) -> list[str]:
        """What a user should know that no layer says."""
        said = self.original.quantization
        cache = said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")
        odd = Counter(oddity for layer in self.original.layers for oddity in layer.record.oddities)
        notes = [f"odd in the source ({count} layers): {oddity}" for oddity, count in odd.items()]
        if cache and not (self.to == "compressed-tensors" and said.get("quant_method") == "compressed-tensors"):
            notes.append("how the key-value cache is quantized is not carried")
        if self.original.checkpoint.is_gguf:
            notes.append("config.json and tokenizer are what transformers makes of the gguf file")
        if self.original.checkpoint.format == "mxfp4":
            notes.append("each expert is a module of its own, as transformers has none: for tools that work on names")
        return notes


def exact_form(target: Target, weight: QuantizedWeight, forms: list[LinearSpec]) -> QuantizedWeight:
    """The weight in the first form that holds it to the bit; NotExact with the last reason where none does."""
    last = NotExact(f"{target.name} has no form for it")
    for form in forms:
        try:
            new = rewrite(weight, form, target.scales(weight.spec))
            if new.scale2 is not None:
                target.pack(new)  # whether a global scale has a reciprocal is seen here
            return new
        except NotExact as error:
            last = error
    raise last


def _take_all(target: Target, plans: Iterable[Plan]) -> bool:
    """Whether a target has a form for every layer, and one config for all of them, as far as headers tell."""
    known: dict[LinearSpec, LinearSpec] = {}
    forms: dict[str, LinearSpec] = {}
    for plan in plans:
        try:
            if plan.spec not in known:
                known[plan.spec] = target.forms(plan.spec)[0]
            forms[plan.layer.name] = known[plan.spec]
        except NotExact:
            if not (plan.layer.may_be_plain and _is_plain(plan.spec)):
                return False
    return not target.settle(forms)[1]


def _is_plain(spec: LinearSpec) -> bool:
    """True where a layer is its weight and nothing else."""
    return spec.act is None and not spec.input_multiplier

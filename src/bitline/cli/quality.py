"""`bitline quality`: perplexity, and what kernels and quantization each change of a model's predictions."""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from bitline.cli.console import out
from bitline.cli.fetch import local_path
from bitline.cli.options import device_of, dtype_of
from bitline.cli.progress import progress_bars
from bitline.cli.render import put, table
from bitline.errors import InputError
from bitline.model.load import load_model
from bitline.model.plan import quant_linears
from bitline.model.quality import Quality, TokenScores, chunks_of, score, summarize
from bitline.model.tokenizer import encode, load_tokenizer
from bitline.model.transformers_logging import suppress_transformers_logging
from bitline.platform import Platform
from bitline.select import Policy, short_name
from bitline.version import __version__

KERNELS, QUANTIZATION = "kernels", "quantization"  # the comparisons, as the report names them
_REFERENCE = Policy("ReferenceLinearKernel")


@dataclass(frozen=True)
class Text:
    """What is scored. source: where it is from; context: tokens of a chunk; chunks: at most so many, None for all."""

    source: str
    text: str
    context: int
    chunks: int | None

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def text_of(file: Path | None, context: int, chunks: int | None) -> Text:
    """The text of --text; by default the language reference that comes with Python (PSF licence)."""
    if file is None:
        topics = pydoc_data.topics.topics
        return Text("Python's language reference", "\n\n".join(topics[name] for name in sorted(topics)), context, chunks)
    try:
        return Text(str(file), file.read_text(encoding="utf-8"), context, chunks)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("the text cannot be read", file=file, found=f"{type(error).__name__}: {error}",
                         expected="a text file in UTF-8") from error  # fmt: skip


def quality_report(
    model: str, original: str | None, text: Text, device: str, dtype: str, policy: Policy, state: Path | None, *, quiet: bool
) -> dict[str, Any]:
    """The report of the command as JSON-compatible values; docs/quality.md describes the keys."""
    target, asked, path = device_of(device), dtype_of(dtype), local_path(model)
    with suppress_transformers_logging(), progress_bars(quiet=quiet) as bars:
        base = load_model(path, device=target, dtype=torch.float32, policy=_REFERENCE)
        tokenizer = load_tokenizer(base.bitline_checkpoint)
        ids = encode(tokenizer, text.text)[0]
        rows = chunks_of(ids, text.context, text.chunks, tokenizer.bos_token_id if _adds_bos(tokenizer, ids) else None)
        tested = load_model(path, device=target, dtype=asked, policy=policy)
        kernels = sorted({layer.choice.best.name for _, layer in quant_linears(tested)})
        settings: dict[str, Any] = {
            "version": __version__, "torch": torch.__version__, "path": str(path), "text": text.digest, "context": text.context,
            "dtype": str(tested.dtype), "kernels": kernels, "device": str(target), "original": original,
        }  # fmt: skip
        scores = _Scores(state, settings)
        found = {KERNELS: scores.of(KERNELS, tested, base, rows, bars)}
        del tested
        if original is not None:
            first = load_model(local_path(original), device=target, dtype=torch.float32)
            _check_vocabulary(first, base)
            found[QUANTIZATION] = scores.of(QUANTIZATION, base, first, rows, bars)
    return {
        "path": str(path), "original": original, "device": str(target), "platform": str(Platform.detect(target)),
        "activations": settings["dtype"].removeprefix("torch."), "kernels": kernels, "text": text.source,
        "text_sha256": text.digest, "context": text.context, "chunks": len(rows),
        "comparisons": {name: asdict(quality) for name, quality in found.items()},
    }  # fmt: skip


def _adds_bos(tokenizer: Any, ids: torch.Tensor) -> bool:
    return tokenizer.bos_token_id is not None and int(ids[0]) == tokenizer.bos_token_id


def _check_vocabulary(original: Any, model: Any) -> None:
    sizes = [m.config.get_text_config().vocab_size for m in (original, model)]
    if sizes[0] != sizes[1]:
        raise InputError("the original model has another vocabulary", found=f"{sizes[0]} tokens", expected=f"{sizes[1]}",
                         fix="give the model that the checkpoint was quantized from")  # fmt: skip


class _Scores:
    """Scores of chunks, kept in a file of JSON lines as they are made, so that an interrupted run goes on where it ended.

    file: None to keep nothing. settings: what the scores depend on; a file of others is an InputError.
    """

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self.file = file
        self.done: dict[tuple[str, int], TokenScores] = {}
        if file is None:
            return
        if not file.exists():
            file.write_text(json.dumps(settings) + "\n")
            return
        lines = file.read_text().splitlines()
        try:
            header, *rest = [json.loads(line) for line in lines if line.endswith("}")]  # a killed run may leave half a line
            self.done = {(row["comparison"], row["chunk"]): TokenScores(**row["scores"]) for row in rest}
        except (ValueError, TypeError, KeyError) as error:
            raise InputError("the file of --state holds no scores", file=file, found=str(error), fix="give a new name") from error
        if header != settings:
            changed = sorted(key for key in settings.keys() | header.keys() if settings.get(key) != header.get(key))
            raise InputError("the scores of --state are of another run", file=file, found=f"another {', '.join(changed)}",
                             fix="give a new name, or delete the file")  # fmt: skip
        file.write_text("".join(f"{line}\n" for line in lines if line.endswith("}")))

    def of(self, comparison: str, model: Any, base: Any, rows: torch.Tensor, bars: Callable[[str, int, int], None]) -> Quality:
        """The figures of a comparison, whose missing chunks are scored."""
        scores = []
        for i, row in enumerate(rows):
            known = self.done.get((comparison, i))
            if known is None:
                known = score(model, base, row)
                self._keep(comparison, i, known)
            scores.append(known)
            bars(comparison, i + 1, len(rows))
        return summarize(scores)

    def _keep(self, comparison: str, chunk: int, scores: TokenScores) -> None:
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps({"comparison": comparison, "chunk": chunk, "scores": asdict(scores)}) + "\n")


def show(report: dict[str, Any]) -> None:
    """Print a report: a column for each comparison."""
    kernels = ", ".join(map(short_name, report["kernels"])) or "no quantized layer"
    head = f"on {report['device']}, activations {report['activations']}, {kernels}"
    out.print(f"[bold]{escape(report['path'])}[/] {head}", highlight=False, soft_wrap=True)
    tokens = next(iter(report["comparisons"].values()))["tokens"]
    out.print(f"{tokens} tokens of {escape(report['text'])}, {report['chunks']} chunks of {report['context']}", highlight=False)
    heads = {KERNELS: "kernels: as it runs, against its float32 reference",
             QUANTIZATION: "quantization: the float32 reference, against the original"}  # fmt: skip
    grid = table("", *(heads[name] for name in report["comparisons"]))
    figures = [_figures(quality) for quality in report["comparisons"].values()]
    for label in figures[0]:
        grid.add_row(label, *(column[label] for column in figures))
    put(grid)


def _figures(q: dict[str, Any]) -> dict[str, str]:
    return {
        "perplexity": f"{q['perplexity']:.4f} ± {q['perplexity_error']:.4f}",
        "perplexity of the base": f"{q['perplexity_base']:.4f}",
        "ln of their ratio": f"{q['log_ratio']:.6f} ± {q['log_ratio_error']:.6f}",
        "mean KLD": f"{q['mean_kld']:.6f} ± {q['mean_kld_error']:.6f}",
        "median KLD": f"{q['median_kld']:.6f}",
        "99 % KLD": f"{q['kld_99']:.6f}",
        "99.9 % KLD": f"{q['kld_999']:.6f}",
        "maximum KLD": f"{q['max_kld']:.6f}",
        "same top token": f"{q['same_top']:.2%}",
        "RMS change of probability": f"{q['rms_shift']:.3%}",
    }

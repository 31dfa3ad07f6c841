"""The command line: sub-commands, options and exit codes. Nothing here imports torch, so that `--help` is fast."""

from __future__ import annotations

import errno
import gc
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bitline.cli.console import err
from bitline.errors import BitlineError
from bitline.version import __version__

app = typer.Typer(
    name="bitline",
    help="Runs the linear layers of any quantized model on any machine, and explains every kernel that it chooses.",
    epilog="Exit codes: 0 success; 1 bad file, machine or result; 2 bad command line; 130 Ctrl-C. With --json every answer is "
    'one JSON object on stdout, an error is {"error": {...}}. docs/command-line.md describes both.',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__mro__[2]  # ClickException, whose module differs among typer's versions

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Backend = Annotated[str | None, typer.Option(metavar="NAME", help="Prefer this provider's kernels where they support a layer.")]
KernelName = Annotated[
    str | None, typer.Option("--kernel", metavar="CLASS", help="Prefer this kernel where it supports a layer.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if --kernel or --backend does not support a layer.")]
PolicyFlags = Annotated[
    str | None, typer.Option("--policy", metavar="FLAGS", help="Only kernels that are batch_invariant, deterministic, or both.")
]
Disable = Annotated[str | None, typer.Option("--disable", metavar="CLASSES", help="Never use these kernels: A,B.")]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help="Activation dtype: auto, bfloat16, float16 or float32.")]


def run() -> None:
    """Entry point. Exit codes: 0 success, 1 bad input, machine or result, 2 bad command line, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # do not fail on a terminal that cannot print ×
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # how typer reports Ctrl-C; any other value is a command's own exit code
            raise KeyboardInterrupt
        sys.exit(code or 0)
    except _UsageError as error:
        if "--json" in sys.argv:
            _fail(type(error).__name__, error.format_message())
        else:
            error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if err.is_terminal:
            err.print()  # the output, or the terminal's ^C, ends in the middle of a line
        _fail("Interrupted", "stopped by Ctrl-C")
        sys.exit(INTERRUPTED)
    except BitlineError as error:
        _fail(type(error).__name__, str(error), file=error.file, tensor=error.tensor, field=error.field,
              found=error.found, expected=error.expected, fix=error.fix)  # fmt: skip
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.EPIPE:  # EPIPE: the reader of the output has exited
            err.print(f"cannot write the output: {error.strerror}", markup=False, highlight=False)
        sys.stdout = sys.stderr = None  # or Python flushes again on exit
        sys.exit(1)


def _fail(kind: str, message: str, **facts: str | None) -> None:
    """Report an error: one JSON object on stdout with `--json`, else a line on stderr."""
    if "--json" in sys.argv:
        emit({"error": {"type": kind, "message": message, **facts}})
    else:
        err.print(f"[bold red]{kind}[/]: ", end="")
        err.print(message, markup=False, highlight=False, soft_wrap=True)


def emit(report: dict[str, Any]) -> None:
    """Print a `--json` report; NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(_finite(report), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,16,512` to batch sizes M."""
    sizes = list(dict.fromkeys(p.strip() for p in text.split(",") if p.strip()))
    if not sizes or not all(p.isascii() and p.isdigit() and 0 < int(p) <= 1 << 16 for p in sizes):
        raise typer.BadParameter("give whole numbers from 1 to 65536, separated by commas, as in 1,16,512", param_hint="--m")
    return tuple(int(p) for p in sizes)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bitline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


@app.command("run")
def run_model(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, or the packaged model: smollm2.")],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue; with --chat, the user message.")
    ] = "The capital of France is",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Tokens to generate.")] = 128,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, xpu.")] = "cpu",
    dtype: Dtype = "auto",
    kernel: KernelName = None,
    backend: Backend = None,
    strict: Strict = False,
    policy: PolicyFlags = None,
    disable: Disable = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    check: Annotated[bool, typer.Option(help="Compare one layer of each spec with the reference at the end.")] = True,
    as_json: Json = False,
) -> None:
    """Load a quantized model, print the kernel of every layer, stream the answer, and report speed, memory and accuracy."""
    from bitline.cli.options import policy_of
    from bitline.cli.run import run_report

    asked = policy_of(kernel, backend, strict, policy, disable)
    report = run_report(model, prompt, max_new_tokens, device, dtype, asked, chat, check, quiet=as_json)
    if as_json:
        emit(report)
    if check and not all(row["ok"] for row in report["checks"]):
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, a .safetensors or a .gguf file, or smollm2.")],
    scales: Annotated[
        bool | None,
        typer.Option("--scales/--no-scales", help="Also check the scales' values; by default if they are small."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains, one row per distinct layer, and report anomalies. Reads no quantized weights."""
    from bitline.cli.inspect import inspect_report, show

    gc.disable()  # a model of experts is a million small objects, none of them garbage, that each collection would traverse
    report = inspect_report(path, scales)
    emit(report) if as_json else show(report)


@app.command(epilog="For example: bitline explain MODEL --platform cuda:sm90,flashinfer --m 1,16,512 --tp 2")
def explain(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, a .gguf file, or smollm2.")],
    platform: Annotated[
        str,
        typer.Option(metavar="P", help="Any platform: cpu:avx512,amx  cuda:sm90  rocm:gfx942  xpu; packages may follow. "
                     "By default this machine's CPU."),
    ] = "",
    m: Annotated[str, typer.Option("--m", metavar="1,16,512", help="Batch sizes (M) to estimate.")] = "1,256",
    dtype: Dtype = "auto",
    tp: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Shard every layer over this many ranks (tensor parallelism).")
    ] = 1,
    kernel: KernelName = None,
    backend: Backend = None,
    strict: Strict = False,
    policy: PolicyFlags = None,
    disable: Disable = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every candidate kernel's reason.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show which kernel each layer would run on, on this or any other platform, and why the other kernels lost."""
    from bitline.cli.explain import explain_report
    from bitline.cli.explain_text import show
    from bitline.cli.options import platform_of, policy_of

    asked = policy_of(kernel, backend, strict, policy, disable, m=parse_batch_sizes(m))
    report = explain_report(path, platform_of(platform), asked, dtype, tp)
    emit(report) if as_json else show(report, everything)


@app.command(
    epilog="For example: bitline tune MODEL --m 1,16,512 --seconds 120, or bitline tune --shape 4096x11008 --scheme W4A16"
)
def tune(
    model: Annotated[str | None, typer.Argument(help="A checkpoint folder, a .gguf file, or smollm2.")] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="NxK", help="Instead of a model, one layer of this shape.")
    ] = None,
    scheme: Annotated[
        str, typer.Option("--scheme", metavar="NAME", help="The scheme of --shape: W4A16, FP8, NVFP4, …")
    ] = "W4A16",
    m: Annotated[str, typer.Option("--m", metavar="1,16,512", help="Batch sizes (M) to measure.")] = "1,256",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time limit; what is not reached keeps its estimates.")
    ] = 60.0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, xpu.")] = "cpu",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Time the kernels of every layer on this machine, and keep the times: selection then prefers them to estimates."""
    from bitline.cli.tune import show, tune_report

    report = tune_report(model, shape, scheme, parse_batch_sizes(m), seconds, device, dtype, quiet=as_json)
    emit(report) if as_json else show(report)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder, a .safetensors or a .gguf file, or smollm2.")],
    result: Annotated[Path, typer.Argument(help="A new folder; with --to gguf, a new .gguf file.")],
    to: Annotated[str, typer.Option("--to", help="compressed-tensors, gptq, awq, gguf, fp8 or modelopt.")],
    lossy: Annotated[bool, typer.Option("--lossy", help="Requantize layers that the format cannot represent exactly.")] = False,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Drop activation quantization.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another format losslessly, and verify every layer by reading it back."""
    from bitline.cli.convert import convert_report, show

    report = convert_report(source, result, to, lossy, weights_only, quiet=as_json)
    emit(report) if as_json else show(report)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show this machine's devices and packages, what each optional package would add, and test every kernel on a small GEMM."""
    from bitline.cli.doctor import doctor_report
    from bitline.cli.doctor_text import show

    report = doctor_report()
    emit(report) if as_json else show(report)
    if not all(row["ok"] for row in report["kernels"] if row["ran"]):
        raise typer.Exit(1)

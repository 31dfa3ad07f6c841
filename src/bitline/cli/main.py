"""The command line: sub-commands, options and exit codes. Nothing here imports torch, so that `--help` is fast."""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bitline import env
from bitline.cli.console import ClosedPipe, err
from bitline.errors import BitlineError, InputError
from bitline.version import __version__

app = typer.Typer(
    name="bitline",
    help="Runs the linear layers of any quantized model on any machine, and explains every kernel that it chooses.",
    epilog="Exit codes: 0 success; 1 bad file, machine or result; 2 bad command line; 130 Ctrl-C; 141 closed pipe. With --json "
    'every answer is one JSON object on stdout, an error is {"error": {...}}. docs/command-line.md describes both.',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
INTERRUPTED = 130
CLOSED_PIPE = 141  # as a program that SIGPIPE ends
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
ExpertParallel = Annotated[
    bool, typer.Option("--expert-parallel", help="Give each tensor-parallel rank whole experts instead of a part of each.")
]
Disable = Annotated[str | None, typer.Option("--disable", metavar="CLASSES", help="Never use these kernels: A,B.")]
Model = Annotated[
    str, typer.Argument(help="A checkpoint folder, a .gguf file, a name on the Hugging Face hub, or the packaged model: smollm2.")
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto (a GPU where there is one), cpu, cuda, cuda:1, xpu.")]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help="Activation dtype: auto, bfloat16, float16 or float32.")]


def run() -> None:
    """Entry point. Exit codes: 0 success, 1 bad input, machine or result, 2 bad command line, 130 Ctrl-C, 141 closed pipe."""
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
    except ClosedPipe:
        sys.stdout = sys.stderr = None  # or Python flushes again on exit
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        err.print(f"cannot write the output: {error.strerror}", markup=False, highlight=False)
        sys.stdout = sys.stderr = None
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
    try:
        print(json.dumps(_finite(report), indent=2, allow_nan=False), flush=True)
    except BrokenPipeError as error:
        raise ClosedPipe from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,16,512` or `1..512` to batch sizes M."""
    from bitline.bench.grid import parse_sizes

    try:
        return parse_sizes(text)
    except InputError as error:
        raise typer.BadParameter(
            f"give whole numbers from 1 to 65536, separated by commas, as in 1,16,512, or 1..512: {error}", param_hint="--m"
        ) from error


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
    model: Model,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue; with --chat, the user message.")
    ] = "The capital of France is",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Tokens to generate.")] = 128,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, metavar="N", help="CPU threads; 0: as torch chooses.")] = 0,
    m: Annotated[
        str, typer.Option("--m", metavar="1,256", help="Batch sizes (M) to choose kernels for: decode and prefill.")
    ] = "1,256",
    kernel: KernelName = None,
    backend: Backend = None,
    strict: Strict = False,
    policy: PolicyFlags = None,
    disable: Disable = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="A conversation: read messages from standard input.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="Draw tokens at this temperature; 0: greedy.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, metavar="N", help="Draw from the N likeliest tokens only; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", min=0.0, max=1.0, metavar="P", help="Draw from the likeliest tokens that add up to P."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="The same seed draws the same tokens.")] = 0,
    check: Annotated[bool, typer.Option(help="Compare one layer of each spec with the reference at the end.")] = True,
    expert_parallel: ExpertParallel = False,
    as_json: Json = False,
) -> None:
    """Load a quantized model, print the kernel of every layer, stream the answer, and report speed, memory and accuracy.

    Started by torchrun, each rank runs its cut of every layer (tensor parallelism) and the first one prints.
    """
    if interactive and (as_json or env.launched_ranks() > 1):
        raise typer.BadParameter("a conversation runs in one process and has no --json", param_hint="--interactive")
    from bitline.cli.options import policy_of, sampling_of
    from bitline.cli.run import RunOptions, run_report
    from bitline.parallel.group import leave

    asked = policy_of(kernel, backend, strict, policy, disable, m=parse_batch_sizes(m))
    sampling = sampling_of(temperature, top_k, top_p, seed)
    options = RunOptions(max_new_tokens, device, dtype, asked, chat, check, threads, sampling, expert_parallel)
    if interactive:
        from bitline.cli.chat import converse

        converse(model, options)
        return
    try:
        report = run_report(model, prompt, options, quiet=as_json)
    finally:
        leave()
    if as_json and env.launched_rank() == 0:
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
        int, typer.Option("--tp", min=1, metavar="N", help="Cut the layers over this many ranks (tensor parallelism).")
    ] = 1,
    expert_parallel: ExpertParallel = False,
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

    if expert_parallel and tp == 1:
        raise typer.BadParameter("give the number of ranks with --tp", param_hint="--expert-parallel")
    asked = policy_of(kernel, backend, strict, policy, disable, m=parse_batch_sizes(m))
    report = explain_report(path, platform_of(platform), asked, dtype, tp, expert_parallel=expert_parallel)
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
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Time the kernels of every layer on this machine, and keep the times: selection then prefers them to estimates."""
    from bitline.cli.tune import show, tune_report

    report = tune_report(model, shape, scheme, parse_batch_sizes(m), seconds, device, dtype, quiet=as_json)
    emit(report) if as_json else show(report)


@app.command(
    epilog="For example: bitline bench --shape 4096x4096 --scheme W4A16:g128 --m 1..4096, bitline bench --batch FILE --mode C, "
    "or bitline bench --compare BEFORE.json AFTER.json"
)
def bench(
    model: Annotated[str | None, typer.Argument(help="A checkpoint: one problem for each kind of layer.")] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="NxK", help="Instead of a model, layers of these shapes: 4096x4096,1024x4096."),
    ] = None,
    batch: Annotated[
        Path | None, typer.Option("--batch", metavar="FILE", help="Instead of a model, problems in lines of text; docs/bench.md.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Print what became slower between two JSON files, and exit with 1 then."),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", metavar="NAMES", help="Schemes of the shapes: W4A16:g128,FP8,Q4_K [default: W4A16]")
    ] = None,
    m: Annotated[
        str, typer.Option("--m", metavar="1,16", help="Batch sizes (M); 1..4096 are 1, 4096 and the powers of two between.")
    ] = "1,256",
    mode: Annotated[str, typer.Option("--mode", metavar="C|P", help="C: correctness. P: performance. CP: both.")] = "P",
    kernel: Annotated[
        str, typer.Option("--kernel", metavar="CLASSES", help="Only these kernels, A,B; a refusal is then a failure.")
    ] = "all",
    skip_impl: Annotated[
        str, typer.Option("--skip-impl", metavar="CLASSES", help="Not these kernels; what only they could run is no failure.")
    ] = "",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time for the calls of all kernels of a layer at one M.")
    ] = 1.0,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="On a CUDA GPU, times under sustained load too, which lowers its clocks.")
    ] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, metavar="N", help="CPU threads; 0: as torch chooses.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    baselines: Annotated[
        str | None,
        typer.Option("--baselines", metavar="FILE.py[:A,B]", help="Times what this Python file defines too; docs/bench.md."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON here, results as they come.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out of an interrupted run, on the same machine and commit.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the roofline; needs matplotlib.")] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="R", help="With --compare: slower is a ratio of times above this.")
    ] = 1.1,
    as_json: Json = False,
) -> None:
    """Check and time every kernel of each kind of layer, beside the read limit, the compute limit and a dense layer."""
    from bitline.cli import bench as command
    from bitline.cli.bench_text import show, show_comparison

    sources = [source for source in (model, shape, batch, compare) if source is not None]
    if len(sources) != 1:
        raise typer.BadParameter("give one of a model, --shape NxK, --batch FILE and --compare A B", param_hint="MODEL")
    if compare is not None:
        compared = command.comparison_of(*compare, threshold)
        emit(command.comparison_report(compared, threshold)) if as_json else show_comparison(compared, threshold)
        if not compared.ok:
            raise typer.Exit(1)
        return
    asked = command.BenchOptions(
        scheme, m, mode, kernel, skip_impl, seconds, sustained, threads, device, dtype, out, plot, baselines, resume
    )
    report = command.bench_report(model, shape, batch, asked, quiet=as_json)
    emit(report.to_dict()) if as_json else show(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command(epilog="For example: bitline verify MODEL --sample 20 --all-kernels, or bitline verify MODEL --tp 4")
def verify(
    model: Model,
    device: Device = "auto",
    dtype: Dtype = "auto",
    m: Annotated[str, typer.Option("--m", metavar="1,16,256", help="Batch sizes (M) to run each layer at.")] = "1,16,256",
    kernel: KernelName = None,
    all_kernels: Annotated[bool, typer.Option("--all-kernels", help="Check every kernel that can run a layer.")] = False,
    disable: Disable = None,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, metavar="N", help="Only N layers, spread evenly over the file.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="The same seed draws the same sample.")] = 0,
    tp: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Check what each of N tensor-parallel ranks would pack.")
    ] = 1,
    expert_parallel: ExpertParallel = False,
    as_json: Json = False,
) -> None:
    """Run every quantized layer of a checkpoint on this machine and compare it with the reference in float64."""
    if kernel is not None and all_kernels:
        raise typer.BadParameter("give one of --kernel and --all-kernels", param_hint="--all-kernels")
    if expert_parallel and tp == 1:
        raise typer.BadParameter("give the number of ranks with --tp", param_hint="--expert-parallel")
    from bitline.cli.options import policy_of
    from bitline.cli.verify import show, verify_report

    asked = policy_of(kernel, None, False, None, disable)
    sizes = parse_batch_sizes(m)
    report = verify_report(
        model, device, dtype, asked, sizes, all_kernels, sample, seed, tp, expert_parallel=expert_parallel, quiet=as_json
    )  # fmt: skip
    emit(report) if as_json else show(report)
    if not report["ok"]:
        raise typer.Exit(1)


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
    from bitline.cli.convert import convert_report, show, target_of

    report = convert_report(source, result, target_of(to), lossy, weights_only, quiet=as_json)
    emit(report) if as_json else show(report)


@app.command(epilog="For example: bitline quantize MODEL OUT --scheme W4A16 --group-size 128")
def quantize(
    source: Annotated[str, typer.Argument(help="An unquantized model: a folder, or a name on the Hugging Face hub.")],
    result: Annotated[Path, typer.Argument(help="A new folder; with --to gguf, a new .gguf file.")],
    scheme: Annotated[
        str, typer.Option("--scheme", metavar="NAME", help="W4A16, W8A16, W8A8, FP8_DYNAMIC, NVFP4A16, …")
    ] = "W4A16",
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Columns per scale, -1 for one scale per row.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="REGEX", help="Copy layers whose name has this; may be repeated.")
    ] = None,
    to: Annotated[str, typer.Option("--to", help="As in convert.")] = "compressed-tensors",
    as_json: Json = False,
) -> None:
    """Quantize a model by rounding to nearest, without calibration, and verify every layer by reading it back.

    GPTQModel, AutoRound and llm-compressor calibrate with data, which is more accurate at 4 bits and below.
    """
    from bitline.cli.convert import quantize_report, show, target_of

    report = quantize_report(source, result, target_of(to), scheme, group_size, ignore or [], quiet=as_json)
    emit(report) if as_json else show(report)


@app.command(
    epilog="For example: bitline quality MODEL --chunks 20, or bitline quality MODEL --original ORIGINAL --text book.txt"
)
def quality(
    model: Model,
    original: Annotated[
        str | None, typer.Option("--original", metavar="MODEL", help="The model that was quantized, to compare with too.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="A text in UTF-8; by default Python's language reference.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=4, metavar="N", help="Tokens of a chunk; its second half is scored.")
    ] = 512,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, metavar="N", help="At most this many chunks.")] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FILE", help="Keep scores here, and go on from those that are.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kernel: KernelName = None,
    backend: Backend = None,
    strict: Strict = False,
    policy: PolicyFlags = None,
    disable: Disable = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity, and how far kernels (and quantization, with --original) change a model's predictions."""
    from bitline.cli.options import policy_of
    from bitline.cli.quality import quality_report, show, text_of

    asked = policy_of(kernel, backend, strict, policy, disable)
    report = quality_report(model, original, text_of(text, context, chunks), device, dtype, asked, state, quiet=as_json)
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

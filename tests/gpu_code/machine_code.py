"""Fingerprints of the machine code of each compiled kernel variant, to prove that a change does not alter it. No GPU needed.

    python tests/gpu_code/machine_code.py dump OUT.json [--target sm_90a ...] [--jobs 2] [--texts FOLDER]
    python tests/gpu_code/machine_code.py compare A.json B.json [--target sm_90a ...]

`dump` compiles the variants of tests/kernels/*_targets.py, and writes for each the SHA-256 of its PTX
or amdgcn text and of its SASS, names and comments taken out, and its registers, spills and shared memory. `compare` matches
variants by target and position, not by label, and its exit status is 1 on any difference.

Of these files it uses `variants()` and `variants(target)` alone, which yield (label, compiled kernel) in a fixed order: dumps
of an old and of a new commit can be compared whatever was renamed between them.
"""

import argparse
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = ("sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201")
HOPPER = {"sm_90a": "hopper", "sm_90a-experts": "hopper_experts", "sm_90a-scaled": "hopper_scaled", "sm_90a-w4a8": "hopper_w4a8"}
# target -> (file whose variants() it compiles, arguments of variants())
TARGETS = {name: (f"{file}_targets.py", ()) for name, file in HOPPER.items()}
TARGETS |= {name: ("triton_targets.py", (name,)) for name in PORTABLE}

# What a launch takes from the compiled kernel beside its code and its shared memory.
LAUNCH = ("num_warps", "num_ctas", "launch_pdl", "launch_cooperative_grid", "global_scratch_size", "tmem_size")
USAGE = {"REG": "registers", "STACK": "stack", "LOCAL": "local", "SHARED": "static shared"}  # cuobjdump's name -> ours
AMD_USAGE = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


def symbols(text):
    """Kernels and device functions that PTX or amdgcn defines, in their order; not those of other libraries."""
    found = []
    for extern, name in re.findall(r"^(.*?)\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*\(", text, re.M):
        found += [name] if ".extern" not in extern and "//" not in extern else []
    return list(dict.fromkeys(found + re.findall(r"^\s*\.type\s+([\w$.]+),\s*@function", text, re.M)))


def normalized(text, names, comment):
    """The text without comments, file names, line information and trailing blanks; function i is called function_i.

    A name after a dot is an instruction's (mad.wide.s32), unless it is a section's.
    """
    for i, name in enumerate(names):
        text = re.sub(rf"(?:(?<![\w.%])|(?<=\.text\.)){re.escape(name)}(?=_param_\d|\W|$)", f"function_{i}", text, flags=re.M)
    lines = []
    for line in text.splitlines():
        line = re.sub(comment, r"\1", line).rstrip()
        if line and not re.match(r"\s*\.(file|loc)\s", line):
            lines.append(line)
    return "\n".join(lines) + "\n"


# A comment runs to the end of its line, and does not begin within quotes.
SLASHES, SEMICOLON = (rf'^((?:[^"]|"[^"]*")*?){mark}.*$' for mark in ("//", ";"))


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def tool(name, *arguments):
    """What a program of Triton's NVIDIA package prints; None where the package is without it."""
    import triton

    path = Path(triton.__path__[0]) / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout if path.exists() else None


def texts_of(kernel):
    """{kind of text: normalized text} of a compiled kernel, and its resources."""
    meta = kernel.metadata
    resources = {"shared": meta.shared} | {name: getattr(meta, name) for name in LAUNCH if hasattr(meta, name)}
    # Arguments that a launch does not specialize for: Triton silently ignores a listed name that no argument has.
    resources["do_not_specialize"] = [i for i, argument in enumerate(kernel.src.fn.params) if argument.do_not_specialize]
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {name: re.findall(rf"\.{name}:\s*(\d+)", text) for name in AMD_USAGE}
        resources |= {name: int(number[0]) for name, number in found.items() if number}
        return {"amdgcn": normalized(text, symbols(text), SEMICOLON)}, resources
    names = symbols(kernel.asm["ptx"])
    found = {"ptx": normalized(kernel.asm["ptx"], names, SLASHES)}
    Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
    usage = tool("cuobjdump", "-res-usage", "kernel.cubin")
    if usage is not None:
        numbers = dict(re.findall(r"\b([A-Z]+):(\d+)", usage.split("Function", 1)[1]))
        resources |= {ours: int(numbers[theirs]) for theirs, ours in USAGE.items()}
    sass = tool("nvdisasm", "-c", "-hex", "kernel.cubin")  # the encoding too: it alone holds stall counts and barriers
    if sass is not None:
        found["sass"] = normalized(sass, names, SLASHES)
        opcodes = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w+)", sass, re.M))
        resources["spills"] = opcodes["LDL"] + opcodes["STL"]  # instructions, of the whole kernel
    return found, resources


def dump_target(target, folder):
    """Compiles the variants of a target, in this process and an empty cache: (their records, seconds)."""
    began = time.monotonic()
    for name in [name for name in os.environ if name.startswith("TRITON_")]:
        del os.environ[name]  # another ptxas, the interpreter
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        os.environ |= {"TRITON_CACHE_DIR": f"{temporary}/cache", "TRITON_DISABLE_LINE_INFO": "1"}
        sys.path.insert(0, str(ROOT / "src"))
        sys.meta_path.insert(0, importlib.machinery.PathFinder)  # else an editable install leads to the tree it was made of
        file, arguments = TARGETS[target]
        sys.path.append(str(ROOT / "tests" / "kernels"))  # the files import each other
        spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / "tests" / "kernels" / file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        records = []
        for label, kernel in module.variants(*arguments):
            source = Path(kernel.src.fn.fn.__code__.co_filename)
            if not source.resolve().is_relative_to(ROOT):
                raise RuntimeError(f"{label} is compiled from {source}, which is not in this tree")
            texts, resources = texts_of(kernel)
            for kind, text in texts.items() if folder else ():
                Path(folder, f"{target}-{len(records):03}.{kind}").write_text(text)
            records.append({"label": label, **{kind: sha(text) for kind, text in texts.items()}, "resources": resources})
        os.chdir(ROOT)
    return records, time.monotonic() - began


def dump(out, targets, jobs, folder):
    import triton

    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
    found, failed = {}, False
    # A fresh process for each target: cache, working folder and environment are its own.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        tasks = {pool.submit(dump_target, target, folder): target for target in targets}
        for task in as_completed(tasks):
            target = tasks[task]
            if error := task.exception():
                failed = True
                print(f"{target}: failed", *traceback.format_exception(error), sep="\n", file=sys.stderr, flush=True)
                continue
            found[target], seconds = task.result()
            print(f"{target}: {len(found[target])} variants in {seconds:.0f} s", flush=True)
    ordered = {target: found[target] for target in TARGETS if target in found}
    out.write_text(json.dumps({"triton": triton.__version__, "targets": ordered}, indent=1) + "\n")
    return 1 if failed else 0


def differences(a, b):
    """One line for each difference of two dumps, and one for each label that reads otherwise."""
    found, reworded = [], []
    if a["triton"] != b["triton"]:
        found.append(f"compiled by Triton {a['triton']} and by Triton {b['triton']}")
    for target in dict.fromkeys([*a["targets"], *b["targets"]]):
        old, new = (dump["targets"].get(target, []) for dump in (a, b))
        if len(old) != len(new):
            found.append(f"{target}: {len(old)} variants and {len(new)} variants")
        for i, (one, other) in enumerate(zip(old, new, strict=False)):
            pair = [one["label"]] + [other["label"]] * (one["label"] != other["label"])
            name = f"{target} {i}: " + " -> ".join(repr(label) for label in pair)
            reworded += [name] if len(pair) == 2 else []
            kinds = [kind for kind in ("ptx", "amdgcn", "sass") if one.get(kind) != other.get(kind)]
            keys = dict.fromkeys([*one["resources"], *other["resources"]])
            values = [(key, one["resources"].get(key), other["resources"].get(key)) for key in keys]
            kinds += [f"{key} {before} -> {after}" for key, before, after in values if before != after]
            found += [f"{name}: {', '.join(kinds)}"] if kinds else []
    return found, reworded


def compare(a, b, targets):
    a, b = (json.loads(path.read_text()) for path in (a, b))
    for found in (a, b):
        found["targets"] = {name: records for name, records in found["targets"].items() if name in targets}
    found, reworded = differences(a, b)
    for line in reworded:
        print(f"reworded  {line}")
    for line in found:
        print(f"DIFFERENT {line}")
    for target in dict.fromkeys([*a["targets"], *b["targets"]]):
        counts = [len(dump["targets"].get(target, [])) for dump in (a, b)]
        print(f"{target}: {counts[0]} and {counts[1]} variants, {sum(line.startswith(target + ' ') for line in found)} different")
    if not any(a["targets"].values()):
        found.append("nothing compared")
    print(f"{len(found)} differences, {len(reworded)} labels reworded")
    return 1 if found else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dump", help="compile every variant and record its fingerprint")
    command.add_argument("out", type=Path)
    command.add_argument("--jobs", type=int, default=2, help="processes, each of one target at a time")
    command.add_argument("--texts", type=Path, help="folder to write the normalized texts to, for diff")
    command = commands.add_parser("compare", help="exit status 1 unless two dumps are the same but for labels")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    for command in commands.choices.values():
        command.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="all unless told")
    given = parser.parse_args(arguments)
    if given.command == "compare":
        return compare(given.a, given.b, given.target)
    return dump(given.out, given.target, given.jobs, given.texts)


if __name__ == "__main__":
    sys.exit(main())

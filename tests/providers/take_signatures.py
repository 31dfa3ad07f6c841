"""Write tests/providers/signatures/<package>.json from unpacked wheels and, of what is in no wheel, from clones of repositories.

python tests/providers/take_signatures.py FOLDER      FOLDER/<wheel's name>/ is what `pip download` and `unzip` give,
                                                      FOLDER/<repository's name>/ what `git clone` gives

Python functions and dataclasses are read with `ast`; operators' schemas and the messages of their checks from the shared
library's strings; pybind11's registrations and the comments of C++ parameters from the source. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "signatures"
# output file: (folder of the unpacked wheel, {module file: names}, {library: operators}, substrings of check messages)
WANTED = {
    "flashinfer": ("flashinfer_python", {
        "flashinfer/gemm/gemm_base.py": ["mm_fp4", "mm_mxfp8", "fp8_blockscale_gemm_sm90"],
        "flashinfer/utils.py": ["srcToDstBlk32RowMap"],
    }, {}, ()),
    "aiter": ("amd_aiter", {"aiter/ops/gemm_op_a8w8.py": ["gemm_a8w8_CK"]}, {}, ()),
    "auto_round_kernel": (
        "auto_round_lib", {"auto_round_kernel/__init__.py": ["_repack_quantized_weight_core", "woqgemm"]}, {}, (),
    ),
    "humming": ("humming_kernels", {
        "humming/schema/humming.py": ["HummingWeightSchema", "HummingInputSchema"],
        "humming/transform.py": ["prepare_layer_config", "transform_humming_tensors"],
        "humming/forward.py": ["humming_forward"],
    }, {}, ()),
    "fbgemm": ("fbgemm_gpu_genai", {}, {"*.so": ["f4f4bf16"]}, ()),
    "mslk": ("mslk_cuda", {}, {"mslk.so": ["f4f4bf16"]}, ("Weight dimensions N and K must be",)),
    "vllm_xpu_kernels": (
        "vllm_xpu_kernels", {}, {"*_xpu_C*.so": ["int4_gemm_w4a16", "int4_gemm_w4a8", "fp8_gemm"]},
        ("for int4 matmul", "for fp8 matmul", "NT format", "Int4-Int8 matmul expects"),
    ),
}  # fmt: skip
# output file: (repository, module with __version__, source, names that pybind11 registers)
REGISTERED = {"deep_gemm": ("deepseek-ai/DeepGEMM", "deep_gemm/__init__.py", "csrc/apis/gemm.hpp", ["fp8_gemm_nt"])}
# an output file above: (repository, source, C++ functions whose parameters' comments state shapes)
COMMENTED = {
    "vllm_xpu_kernels": (
        "vllm-project/vllm-xpu-kernels", "csrc/xpu/onednn/onednn_matmul.cpp", ["int4_gemm_w4a16", "int4_gemm_w4a8"],
    ),
}  # fmt: skip
_PYTHON = {"std::nullopt": "None", "true": "True", "false": "False"}


def python_names(file: Path, names: list[str]) -> dict[str, object]:
    """Signatures of functions, methods and dataclasses, and values of constants, from a module's source."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found.setdefault(node.name, f"({ast.unparse(node.args)})")
        if isinstance(node, ast.ClassDef) and node.name in names:
            fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)]
            found[node.name] = f"(*, {', '.join(map(ast.unparse, fields))})"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def schemas(file: Path, names: list[str]) -> dict[str, object]:
    """Operator schemas among a library's strings."""
    text = file.read_bytes()
    pattern = rb"(?:%s)\([ -~]*\) -> [ -~]+" % b"|".join(name.encode() for name in names)
    return {m.decode().partition("(")[0]: m.decode() for m in re.findall(pattern, text)}


def messages(file: Path, parts: tuple[str, ...]) -> set[str]:
    """A library's strings that contain one of the parts."""
    strings = re.findall(rb"[ -~]{12,}", file.read_bytes())
    return {s.decode().strip() for s in strings if any(part.encode() in s for part in parts) and b"_Z" not in s}


def registered(source: str, name: str) -> str:
    """The signature of a function that pybind11 registers, following an alias (`m.attr`)."""
    alias = re.search(rf'm\.attr\("{name}"\) = m\.attr\("(\w+)"\)', source)
    name = alias[1] if alias else name
    text = re.search(rf'm\.def\("{name}", &\w+,(.*?)\);', source, re.S)
    assert text is not None, f"{name} is not registered"
    arguments = re.findall(r'py::arg\("(\w+)"\)(?: = ([^,)]+(?:\([^)]*\))?))?', text[1])
    return f"({', '.join(a + (f'={_PYTHON.get(d, d)}' if d else '') for a, d in arguments)})"


def comments(source: str, name: str) -> dict[str, str]:
    """The comments behind a C++ function's parameters, by parameter."""
    text = re.search(rf"^torch::Tensor {name}\((.*?)\) \{{", source, re.S | re.M)
    assert text is not None, f"{name} is not defined"
    return dict(re.findall(r"(\w+),\s*// (.+)", text[1]))


def of_repository(folder: Path, repository: str, file: str) -> tuple[dict[str, str], str]:
    """The provenance of a file, and its text."""
    root = folder / repository.partition("/")[2]
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {"repository": f"github.com/{repository}", "commit": commit, "file": file}, (root / file).read_text(encoding="utf-8")


def write(package: str, record: dict[str, object]) -> None:
    (HERE / f"{package}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write every record."""
    for package, (wheel, modules, libraries, checks) in WANTED.items():
        root = folder / wheel
        info = next(root.glob("*.dist-info"))
        meta = dict(re.findall(r"^(Name|Version): (.*)$", (info / "METADATA").read_text(encoding="utf-8"), re.MULTILINE))
        found: dict[str, object] = {}
        said: set[str] = set()
        for file, names in modules.items():
            found |= python_names(root / file, names)
        for pattern, names in libraries.items():
            for library in sorted(root.rglob(pattern)):
                found |= schemas(library, names)
                said |= messages(library, checks) if checks else set()
        wanted = {n for group in (*modules.values(), *libraries.values()) for n in group}
        if set(found) != wanted:
            sys.exit(f"{package}: not found: {sorted(wanted - set(found))}")
        record: dict[str, object] = {
            "distribution": meta["Name"], "version": meta["Version"], "taken": "take_signatures.py, from the wheel",
            "names": dict(sorted(found.items())),
        }  # fmt: skip
        record |= {"messages": sorted(said)} if said else {}
        if package in COMMENTED:
            repository, file, names = COMMENTED[package]
            origin, source = of_repository(folder, repository, file)
            record["comments"] = {**origin, "parameters": {name: comments(source, name) for name in names}}
        write(package, record)
    for package, (repository, module, file, names) in REGISTERED.items():
        origin, source = of_repository(folder, repository, file)
        version = python_names(folder / repository.partition("/")[2] / module, ["__version__"])["__version__"]
        write(package, {"distribution": package, "version": version,
                        "taken": "take_signatures.py, from the repository; no wheel of this version is on PyPI", **origin,
                        "names": {name: registered(source, name) for name in names}})  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))

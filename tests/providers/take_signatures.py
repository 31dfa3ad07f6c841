"""Write tests/providers/signatures/<package>.json from unpacked wheels.

python tests/providers/take_signatures.py FOLDER      FOLDER/<wheel's name>/ is what `pip download` and `unzip` give

Python functions are read with `ast`, operators' schemas out of the shared library's strings; nothing is imported or run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent / "signatures"
# file of the result: (folder of the unpacked wheel, its distribution, how a caller finds it, {module file: names}, libraries)
WANTED = {
    "flashinfer": ("flashinfer_python", {
        "flashinfer/gemm/gemm_base.py": ["mm_fp4", "mm_mxfp8", "fp8_blockscale_gemm_sm90"],
        "flashinfer/utils.py": ["srcToDstBlk32RowMap"],
    }, {}),
    "aiter": ("amd_aiter", {"aiter/ops/gemm_op_a8w8.py": ["gemm_a8w8_CK"]}, {}),
    "auto_round_kernel": ("auto_round_lib", {"auto_round_kernel/__init__.py": ["_repack_quantized_weight_core", "woqgemm"]}, {}),
    "fbgemm": ("fbgemm_gpu_genai", {}, {"*.so": ["f4f4bf16"]}),
    "vllm_xpu_kernels": ("vllm_xpu_kernels", {}, {"*_xpu_C*.so": ["int4_gemm_w4a16", "int4_gemm_w4a8", "fp8_gemm"]}),
}  # fmt: skip


def python_names(file: Path, names: list[str]) -> dict[str, object]:
    """The signatures of functions and methods, and the values of constants, of a module's text."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found.setdefault(node.name, f"({ast.unparse(node.args)})")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def schemas(file: Path, names: list[str]) -> dict[str, object]:
    """Operators' schemas in a library's strings."""
    text = file.read_bytes()
    pattern = rb"(?:%s)\([ -~]*\) -> [ -~]+" % b"|".join(name.encode() for name in names)
    return {m.decode().partition("(")[0]: m.decode() for m in re.findall(pattern, text)}


def main(folder: Path) -> None:
    """Every file."""
    for package, (wheel, modules, libraries) in WANTED.items():
        root = folder / wheel
        info = next(root.glob("*.dist-info"))
        meta = dict(re.findall(r"^(Name|Version): (.*)$", (info / "METADATA").read_text(encoding="utf-8"), re.MULTILINE))
        found: dict[str, object] = {}
        for file, names in modules.items():
            found |= python_names(root / file, names)
        for pattern, names in libraries.items():
            for file in sorted(root.rglob(pattern)):
                found |= schemas(file, names)
        wanted = {n for group in (*modules.values(), *libraries.values()) for n in group}
        if set(found) != wanted:
            sys.exit(f"{package}: not found: {sorted(wanted - set(found))}")
        record = {"distribution": meta["Name"], "version": meta["Version"], "taken": "take_signatures.py, from the wheel",
                  "names": dict(sorted(found.items()))}  # fmt: skip
        (HERE / f"{package}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

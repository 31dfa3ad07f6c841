"""The import order: modules import only from lower rows, and without cycles."""

import ast
import graphlib
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"

# Lowest first. A module may import modules of earlier rows and of its own entry. An entry is a module, or a folder without the
# parts that have an entry of their own.
ROWS = (
    ("version", "errors", "env", "host"),
    ("native",),
    ("memory",),
    ("types", "bitstream", "expert_counts", "expert_gate", "packed_module"),
    ("dequant", "weight_checks"),
    ("sharding",),
    ("platform", "weight", "act_quant"),
    ("rtn", "formats.base", "kernels.base", "quantized_input", "tuning"),
    ("formats.io",),
    ("formats.quant_config", "formats.common", "kernels.registry"),
    ("formats", "kernels.integers", "kernels.microscaled", "kernels.cpu.costs", "kernels.providers.common"),
    ("checkpoint", "kernels.reference", "kernels.triton", "kernels.cpu"),
    ("kernels.hopper",),
    ("kernels.torch", "kernels.weight_only", "kernels.emulation", "select"),
    ("kernels.providers", "kernels.triton_fake_quant", "kernels.aliases", "linear", "testing"),
    ("ops", "experts", "parallel", "timing"),
    ("kernels", "model", "protocol"),
    ("kernels.linear", "conversion", "operators", "hf", "engines", "bench"),
    ("vllm", "sglang"),
    ("cli",),
    ("__main__", "__init__"),
)
RANK = {entry: rank for rank, row in enumerate(ROWS) for entry in row}


def modules():
    """All modules of the package: (name without "bitline.", file)."""
    for path in sorted((SRC / "bitline").rglob("*.py")):
        name = ".".join(path.relative_to(SRC / "bitline").with_suffix("").parts)
        yield (name if name == "__init__" else name.removesuffix(".__init__")), path


FILES = dict(modules())


def entry_of(module):
    """The most specific entry of a module."""
    parts = module.split(".")
    found = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((name for name in found if name in RANK), None)


def imports(path):
    """The modules of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "bitline":
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names if alias.name.partition(".")[0] == "bitline"]
        for name, parent in names:
            found = (dotted.partition(".")[2] or "__init__" for dotted in (name, parent))
            yield next(module for module in found if module in FILES)


GRAPH = {module: set(imports(path)) - {module} for module, path in FILES.items()}


def test_every_module_has_a_rank():
    missing = [module for module in FILES if entry_of(module) is None]
    assert not missing, f"give these a row: {missing}"
    unused = [entry for entry in RANK if entry not in FILES]
    assert not unused, f"no such module or folder: {unused}"


def test_imports_are_from_lower_rows():
    wrong = []
    for module, found in GRAPH.items():
        here = entry_of(module)
        for other in sorted(found):
            there = entry_of(other)
            if there != here and RANK[there] >= RANK[here]:
                wrong.append(f"{module} (row {RANK[here]}) imports {other} (row {RANK[there]})")
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles():
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the modules


def test_private_modules_stay_in_their_folder():
    wrong = [
        f"{module} imports {other}"
        for module, found in GRAPH.items()
        for other in found
        if any(part.startswith("_") and not part.startswith("__") for part in other.split("."))
        and other.rpartition(".")[0] != module.rpartition(".")[0]
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_and_kernels_do_not_import_each_other():
    crossing = [
        f"{module} imports {other}"
        for module, found in GRAPH.items()
        for other in found
        if {module.partition(".")[0], other.partition(".")[0]} == {"formats", "kernels"}
    ]
    assert not crossing, "\n".join(crossing)


SHARED_BY_FORMATS = {"base", "common", "io", "quant_config"}


def test_format_families_do_not_import_each_other():
    """What two families need is in formats.base, formats.common, formats.io or formats.quant_config."""
    crossing = []
    for module, found in GRAPH.items():
        family = module.split(".")[1:2]
        others = (other for other in found if other.startswith("formats.") and other.split(".")[1] not in SHARED_BY_FORMATS)
        if module.startswith("formats."):
            crossing += [f"{module} imports {other}" for other in others if other.split(".")[1:2] != family]
    assert not crossing, "\n".join(crossing)

"""Layers of the package only point down."""

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "bitline"

# Lower rank may not import higher rank. A folder's rank holds for every file in it unless the file has its own.
RANK = {
    "errors": -3, "env": -3, "native": -2, "memory": -1, "types": 0, "bits": 0, "platform": 1, "weight": 1,
    "activations": 1, "rounding": 2, "formats": 2, "checkpoint": 3, "kernels": 2, "select": 3,
    "linear": 4, "embedding": 4, "gguf_bridge": 4, "skeleton": 5, "step": 5, "parallel": 5, "models": 5, "testing": 5,
    "model": 6, "verify": 7, "generate": 8, "conversion": 9, "cli": 10, "__main__": 11, "__init__": 11, "kernels.linear": 5,
}  # fmt: skip


def _layer(dotted: str) -> str:
    """The part of a module's name that has a rank: its folder's own, or its parent's."""
    parts = dotted.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in RANK else parts[0]


def _module(path: Path) -> str:
    return _layer(".".join(path.relative_to(SRC).with_suffix("").parts))


def test_imports_point_down():
    wrong = []
    for path in SRC.rglob("*.py"):
        here = _module(path)
        assert here in RANK, f"{path.name}: give it a rank"
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bitline"):
                names = [f"{node.module}.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.startswith("bitline")]
            for name in names:
                there = _layer(name.partition(".")[2]) if "." in name else "__init__"
                if there in RANK and there != here and RANK[there] >= RANK[here] and here != "__init__":
                    wrong.append(f"{path.relative_to(SRC)} (rank {RANK[here]}) imports {name} (rank {RANK[there]})")
    assert not wrong, "\n".join(wrong)

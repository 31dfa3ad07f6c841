"""Fuzz a target with atheris, or replay inputs without it: see README.md.

python fuzz/run.py TARGET CORPUS_FOLDER… [-max_total_time=600 …]      needs atheris
python fuzz/run.py TARGET --replay FILE…
"""

from __future__ import annotations

import gc
import importlib
import json
import pkgutil
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
TRACED = ("bitline.formats", "bitline.checkpoint", "bitline.weight", "bitline.types")


def _mutator(target: str, mutate: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """Half of the time a mutation of a JSON value, which random bytes seldom reach; else libFuzzer's own mutation."""
    from fuzz_targets import FAMILIES
    from mutate import mutate_json

    names = [name.encode() for name in FAMILIES]

    def change(data: bytes, size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        data = bytes(data)
        if target == "gguf" or rng.random() < 0.4:
            return mutate(data, size)
        base, rest = b"", b""
        if target in ("config", "weights"):
            base, _, data = data.partition(b"\n")
            if rng.random() < 0.1:
                base = rng.choice(names)
        if target == "weights":
            data, _, rest = data.partition(b"\n")
            rest = mutate(rest, 64) if rng.random() < 0.5 else rest
            if not data and rng.random() < 0.3 and base.decode("latin-1") in FAMILIES:
                data = json.dumps({"quantization_config": FAMILIES[base.decode("latin-1")]()[1]}).encode()
        try:
            data = json.dumps(mutate_json(json.loads(data), rng)).encode()
        except (ValueError, RecursionError):
            data = data if target == "weights" and not data else mutate(data, size)
        parts = [base, data, rest][0 if base else 1 : 3 if target == "weights" else 2]
        return b"\n".join(parts)[:size]

    return change


def main(arguments: list[str]) -> None:
    """Run a target."""
    target, rest = arguments[0], arguments[1:]
    if rest[:1] == ["--replay"]:
        from fuzz_targets import TARGETS

        for file in rest[1:]:
            print(file, "opens" if TARGETS[target](Path(file).read_bytes()) else "is refused")
        return
    import atheris
    from fuzz_targets import TARGETS

    from bitline import formats

    for module in pkgutil.walk_packages(formats.__path__, "bitline.formats."):
        importlib.import_module(module.name)
    for function in filter(lambda found: isinstance(found, types.FunctionType), gc.get_objects()):
        if (function.__module__ or "").startswith(TRACED):  # atheris' import hook does not see an editable installation
            atheris.instrument_func(function)

    def run(data: bytes) -> None:
        TARGETS[target](data)

    # Setup replaces atheris.Mutate, so it is looked up at call time.
    atheris.Setup([sys.argv[0], *rest], run, custom_mutator=_mutator(target, lambda data, size: atheris.Mutate(data, size)))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])

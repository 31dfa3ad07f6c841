"""Stubs of SGLang on the path: modules with the signatures of the published ones. `test_sglang_published.py` compares them."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def forget():
    for name in [n for n in sys.modules if n.partition(".")[0] in ("sglang", "sglang_models") or n.startswith("bitline.sglang")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def sglang():
    """The stub package with Bitline registered and its hooks applied, as `load_plugins` does in SGLang."""
    paths = [str(HERE / "stubs"), str(HERE), str(HERE.parent / "in_vllm")]
    forget()
    sys.path[:0] = paths
    try:
        importlib.import_module("bitline.sglang").register()
        hook_registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        hook_registry.HookRegistry.apply_hooks()
        yield importlib.import_module("sglang")
    finally:
        for path in paths:
            sys.path.remove(path)
        forget()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Tiny Llamas in the formats of `tests/in_vllm/vllm_models.py`, made on first use."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name):
        if name not in made:
            made[name] = importlib.import_module("vllm_models").make(name, root)
        return made[name]

    return get

"""One process runs all of vLLM's engines, one after the other: the first takes ten seconds to start, the next ones three."""

import functools
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(Path(__file__).parent), str(TESTS / "moe"), str(TESTS), str(TESTS / "formats")]
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="INFO",
)  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Tiny checkpoints by their names in `vllm_models`, made on first use."""
    import vllm_models

    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: vllm_models.make(name, root))


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Folders of this run for vLLM's compiled graphs and for what Bitline makes of GGUF files."""
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm"))
    os.environ["BITLINE_CACHE"] = str(tmp_path_factory.mktemp("bitline"))

"""docs/kernels.md is up to date, and every kernel in it has an existing proof test."""

import importlib.util
import re
from pathlib import Path

import pytest

from bitline.kernels import registry
from proofs import PROOFS

ROOT = Path(__file__).parents[1]


def _table():
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "benchmarks" / "kernel_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    table = _table()
    assert table.PAGE.read_text() == table.page(PROOFS), "run python benchmarks/kernel_table.py"


def test_every_kernel_has_a_proof_and_every_proof_a_kernel():
    ours = {e.name for e in registry.entries() if e.source == "bitline"}
    assert ours == set(PROOFS)
    assert all(PROOFS.values())


@pytest.mark.parametrize("name", sorted(PROOFS))
def test_a_proof_is_a_test_that_exists_on_a_platform_of_the_kernel(name):
    for platform, how, test in PROOFS[name]:
        file, _, function = test.partition("::")
        assert re.search(rf"def {function}\b", (ROOT / file).read_text()), test
        assert platform in registry.kernel_by_name(name).platforms or how == "interpreted in CI"

"""Every fixture: its weights equal its expected.safetensors, where it has one, else what the oracle reads.

These files, which the formats' own producers wrote, test the oracle too; tests/formats compares them with the producers' own
dequantization.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outcomes import check_weights
from safetensors.torch import load_file

from bitline import open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
CASES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())


@pytest.mark.parametrize("case", CASES)
def test_fixture(case):
    folder = CHECKPOINTS / case
    weights = {record.name: record.weight() for record in open_checkpoint(folder).layers()}
    assert weights
    if (folder / "expected.safetensors").is_file():
        expected = load_file(folder / "expected.safetensors")
        assert weights.keys() == expected.keys()
        assert all(weights[name].dequantize(tensor.dtype).equal(tensor) for name, tensor in expected.items())
    else:
        check_weights(folder, weights)

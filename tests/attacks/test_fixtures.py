"""Every fixture: its weights are its expected.safetensors, where it has one, and else what the oracle reads.

The other way round these files, which the formats' own producers wrote, are what the oracle is tested on; tests/formats holds
them against the producers' own weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outcomes import right
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
        right(folder, weights)

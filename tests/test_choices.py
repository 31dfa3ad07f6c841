"""Kernel selection for every scheme and platform against a snapshot, and a runnable kernel for every spec.

python tests/test_choices.py        rewrites the snapshot, to be reviewed as a diff
"""

import json
from pathlib import Path

import pytest

from bitline.platform import Platform
from bitline.select import Policy, choose
from bitline.testing.generators import random_spec
from test_kernel_table import _table

SNAPSHOT = Path(__file__).with_name("choices.json")
PLATFORMS = [
    *(f"cuda:sm{sm}" for sm in (75, 80, 89, 90, 100, 103, 120, 121)),
    *(f"rocm:{gfx}" for gfx in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")),
    "xpu", "cpu:amx", "cpu:avx512_bf16,avx512_vbmi,zen", "cpu:avx512", "cpu:avx2", "cpu:aarch64,dotprod", "cpu:avx2,no_native",
]  # fmt: skip
SCHEMES = _table().SCHEMES


def chosen(spec, platform):
    return choose(spec, platform, Policy()).best.name.removesuffix("LinearKernel").removesuffix("Kernel")


def snapshot():
    return {name: {platform: chosen(spec, platform) for platform in PLATFORMS} for name, spec in SCHEMES.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_choices_are_those_of_the_snapshot(scheme):
    expected = json.loads(SNAPSHOT.read_text())
    assert sum(map(len, expected.values())) >= 300 and set(expected) == set(SCHEMES)
    assert {p: chosen(SCHEMES[scheme], p) for p in PLATFORMS} == expected[scheme], "if it is meant: python tests/test_choices.py"


@pytest.mark.parametrize("part", range(4))
def test_a_choice_never_dead_ends(part):
    machines = [Platform.parse(p) for p in PLATFORMS]
    for seed in range(part * 2500, (part + 1) * 2500):
        best = choose(random_spec(seed), machines[seed % len(machines)], Policy()).best
        assert best.verdict and best.costs


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n")

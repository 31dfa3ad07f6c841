"""Every registered kernel on every GGUF type: it computes with the type's own values, or refuses with a reason."""

import os
import subprocess
import sys

import pytest
import torch

from bitline import Platform, types
from bitline.formats.gguf.blocks import BLOCKS
from bitline.kernels import registry
from bitline.kernels.integers import integer_codes
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import random_weight
from bitline.types import ActSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLES = (types.iq4_nl, types.iq3_xxs, types.iq3_s, types.iq2, types.iq1_m, types.binary)
CHANNEL = tuple(
    BLOCKS["Q8_0"].spec(40, 256).replace(weight=t, block=(1, 256), scale_dtype=torch.float32) for t in (*TABLES, types.uint2b1)
)
SPECS = [
    *(b.spec(40, 512, bias=True) for b in BLOCKS.values()),
    *(b.spec(40, 512).replace(act_dtype=torch.float32) for b in BLOCKS.values()),
    *(b.spec(33, 256, scaled=True) for b in BLOCKS.values()),
    *CHANNEL, *(s.replace(act=ActSpec(t)) for s in CHANNEL for t in (types.int8, types.float8_e4m3fn)),
]  # fmt: skip

if INTERPRETED:  # the interpreter is slow: one of each type that no other test has
    SPECS = list({(s.weight, s.act): s for s in SPECS if s.weight in (*TABLES, types.uint2b1, types.uint2)}.values())


def runs_here(entry):
    here = Platform.detect("cpu")
    return "cpu" in entry.platforms and bool(entry.kernel.is_supported(here))


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda e: e.name)
def test_a_kernel_computes_with_the_types_values_or_refuses(entry):
    kernel = entry.kernel
    taken = [s for s in SPECS if s.act_dtype in kernel.act_dtypes and kernel.can_implement(s)]
    for spec in set(SPECS) - set(taken):
        assert spec.act_dtype not in kernel.act_dtypes or kernel.can_implement(spec).reason
    if runs_here(entry):
        if taken:
            assert len(check_kernel(kernel, taken).passed) == len(taken)
    elif not entry.name.startswith("Triton"):  # Triton kernels run in the interpreted process below
        for spec in taken:
            if spec.weight in TABLES:
                packs_integers(kernel, random_weight(spec, 1))


def packs_integers(kernel, weight):
    """The packed tensors of a kernel that does not run here hold the table's values, as bytes in any order."""
    known = integer_codes(weight.spec.weight)
    try:
        tensors = kernel.pack(weight).values()
    except ModuleNotFoundError:
        return  # it needs its provider's package to pack
    packed = [t.view(torch.int8) for t in tensors if t.numel() >= weight.codes.numel() and t.itemsize == 1]
    expected = torch.tensor(known.values)[weight.unpacked().int()].flatten()
    count = lambda values: torch.bincount(values.flatten().int()[values.flatten() != 0] + 128, minlength=256)
    assert any(torch.equal(count(t), count(expected)) for t in packed)


@pytest.mark.exhaustive
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted process")
def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-k", "Triton"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

"""Fixtures of the kernels' tests."""

from types import SimpleNamespace

import pytest
import torch

from bitline.kernels.hopper import launch


@pytest.fixture
def device(monkeypatch):
    """A device that runs nothing: `calls` are the launches, `maps` the tensor maps made, `stream` the current stream."""
    fake = SimpleNamespace(calls=[], maps=[], stream=7, capturing=False)

    def fill(address, swizzle, size, dtype, block, shape, strides, padding):
        fake.maps.append((address, tuple(block), tuple(shape)))
        return ("map", address, tuple(block))

    def compiled(kernel, programs, arguments, constants, options):
        two = 1 + (getattr(constants[1], "bm2", 0) > 0)
        names = ["x"] * two + ["words", "scale"] + ["zero"] * constants[0].zero + ["y"] * two
        forms = tuple((0, 2, 1, i, name) for i, name in enumerate(names))
        return launch._Binary(lambda *a: fake.calls.append(a), ("function",), False, forms, {})

    monkeypatch.setattr(launch, "_triton", lambda: SimpleNamespace(
        decode=None, ring=None, wide=None, fill=fill, swizzled=0, plain32=0, plain16=0,
        Descriptor=SimpleNamespace(from_tensor=lambda *a: a),
    ))  # fmt: skip
    monkeypatch.setattr(launch, "_compile", compiled)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(launch, "_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    for name in ("_binaries", "_spaces", "_pools", "_plans"):
        monkeypatch.setattr(launch, name, {})
    return fake

"""Fixtures of the kernels' tests."""

from types import SimpleNamespace

import pytest
import torch

from bitline import native
from bitline.kernels.hopper import launch, runtime, workspace


@pytest.fixture(params=[level for level in native.isas() if level != "portable"])
def kernel_level(request):
    """Each level of this machine that has linear kernels, in use during the test; `level` of tests/conftest.py has all levels."""
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


@pytest.fixture
def device(monkeypatch):
    """A device that runs nothing: `calls` are the launches, `maps` the tensor maps made, `stream` the current stream."""
    fake = SimpleNamespace(calls=[], maps=[], stream=7, capturing=False)

    def fill_tensor_map(address, swizzle, size, dtype, box, shape, strides, padding):
        fake.maps.append((address, tuple(box), tuple(shape)))
        return ("map", address, tuple(box))

    def compile_and_run(kernel, num_ctas, args, constants, options):
        scheme, traits = constants[:2]
        maps_per_matrix = 1 + (getattr(traits, "tile_m_extra", 0) > 0)
        names = ["x"] * maps_per_matrix + ["weight", "scale"] + ["zero"] * scheme.zero_points + ["y"] * maps_per_matrix
        formats = tuple((0, 2, 1, i, name) for i, name in enumerate(names))
        return runtime.Binary(lambda *a: fake.calls.append(a), ("function",), False, formats, {})

    monkeypatch.setattr(runtime, "gluon", lambda: SimpleNamespace(
        gemv_mma=None, small_m_pipelined=None, wgmma_persistent=None, fill_tensor_map=fill_tensor_map, swizzle128=0, plain32=0,
        plain16=0, TensorDescriptor=SimpleNamespace(from_tensor=lambda *a: a),
    ))  # fmt: skip
    monkeypatch.setattr(runtime, "compile_and_run", compile_and_run)
    monkeypatch.setattr(runtime, "raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(runtime, "is_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    for module, name in ((runtime, "binaries"), (workspace, "_by_stream"), (workspace, "_flag_pools"), (launch, "_plans")):
        monkeypatch.setattr(module, name, {})
    return fake

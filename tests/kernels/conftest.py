"""Fixtures of the kernels' tests."""

from types import SimpleNamespace

import pytest
import torch

from bitline import native
from bitline.kernels.hopper import launch, runtime, scaled_linear, w4a8_plans, workspace


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


@pytest.fixture
def fake(monkeypatch):
    """A device that runs nothing, for the kernels with quantized activations: `calls` are the launches, `maps` the tensor maps
    made, `compiled` the kernels with their arguments of the first call."""
    fake = SimpleNamespace(calls=[], maps=[], compiled=[], stream=7, capturing=False)

    def fill_tensor_map(address, swizzle, size, dtype, box, shape, strides, padding):
        fake.maps.append((address, tuple(shape)))
        return ("map", address, tuple(shape))

    def compile_and_run(kernel, num_ctas, args, constants, options):
        fake.compiled.append((kernel, args, constants))
        descriptors = [a for a in args if isinstance(a, tuple)]
        formats = tuple((0, 1, 1, *box) for _, box, _ in descriptors)
        launch = lambda *a: fake.calls.append((kernel, len(args) + len(constants), a))
        return runtime.Binary(launch, ("function",), False, formats, {})

    w4a8 = SimpleNamespace(w4a8_persistent="w4a8_persistent", w4a8_small_m="w4a8_small_m")
    names = ("quantize_x", "scaled_small_m", "scaled_persistent", "scaled_large_m")
    gluon = SimpleNamespace(
        **{name: name for name in names}, fill_tensor_map=fill_tensor_map, swizzle128=0, swizzle128_bytes=0, plain32=0,
        TensorDescriptor=SimpleNamespace(from_tensor=lambda *a: a),
    )  # fmt: skip
    monkeypatch.setattr(runtime, "gluon", lambda: gluon)
    monkeypatch.setattr(w4a8_plans, "kernels", lambda: w4a8)
    monkeypatch.setattr(runtime, "compile_and_run", compile_and_run)
    monkeypatch.setattr(runtime, "raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(scaled_linear, "raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(runtime, "is_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    monkeypatch.setattr(runtime, "fast_empty", lambda: empty)
    monkeypatch.setattr(scaled_linear, "fast_empty", lambda: empty)
    monkeypatch.setattr(scaled_linear, "num_sms", lambda index: 132)
    for module, name in ((runtime, "binaries"), (workspace, "_by_stream"), (workspace, "_flag_pools"), (scaled_linear, "_plans")):
        monkeypatch.setattr(module, name, {})
    return fake

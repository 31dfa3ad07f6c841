"""QuantLinear: shapes, state, errors, and what a compiler and an exporter see."""

import copy
import dataclasses
import io

import pytest
import torch

from bitline import InputError, Kernel, LinearSpec, NoKernelError, OutOfMemoryError, Policy, QuantLinear, quantize
from bitline.kernels import registry
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.testing import check, random_spec, random_weight
from bitline.types import YES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(scheme="W4A16", n=48, k=64, bias=False, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(n, k, generator=g).to(dtype), scheme, bias=torch.randn(n, generator=g) if bias else None)


def layer(**kwargs):
    return QuantLinear(weight(**kwargs), kernel="ReferenceLinearKernel")


def make_x(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4"])
def test_it_computes_the_linear_layer(scheme, bias, dtype):
    w = weight(scheme, bias=bias, dtype=dtype)
    made = QuantLinear(w)
    x = make_x(5, 64, dtype=dtype)
    out = made(x)
    assert out.dtype == dtype and made.spec == w.spec and (made.in_features, made.out_features) == (64, 48)
    check(out, x, w)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64), (0, 3, 64)])
def test_batch_dimensions(shape):
    made = layer(bias=True)
    x = make_x(*shape)
    out = made(x)
    assert out.shape == (*shape[:-1], 48)
    flat = x.reshape(-1, 64)
    assert torch.equal(out.reshape(-1, 48), made(flat) if len(flat) else out.reshape(-1, 48))


def test_inputs_that_are_not_contiguous():
    made = layer()
    wide, tall = make_x(6, 128), make_x(64, 6)
    for x in (wide[:, ::2], wide[:, 64:], tall.T, make_x(4, 64)[::2], make_x(3, 2, 64).transpose(0, 1), make_x(64).expand(5, 64)):
        assert torch.equal(made(x), made(x.contiguous()))


def test_a_given_bias_replaces_the_weights_own():
    own = torch.arange(48.0)
    without = layer()
    made = QuantLinear(weight(bias=True), bias=own)
    assert torch.allclose(made(make_x(3, 64)), without(make_x(3, 64)) + own, atol=1e-5) and made.spec.bias


def test_the_input_dtype_can_be_chosen():
    made = QuantLinear(weight(dtype=torch.bfloat16, bias=True), act_dtype=torch.float32)
    assert made(make_x(2, 64)).dtype == torch.float32 and made.spec.act_dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 63), r"\[2, 63\].*64"), (torch.zeros(2, 64, dtype=torch.float16), "float16.*float32"),
        (torch.zeros(2, 64, dtype=torch.int32), "int32"), (torch.zeros(2, 63).requires_grad_(), r"\[2, 63\]"),
    ],
)  # fmt: skip
def test_inputs_of_another_shape_or_dtype(x, words):
    with pytest.raises(InputError, match=words):
        layer()(x)


def test_a_grad_input_is_fine_where_no_gradient_is_asked_for():
    with torch.no_grad():
        assert layer()(torch.zeros(2, 64).requires_grad_()).shape == (2, 48)


def test_dtype_conversions_leave_the_packed_weight():
    made = layer(bias=True)
    before = {name: b.clone() for name, b in made.named_buffers()}
    out = made(make_x(3, 64))
    for change in (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.to("cpu"),
        lambda m: m.float(),
    ):
        assert change(made) is made
        assert {name: b.dtype for name, b in made.named_buffers()} == {name: b.dtype for name, b in before.items()}
        assert torch.equal(made(make_x(3, 64)), out)
    inside = torch.nn.Sequential(made, torch.nn.Linear(48, 4)).to(torch.bfloat16)
    assert inside[1].weight.dtype == torch.bfloat16 and made.get_buffer("packed_scale").dtype == torch.float32


def test_a_move_updates_the_cached_call_arguments():
    meta = layer(bias=True).to("meta")
    assert {b.device.type for b in meta.buffers()} == {"meta"}
    assert {t.device.type for t in meta._packed} == {"meta"} and meta._op_arguments[0].device.type == "meta"
    assert meta(torch.empty(3, 64, device="meta")).shape == (3, 48)


def test_it_has_no_parameters():
    made = layer(bias=True)
    assert not list(made.parameters())
    assert made.packed_bytes() == sum(b.nbytes for b in made.buffers()) > 48 * 32
    assert "64 -> 48" in repr(made) and "uint4b8 channel" in repr(made) and "ReferenceLinearKernel" in repr(made)


def test_reload():
    made = layer(bias=True)
    other = weight(bias=True, seed=7)
    expected = QuantLinear(other, kernel="ReferenceLinearKernel")(make_x(3, 64))
    made.reload(other)
    assert torch.equal(made(make_x(3, 64)), expected)
    for wrong in (weight(n=47, bias=True), weight("W8A16", bias=True), weight()):
        with pytest.raises(InputError, match="another spec"):
            made.reload(wrong)
    assert torch.equal(made(make_x(3, 64)), expected)
    made.reload(weight(bias=True, seed=7).with_act_dtype(torch.bfloat16))  # the layer keeps its own input dtype
    assert torch.equal(made(make_x(3, 64)), expected)


def test_the_weight_is_not_changed():
    w = weight(bias=True)
    before = {name: t.clone() for name, t in w.tensors().items()}
    QuantLinear(w).half()(make_x(2, 64))
    assert all(torch.equal(t, before[name]) for name, t in w.tensors().items())


def test_copies_are_independent():
    made = layer(bias=True)
    out = made(make_x(3, 64))
    twin = copy.deepcopy(made)
    assert torch.equal(twin(make_x(3, 64)), out)
    made.reload(weight(bias=True, seed=9))
    assert torch.equal(twin(make_x(3, 64)), out) and not torch.equal(made(make_x(3, 64)), out)
    stored = io.BytesIO()
    torch.save(twin, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(make_x(3, 64)), out)


def test_policy_and_kernel():
    assert QuantLinear(weight(), kernel="ReferenceLinearKernel").choice.best.name == "ReferenceLinearKernel"
    assert QuantLinear(weight(), policy=Policy(backend="reference")).choice.best.name == "ReferenceLinearKernel"
    with pytest.raises(NoKernelError, match="NotThere"):
        QuantLinear(weight(), kernel="NotThere")


def test_memory_errors_say_what_was_packed():
    class OutOfMemory(Kernel):
        can_implement = classmethod(lambda cls, spec: YES)
        cost = classmethod(lambda cls, spec, platform, m: 1e-9)

        @classmethod
        def pack(cls, weight):
            raise MemoryError

    registry.register_kernel(OutOfMemory)
    try:
        with pytest.raises(OutOfMemoryError, match="bytes to pack"):
            QuantLinear(weight(), kernel="OutOfMemory")
    finally:
        registry.unregister_kernel("OutOfMemory")


# ---- compilers ---------------------------------------------------------------------------------------------------------


def ops_of(graphs):
    return [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


def test_compile_sees_one_opaque_operator_for_each_layer():
    model = torch.nn.Sequential(layer(bias=True), torch.nn.ReLU(), layer(n=16, k=48), layer(n=8, k=16, scheme="W8A8")).eval()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for m in (3, 17, 64):
        x = make_x(m, 64)
        assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(make_x(2, 5, 64)), model(make_x(2, 5, 64)))
    first = [op for op in ops_of(graphs[:1]) if "bitline" in str(op)]
    assert len(first) == 3 and set(map(str, first)) == {"bitline.linear.default"}
    assert len(graphs) == 2, "one graph for two-dimensional inputs of every size, one for three-dimensional"


def test_export_keeps_the_operator_and_its_key():
    made = layer(bias=True)
    m = torch.export.Dim("m", min=2, max=4096)
    program = torch.export.export(made, (make_x(4, 64),), dynamic_shapes=({0: m},))
    calls = [node for node in program.graph.nodes if str(node.target) == "bitline.linear.default"]
    assert len(calls) == 1
    name, key = calls[0].args[3], calls[0].args[4]
    assert name == "ReferenceLinearKernel" and LinearSpec.parse(key) == made.spec
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    assert torch.equal(loaded(make_x(9, 64)), made(make_x(9, 64)))


def test_opcheck():
    made = layer(bias=True)
    args = (make_x(3, 64), made._packed, made.get_buffer("bias"), "ReferenceLinearKernel", made.spec.key)
    torch.library.opcheck(torch.ops.bitline.linear.default, args)
    torch.library.opcheck(torch.ops.bitline.linear.default, (make_x(0, 64), *args[1:]))


def test_every_kind_of_weight_runs():
    for seed in range(80):
        spec = random_spec(seed)
        w = random_weight(spec, seed)
        x = make_x(3, spec.k, dtype=spec.act_dtype, seed=seed)
        check(QuantLinear(w, policy=Policy())(x), x, w)


def test_the_reference_holds_one_chunk_of_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("bitline.bitstream.ROW_CHUNK_BYTES", 64 * 5)
    w = weight(bias=True)
    seen = []
    real = type(w).dequantize_rows

    def spy(self, part, dtype=torch.float32):
        seen.append(part.stop - part.start)
        return real(self, part, dtype)

    monkeypatch.setattr(type(w), "dequantize_rows", spy)
    out = ReferenceLinearKernel.apply(make_x(2, 64), list(ReferenceLinearKernel.pack(w).values()), w.bias, w.spec)
    assert max(seen) == 5 and sum(seen) == 48
    monkeypatch.undo()
    check(out, make_x(2, 64), w)


def test_a_replaced_kernel_is_the_one_that_runs():
    """The look-up by kernel name is cached; replacing or removing a kernel has to invalidate it."""

    def made(value):
        members = {
            "can_implement": classmethod(lambda cls, spec: YES),
            "cost": classmethod(lambda cls, spec, platform, m: 1e-9),
            "pack": classmethod(lambda cls, weight: {"codes": weight.codes}),
            "apply": classmethod(lambda cls, x, packed, bias, spec: x.new_full((x.shape[0], spec.n), value)),
        }
        return type("Swapped", (Kernel,), members)

    try:
        for value in (1.0, 2.0):
            registry.register_kernel(made(value), replace=True)
            assert float(QuantLinear(weight(), kernel="Swapped")(make_x(1, 64))[0, 0]) == value
        registry.unregister_kernel("Swapped")
        registry.register_kernel(made(3.0))
        assert float(QuantLinear(weight(), kernel="Swapped")(make_x(1, 64))[0, 0]) == 3.0
    finally:
        registry.unregister_kernel("Swapped")


def test_a_move_to_another_type_of_device_is_refused_before_anything_moves():
    layer = QuantLinear(quantize(torch.randn(32, 64), "W4A16", group_size=32), act_dtype=torch.bfloat16)
    before = layer(torch.ones(1, 64, dtype=torch.bfloat16))

    class Elsewhere:
        device = torch.device("xpu")

    with pytest.raises(InputError, match=r"cpu to xpu.*device='xpu'"):
        layer._apply(lambda _tensor: Elsewhere())
    assert torch.equal(layer(torch.ones(1, 64, dtype=torch.bfloat16)), before)


def test_a_layer_keeps_its_own_bias():
    bias = torch.nn.Parameter(torch.zeros(32, dtype=torch.bfloat16))
    made = QuantLinear(quantize(torch.randn(32, 64), "W4A16", group_size=32), bias=bias, act_dtype=torch.bfloat16)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    before = made(x)
    assert not before.requires_grad
    bias.data += 5
    assert torch.equal(made(x), before)


def test_wrong_arguments_have_clear_errors():
    with pytest.raises(InputError, match="QuantizedWeight"):
        QuantLinear(torch.randn(4, 4))
    with pytest.raises(InputError, match=r"torch\.dtype"):
        QuantLinear(quantize(torch.randn(32, 64), "W4A16", group_size=32), act_dtype="bfloat16")
    made = QuantLinear(quantize(torch.randn(32, 64), "W4A16", group_size=32), act_dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"\[\]"):
        made(torch.tensor(1.0, dtype=torch.bfloat16))


def test_a_kernels_buffer_names_do_not_collide_with_the_layers_attributes():
    def pack(cls, weight):
        return {"choice": weight.dequantize(torch.bfloat16), "bias": torch.ones(1), "_op_arguments": torch.ones(2)}

    members = {
        "can_implement": classmethod(lambda cls, spec: YES), "cost": classmethod(lambda cls, *_: 1.0), "pack": classmethod(pack),
        "apply": classmethod(lambda cls, x, packed, bias, spec: x @ packed[0].T + bias),
    }  # fmt: skip
    registry.register_kernel(type("Named", (Kernel,), members))
    try:
        w = quantize(torch.randn(32, 64), "W4A16", group_size=32, bias=torch.ones(32))
        made = QuantLinear(w, act_dtype=torch.bfloat16, kernel="Named")
        x = torch.randn(2, 64).bfloat16()
        assert torch.equal(made(x), x @ w.dequantize(torch.bfloat16).T + 1)
    finally:
        registry.unregister_kernel("Named")


def test_modes_tracers_and_profilers_see_the_operator():
    """A plain eager call skips torch's dispatcher; whatever observes the dispatcher gets the operator."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    layer = QuantLinear(quantize(torch.randn(8, 32), "W4A16", group_size=32), kernel="ReferenceLinearKernel")
    x = torch.randn(2, 3, 32)
    want = layer(x)
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            assert torch.equal(layer(x), want)
        assert sum("bitline.linear" in name for name in seen) == 1
    seen.clear()
    assert torch.equal(layer(x.as_subclass(Own)).as_subclass(torch.Tensor), want)
    assert sum("bitline.linear" in name for name in seen) == 1
    with torch.profiler.profile() as profile:
        layer(x)
    assert "bitline::linear" in {e.key for e in profile.key_averages()}
    assert "bitline.linear" in make_fx(layer)(x).code
    assert "bitline::linear" in str(torch.jit.trace(layer, x, check_trace=False).graph)
    assert layer(x.to("meta")).shape == want.shape
    with pytest.raises(RuntimeError, match="Batching rule not implemented for bitline::linear"):
        torch.vmap(layer)(x[None].expand(2, 2, 3, 32)).sum().item()


def test_a_kernels_eager_function_is_used_only_where_the_dispatcher_is_not_needed(monkeypatch):
    def eager(packed, bias, spec):
        return lambda x: None if x.shape[0] == 3 else torch.full((*x.shape[:-1], spec.n), 7.0)

    plain = layer()
    monkeypatch.setattr(ReferenceLinearKernel, "eager", eager)
    made = layer()
    x, three = make_x(2, 5, 64), make_x(3, 64)
    assert made(x).shape == (2, 5, 48) and (made(x) == 7).all()
    assert torch.equal(made(three), plain(three))  # the eager function declined
    with torch.profiler.profile():
        assert torch.equal(made(x), plain(x))
    assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), plain(x))
    assert torch.equal(made(x.clone().requires_grad_()), plain(x))  # whose gradient the operator has
    w = weight()
    w = dataclasses.replace(w, spec=w.spec.replace(input_multiplier=True), input_multiplier=torch.full((64,), 2.0))
    scaled = QuantLinear(w, kernel="ReferenceLinearKernel")
    assert torch.allclose(scaled(x), plain(x * 2), atol=1e-5)


def test_pack_of_any_kernel_ignores_the_default_device():
    """Engines build layers under a meta or GPU default."""

    class OwnKernel(ReferenceLinearKernel):
        @classmethod
        def pack(cls, weight):
            return super().pack(weight) | {"table": torch.zeros(3)}

    weight = quantize(torch.randn(8, 32), "W4A16", group_size=32)
    for kernel in (OwnKernel, ReferenceLinearKernel):
        with torch.device("meta"):
            packed = kernel.pack(weight)
            assert torch.zeros(3).is_meta
        assert not any(tensor.is_meta for tensor in packed.values())

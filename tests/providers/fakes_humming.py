"""A fake of humming with its wheel's recorded signatures; tensors are checked as its schema's `validate_tensors` does."""

import sys
import types as python_types
from contextlib import contextmanager

import torch
from fakes import bind, module

from bitline import bitstream
from bitline import types as bt

TORCH = {
    "float8e4m3": torch.float8_e4m3fn, "float8e8m0": torch.float8_e8m0fnu, "float32": torch.float32, "int8": torch.int8,
    "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
FLOATS = {
    "float8e4m3": bt.float8_e4m3fn, "float6e2m3": bt.float6_e2m3, "float6e3m2": bt.float6_e3m2, "float4e2m1": bt.float4_e2m1,
}  # fmt: skip


def width(b_dtype):
    return FLOATS[b_dtype].bits if b_dtype in FLOATS else int(b_dtype.removeprefix("uint"))


def schema(name):
    return lambda *args, **kwargs: bind("humming", name, args, kwargs)


def prepare_layer_config(*args, **kwargs):
    """The conditions of its compatibility check and of its kernels' `check_shape` and `check_scale`, for 128x128 tiles."""
    g = bind("humming", "prepare_layer_config", args, kwargs)
    w, i = g.weight_schema, g.input_schema
    c = NAMES[g.torch_dtype]
    a = c if i is None else i.a_dtype
    least = 16 if a == c else 32
    assert a in (c, "int8", "float8e4m3") and not g.has_bias and g.num_experts is None
    assert g.shape_n % 128 == 0 and g.shape_k % 128 == 0 and g.pad_n_to_multiple == g.pad_k_to_multiple == 1
    group = w.weight_scale_group_size
    assert w.weight_scale_type in ("tensor", "channel", "group", "block") and (group > 0) == (
        w.weight_scale_type in ("group", "block")
    )
    assert not group or (group >= least and group & (group - 1) == 0 and g.shape_k % group == 0)
    assert TORCH[w.bs_dtype].itemsize != 2 or w.bs_dtype == c, "16-bit scales have the output's dtype"
    assert not (w.bs_dtype == "float8e8m0" and c == "float16"), "only where its exponents happen to fit"
    if w.weight_scale_type == "block":
        assert (
            w.weight_scale_group_size_n == 128
            and i.input_scale_group_size == group == 128
            and i.input_quant_mode == "dynamic_group"
        )
    else:
        assert i is None or (i.input_scale_group_size == 0 and i.input_quant_mode == "dynamic_token")
    if a == "int8":
        assert w.b_dtype.startswith("uint") and not w.has_zero_point
    if a == "float8e4m3":
        assert w.b_dtype == a or (w.b_dtype.startswith("uint") and width(w.b_dtype) <= 5)
    return python_types.SimpleNamespace(n=g.shape_n, k=g.shape_k, w=w, i=i, a=a, dtype=g.torch_dtype)


def transform_humming_tensors(*args, **kwargs):
    g = bind("humming", "transform_humming_tensors", args, kwargs)
    c, w = g.config, g.config.w
    n, k, b, groups = c.n, c.k, width(w.b_dtype), c.k // (w.weight_scale_group_size or c.k)
    wanted = {"weight": ((n, k * b // 32), torch.int32)}
    wanted["weight_scale"] = {
        "tensor": ((1,), torch.float32), "channel": ((n, 1), TORCH[w.bs_dtype]), "group": ((n, groups), TORCH[w.bs_dtype]),
        "block": ((n // 128, groups), torch.float32),
    }[w.weight_scale_type]  # fmt: skip
    if w.has_zero_point:
        wanted["zero_point"] = ((n * b // 32, groups), torch.int32)
    if w.weight_scale_2_type == "tensor":
        wanted["weight_scale_2"] = ((1,), torch.float32)
    assert {name: (tuple(t.shape), t.dtype) for name, t in g.tensors.items()} == wanted
    assert all(t.is_contiguous() for t in g.tensors.values())
    return {name: t.clone() for name, t in g.tensors.items()}


def dequantized(c, weight, scale, zero, scale2):
    """The dequantized weight float64 [N, K]."""
    w, b = c.w, width(c.w.b_dtype)
    codes = bitstream.unpack(weight.view(torch.uint8), b, c.k).long()
    if w.b_dtype in FLOATS:
        values = torch.tensor(FLOATS[w.b_dtype].values(), dtype=torch.float64)[codes]
    elif zero is None:
        values = codes.double() - (1 << (b - 1))
    else:
        groups = zero.shape[1]
        zeros = bitstream.unpack(zero.t().contiguous().view(torch.uint8), b, c.n).long().t()
        values = (codes - zeros.repeat_interleave(c.k // groups, 1)).double()
    scale = scale.view(1, 1) if scale.dim() == 1 else scale
    expanded = scale.float().double().repeat_interleave(c.n // scale.shape[0], 0).repeat_interleave(c.k // scale.shape[1], 1)
    return values * expanded * (1.0 if scale2 is None else scale2.double())


def humming_forward(*args, **kwargs):
    g = bind("humming", "humming_forward", args, kwargs)
    c, x = g.config, g.inputs
    assert x.is_contiguous() and x.shape[1] == c.k and x.shape[0] > 0 and g.bias is None
    assert g.locks.dtype == torch.int32 and g.locks.shape == (2048,) and not g.locks.any()
    a = x.double()
    if c.i is None:
        assert x.dtype == c.dtype and g.input_scale is None
    else:
        groups = c.k // 128 if c.i.input_quant_mode == "dynamic_group" else 1
        assert x.dtype == TORCH[c.a] and g.input_scale.dtype == torch.float32 and g.input_scale.is_contiguous()
        assert g.input_scale.shape == (x.shape[0], groups)
        assert c.i.input_quant_mode != "dynamic_token" or g.input_scale.untyped_storage().nbytes() % 16 == 0, (
            "four scales are read at a time"
        )
        a = a * g.input_scale.double().repeat_interleave(c.k // groups, 1)
    return (a @ dequantized(c, g.weight, g.weight_scale, g.zero_point, g.weight_scale_2).T).to(c.dtype)


@contextmanager
def humming():
    """The package's modules."""
    with (
        module("humming.schema", **{n: schema(n) for n in ("HummingWeightSchema", "HummingInputSchema")}),
        module(
            "humming.transform", prepare_layer_config=prepare_layer_config, transform_humming_tensors=transform_humming_tensors
        ),
        module("humming.forward", humming_forward=humming_forward),
    ):
        for name in ("schema", "transform", "forward"):
            setattr(sys.modules["humming"], name, sys.modules[f"humming.{name}"])
        yield

"""Fakes of packages that do not run on this machine.

Each accepts only what the package's recorded signature accepts (tests/providers/signatures), checks dtypes, shapes and strides as
the package's documentation and its own checks ask, and computes the result by dequantizing its operands: wrong packing gives
wrong numbers. They are put into sys.modules, or registered as operators, for one test.
"""

import ast
import inspect
import json
import sys
import types
from contextlib import contextmanager
from importlib import machinery
from pathlib import Path

import torch

from bitline import types as bt

RECORDS = Path(__file__).with_name("signatures")
E2M1 = torch.tensor(bt.float4_e2m1.values(), dtype=torch.float64)


def record(package):
    return json.loads((RECORDS / f"{package}.json").read_text())


def _default(node):
    text = ast.unparse(node)
    return eval(text, {"torch": torch, "dtypes": types.SimpleNamespace(bf16=torch.bfloat16)})


def bind(package, name, args, kwargs):
    """Arguments by name, bound to the recorded signature, whose literals are enforced. Raises TypeError where they do not fit."""
    spec = ast.parse(f"def f{record(package)['names'][name]}: ...").body[0].args
    defaults = [inspect.Parameter.empty] * (len(spec.args) - len(spec.defaults)) + [_default(d) for d in spec.defaults]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(a.arg, kind, default=d) for a, d in zip(spec.args, defaults, strict=True)]
    keyword = [
        inspect.Parameter(a.arg, inspect.Parameter.KEYWORD_ONLY, default=_default(d) if d else inspect.Parameter.empty)
        for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    bound = inspect.Signature(parameters + keyword).bind(*args, **kwargs)
    bound.apply_defaults()
    for a in spec.args:
        if a.annotation is not None and ast.unparse(a.annotation).startswith("Literal"):
            allowed = [n.value for n in ast.walk(a.annotation) if isinstance(n, ast.Constant)]
            assert bound.arguments[a.arg] in allowed, f"{name}: {a.arg} is one of {allowed}"
    return types.SimpleNamespace(**bound.arguments)


@contextmanager
def module(name, **functions):
    """A module of that name, its parents too, in sys.modules."""
    before = dict(sys.modules)
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:i])] = types.ModuleType(".".join(parts[:i]))
        sys.modules[".".join(parts[:i])].__spec__ = machinery.ModuleSpec(".".join(parts[:i]), None)
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[".".join(parts[:i])])
    for key, function in functions.items():
        setattr(sys.modules[name], key, function)
    try:
        yield
    finally:
        for i in range(1, len(parts) + 1):
            key = ".".join(parts[:i])
            if key in before:
                sys.modules[key] = before[key]
            else:
                del sys.modules[key]


@contextmanager
def operators(package, namespace, **functions):
    """torch.ops.<namespace>.<name> with the recorded schemas."""
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        for name, function in functions.items():
            library.define(record(package)["names"][name])
            library.impl(name, function, "CompositeExplicitAutograd")
        yield
    finally:
        library._destroy()
        for name in functions:
            if hasattr(getattr(torch.ops, namespace), name):
                delattr(getattr(torch.ops, namespace), name)


# ---- dequantization -----------------------------------------------------------------------------------------------------


def e2m1(codes):
    """uint8 [R, C] to float64 [R, 2 C]."""
    assert codes.dtype == torch.uint8
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(1)


def tiles(swizzled, rows, columns):
    """Unswizzled scales uint8 [rows, columns] of the 128x4 tile layout in cuBLASLt's documentation."""
    width = -(-columns // 4)
    assert swizzled.is_contiguous() and swizzled.numel() == -(-rows // 128) * 128 * width * 4
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    at = ((r // 128) * width + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    return swizzled.reshape(-1).view(torch.uint8)[at]


def scaled(values, scales, columns, kind):
    """Values times block scales, one per `columns`."""
    if kind == "e4m3":
        numbers = scales.view(torch.float8_e4m3fn).double()
    else:
        numbers = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))
    return (values.view(values.shape[0], -1, columns) * numbers[..., None]).flatten(1)


# ---- FlashInfer --------------------------------------------------------------------------------------------------------


def mm_fp4(*args, **kwargs):
    g = bind("flashinfer", "mm_fp4", args, kwargs)
    m, half = g.a.shape
    k, n = 2 * half, g.b.shape[1]
    size, kind = (16, "e4m3") if g.use_nvfp4 else (32, "e8m0")
    assert g.a.dtype == g.b.dtype == torch.uint8 and g.a_descale.dtype == g.b_descale.dtype == torch.uint8
    assert g.a.is_contiguous() and g.b.shape == (half, n) and g.b.stride() == (1, half)
    assert g.block_size == size and not g.use_8x4_sf_layout and m > 0
    assert g.use_nvfp4 or g.backend == "cudnn", "only cuDNN has MXFP4"
    assert g.alpha.dtype == torch.float32 and g.alpha.numel() == 1
    assert g.out_dtype in ((torch.bfloat16,) if g.backend == "trtllm" else (torch.bfloat16, torch.float16))
    assert k % 32 == 0 and n % (128 if g.backend == "trtllm" else 32) == 0
    padded = -(-m // 128) * 128, -(-(k // size) // 4) * 4
    assert g.a_descale.shape == padded and g.b_descale.shape == (padded[1], -(-n // 128) * 128)
    w, w_scale = e2m1(g.b.t()), tiles(g.b_descale.t(), n, k // size)
    if g.backend == "trtllm":  # row `old` of each 32 was put at map[old]
        at = torch.tensor(record("flashinfer")["names"]["srcToDstBlk32RowMap"])
        rows = torch.arange(n) // 32 * 32 + at[torch.arange(n) % 32]
        w, w_scale = w[rows], w_scale[rows]
    a = scaled(e2m1(g.a), tiles(g.a_descale, m, k // size), size, kind)
    return (a @ scaled(w, w_scale, size, kind).T * g.alpha.double()).to(g.out_dtype)


def mm_mxfp8(*args, **kwargs):
    g = bind("flashinfer", "mm_mxfp8", args, kwargs)
    (m, k), n = g.a.shape, g.b.shape[1]
    assert g.a.dtype == g.b.dtype == torch.float8_e4m3fn and g.a_descale.dtype == g.b_descale.dtype == torch.uint8
    assert g.a.is_contiguous() and g.b.stride() == (1, k) and n >= 128 and k >= 128 and k % 32 == 0
    assert g.a_descale.dim() == g.b_descale.dim() == 1 and not g.use_8x4_sf_layout and m % 128 == 0
    assert g.out_dtype in (torch.bfloat16, torch.float16) and g.out is None
    a = scaled(g.a.double(), tiles(g.a_descale, m, k // 32), 32, "e8m0")
    w = scaled(g.b.t().double(), tiles(g.b_descale, n, k // 32), 32, "e8m0")
    return (a @ w.T).to(g.out_dtype)


def flashinfer():
    """The package's GEMM module."""
    return module("flashinfer.gemm", mm_fp4=mm_fp4, mm_mxfp8=mm_mxfp8)


# ---- the others --------------------------------------------------------------------------------------------------------


def gemm_a8w8(*args, **kwargs):
    g = bind("aiter", "gemm_a8w8_CK", args, kwargs)
    (m, k), n = g.XQ.shape, g.WQ.shape[0]
    assert g.XQ.dtype == g.WQ.dtype == torch.int8 and k % 16 == 0 and n % 16 == 0 and g.WQ.shape[1] == k
    assert g.x_scale.dtype == g.w_scale.dtype == torch.float32 and g.x_scale.is_contiguous() and g.w_scale.is_contiguous()
    assert g.x_scale.shape == (m, 1) and g.w_scale.shape == (n, 1) and g.bias is None
    assert g.dtype in (torch.bfloat16, torch.float16)
    return ((g.XQ.double() * g.x_scale.double()) @ (g.WQ.double() * g.w_scale.double()).T).to(g.dtype)


def aiter():
    """AMD's package."""
    return module("aiter", gemm_a8w8_CK=gemm_a8w8)


def f4f4bf16(XQ, WQ, x_scale, w_scale, output=None, global_scale=None):
    (m, half), n = XQ.shape, WQ.shape[0]
    assert XQ.dtype == WQ.dtype == x_scale.dtype == w_scale.dtype == torch.uint8 and WQ.shape[1] == half
    assert half % 16 == 0 and n % 32 == 0 and x_scale.dim() == w_scale.dim() == 1
    assert XQ.is_contiguous() and WQ.is_contiguous() and global_scale is not None, "without a global scale it is MXFP4"
    assert global_scale.dtype == torch.float32 and global_scale.numel() == 1 and output is None
    a = scaled(e2m1(XQ), tiles(x_scale, m, half // 8), 16, "e4m3")
    return (a @ scaled(e2m1(WQ), tiles(w_scale, n, half // 8), 16, "e4m3").T * global_scale.double()).bfloat16()


def mslk_f4f4bf16(XQ, WQ, x_scale, w_scale, output=None, global_scale=None, mxfp4_block_size=32):
    assert WQ.shape[0] % 16 == 0 and XQ.shape[1] % 8 == 0, record("mslk")["messages"]
    return f4f4bf16(XQ, WQ, x_scale, w_scale, output, global_scale)


@contextmanager
def fbgemm():
    """FBGEMM's operators, under the package's former name."""
    with module("fbgemm_gpu.experimental.gen_ai"), operators("fbgemm", "fbgemm", f4f4bf16=f4f4bf16):
        yield


@contextmanager
def mslk():
    """The same under the package's new name."""
    with module("mslk.gemm"), operators("mslk", "mslk", f4f4bf16=mslk_f4f4bf16):
        yield


def blocks(codes, scale, rows):
    """FP8 codes [R, C] with float32 scales of rows x 128 blocks, as float64."""
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and codes.shape[1] % 128 == 0
    assert scale.shape == (-(-codes.shape[0] // rows), codes.shape[1] // 128)
    expanded = scale.double().repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(128, 1)
    return codes.double() * expanded


def fp8_gemm_nt(*args, **kwargs):
    g = bind("deep_gemm", "fp8_gemm_nt", args, kwargs)
    (a, a_scale), (b, b_scale) = g.a, g.b
    assert a.is_contiguous() and b.is_contiguous() and g.d.is_contiguous() and g.d.dtype == torch.bfloat16 and g.c is None
    assert a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0, "M-major scales, aligned for TMA"
    assert b.shape[0] % 64 == 0 and g.disable_ue8m0_cast
    g.d.copy_(blocks(a, a_scale, 1) @ blocks(b, b_scale, 128).T)


def deep_gemm():
    """DeepGEMM."""
    return module("deep_gemm", fp8_gemm_nt=fp8_gemm_nt)


def fp8_blockscale(*args, **kwargs):
    """Codes and scales as the wheel's TMA descriptors read them (csrc/nv_internal, deep_gemm/fp8_gemm.cuh): M-major scales, M a
    multiple of 4."""
    g = bind("flashinfer", "fp8_blockscale_gemm_sm90", args, kwargs)
    (m, _k), n = g.input.shape, g.weight.shape[0]
    assert g.input.dtype == torch.float8_e4m3fn and g.input.is_contiguous() and g.out is None and g.out_dtype == torch.bfloat16
    assert g.weight.is_contiguous() and n % 64 == 0 and g.input_scale.stride() == (1, m) and m % 4 == 0
    return (blocks(g.input, g.input_scale, 1) @ blocks(g.weight, g.weight_scale, 128).T).bfloat16()


def flashinfer_fp8():
    """FlashInfer's block-scaled FP8 GEMM."""
    return module("flashinfer.gemm", fp8_blockscale_gemm_sm90=fp8_blockscale)

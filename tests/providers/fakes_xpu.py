"""A fake of vllm-xpu-kernels with its recorded schemas, messages of checks, and shapes in comments of its C++ parameters."""

from contextlib import contextmanager

import torch
from fakes import module, operators, record, scaled

RECORD = record("vllm_xpu_kernels")
PER_TOKEN = "Int4-Int8 matmul expects quantized input A to be per-token ([b*m,1]) or per-tensor ([b]) quantized!"


def check(ok, message):
    """A check whose message is among the library's strings."""
    assert message in RECORD["messages"]
    if not ok:
        raise RuntimeError(message)


def shaped(operator, parameter, tensor, **sizes):
    """Check a matrix against the shape in the C++ parameter's comment; sizes by name."""
    said = RECORD["comments"]["parameters"][operator][parameter]
    shape = [eval(part.replace("/", "//"), {}, sizes) for part in said[said.index("[") + 1 : said.index("]")].split(",")]
    assert tensor.dim() == 2 and list(tensor.shape) == shape, f"{parameter} is {said}, got {list(tensor.shape)}"


def nibbles(packed):
    """int32 [R, C] to codes int64 [R, 8 C], the first in the low bits."""
    assert packed.dtype == torch.int32
    return ((packed.long()[..., None] >> (4 * torch.arange(8))) & 15).flatten(1)


def int4_weight(operator, k, b, scale, zero, size):
    """The dequantized weight float64 [N, K] of packed int32, a transposed view [K / 8, N]."""
    n = b.shape[1]
    check(b.dtype == torch.int32 and b.stride(0) == 1, "Int4 weight must be in NT format!")
    check(scale.is_contiguous(), "B_scale must be contiguous for int4 matmul")
    assert b.shape == (k // 8, n) and k % 8 == 0 and n % 8 == 0 and k % size == 0 and zero.is_contiguous()
    shaped(operator, "B_scale", scale, k=k, n=n, group_size=size)
    if zero.dim() == 1:  # symmetric: one signed byte
        assert zero.dtype == torch.int8 and zero.numel() == 1
        zeros = zero.long().expand(k // size, n)
    else:
        shaped(operator, "B_zp", zero, k=k, n=n, group_size=size)
        zeros = nibbles(zero)
    spread = lambda t: t.double().T.repeat_interleave(size, 1)
    return (nibbles(b.t()) - spread(zeros)) * spread(scale)


def int4_gemm_w4a16(A, B, bias, B_scale, B_zp, group_size, g_idx):
    assert A.dtype in (torch.float16, torch.bfloat16) and B_scale.dtype == A.dtype and g_idx is None
    y = A.double() @ int4_weight("int4_gemm_w4a16", A.shape[1], B, B_scale, B_zp, group_size).T
    return (y if bias is None else y + bias.double()).to(A.dtype)


def int4_gemm_w4a8(A_, A_scale, A_zp, B, B_scale, B_zp, group_size, g_idx, bias):
    m, k = A_.shape
    check(A_scale.is_contiguous(), "A_scale must be contiguous for int4 matmul")
    check(A_scale.shape == A_zp.shape == (m, 1), PER_TOKEN)
    assert A_.dtype == torch.int8 and A_zp.dtype == torch.int32 and g_idx is None
    # Primitives are cached without the scales' dtypes, and its own tests use float16 alone.
    assert A_scale.dtype == B_scale.dtype == torch.float16 and (bias is None or bias.dtype == torch.float16)
    a = (A_.double() - A_zp) * A_scale.double()
    y = a @ int4_weight("int4_gemm_w4a8", k, B, B_scale, B_zp, group_size).T
    return (y if bias is None else y + bias.double()).half()


def fp8_gemm(A, B, out_dtype, A_scale_, B_scale_, bias_):
    (m, k), n = A.shape, B.shape[1]
    check(A.dtype == B.dtype == torch.float8_e4m3fn, "input and weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul")
    check(out_dtype in (torch.float16, torch.bfloat16), "output must be float16 or bfloat16 for fp8 matmul")
    check(A_scale_.is_contiguous(), "A_scale must be contiguous for fp8 matmul")
    check(B_scale_.is_contiguous(), "B_scale must be contiguous for fp8 matmul")
    check(bias_ is None or bias_.is_contiguous(), "bias must be contiguous for fp8 matmul")
    assert A_scale_.dtype == B_scale_.dtype and B.stride() == (1, k)
    if A_scale_.dtype == torch.float8_e8m0fnu:
        assert A_scale_.shape == (m, k // 32) and B_scale_.shape == (k // 32, n)
        a = scaled(A.double(), A_scale_.view(torch.uint8), 32, "e8m0")
        w = scaled(B.t().double(), B_scale_.t().contiguous().view(torch.uint8), 32, "e8m0")
    elif A_scale_.dim() == 2 and A_scale_.shape[1] > 1:  # dnnl_matmul_w8a8_fp8 takes these for block scales
        assert A_scale_.dtype == torch.float32 and A_scale_.shape[1] == B_scale_.shape[0]
        groups, columns = k // B_scale_.shape[0], n // B_scale_.shape[1]
        assert groups == columns == 128 and k % 128 == 0 and n % 128 == 0
        a = A.double() * A_scale_.double().repeat_interleave(128, 1)
        w = B.t().double() * B_scale_.double().t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert A_scale_.dtype == torch.float32 and A_scale_.numel() in (1, m) and B_scale_.numel() in (1, n)
        a, w = A.double() * A_scale_.double().view(-1, 1), B.t().double() * B_scale_.double().view(-1, 1)
    y = a @ w.T
    return (y if bias_ is None else y + bias_.double()).to(out_dtype)


@contextmanager
def xpu():
    """The package's operators."""
    ops = {"int4_gemm_w4a16": int4_gemm_w4a16, "int4_gemm_w4a8": int4_gemm_w4a8, "fp8_gemm": fp8_gemm}
    with module("vllm_xpu_kernels._xpu_C"), operators("vllm_xpu_kernels", "_xpu_C", **ops):
        yield

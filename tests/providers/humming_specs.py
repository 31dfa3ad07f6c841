"""Layers that the humming adapters take: shared by the tests with a fake, with the real wheel, and on a GPU."""

import torch

from bitline import types
from bitline.kernels.providers.humming import (
    HummingFP8ScaledMMLinearKernel,
    HummingInt8ScaledMMLinearKernel,
    HummingLinearKernel,
)
from bitline.types import ActSpec, LinearSpec

E4M3, E2M1, E8M0 = types.float8_e4m3fn, types.float4_e2m1, torch.float8_e8m0fnu
HALF = {"act_dtype": torch.float16, "scale_dtype": torch.float16}
W4 = LinearSpec(64, 256, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
INTEGERS = [
    W4.replace(weight=types.unsigned(b, symmetric=z == "none"), zero=z, block=(1, group))
    for b, group in zip(range(2, 9), (16, 32, 64, 128, 256, 16, 256), strict=True) for z in ("none", "int")
]  # fmt: skip
WEIGHT_ONLY = [
    *INTEGERS, W4.replace(**HALF), W4.replace(weight=types.uint4, zero="int", bias=True, **HALF), W4.replace(bias=True),
    W4.replace(weight=types.int4, block=(1, 32)), W4.replace(weight=types.int8, block=(1, 256)), W4.replace(act_order=True),
    W4.replace(n=33, k=77, block=(1, 32)), W4.replace(n=1, k=300, block=(1, 64), weight=types.uint4, zero="int", bias=True),
    W4.replace(n=130, k=200, block=(1, 256)), W4.replace(n=200, k=600, block=(1, 256), act_order=True),
    W4.replace(n=77, k=130, weight=types.uint3b4, block=(1, 16)), W4.replace(block=(1, 256), n=100, k=99, **HALF),
    *(W4.replace(weight=w, block=(1, g)) for w in (E4M3, types.float6_e2m3, types.float6_e3m2, E2M1) for g in (32, 256)),
    W4.replace(weight=E4M3, block=(64, 256), scale_dtype=torch.float32), W4.replace(weight=E4M3, block=(64, 256)),
    W4.replace(weight=E4M3, block=(64, 256), n=200), W4.replace(block=(16, 32), block_offset=(5, 0)),
    W4.replace(weight=E2M1, block=(1, 32), scale_dtype=E8M0),
    W4.replace(weight=E4M3, block=(1, 32), scale_dtype=E8M0, n=70, k=99),
    W4.replace(weight=types.float6_e2m3, block=(1, 32), scale_dtype=E8M0, bias=True),
    W4.replace(weight=E2M1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(64, 256)),
    W4.replace(weight=E2M1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, act_dtype=torch.float16, n=33, k=80),
]  # fmt: skip
I8, F8 = ActSpec(types.int8), ActSpec(E4M3)
W8A8 = W4.replace(weight=types.int8, block=(1, 256), act=I8)
INT8 = [
    W8A8, W8A8.replace(bias=True, **HALF), W8A8.replace(act=ActSpec(types.int8, False, "tensor")),
    W8A8.replace(act=ActSpec(types.int8, True, "tensor"), n=33, k=77), W8A8.replace(weight=types.uint8b128, act_order=True),
    W8A8.replace(block=(64, 256), scale_dtype=torch.float32),
    *(W4.replace(act=I8, block=(1, g)) for g in (32, 64, 128, 256)), W4.replace(act=I8, n=130, k=200, weight=types.int4),
    W4.replace(act=I8, weight=types.uint2b2, **HALF),
]  # fmt: skip
FP8 = [
    W8A8.replace(weight=E4M3, act=F8), W8A8.replace(weight=E4M3, act=F8, bias=True, n=33, k=77, **HALF),
    W8A8.replace(weight=E4M3, act=ActSpec(E4M3, False, "tensor"), block=(64, 256), scale_dtype=torch.float32),
    W8A8.replace(weight=E4M3, act=ActSpec(E4M3, True, "tensor"), act_order=True),
    W4.replace(act=F8), W4.replace(act=F8, block=(1, 256), bias=True),
    W4.replace(weight=E4M3, block=(128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128)),
    W4.replace(weight=E4M3, block=(128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128), n=200, k=330,
               bias=True, act_dtype=torch.float16),
]  # fmt: skip
CASES = [
    (HummingLinearKernel, "cuda:sm80,humming", WEIGHT_ONLY),
    (HummingInt8ScaledMMLinearKernel, "cuda:sm80,humming", INT8),
    (HummingFP8ScaledMMLinearKernel, "cuda:sm90,humming", FP8),
]
REFUSED = [
    (HummingLinearKernel, W8A8, "weight-only"),
    (HummingLinearKernel, W4.replace(block=(1, 48)), "power of two"),
    (HummingLinearKernel, W4.replace(block=(1, 8)), "at least 16"),
    (HummingLinearKernel, W4.replace(scale_dtype=torch.float32), "input's dtype"),
    (HummingLinearKernel, W4.replace(act_dtype=torch.float16), "input's dtype"),
    (HummingLinearKernel, W4.replace(weight=types.nf4), "integers of 2 to 8 bits"),
    (HummingLinearKernel, W4.replace(weight=types.uint4, zero="float"), "integers of 2 to 8 bits"),
    (HummingLinearKernel, W4.replace(ragged=True), "equal size"),
    (HummingLinearKernel, W4.replace(block_offset=(0, 3)), "equal size"),
    (HummingLinearKernel, W4.replace(weight=E2M1, block=(1, 32), scale_dtype=E8M0, act_dtype=torch.float16), "bfloat16"),
    (HummingLinearKernel, W4.replace(scale2_block=(1, 256), scale_dtype=torch.uint8), "one global scale"),
    (HummingInt8ScaledMMLinearKernel, W4, "symmetric int8 activations"),
    (HummingInt8ScaledMMLinearKernel, W8A8.replace(act=ActSpec(types.int8, True, "token", 0, False)), "symmetric int8"),
    (HummingInt8ScaledMMLinearKernel, W8A8.replace(block=(1, 128)), "one scale per channel"),
    (HummingInt8ScaledMMLinearKernel, W4.replace(act=I8, block=(1, 16)), "at least 32"),
    (HummingInt8ScaledMMLinearKernel, W8A8.replace(weight=E4M3), "symmetric integers"),
    (HummingFP8ScaledMMLinearKernel, W8A8, "float8_e4m3fn activations"),
    (HummingFP8ScaledMMLinearKernel, W8A8.replace(act=F8), "2 to 4 bits"),
    (HummingFP8ScaledMMLinearKernel, W8A8.replace(weight=E4M3, act=F8, block=(1, 128)), "128x128"),
    (HummingFP8ScaledMMLinearKernel, FP8[6].replace(block_offset=(5, 0)), "row and column 0"),
    (HummingFP8ScaledMMLinearKernel, FP8[6].replace(scale_dtype=torch.bfloat16), "float32 scales"),
]  # fmt: skip

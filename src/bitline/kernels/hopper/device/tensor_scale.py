# mypy: ignore-errors
"""The scale of all of x, for dynamic quantization per tensor: one launch before the kernels that take a static scale."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bitline.kernels.hopper.device.quantize import token_scale


@gluon.jit(do_not_specialize=["size8", "limit", "num_ctas"])
def tensor_scale(x_ptr, scale_ptr, flags_ptr, size8, limit, num_ctas, act: gl.constexpr):
    """scale_ptr: float32 [1], of x [8 * size8]. flags_ptr: two int32, zero before and after.

    The bits of absolute values are compared as integers, which orders NaN last. The last CTA works out the scale.
    """
    COLUMNS: gl.constexpr = act.columns
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    gdc_launch_dependents()
    gdc_wait()
    size = size8.to(gl.int64) * 8
    offs = gl.arange(0, COLUMNS, L)
    largest = gl.zeros([COLUMNS], gl.int32, L)
    for chunk in range(gl.program_id(0), (size + COLUMNS - 1) // COLUMNS, num_ctas):
        at = chunk.to(gl.int64) * COLUMNS + offs
        v = gl.load(x_ptr + at, mask=at < size, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, v.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    gl.atomic_max(flags_ptr, gl.max(largest, 0), sem="relaxed", scope="gpu")
    arrived = gl.atomic_add(flags_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if arrived == num_ctas - 1:
        amax = gl.atomic_xchg(flags_ptr, 0, sem="relaxed", scope="gpu").to(gl.float32, bitcast=True)
        gl.atomic_xchg(flags_ptr + 1, 0, sem="relaxed", scope="gpu")
        scale, _zero = token_scale(amax, 0.0, limit, act)
        gl.store(scale_ptr, scale)

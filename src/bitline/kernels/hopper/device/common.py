# mypy: ignore-errors
"""Device code that the Hopper kernels share: barriers, programmatic dependent launch, scales, and storing y.

`scheme` is a `traits.SchemeTraits`. In a fragment, lane 4*g + q of a warp owns rows g and g + 8.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7

# Programmatic dependent launch
GRID_DEPENDENCY_WAIT = gl.constexpr("griddepcontrol.wait; // $0")
LAUNCH_DEPENDENTS = gl.constexpr("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def emit(ptx: gl.constexpr):
    """Emit an instruction without operands."""
    gl.inline_asm_elementwise(ptx, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pipeline_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The mbarriers (full, empty) of a pipeline's stages: one arrival fills a stage, one of each consumer empties it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return full, empty


@gluon.jit
def load_scale(scale_ptr, entry, scheme: gl.constexpr):
    """Scales of rows g and g + 8: two float32, or one int32 with both, twice."""
    if scheme.fp32_scales:
        return (gl.load(scale_ptr + entry * 2), gl.load(scale_ptr + entry * 2 + 1))
    else:
        packed = gl.load(scale_ptr + entry)
        return (packed, packed)


@gluon.jit
def scales_to_float32(s, scheme: gl.constexpr):
    """Scales of rows g and g + 8 as float32."""
    if scheme.fp32_scales:
        return s[0], s[1]
    elif scheme.fp16:
        lo = (s[0] & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        hi = (s[0] >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return lo, hi
    else:
        return (s[0] << 16).to(gl.float32, bitcast=True), (s[0] & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def scale_pairs(s, i: gl.constexpr, scheme: gl.constexpr):
    """The i-th scales of rows g and g + 8 as pairs of the input's dtype: the operands of a packed multiplication."""
    PTX: gl.constexpr = scheme.scale_pairs_ptx
    if scheme.fp32_scales:
        lo = gl.inline_asm_elementwise(PTX[0], PTX[1], [s[i]], dtype=gl.int32, is_pure=True, pack=1)
        hi = gl.inline_asm_elementwise(PTX[0], PTX[1], [s[i + 1]], dtype=gl.int32, is_pure=True, pack=1)
        return (lo, hi)
    else:
        lo, hi = gl.inline_asm_elementwise(PTX[0], PTX[1], [s[i]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        return (lo, hi)


@gluon.jit
def store_output(acc, n, m, bias_ptr, alpha_ptr, y_ptr, M, N, scheme: gl.constexpr):
    """y[m, n] = acc times the global scale plus bias, masked to M and N."""
    if scheme.has_global_scale:
        acc *= gl.load(alpha_ptr)
    if scheme.has_bias:
        acc += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    gl.store(y_ptr + m * N + n, acc.to(gl.float16 if scheme.fp16 else gl.bfloat16), mask=(m < M) & (n < N))

"""Run by test_cross_product.py in processes with Triton's interpreter: a part of the layer grid on the Triton kernels.

The fake-quantizing kernel combines two stages that each run on the whole grid elsewhere, so here each pair of format and
activation scheme runs with only one column order and dtype, which rotate.
"""

import sys

import layer_grid

from bitline.kernels import registry
from bitline.kernels.triton_fake_quant import TritonFakeQuantLinearKernel
from bitline.types import no

KERNELS = [(e.kernel, "cuda:sm90") for e in registry.entries() if e.kernel.backend in ("triton", "rdna", "marlin")]
ACCEPTS, DTYPES = layer_grid.accepts, (layer_grid.BF16, layer_grid.F16, layer_grid.F32)


def accepts_in_rotation(format_index):
    def accepts(kernel, spec):
        if kernel is TritonFakeQuantLinearKernel and spec.act is not None:
            order = 1 if spec.act_order else 2 if spec.ragged else 3 if any(spec.block_offset) else 0
            if order * 3 + DTYPES.index(spec.act_dtype) != (format_index + layer_grid.ACTS.index(spec.act)) % 12:
                return no("left to another format")
        return ACCEPTS(kernel, spec)

    return accepts


def run(part, parts):
    accepted = 0
    for index, name in list(enumerate(layer_grid.FORMATS))[part::parts]:
        layer_grid.accepts = accepts_in_rotation(index)
        accepted += sum(layer_grid.check_grid(name, KERNELS).values())
    return accepted


if __name__ == "__main__":
    layer_grid.SHAPES, layer_grid.M = ((33, 77),), (5,)  # multiples of nothing, and few, since the interpreter is slow
    print(run(*map(int, sys.argv[1:])))

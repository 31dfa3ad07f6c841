"""Run by test_cross_product.py in processes that have Triton's interpreter: a part of the product on Triton's kernels.

Where the input is read back before a weight-only product, both of which run in all combinations elsewhere, each format and input
scheme meet in one order of columns and dtype, which go round.
"""

import sys

import product

from bitline.kernels import registry
from bitline.kernels.triton_fake_quant import TritonFakeQuantLinearKernel
from bitline.types import no

KERNELS = [(e.kernel, "cuda:sm90") for e in registry.entries() if e.kernel.backend in ("triton", "rdna", "marlin")]
ACCEPTS, DTYPES = product.accepts, (product.BF16, product.F16, product.F32)


def going_round(number):
    def accepts(kernel, spec):
        if kernel is TritonFakeQuantLinearKernel and spec.act is not None:
            order = 1 if spec.act_order else 2 if spec.ragged else 3 if any(spec.block_offset) else 0
            if order * 3 + DTYPES.index(spec.act_dtype) != (number + product.ACTS.index(spec.act)) % 12:
                return no("another format's turn")
        return ACCEPTS(kernel, spec)

    return accepts


def run(part, parts):
    taken = 0
    for number, name in list(enumerate(product.FORMATS))[part::parts]:
        product.accepts = going_round(number)
        taken += sum(product.check_product(name, KERNELS).values())
    return taken


if __name__ == "__main__":
    product.SHAPES, product.ROWS = ((33, 77),), (5,)  # of no multiple; the interpreter takes its time
    print(run(*map(int, sys.argv[1:])))

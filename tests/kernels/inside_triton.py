"""Run by test_cross_product.py in processes that have Triton's interpreter: a part of the product on Triton's kernels."""

import sys

import product

from bitline.kernels import registry

KERNELS = [(e.kernel, "cuda:sm90") for e in registry.entries() if e.kernel.backend in ("triton", "rdna")]


if __name__ == "__main__":
    product.SHAPES, product.ROWS = ((33, 77),), (5,)  # of no multiple; the interpreter takes its time
    part, parts = map(int, sys.argv[1:])
    print(sum(sum(product.check_product(name, KERNELS).values()) for name in list(product.FORMATS)[part::parts]))

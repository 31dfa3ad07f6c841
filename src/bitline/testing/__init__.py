"""Test tools for authors of kernels and readers: random and lossless data, poisoned memory, tolerances, a conformance suite."""

from bitline.testing.conformance import Report, check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_spec, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import Comparison, check, check_exact, compare, reference64

__all__ = [
    "Comparison", "Report", "check", "check_exact", "check_kernel", "compare", "inputs", "lossless_inputs", "lossless_weight",
    "poison", "random_spec", "random_weight", "reference64",
]  # fmt: skip

"""For authors of kernels and readers: random weights, poisoned memory, tolerances and a conformance suite."""

from bitline.testing.poison import poison
from bitline.testing.tolerance import Comparison, check, check_exact, compare, reference64

__all__ = ["Comparison", "check", "check_exact", "compare", "poison", "reference64"]

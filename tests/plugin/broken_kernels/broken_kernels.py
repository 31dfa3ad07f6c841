"""Kernels as no package should offer them."""

from bitline import Kernel
from bitline.types import YES

NUMBER = 7


class Stranger:
    """No kernel at all."""


class ReferenceLinearKernel(Kernel):
    """Has the name of another one."""


def register():
    """Is called, and raises."""
    raise RuntimeError("out of order")


class Trips(Kernel):
    """Trips over every machine."""

    @classmethod
    def is_supported(cls, platform):
        return platform.no_such_attribute


class Lies(Kernel):
    """Says yes to everything in a way of its own, which a condition takes for a yes."""

    @classmethod
    def can_implement(cls, spec):
        return False, "never"

    @classmethod
    def cost(cls, spec, platform, m):
        return 1e-9


class Dear(Kernel):
    """Not offered to anyone."""

    @classmethod
    def can_implement(cls, spec):
        return YES

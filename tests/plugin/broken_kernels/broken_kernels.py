"""Entry points that a package should not have: each breaks in its own way."""

from bitline import Kernel
from bitline.types import YES

NUMBER = 7


class NotAKernel:
    """Not a subclass of Kernel."""


class ReferenceLinearKernel(Kernel):
    """A name that is taken."""


def register():
    """Raises when it is called."""
    raise RuntimeError("out of order")


class RaisingSupport(Kernel):
    """is_supported raises."""

    @classmethod
    def is_supported(cls, platform):
        return platform.no_such_attribute


class TupleVerdict(Kernel):
    """can_implement returns a tuple, which is truthy, instead of a Verdict."""

    @classmethod
    def can_implement(cls, spec):
        return False, "never"

    @classmethod
    def cost(cls, spec, platform, m):
        return 1e-9


class Unregistered(Kernel):
    """A valid kernel that no entry point registers."""

    @classmethod
    def can_implement(cls, spec):
        return YES

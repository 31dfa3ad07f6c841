"""What a result was measured on: machine, versions, commit."""

from bitline.bench.machine import commit, machine

__all__ = ["commit", "machine"]

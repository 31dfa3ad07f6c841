"""Kernels by provider: `base.py` holds the protocol that each class implements, `registry.py` the list of all kernels."""

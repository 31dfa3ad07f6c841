"""Kernels: one class in one file each. `base.py` holds the protocol, `registry.py` the list of built-in ones."""

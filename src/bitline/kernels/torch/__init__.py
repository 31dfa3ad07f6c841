"""Kernels over torch's own operators."""

"""Adapters for kernels of other packages. Each imports its package when it packs its first weight, not before."""

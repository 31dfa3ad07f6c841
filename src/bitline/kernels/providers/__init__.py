"""Kernels of other packages: thin adapters, each of which imports its package when it packs its first weight."""

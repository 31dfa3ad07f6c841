"""Kernels of the native core (csrc/) for CPUs, and measured costs of CPU operators."""

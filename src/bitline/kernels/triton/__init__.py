"""Kernels in Triton: one source for NVIDIA, AMD and Intel. Host classes here import Triton only when they run."""

"""Kernels in Triton, one source for NVIDIA, AMD and Intel GPUs. Host classes import Triton only when they launch a kernel."""

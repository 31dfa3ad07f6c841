"""Kernels on torch's own operators: cuBLASLt and CUTLASS through `torch._scaled_mm`, oneDNN, and torch's CPU int4/int8 GEMMs."""

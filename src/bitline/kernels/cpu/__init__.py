"""The native core's linear kernels (csrc/gemm*) and measured costs of CPU operators."""

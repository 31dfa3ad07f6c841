"""Device code of the portable Triton kernels. Only this folder imports Triton."""

"""Device code of the Hopper kernels. Only this folder imports Triton."""

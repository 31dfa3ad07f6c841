"""Device code of the portable Triton kernels. Only modules of this folder import Triton at the top."""

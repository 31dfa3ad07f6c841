"""Weight-only linear for NVIDIA Hopper, in Gluon. `linear` is the kernel; Triton is imported by `device` alone, on first use."""

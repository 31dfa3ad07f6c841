"""Weight-only linear for NVIDIA Hopper, in Gluon. `linear` is the kernel; only modules that end in `_device` import Triton."""

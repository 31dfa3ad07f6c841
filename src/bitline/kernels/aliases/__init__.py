"""Kernels under names that vLLM's users know and whose own code is in no package: they run torch's operators or Bitline's."""

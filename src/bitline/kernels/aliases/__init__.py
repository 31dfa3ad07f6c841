"""Kernels under names that vLLM's users know but whose code no package ships: they run torch's operators or Bitline's kernels."""

"""vLLM's linear-kernel protocol (`process_weights_after_loading`, `apply_weights`) over `Kernel.pack` and `Kernel.apply`."""

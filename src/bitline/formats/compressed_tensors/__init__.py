"""compressed-tensors, the format of llm-compressor, and AutoRound's config over the same tensors."""

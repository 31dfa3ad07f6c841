"""compressed-tensors, the format of llm-compressor, also under AutoRound's own config."""

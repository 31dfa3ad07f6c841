"""transformers models whose linear layers run on Bitline: loading, one-token decode steps, text generation, verification."""

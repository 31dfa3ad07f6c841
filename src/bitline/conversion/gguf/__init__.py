"""GGUF as a source and as a target of conversions."""

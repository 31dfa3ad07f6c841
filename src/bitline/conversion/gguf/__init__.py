"""GGUF as a target and as a source of conversions."""

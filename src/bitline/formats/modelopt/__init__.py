"""NVIDIA ModelOpt."""

"""Shared by the readers of several formats: checks of module tensors, packed int32, act-order, module names and patterns."""

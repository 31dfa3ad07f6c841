"""GGUF: llama.cpp's one-file models."""

"""GGUF: llama.cpp's model files."""

"""File access below the readers: safetensors, JSON and memory maps, all treated as untrusted input."""

"""Files under a reader: safetensors, JSON and memory maps, all of them read as hostile."""

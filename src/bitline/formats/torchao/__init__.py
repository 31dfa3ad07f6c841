"""torchao: tensor subclasses in safetensors, described in the file's metadata."""

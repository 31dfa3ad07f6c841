"""vLLM, as the modules that engines share name it."""

from bitline.engines.engine import Engine

VLLM = Engine("vLLM", "vllm.plugins.bitline")

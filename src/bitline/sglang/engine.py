"""SGLang, as the modules that engines share name it."""

from bitline.engines.engine import Engine

SGLANG = Engine("SGLang", "sglang.srt.plugins.bitline")

from sglang.srt.layers.quantization.base_config import QuantizationConfig

BASE_QUANTIZATION_METHODS = {"awq": QuantizationConfig}
CPU_QUANTIZATION_METHODS = {"awq": QuantizationConfig}
QUANTIZATION_METHODS = {**BASE_QUANTIZATION_METHODS}


def get_quantization_config(quantization):
    return QUANTIZATION_METHODS[quantization]

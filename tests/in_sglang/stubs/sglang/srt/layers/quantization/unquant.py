import torch

from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizeMethodBase


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer, input_):
        return torch.nn.functional.embedding(input_, layer.weight)

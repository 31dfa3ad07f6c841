import torch
from torch import nn

from sglang.srt.distributed.utils import get_group_rank_size

WEIGHT_LOADER_V2_SUPPORTED = ["AWQLinearMethod"]
STUB_GROUP = [None]  # the rank and size that tests give new layers


def _resolve_linear_group(parallel_group):
    return None if parallel_group == "replicated" else STUB_GROUP[0]


class LinearBase(nn.Module):
    tp_group = None

    def __init__(self, input_size, output_size, skip_bias_add=False, params_dtype=None, quant_config=None, prefix=""):
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config = quant_config
        if quant_config is None:
            from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

            self.quant_method = UnquantizedLinearMethod()
        else:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)

    def stub_bias(self, bias, size):
        self.register_parameter("bias", nn.Parameter(torch.zeros(size, dtype=self.params_dtype)) if bias else None)


class ReplicatedLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, skip_bias_add=False, params_dtype=None, quant_config=None, prefix=""):
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix=prefix)
        sizes = (self.input_size, [self.output_size], self.input_size, self.output_size)
        self.quant_method.create_weights(self, *sizes, self.params_dtype, weight_loader=None)
        self.stub_bias(bias, self.output_size)

    def forward(self, x):
        bias = self.bias if not self.skip_bias_add else None
        return self.quant_method.apply(self, x, bias), self.bias if self.skip_bias_add else None


class ColumnParallelLinear(LinearBase):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        output_sizes=None,
        prefix="",
        *,
        use_presharded_weights=False,
        skip_block_quant_check=False,
        parallel_group=None,
    ):
        self._initialize_partition(
            input_size,
            output_size,
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            output_sizes,
            prefix,
            tp_group=_resolve_linear_group(parallel_group),
            use_presharded_weights=use_presharded_weights,
        )

    def _initialize_partition(
        self,
        input_size,
        output_size,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        output_sizes=None,
        prefix="",
        *,
        tp_group,
        use_presharded_weights=False,
        skip_block_quant_check=False,
        parallel_group=None,
    ):
        self.tp_group = tp_group
        _, tp_size = get_group_rank_size(tp_group)
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
        self.use_presharded_weights = use_presharded_weights
        self.output_size_per_partition = self.output_size // tp_size
        self.output_partition_sizes = [self.output_size_per_partition]
        if hasattr(self, "output_sizes"):
            self.output_partition_sizes = [output_size // tp_size for output_size in self.output_sizes]
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=self.input_size,
            output_partition_sizes=self.output_partition_sizes,
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=self.params_dtype,
            skip_block_quant_check=skip_block_quant_check,
            weight_loader=None,
        )
        self.stub_bias(bias, self.output_size_per_partition)

    def forward(self, input_):
        bias = self.bias if not self.skip_bias_add else None
        return self.quant_method.apply(self, input_, bias), self.bias if self.skip_bias_add else None


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        input_size,
        output_sizes,
        bias=True,
        gather_output=False,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        use_presharded_weights=False,
        parallel_group=None,
    ):
        self.output_sizes = output_sizes
        self.use_presharded_weights = use_presharded_weights
        super()._initialize_partition(
            input_size=input_size,
            output_size=sum(output_sizes),
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp_group=_resolve_linear_group(parallel_group),
            use_presharded_weights=use_presharded_weights,
        )
        self.prefix = prefix


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(
        self,
        hidden_size,
        head_size,
        total_num_heads,
        total_num_kv_heads=None,
        bias=True,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        load_presharded_attn=False,
        v_head_size=None,
        skip_block_quant_check=False,
        parallel_group=None,
        kv_parallel_group=None,
    ):
        self.head_size = head_size
        self.v_head_size = v_head_size if v_head_size is not None else head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        tp_group = self.kv_tp_group = _resolve_linear_group(parallel_group)
        _, tp_size = get_group_rank_size(tp_group)
        self.num_heads = self.total_num_heads // tp_size
        self.num_kv_heads = max(1, self.total_num_kv_heads // tp_size)
        self.num_kv_head_replicas = max(1, tp_size // self.total_num_kv_heads)
        self.output_sizes = [
            self.num_heads * self.head_size * tp_size,
            self.num_kv_heads * self.head_size * tp_size,
            self.num_kv_heads * self.v_head_size * tp_size,
        ]
        super()._initialize_partition(
            input_size=hidden_size,
            output_size=sum(self.output_sizes),
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp_group=tp_group,
            use_presharded_weights=load_presharded_attn,
        )


class RowParallelLinear(LinearBase):
    def __init__(
        self,
        input_size,
        output_size,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        params_dtype=None,
        reduce_results=True,
        quant_config=None,
        prefix="",
        *,
        use_presharded_weights=False,
        use_dp_attention_reduce=False,
        parallel_group=None,
    ):
        self.tp_group = _resolve_linear_group(parallel_group)
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
        self.input_size_per_partition = input_size // get_group_rank_size(self.tp_group)[1]
        self.use_presharded_weights = use_presharded_weights
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=self.input_size_per_partition,
            output_partition_sizes=[self.output_size],
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=self.params_dtype,
            weight_loader=None,
        )
        self.stub_bias(bias, self.output_size)

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        tp_rank, _ = get_group_rank_size(self.tp_group)
        bias_ = None if (tp_rank > 0 or self.skip_bias_add) else self.bias
        return self.quant_method.apply(self, input_, bias=bias_), self.bias if self.skip_bias_add else None


class MergedColumnParallelRepeatedLinear(LinearBase):
    def __init__(
        self,
        input_size,
        column_output_sizes,
        repeated_output_sizes,
        skip_bias_add=False,
        params_dtype=None,
        quant_config=None,
        prefix="",
        *,
        parallel_group=None,
    ):
        self.tp_group = _resolve_linear_group(parallel_group)
        output_size = sum(column_output_sizes) + sum(repeated_output_sizes)
        super().__init__(input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)

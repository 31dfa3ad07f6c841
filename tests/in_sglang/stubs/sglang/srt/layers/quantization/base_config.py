from abc import ABC, abstractmethod


class QuantizeMethodBase(ABC):
    def create_weights(self, layer, *weight_args, **extra_weight_attrs):
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer, *args, **kwargs):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        return

    def restore_weights_before_loading(self, layer):
        return


class LinearMethodBase(QuantizeMethodBase):
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
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer, x, bias=None):
        raise NotImplementedError


class QuantizationConfig(ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {}

    def update_packed_modules_mapping(self, mapping):
        self.packed_modules_mapping = mapping

    @abstractmethod
    def get_name(self):
        raise NotImplementedError

    @abstractmethod
    def get_supported_act_dtypes(self):
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def get_min_capability(cls):
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_config_filenames():
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def from_config(cls, config):
        raise NotImplementedError

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant):
        return None

    @abstractmethod
    def get_quant_method(self, layer, prefix):
        raise NotImplementedError

    def is_linear_unquantized(self, prefix):
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        return isinstance(self.get_quant_method(LinearBase(1, 1), prefix=prefix), UnquantizedLinearMethod)

    @abstractmethod
    def get_scaled_act_names(self):
        raise NotImplementedError

    def apply_weight_name_mapper(self, hf_to_sglang_mapper):  # noqa: B027
        pass


def method_has_implemented_embedding(method_class):
    return getattr(method_class, "embedding", None) is not None

import torch
from safetensors import safe_open

from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.model_loader.utils import get_model_architecture


def _get_quantization_config(model_config, load_config):
    model_class, _ = get_model_architecture(model_config)
    packed_modules_mapping = getattr(model_class, "packed_modules_mapping", {})
    quant_cls = get_quantization_config(model_config.quantization)
    found = getattr(model_config.hf_config, "quantization_config", None)
    quant_config = quant_cls.from_config(found | {"packed_modules_mapping": packed_modules_mapping}) if found else quant_cls()
    mapper = getattr(model_class, "hf_to_sglang_mapper", None)
    if mapper is not None:
        quant_config.apply_weight_name_mapper(mapper)
    return quant_config


class DefaultModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def _get_all_weights(self, model_config, model):
        with safe_open(f"{model_config.model_path}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    def load_model(self, *, model_config, device_config):
        target_device = torch.device(device_config.device)
        quant_config = _get_quantization_config(model_config, self.load_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(model_config.dtype)
        try:
            with target_device:
                model = get_model_architecture(model_config)[0](config=model_config.hf_config, quant_config=quant_config)
            self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), target_device)
        finally:
            torch.set_default_dtype(before)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model, target_device):
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    @staticmethod
    def restore_weights_before_loading(model, target_device):
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.restore_weights_before_loading(module)

import torch

from bitline import LinearSpec, QuantizedWeight
from bitline.errors import CheckpointError, WeightError
from bitline.formats.base import LayerRecord, in_tensor
from bitline.formats.quant_config import quantization_config
from bitline.types import int8


class ToyReader:
    """`<module>.toy_codes` int8 [N, K] and `<module>.toy_scale` float32 [N]."""

    name = "toy"

    def matches(self, source):
        return quantization_config(source).get("quant_method") == "toy"

    def layers(self, source):
        for name, info in source.tensors.items():
            if name.endswith(".toy_codes"):
                yield self._record(source, name.removesuffix(".toy_codes"), info)

    def _record(self, source, module, info):
        scale = source.tensors.get(f"{module}.toy_scale")
        if scale is None or scale.shape != info.shape[:1]:
            found, wanted = None if scale is None else list(scale.shape), list(info.shape[:1])
            what = "a layer's scales do not fit its codes"
            raise CheckpointError(what, file=info.file, tensor=f"{module}.toy_scale", found=found, expected=wanted)
        n, k = info.shape
        spec = LinearSpec(n, k, int8, (1, k), scale_dtype=scale.dtype)

        def read():
            codes = source.read(info.name).view(torch.uint8)
            try:
                return QuantizedWeight(spec, codes, source.read(scale.name).unsqueeze(1), origin=module)
            except WeightError as error:
                raise in_tensor(error, info) from error

        return LayerRecord(module, "toy", spec, (info.name, scale.name), read, nbytes=info.nbytes + scale.nbytes)

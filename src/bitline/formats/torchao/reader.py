"""torchao in safetensors: tensor subclasses stored as their inner tensors, described in the file's metadata.

Only names and numbers are taken from a description; no class that it names is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource, missing_codes
from bitline.formats.quant_config import find_quantization
from bitline.formats.torchao import integers, minifloats
from bitline.formats.torchao.tensor_subclass import SubclassTensors

_QDATA, _SCALE = "._weight_qdata", "._weight_scale"
_KINDS = (*integers.KINDS, *minifloats.KINDS)


class TorchAOReader:
    """Layer records of torchao checkpoints in safetensors."""

    name = "torchao"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "torchao"."""
        return find_quantization(source)[0].get("quant_method") == "torchao"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every weight that is stored as a tensor subclass. Of tensor data only zero points of int8 are read."""
        for name, info in source.tensors.items():
            if name.endswith(_QDATA):
                yield _record(SubclassTensors(source, name.removesuffix(_QDATA)))
            elif name.endswith(_SCALE) and name.removesuffix(_SCALE) + _QDATA not in source.tensors:
                raise missing_codes(info, name.removesuffix(_SCALE) + _QDATA)
            elif name.endswith("_qdata") and "._" in name:
                raise CheckpointError(
                    "torchao parameters that are not a layer's weight are not supported yet", file=info.file, tensor=name,
                    found=f"{info.dtype} {list(info.shape)}", expected="the weight of a linear layer, not experts in one tensor",
                )  # fmt: skip


def _record(m: SubclassTensors) -> LayerRecord:
    """The record, by the class of the weight."""
    if m.kind in integers.KINDS:
        return integers.integer_record(m)
    if m.kind in minifloats.KINDS:
        return minifloats.minifloat_record(m)
    raise m.error(
        m.codes, "torchao weights of this kind are not supported yet", repr(m.kind), " or ".join(_KINDS),
        "its bytes are in the order of one kernel: quantize the model again with one of these",
    )  # fmt: skip


READER = TorchAOReader()

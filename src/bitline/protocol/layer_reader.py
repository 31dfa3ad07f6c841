"""From the parameters of a layer of vLLM's kernel protocol to the canonical weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bitline.protocol.config import Config
from bitline.protocol.layer_parameters import LayerParameters
from bitline.protocol.mixed_precision_reader import read_mixed_precision
from bitline.protocol.scaled_reader import read_block_scaled, read_fp8, read_int8
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

_READERS: dict[str, Callable[[LayerParameters, LinearSpec], QuantizedWeight]] = {
    "mp": read_mixed_precision, "int8": read_int8, "fp8": read_fp8, "fp8_block": read_fp8,
    "nvfp4": read_block_scaled, "mxfp4": read_block_scaled, "mxfp6": read_block_scaled, "mxfp8": read_block_scaled,
}  # fmt: skip


def read_layer(layer: Any, config: Config, names: Mapping[str, str]) -> QuantizedWeight:
    """The canonical weight of a layer: views of its parameters where possible. The layer is not changed.

    names: role -> parameter name, where it is not the family's usual one. The layout of a parameter is given by its input_dim,
    output_dim and packed_dim, or else by its shape; an InputError where a shape has two readings.
    """
    parameters = LayerParameters(layer, config, names)
    return _READERS[parameters.family](parameters, config.to_spec())

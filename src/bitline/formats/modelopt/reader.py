"""NVIDIA ModelOpt: FP8, NVFP4, MX, INT4 (AWQ) and INT8 (SmoothQuant) weights as its Hugging Face export writes them.

The tensors say how the weight is stored, the algorithm's name says how activations are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common.expert_stacks import unstack_experts
from bitline.formats.common.ignored_modules import IgnoredModules
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import E8M0, FLOATS, SCALAR_SHAPES, stored_shapes
from bitline.formats.common.slices import COLUMNS, ROWS, Axis, Layout, byte_axis, scale_axes, vector_axes
from bitline.formats.modelopt.config import AlgorithmByModule, QuantAlgorithm
from bitline.formats.quant_config import quantization_config
from bitline.types import LinearSpec, ScalarType

_CODES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_MX_BLOCK = 32
_STORED_AS = {
    "scale": "weight_scale", "scale2": "weight_scale_2", "input_scale": "input_scale", "input_multiplier": "pre_quant_scale",
}  # fmt: skip


class ModelOptReader:
    """Layer records of ModelOpt checkpoints."""

    name = "modelopt"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "modelopt", "modelopt_fp4" and the like, or hf_quant_config.json alone."""
        return str(quantization_config(source).get("quant_method")).startswith("modelopt")

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose `weight` is FP8, uint8 or int8 and has a `weight_scale`. No tensor data is read."""
        algorithms = AlgorithmByModule(source)
        ignored = IgnoredModules(algorithms.ignored, algorithms.file)
        source = unstack_experts(source, _CODES)
        for tensor, info in source.tensors.items():
            name, dot, suffix = tensor.rpartition(".")
            weight = source.tensors.get(f"{name}.weight")
            if suffix == "weight" and dot and info.dtype in _CODES:
                module = _ModelOptModule(source, name)
                ignored.warn_if_listed(module)
                yield module.layer(algorithms)
            elif suffix == "weight_scale" and (weight is None or weight.dtype not in _CODES):
                found = "no weight" if weight is None else f"a weight of {weight.dtype}"
                raise CheckpointError(
                    "scales without codes", file=info.file, tensor=tensor, found=found, expected=f"{name}.weight in 8 or 4 bits"
                )


class _ModelOptModule(ModuleTensors):
    """A module with its scales and its algorithm."""

    scale: TensorInfo
    algorithm: QuantAlgorithm
    _algorithms: AlgorithmByModule

    def layer(self, algorithms: AlgorithmByModule) -> LayerRecord:
        """The record, by how the weight is stored."""
        lora = self.find(("svdquant_lora_a", "svdquant_lora_b", "weight_quantizer.svdquant_lora_a"))
        if lora is not None:
            raise self.error(lora, "a low-rank term beside the quantized weight is not supported yet", lora.name, "no SVDQuant")
        self.scale = self.require("weight_scale", (*FLOATS, *E8M0, torch.float8_e4m3fn))
        storage = self._storage()
        self._algorithms, self.algorithm = algorithms, algorithms.find(self, storage)
        spec = {
            "fp8": self._fp8, "mxfp8": self._mxfp8, "nvfp4": self._nvfp4, "mxfp4": self._mxfp4, "int4": self._int4,
            "int8": self._int8,
        }[storage]()  # fmt: skip
        return self._finish(spec, self._read_int4 if storage == "int4" else self._read_bytes)

    def _storage(self) -> str:
        """How the weight is stored, by the dtypes of codes and scales."""
        scale, found = self.scale, None
        if self.codes.dtype == torch.float8_e4m3fn:
            found = "fp8" if scale.dtype in FLOATS else "mxfp8" if scale.dtype in E8M0 else None
        elif self.codes.dtype == torch.uint8:
            found = "int4" if scale.dtype in FLOATS else "mxfp4" if scale.dtype in E8M0 else "nvfp4"
        elif scale.dtype in FLOATS:
            found = "int8"
        if found is None:
            expected = f"scales that go with {self.codes.dtype}"
            raise self.error(scale, "a tensor has another dtype than its format", scale.dtype, expected)
        return found

    # ---- the spec of each storage ----------------------------------------------------------------------------------------

    def _fp8(self) -> LinearSpec:
        (n, k), shape = self.matrix(), self.scale.shape
        if len(shape) == 4 and shape[1] == shape[3] == 1:  # [N / 128, 1, K / 128, 1], the shape of the reduction
            shape = (shape[0], shape[2])
        if shape in SCALAR_SHAPES:
            block = n, k
        elif shape in ((n,), (n, 1)):
            block = 1, k
        elif len(shape) == 2 and 0 not in shape:
            block = self.algorithm.block or (_block_size(n, shape[0], 128), _block_size(k, shape[1], 128))
        else:
            block = 1, 1
        return self._spec(n, k, types.float8_e4m3fn, block, shape)

    def _mxfp8(self) -> LinearSpec:
        """A scale per 32 columns of one row or of a tile of 2**i rows."""
        (n, k), shape = self.matrix(), self.scale.shape
        rows = next((1 << i for i in range(n.bit_length() + 1) if shape and -(-n // (1 << i)) == shape[0]), 1)
        return self._spec(n, k, types.float8_e4m3fn, (rows, _MX_BLOCK), shape)

    def _nvfp4(self) -> LinearSpec:
        n, columns = self.matrix()
        k = 2 * columns
        self.scalar("weight_scale_2")
        return self._spec(n, k, types.float4_e2m1, self._row_block(k, 16), self.scale.shape, scale2_block=(n, k))

    def _mxfp4(self) -> LinearSpec:
        n, columns = self.matrix()
        return self._spec(n, 2 * columns, types.float4_e2m1, (1, _MX_BLOCK), self.scale.shape)

    def _int4(self) -> LinearSpec:
        """Two rows per byte, [N/2, K], in two's complement; read as uint4b8, which more kernels take."""
        pairs, k = self.matrix()
        shape = self.scale.shape if len(self.scale.shape) != 1 else (*self.scale.shape, 1)
        self.leave_unused("weight_scale_2")  # of W4A8_AWQ's FP8 weights inside the kernel: not part of the weight
        return self._spec(2 * pairs, k, types.uint4b8, self._row_block(k, 128), shape)

    def _int8(self) -> LinearSpec:
        (n, k), shape = self.matrix(), self.scale.shape
        return self._spec(n, k, types.int8, (n, k) if shape in SCALAR_SHAPES else (1, k), shape)

    def _row_block(self, k: int, default: int) -> tuple[int, int]:
        """The scale block of one row: the config's, else by the shape of the scales."""
        shape = self.scale.shape
        return self.algorithm.block or (1, _block_size(k, shape[1] if len(shape) == 2 else 1, default))

    def _spec(
        self, n: int, k: int, weight: ScalarType, block: tuple[int, int], scale_shape: tuple[int, ...], **fields: Any
    ) -> LinearSpec:
        dtype = torch.float8_e8m0fnu if self.scale.dtype in E8M0 else self.scale.dtype
        spec = LinearSpec(n, k, weight, block, scale_dtype=dtype).replace(**fields)
        if scale_shape not in stored_shapes(spec.grid, n):
            raise self.scale_shape_error(self.scale, n, k, f"{list(spec.grid)} (blocks of {block[0]} x {block[1]})")
        return spec

    # ---- activations, and what reads the weight --------------------------------------------------------------------------

    def _finish(self, spec: LinearSpec, read_codes: Callable[[], Tensor]) -> LayerRecord:
        n, k = spec.n, spec.k
        act = self.algorithm.act(spec.block[1], calibrated=self.find("input_scale") is not None)
        is_global = act is not None and act.scale == "e4m3"  # NVFP4's input_scale
        has_input_scale = act is not None and (is_global or not act.dynamic)
        if has_input_scale:
            self.scalar("input_scale")
        else:
            self.leave_unused("input_scale")
        multiplier = self.has_vector("pre_quant_scale", k, "pre_quant_scale")
        spec = spec.replace(act=act, bias=self.has_bias(n), input_multiplier=multiplier)

        def read_fields() -> dict[str, Tensor | None]:
            fields: dict[str, Tensor | None] = {
                "codes": read_codes(), "scale": self.read("weight_scale").view(spec.scale_dtype).reshape(spec.grid),
                # float64, as every global scale: its product with a block scale is then rounded once.
                "scale2": None if spec.scale2_block is None else self.read("weight_scale_2", 1, 1).double(),
                "input_scale": None, "input_multiplier": self.read("pre_quant_scale", k) if multiplier else None,
            }  # fmt: skip
            if has_input_scale:  # NVFP4's global scale multiplies in ModelOpt, the canonical one divides
                fields["input_scale"] = self.read_reciprocal("input_scale") if is_global else self.read("input_scale").reshape(())
            return fields

        layout: Layout = {"weight": self._code_axes(), "weight_scale": scale_axes(spec, self.scale.shape)}
        if multiplier:
            layout["pre_quant_scale"] = vector_axes(COLUMNS, self.require("pre_quant_scale").shape)
        again = lambda part: part.layer(self._algorithms)
        return self.record(f"modelopt {self.algorithm.name}", spec, read_fields, _STORED_AS, layout, again)

    def _code_axes(self) -> tuple[Axis, Axis]:
        """How `weight` lies along N and K."""
        storage = self.algorithm.storage
        return (Axis(0, 2), COLUMNS) if storage == "int4" else (ROWS, byte_axis(4 if storage.endswith("fp4") else 8))

    def _read_bytes(self) -> Tensor:
        return self.read("weight").view(torch.uint8)

    def _read_int4(self) -> Tensor:
        return repack_row_pairs(self.read("weight"))


def _block_size(size: int, blocks: int, default: int) -> int:
    """Elements per block where `size` elements have this many blocks: the default if it fits, else an even division."""
    if blocks < 1 or -(-size // default) == blocks:
        return default
    return size // blocks if size % blocks == 0 else default


def repack_row_pairs(packed: Tensor) -> Tensor:
    """uint8 [N/2, K], row 2i in low and 2i + 1 in high nibbles, two's complement, to uint4b8 rows, uint8 [N, ceil(K/2)]."""
    pairs, k = packed.shape
    out = torch.empty(pairs, 2, bitstream.row_bytes(k, 4), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, pairs, step):
        rows = packed[r : r + step] ^ 0x88
        out[r : r + step, 0] = bitstream.pack(rows, 4)
        out[r : r + step, 1] = bitstream.pack(rows >> 4, 4)
    return out.view(2 * pairs, -1)


READER = ModelOptReader()

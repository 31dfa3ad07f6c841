"""NVIDIA ModelOpt: FP8, NVFP4, MX, INT4 (AWQ) and INT8 (SmoothQuant) weights as its export to Hugging Face writes them.

The tensors say how the weight is stored, the algorithm's name says how the input is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common.expert_stacks import unstacked
from bitline.formats.common.ignored_modules import Hints
from bitline.formats.common.module_tensors import E8M0, FLOATS, NUMBER, Layer
from bitline.formats.modelopt import config
from bitline.formats.modelopt.config import Algorithm
from bitline.formats.quant_config import quantization_config
from bitline.types import LinearSpec, ScalarType

_CODES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_MX = 32
_FIELDS = {
    "scale": "weight_scale", "scale2": "weight_scale_2", "input_scale": "input_scale", "input_multiplier": "pre_quant_scale",
}  # fmt: skip
_TINY, _HUGE = 1e-35, 1e35  # an input scale outside has no float32 reciprocal, or one that is nothing


class ModelOptReader:
    """Layer records of ModelOpt checkpoints."""

    name = "modelopt"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "modelopt", "modelopt_fp4" and the like, or hf_quant_config.json alone."""
        return str(quantization_config(source).get("quant_method")).startswith("modelopt")

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose `weight` is FP8, uint8 or int8 and has a `weight_scale`. No tensor data is read."""
        algorithms = config.Algorithms(source)
        hints = Hints(algorithms.left_alone, algorithms.file)
        source = unstacked(source, _CODES)
        for name, info in source.tensors.items():
            base, dot, suffix = name.rpartition(".")
            weight = source.tensors.get(f"{base}.weight")
            if suffix == "weight" and dot and info.dtype in _CODES:
                module = Layer(source, base)
                hints.note(module)
                yield _record(module, algorithms)
            elif suffix == "weight_scale" and (weight is None or weight.dtype not in _CODES):
                found = "no weight" if weight is None else f"a weight of {weight.dtype}"
                raise CheckpointError(
                    "scales without codes", file=info.file, tensor=name, found=found, expected=f"{base}.weight in 8 or 4 bits"
                )


def _record(m: Layer, algorithms: config.Algorithms) -> LayerRecord:
    if (lora := m.find(("svdquant_lora_a", "svdquant_lora_b", "weight_quantizer.svdquant_lora_a"))) is not None:
        raise m.error(lora, "a low-rank term beside the quantized weight is not supported yet", lora.name, "no SVDQuant")
    scale = m.need("weight_scale", (*FLOATS, *E8M0, torch.float8_e4m3fn))
    kind = _kind(m, scale)
    algorithm = algorithms.of(m, kind)
    return _Layer(m, scale, algorithm).record(kind)


def _kind(m: Layer, scale: TensorInfo) -> str:
    """How the weight is stored: "fp8", "mxfp8", "nvfp4", "mxfp4", "int4" or "int8"."""
    found = None
    if m.main.dtype == torch.float8_e4m3fn:
        found = "fp8" if scale.dtype in FLOATS else "mxfp8" if scale.dtype in E8M0 else None
    elif m.main.dtype == torch.uint8:
        found = "int4" if scale.dtype in FLOATS else "mxfp4" if scale.dtype in E8M0 else "nvfp4"
    elif scale.dtype in FLOATS:
        found = "int8"
    if found is None:
        raise m.error(scale, "a tensor has another dtype than its format", scale.dtype, f"scales that go with {m.main.dtype}")
    return found


class _Layer:
    """One module on its way to a record: what all kinds have in common."""

    def __init__(self, m: Layer, scale: TensorInfo, algorithm: Algorithm) -> None:
        self.m, self.scale, self.algorithm = m, scale, algorithm
        self.rows, self.columns = m.matrix()

    def record(self, kind: str) -> LayerRecord:
        kinds: dict[str, Callable[[], tuple[LinearSpec, Callable[[], Tensor]]]] = {
            "fp8": self._fp8, "mxfp8": self._mxfp8, "nvfp4": self._nvfp4, "mxfp4": self._mxfp4, "int4": self._int4,
            "int8": self._int8,
        }  # fmt: skip
        spec, codes = kinds[kind]()
        return self._finish(spec, codes)

    # ---- the kinds of weights: a spec, and a function that reads the codes -----------------------------------------------

    def _fp8(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        n, k, shape = self.rows, self.columns, self.scale.shape
        if len(shape) == 4 and shape[1] == shape[3] == 1:  # [N / 128, 1, K / 128, 1], as it was reduced
            shape = (shape[0], shape[2])
        if shape in NUMBER:
            block = n, k
        elif shape in ((n,), (n, 1)):
            block = 1, k
        elif len(shape) == 2 and 0 not in shape:
            size = self.algorithm.group_size
            block = (size, size) if size else (_divided(n, shape[0], 128), _divided(k, shape[1], 128))
        else:
            block = 1, 1
        return self._spec(n, k, types.float8_e4m3fn, block, shape), self._bytes

    def _mxfp8(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        """A scale for 32 columns of one row or, in tiles, of a power of two of rows."""
        n, k, shape = self.rows, self.columns, self.scale.shape
        tall = next((1 << i for i in range(n.bit_length() + 1) if shape and -(-n // (1 << i)) == shape[0]), 1)
        return self._spec(n, k, types.float8_e4m3fn, (tall, _MX), shape), self._bytes

    def _nvfp4(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        n, k = self.rows, 2 * self.columns
        self.m.number("weight_scale_2")
        return self._spec(n, k, types.float4_e2m1, (1, self._group(k, 16)), self.scale.shape, scale2_block=(n, k)), self._bytes

    def _mxfp4(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        return self._spec(self.rows, 2 * self.columns, types.float4_e2m1, (1, _MX), self.scale.shape), self._bytes

    def _int4(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        """Two rows in a byte. Two's complement becomes the value plus 8, which more kernels know and is a bit turned."""
        n, k = 2 * self.rows, self.columns
        shape = self.scale.shape if len(self.scale.shape) != 1 else (*self.scale.shape, 1)
        self.m.find("weight_scale_2")  # W4A8_AWQ's second quantization, to FP8, is the kernels' own: no part of the weight

        def codes() -> Tensor:
            return unpack_rows(self.m.read("weight"))

        return self._spec(n, k, types.uint4b8, (1, self._group(k, 128)), shape), codes

    def _int8(self) -> tuple[LinearSpec, Callable[[], Tensor]]:
        n, k, shape = self.rows, self.columns, self.scale.shape
        return self._spec(n, k, types.int8, (n, k) if shape in NUMBER else (1, k), shape), self._bytes

    # ---- what they have in common ----------------------------------------------------------------------------------------

    def _bytes(self) -> Tensor:
        return self.m.read("weight").view(torch.uint8)

    def _group(self, k: int, usual: int) -> int:
        """Columns of a scale: the config's, else what divides the columns evenly."""
        shape = self.scale.shape
        return self.algorithm.group_size or _divided(k, shape[1] if len(shape) == 2 else 1, usual)

    def _spec(
        self, n: int, k: int, weight: ScalarType, block: tuple[int, int], shape: tuple[int, ...], **more: Any
    ) -> LinearSpec:
        dtype = torch.float8_e8m0fnu if self.scale.dtype in E8M0 else self.scale.dtype
        spec = LinearSpec(n, k, weight, block, scale_dtype=dtype).replace(**more)
        flat: set[tuple[int, ...]] = set(NUMBER) if spec.grid == (1, 1) else {(n,)} if spec.grid == (n, 1) else set()
        if shape not in {spec.grid, *flat}:
            raise self.m.unfit(self.scale, n, k, f"{list(spec.grid)} (blocks of {block[0]} x {block[1]})")
        return spec

    def _finish(self, spec: LinearSpec, codes: Callable[[], Tensor]) -> LayerRecord:
        m, (n, k) = self.m, (spec.n, spec.k)
        act = self.algorithm.act(spec.block[1], calibrated=m.find("input_scale") is not None)
        inverse = act is not None and act.scale == "e4m3"
        inputs = m.number("input_scale") if act is not None and (inverse or not act.dynamic) else None
        factors = m.vector("pre_quant_scale", k, "pre_quant_scale")
        spec = spec.replace(act=act, bias=m.bias(n), input_multiplier=factors)

        def build() -> dict[str, Tensor | None]:
            return {
                "codes": codes(), "scale": m.read("weight_scale").view(spec.scale_dtype).reshape(spec.grid),
                # Float64, as every global scale: its product with a block's scale is then rounded once.
                "scale2": None if spec.scale2_block is None else m.read("weight_scale_2", 1, 1).double(),
                "input_scale": None if inputs is None else self._input_scale(inputs, inverse),
                "input_multiplier": m.read("pre_quant_scale", k) if factors else None,
            }  # fmt: skip

        return m.record(f"modelopt {self.algorithm.name}", spec, build, _FIELDS)

    def _input_scale(self, info: TensorInfo, inverse: bool) -> Tensor:
        """The static scale, or NVFP4's global one: ModelOpt's is multiplied by, the canonical one is divided by."""
        value = self.m.read("input_scale").reshape(())
        if not inverse:
            return value
        if not _TINY < float(value) < _HUGE:
            raise self.m.error(info, "an input scale that nothing can be divided by", float(value), f"{_TINY} to {_HUGE}")
        return value.double().reciprocal().float()


def _divided(size: int, parts: int, usual: int) -> int:
    """Elements of one of `parts` equal parts; the usual number where that fits, with a short last part perhaps."""
    if parts < 1 or -(-size // usual) == parts:
        return usual
    return size // parts if size % parts == 0 else usual


def unpack_rows(packed: Tensor) -> Tensor:
    """uint8 [N/2, K], row 2i in the low and 2i + 1 in the high halves, two's complement, to uint4b8 rows [N, ceil(K/2)]."""
    pairs, k = packed.shape
    out = torch.empty(pairs, 2, bitstream.row_bytes(k, 4), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, pairs, step):
        rows = packed[r : r + step] ^ 0x88
        out[r : r + step, 0] = bitstream.pack(rows, 4)
        out[r : r + step, 1] = bitstream.pack(rows >> 4, 4)
    return out.view(2 * pairs, -1)


READER = ModelOptReader()

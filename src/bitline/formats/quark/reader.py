"""AMD Quark: integers of 2, 3, 4 and 8 bits, FP8, and FP4 or FP6 under E8M0 (MX), E4M3 (NVFP4) or E5M3 scales.

A module is quantized if it has a `weight_scale`; the config says which of its rules made the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common.ignored_modules import Hints
from bitline.formats.common.module_tensors import E8M0, FLOATS, NUMBER, Layer, e5m3_scales
from bitline.formats.quant_config import find_quantization
from bitline.formats.quark import packing
from bitline.formats.quark.config import Rules
from bitline.types import ActSpec, LinearSpec, ScalarType

_FP8 = {"fp8_e4m3": (types.float8_e4m3fn, torch.float8_e4m3fn), "fp8_e5m2": (types.float8_e5m2, torch.float8_e5m2)}
_SMALL = {"fp4": types.float4_e2m1, "fp6_e2m3": types.float6_e2m3, "fp6_e3m2": types.float6_e3m2}
_ZERO = "weight_zero_point"
_FIELDS = {
    "scale": "weight_scale", "scale2": "weight_scale_2", "zero": _ZERO, "offset": _ZERO, "input_scale": "input_scale",
    "input_zero": "input_zero_point",
}  # fmt: skip

Parts = dict[str, Tensor | None]


class QuarkReader:
    """Layer records of Quark checkpoints."""

    name = "quark"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "quark"."""
        return find_quantization(source)[0].get("quant_method") == "quark"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a weight_scale. No tensor data is read."""
        config, file = find_quantization(source)
        rules = Rules(config, file)
        hints = Hints(rules.left_alone, file)
        for name in source.tensors:
            if name.endswith(".weight_scale"):
                yield _Module(source, name.removesuffix(".weight_scale"), rules, hints).layer()


class _Module(Layer):
    """A module under inspection, with what the config says of it."""

    def __init__(self, source: TensorSource, base: str, rules: Rules, hints: Hints) -> None:
        super().__init__(source, base)
        config, (self.spec, *self.scale_spec), odd = rules.of(base)
        self.rules, self.inputs = rules, rules.specs(config, "input_tensors")
        self.oddities += odd
        hints.note(self)
        for suffix in ("input_rotation", "input_prescale"):
            if (info := self.find(suffix)) is not None:
                raise self.error(info, "the input of a layer is transformed, which is not supported yet", suffix, "none")
        for suffix in ("output_scale", "output_zero_point"):  # of a key-value cache
            self.find(suffix)
        self.dtype, self.how = str(self.spec.get("dtype")), str(self.spec.get("qscheme"))

    def layer(self) -> LayerRecord:
        """The record, by the dtype that the config names; its tensors have to be of that dtype."""
        self.scale = self.need("weight_scale")
        if self.dtype in ("mx", "mx6", "mx9", "bfp16"):
            return self._mx()
        if self.dtype in packing.INTEGERS or self.dtype == "int3":
            return self._integers()
        if self.dtype in _FP8:
            scalar, stored = _FP8[self.dtype]
            n, k = self.matrix("weight", (stored,))
            return self._floats(n, k, scalar)
        if self.dtype in _SMALL and self.how == "per_group":
            scalar = _SMALL[self.dtype]
            n, columns = self.matrix("weight", (torch.uint8,))
            return self._floats(n, self._codes_in(columns, scalar.bits), scalar)
        raise self.error(
            self.main, "Quark weights of this kind are not supported yet", f"{self.dtype} {self.how}",
            "integers of 2, 3, 4 or 8 bits, FP8, fp4 or fp6 per group",
        )  # fmt: skip

    def _mx(self) -> LayerRecord:
        """The "mx" type: blocks of 32 columns under exponents in two's complement, without the bias of E8M0."""
        element, size = str(self.spec.get("mx_element_dtype")), self.spec.get("group_size")
        axis = self.spec.get("ch_axis", -1)
        if self.dtype != "mx" or element not in _SMALL or size != packing.BLOCK or axis not in (1, -1):
            raise self.error(
                self.main, "Quark weights of this kind are not supported yet",
                f"{self.dtype} of {element}, groups of {size} along axis {axis}",
                f"mx of {', '.join(_SMALL)} in blocks of {packing.BLOCK}",
                "quantize the model again with fp4 per group and scale_format e8m0",
            )  # fmt: skip
        scalar = _SMALL[element]
        n, columns = self.matrix("weight", (torch.uint8,))
        k = self._codes_in(columns, scalar.bits)
        grid = (n, -(-k // packing.BLOCK))
        self.need("weight_scale", (torch.uint8, torch.int8), (grid,))
        spec = self._linear(n, k, scalar, (1, packing.BLOCK), scale_dtype=torch.float8_e8m0fnu)

        def build() -> Parts:
            codes, exponent = self.read("weight"), self.read("weight_scale").view(torch.uint8)
            scale = (exponent + 127).view(torch.float8_e8m0fnu)  # modulo 256, as bytes add
            return {"codes": packing.planes(codes) if scalar.bits == 6 else codes, "scale": scale}

        return self._done(f"mx {element}", spec, build)

    # ---- integers --------------------------------------------------------------------------------------------------------

    def _integers(self) -> LayerRecord:
        """Integers of a group are stored as [K, N] under scales [G, N], all others in rows; 3 bits are always in rows."""
        grouped, three = self.how == "per_group", self.dtype == "int3"
        width, signed, stored, per = (3, True, (torch.uint8,), 1) if three else packing.INTEGERS[self.dtype]
        rows, columns = self.matrix("weight", stored)
        across = columns * 8 // 3 if three else columns * per
        if three:
            self._codes_in(columns, 3)
        if grouped:
            groups, n = self.matrix("weight_scale", FLOATS)
            k = across if three else rows
            if (rows if three else columns) != (n if three else -(-n // per)):
                found = f"weight {[rows, columns]}, weight_scale {[groups, n]}"
                raise self.error(self.main, "weight and weight_scale do not fit", found, f"{n} rows in both")
            block: tuple[int, int] = (1, self._group(k, groups))
        else:
            n, k, groups = rows, across, 1
            block = self._block(n, k)
        grid = (-(-n // block[0]), -(-k // block[1]))
        if not grouped:
            self.need("weight_scale", FLOATS, self._shapes(grid, n))
        # Quark writes zero points for symmetric weights too; those of signed types are all 0.
        symmetric = signed and self.spec.get("symmetric") is not False
        zeros = self.find(_ZERO)
        if zeros is None and not symmetric:
            self.need(_ZERO)
        # Zero points that are numbers are not packed, may be outside the codes' range, and were rounded by some releases.
        floating = zeros is not None and (zeros.dtype in FLOATS or self.spec.get("zero_point_type") == "float32")
        if zeros is not None:
            self._zero_shape(1 if floating else per, grid, n, grouped, three and not floating)
        scalar: ScalarType = types.unsigned(width, symmetric=symmetric)
        if width == 8:
            scalar = types.int8 if symmetric else types.uint8
        spec = self._linear(n, k, scalar, block, zero="none" if symmetric else "float" if floating else "int")
        if floating and not symmetric:
            spec = spec.replace(scale_dtype=torch.float32)
        reorder, transposed = self.rules.order == "reorder", grouped and not three

        def build() -> Parts:
            codes = packing.integers(self.read("weight"), self.dtype, n, k, transposed, reorder)
            if codes is None:
                raise self.error(self.main, f"values do not fit {width} bits", "integers out of range", self.dtype)
            if scalar is types.int8:  # its codes are two's complement again
                codes ^= 128
            scale = self.read("weight_scale")
            scale = scale.t().contiguous() if grouped else scale.reshape(grid)
            parts: Parts = {"codes": codes, "scale": scale, "zero": None}
            if zeros is not None and floating:
                self._float_zeros(zeros, parts, grid, symmetric, 1 << (width - 1) if signed else 0)
            elif zeros is not None:
                zero = self._zeros(zeros, grid, per, grouped, reorder)
                half = 1 << (width - 1)
                if symmetric and bool((zero != half).any()):
                    raise self.error(
                        zeros, "the config says symmetric, but there are zero points", "some that are not 0", "zeros"
                    )
                parts["zero"] = None if symmetric else zero
            return parts

        order = f" {self.rules.order}" if width == 4 else ""
        return self._done(f"{self.dtype}{order}", spec, build)

    def _zero_shape(self, per: int, grid: tuple[int, int], n: int, grouped: bool, three: bool) -> None:
        """Zero points are packed like the weight, `per` in an element or (three) 8 in 3 bytes; those of groups along N."""
        if grouped:
            shapes: tuple[tuple[int, ...], ...] = ((n, grid[1] * 3 // 8),) if three else ((grid[1], -(-n // per)),)
        elif grid == (1, 1):
            shapes = NUMBER
        else:
            flat = n * 3 // 8 if three else -(-n // per)
            shapes = ((flat,), (flat, 1))
        packed = None if shapes is NUMBER else torch.uint8 if three else {8: torch.int32, 4: torch.uint8}.get(per)
        self.need(_ZERO, (torch.int32, torch.int8, torch.uint8, *FLOATS) if packed is None else (packed,), shapes)

    def _zeros(self, info: TensorInfo, grid: tuple[int, int], per: int, grouped: bool, reorder: bool) -> Tensor:
        """Whole zero points as unsigned codes, uint8 [grid]."""
        stored = self.read(_ZERO)
        if grid == (1, 1) and not grouped:  # one number is not packed
            width = 3 if self.dtype == "int3" else packing.INTEGERS[self.dtype][0]
            signed = self.dtype.startswith("int")
            value = int(stored) + (1 << (width - 1) if signed else 0)
            zero = torch.tensor([[value]]) if 0 <= value < 1 << width else None
        else:
            if per == 1 and stored.dtype not in (torch.int8, torch.uint8) and self.dtype in ("int8", "uint8"):
                stored = stored.clamp(-256, 511)  # so that what does not fit is seen below and not cut
            across = grid[1] if grouped and self.dtype == "int3" else grid[0]
            lines = stored if grouped else stored.reshape(1, -1)
            zero = packing.fields(lines, self.dtype, across, reorder)
            if zero is not None and not (grouped and self.dtype == "int3"):
                zero = zero.t()
        if zero is None or zero.shape != grid:
            found = f"{int(stored.min())}..{int(stored.max())}"
            raise self.error(info, f"zero points do not fit {self.dtype}", found, "values of that type")
        return zero.to(torch.uint8).contiguous()

    def _float_zeros(self, info: TensorInfo, parts: Parts, grid: tuple[int, int], symmetric: bool, half: int) -> None:
        """Zero points that are numbers: W = scale * (code - zero) becomes a scale and an offset in float32."""
        zero, scale = self.read(_ZERO).float(), parts["scale"]
        assert scale is not None
        zero = (zero.t() if zero.dim() == 2 else zero).reshape(grid)
        if symmetric and bool(zero.any()):
            raise self.error(info, "the config says symmetric, but there are zero points", "some that are not 0", "zeros")
        if not symmetric:
            parts["scale"] = scale.float().contiguous()
            parts["offset"] = -((zero + half) * scale.float())

    # ---- minifloats ------------------------------------------------------------------------------------------------------

    def _floats(self, n: int, k: int, scalar: ScalarType) -> LayerRecord:
        """FP8, FP6 or FP4 rows, already the canonical stream; scales are floats, E8M0, E5M3, or E4M3 under a global one."""
        block = self._block(n, k)
        grid = (-(-n // block[0]), -(-k // block[1]))
        two, said = bool(self.scale_spec), self.spec.get("scale_format")
        if two and self.scale_spec[0].get("dtype") != "fp8_e4m3":
            found = self.scale_spec[0].get("dtype")
            raise self.error(self.scale, "scales of this kind are not supported yet", found, "fp8_e4m3")
        five = not two and said == "e5m3"
        mx = not two and not five and (said == "e8m0" or self.scale.dtype in E8M0)
        dtypes = (torch.float8_e4m3fn,) if two else (torch.uint8,) if five else E8M0 if mx else FLOATS
        self.need("weight_scale", dtypes, self._shapes(grid, n))
        if two:
            self.number("weight_scale_2", (torch.float32,))
        dtype = torch.float8_e8m0fnu if mx else torch.bfloat16 if five else self.scale.dtype
        spec = self._linear(n, k, scalar, block, scale_dtype=dtype, scale2_block=(n, k) if two else None)

        def build() -> Parts:
            scale = self.read("weight_scale")
            scale = scale.view(torch.float8_e8m0fnu) if mx else e5m3_scales(scale) if five else scale
            scale2 = self.read("weight_scale_2", 1, 1).double() if two else None
            return {"codes": self.read("weight").view(torch.uint8), "scale": scale.reshape(grid), "scale2": scale2}

        kind = " e4m3" if two else " e8m0" if mx else " e5m3" if five else ""
        return self._done(self.dtype + kind, spec, build)

    # ---- what they have in common ----------------------------------------------------------------------------------------

    def _codes_in(self, columns: int, width: int) -> int:
        if columns * 8 % width or (width == 3 and columns % 3):
            raise self.error(self.main, "bytes do not hold whole codes", columns, f"a multiple of {3 if width != 4 else 1}")
        return columns * 8 // width

    def _shapes(self, grid: tuple[int, int], n: int) -> tuple[tuple[int, ...], ...]:
        flat: tuple[tuple[int, ...], ...] = NUMBER if grid == (1, 1) else ((n,),) if grid == (n, 1) else ()
        return (grid, *flat)

    def _block(self, n: int, k: int) -> tuple[int, int]:
        if self.how == "per_tensor":
            return n, k
        if self.how == "per_channel" and self.spec.get("ch_axis") == 0:
            return 1, k
        if self.how == "per_group" and self.spec.get("ch_axis") in (1, -1):
            return 1, self._group(k, self.scale.shape[-1] if self.scale.shape else 0)
        sizes = self.spec.get("block_size")
        if self.how == "per_block" and isinstance(sizes, list) and len(sizes) == 2 and all(_size(s) for s in sizes):
            return sizes[0], sizes[1]
        found = f"qscheme {self.how}, ch_axis {self.spec.get('ch_axis')}, block_size {sizes}"
        raise self.error(self.main, "weights quantized this way are not supported yet", found, "per tensor, row, group or block")

    def _group(self, k: int, groups: int) -> int:
        size: Any = self.spec.get("group_size")
        if not _size(size) or -(-k // size) != groups or self.spec.get("ch_axis") not in (1, -1):
            found = f"{groups} groups of {k} columns"
            raise self.error(self.scale, "the tensors and the config disagree about groups", found, f"group_size {size!r}")
        return int(size)

    def _linear(self, n: int, k: int, scalar: ScalarType, block: tuple[int, int], **more: Any) -> LinearSpec:
        more = (
            {"scale_dtype": self.source.tensors[f"{self.base}.weight_scale"].dtype, **more} if "scale_dtype" not in more else more
        )
        return LinearSpec(n, k, scalar, block, act=self._act(), bias=self.bias(n), **more)

    def _act(self) -> ActSpec | None:
        """How inputs are to be quantized; static scales are looked for."""
        if not self.inputs:
            return None
        spec, *scales = self.inputs
        dtype, how, dynamic = str(spec.get("dtype")), str(spec.get("qscheme")), spec.get("is_dynamic") is True
        known: dict[str, ScalarType] = {"fp8_e4m3": types.float8_e4m3fn, "int8": types.int8, "uint8": types.int8, **_SMALL}
        found = f"{dtype} {how}, {'dynamic' if dynamic else 'static'}"
        size, token = spec.get("group_size"), how == "per_channel" and dynamic
        rows = spec.get("ch_axis") in (None, 1, -1) and not any(scale.get("is_dynamic") for scale in scales)
        if how == "per_group" and rows and dynamic and isinstance(size, int) and _size(size) and dtype in ("fp8_e4m3", *_SMALL):
            if dtype == "fp4" and scales and scales[0].get("dtype") == "fp8_e4m3":
                self.number("input_scale_2", (torch.float32,))
                return ActSpec(types.float4_e2m1, True, "group", size, scale="e4m3")
            if not scales and (dtype == "fp8_e4m3" or spec.get("scale_format") == "e8m0"):
                kind: Any = "e8m0" if spec.get("scale_format") == "e8m0" else "float"
                return ActSpec(known[dtype], True, "group", size, scale=kind)
        elif how == "per_token" and dynamic:
            token = True
        symmetric = spec.get("symmetric") is not False and dtype != "uint8"
        integer = dtype in ("int8", "uint8")
        if dtype not in known or dtype in _SMALL or not (how == "per_tensor" or token) or scales or not (symmetric or integer):
            raise self.error(self.main, "inputs quantized this way are not supported yet", found, "FP8, int8, fp4")
        if not dynamic:
            self.number("input_scale")
            if not symmetric:
                self.number("input_zero_point", (torch.int8, torch.uint8, torch.int32))
        for suffix in ("input_scale", "input_zero_point"):
            self.find(suffix)
        return ActSpec(known[dtype], dynamic, "token" if token else "tensor", 0, symmetric)

    def _done(self, label: str, spec: LinearSpec, build: Callable[[], Parts]) -> LayerRecord:
        act = spec.act

        def whole() -> Parts:
            parts = build()
            if act is not None and not act.dynamic:
                parts["input_scale"] = self.read("input_scale").reshape(())
                if not act.symmetric:
                    shift = 128 if str(self.inputs[0].get("dtype")) == "uint8" else 0
                    parts["input_zero"] = self.read("input_zero_point").reshape(()).int() - shift
            elif act is not None and act.scale == "e4m3":  # stored as a factor, and used as a divisor
                value = self.read("input_scale_2").reshape(()).double()
                if not 1e-35 < float(value) < 1e35:
                    info = self.source.tensors[f"{self.base}.input_scale_2"]
                    raise self.error(info, "a global scale of inputs that is no scale", float(value), "1e-35 to 1e35")
                parts["input_scale"] = value.reciprocal().float()
            return parts

        return self.record(f"quark {label}", spec, whole, _FIELDS)


def _size(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


READER = QuarkReader()

"""compressed-tensors: integer, FP8, NVFP4 and MX weights as llm-compressor and AutoRound write them.

The tensors say what a module is; the config says what they mean. Where the two can both be true in an odd way, the
record says so; where they contradict each other, the checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, check_act_order_length, missing_codes
from bitline.formats.common.expert_stacks import unstacked
from bitline.formats.common.ignored_modules import KV_ODDITY
from bitline.formats.common.module_tensors import E8M0, Layer, e5m3_scales
from bitline.formats.common.module_tensors import FLOATS as _SCALES
from bitline.formats.compressed_tensors import auto_round
from bitline.formats.compressed_tensors import config as ct_config
from bitline.formats.compressed_tensors.config import E5M3
from bitline.formats.compressed_tensors.packing import Packed, column_order, narrow_integers, zero_points
from bitline.formats.quant_config import find_quantization, quantization_config
from bitline.types import LinearSpec, ScalarType

_FP8 = {torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2}
# Left over from another scheme or step; they belong to the layer although nothing is read from them.
_SPARE = ("weight_zero_point", "input_scale", "input_zero_point", "input_global_scale", "weight_g_idx")
# Fields of the canonical weight, and the tensors they come from.
_FIELDS = {
    "scale": "weight_scale", "scale2": "weight_global_scale", "zero": "weight_zero_point", "perm": "weight_g_idx",
    "group_index": "weight_g_idx", "input_scale": "input_scale", "input_zero": "input_zero_point",
}  # fmt: skip


Parts = dict[str, Tensor | None]


class CompressedTensorsReader:
    """Layer records of compressed-tensors checkpoints, and of AutoRound's in the same layout."""

    name = "compressed-tensors"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "compressed-tensors", and "auto-round" with a packing_format that is laid out like it."""
        config = quantization_config(source)
        method = config.get("quant_method")
        if method in auto_round.METHODS:
            return auto_round.takes(config)
        return method == "compressed-tensors"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose tensors are quantized. Of tensor data only shapes and activation orders are read."""
        config, file = find_quantization(source)
        schemes: ct_config.Schemes
        if config.get("quant_method") in auto_round.METHODS:
            schemes = auto_round.AutoRoundSchemes(config, file)
        else:
            schemes = ct_config.parse(config, file)
        source = unstacked(source, (torch.int32, torch.uint8, torch.int8, *_FP8))
        for module in _modules(source):
            yield _record(source, schemes, module)


def _modules(source: TensorSource) -> Iterator[str]:
    """Modules with quantized codes, in file order. A plain float `weight` is a dense layer, whatever the config targets."""
    for name, info in source.tensors.items():
        base, dot, suffix = name.rpartition(".")
        if not dot:
            continue
        if suffix == "weight_packed":
            yield base
        elif suffix == "weight" and f"{base}.weight_packed" not in source.tensors:
            if info.dtype == torch.int8 or info.dtype in _FP8:
                yield base
        elif suffix == "weight_scale" and not {f"{base}.weight", f"{base}.weight_packed"} & source.tensors.keys():
            raise missing_codes(info, f"{base}.weight or {base}.weight_packed")


class _Module(Layer):
    """A module under inspection, with what the config says of it."""

    def __init__(self, source: TensorSource, base: str, main: str, scheme: ct_config.Scheme, schemes: ct_config.Schemes) -> None:
        super().__init__(source, base, main)
        self.scheme, self.schemes = scheme, schemes

    def block(self, n: int, k: int) -> tuple[int, int]:
        """The block of one scale, from the config, held against the shape of weight_scale."""
        info, args = self.source.tensors[f"{self.base}.weight_scale"], self.scheme.weights
        shape, how = info.shape, args.how
        if self.scheme.loose:  # the config names no reliable size
            if info.shape in ((), (1,), (1, 1)):
                how = "tensor"
            elif how != "block" and (len(shape) == 1 or shape[-1] == 1):
                how = "channel"
        size = args.group_size or 0
        if self.scheme.loose and how in ("group", "channel") and len(shape) == 2 and shape[1] > 1:
            if size <= 0 or -(-k // size) != shape[1]:
                size = -(-k // shape[1])
                if k % shape[1]:  # groups of other sizes are as many
                    raise self.unfit(info, n, k, f"groups that divide {k} columns")
            how = "group"
        blocks = {"tensor": (n, k), "channel": (1, k), "group": (1, size), "tensor_group": (1, size)}
        block = args.block if how == "block" else blocks.get(how)
        if block is None:
            raise self.error(info, "weights are not quantized this way", f"strategy {how}", "tensor, channel, group or block")
        grid = -(-n // block[0]), -(-k // block[1])
        flat = {(), (1,)} if grid == (1, 1) else ({(n,)} if grid == (n, 1) else set())
        if shape not in {grid, *flat}:
            raise self.error(info, f"scales do not fit a [{n}, {k}] weight", list(shape), f"{list(grid)} (one per {how} {block})")
        return block

    def spec(self, n: int, k: int, weight: ScalarType, block: tuple[int, int], **more: object) -> LinearSpec:
        act = self.scheme.act
        if act is not None and not act.dynamic:
            self.number("input_scale", _SCALES)
            if not act.symmetric:
                self.number("input_zero_point", (torch.int8, torch.int32))
        elif act is not None and act.scale == "e4m3":
            self.number("input_global_scale", (torch.float32,))
        scale_dtype = self.source.tensors[f"{self.base}.weight_scale"].dtype
        base = LinearSpec(n, k, weight, block, scale_dtype=scale_dtype, act=act, bias=self.bias(n))
        return base.replace(**more)

    def parts(self, spec: LinearSpec, codes: Tensor, scale: Tensor | None = None, **more: Tensor | None) -> Parts:
        """The parts of the weight: these, the module's scales and its input's."""
        act = self.scheme.act
        scale = self.read("weight_scale") if scale is None else scale
        if scale.dim() != 2:
            scale = scale.reshape(spec.grid)
        if act is not None and (not act.dynamic or act.scale == "e4m3"):
            more["input_scale"] = self.read("input_scale" if not act.dynamic else "input_global_scale").reshape(())
            if not act.dynamic and not act.symmetric:
                more["input_zero"] = self.read("input_zero_point").reshape(())
        return {"codes": codes, "scale": scale, **more}


_Plan = tuple[str, LinearSpec, Callable[[], Parts]]


def _record(source: TensorSource, schemes: ct_config.Schemes, base: str) -> LayerRecord:
    packed = source.tensors.get(f"{base}.weight_packed")
    main = packed or source.tensors[f"{base}.weight"]
    scheme = schemes.find(base)
    if scheme is None:
        raise CheckpointError(
            "a layer is quantized, but no config group targets it", file=main.file, tensor=main.name,
            found=f"{main.dtype} codes", expected="a group of config_groups that matches its name or class",
        )  # fmt: skip
    module = _Module(source, base, "weight" if packed is None else "weight_packed", scheme, schemes)
    if schemes.ignored(base):
        module.oddities.append("the config's ignore list names this layer, yet its tensors are quantized")
    module.need("weight_scale", (*_SCALES, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu))
    if scheme.quantizes_output:
        module.oddities.append(KV_ODDITY)
    if packed is not None and packed.dtype == torch.uint8:
        label, spec, build = _micro_packed(module) if scheme.weights.floating else _mx_int(module)
    elif packed is not None:
        label, spec, build = _pack_quantized(module)
    elif main.dtype == torch.int8:
        label, spec, build = _int_quantized(module)
    else:
        label, spec, build = _float_quantized(module)
    if (
        scheme.format in ct_config.FORMATS
        and label != scheme.format
        and {label, scheme.format} != {"float-quantized", "naive-quantized"}
    ):
        module.oddities.append(f"the config says {scheme.format}, the tensors are {label}")

    for suffix in _SPARE:
        module.find(suffix)
    fields = _FIELDS
    if scheme.act is not None and scheme.act.dynamic:  # NVFP4: the input's global scale is the static part
        fields = {**_FIELDS, "input_scale": "input_global_scale"}
    return module.record(f"compressed-tensors {label}", spec, build, fields)


def _integers(module: _Module) -> tuple[int, bool]:
    """Bits and symmetry of integer codes, held against the config."""
    args = module.scheme.weights
    if args.floating or not 1 <= args.num_bits <= 8:
        raise module.error(
            module.main, "codes do not fit their config group", f"{args.type} {args.num_bits} bits", "int 1..8 bits"
        )
    return args.num_bits, args.symmetric


def _pack_quantized(m: _Module) -> _Plan:
    rows, columns = m.matrix("weight_packed", (torch.int32,))
    width, symmetric = _integers(m)
    shape = m.need("weight_shape", (torch.int64, torch.int32))
    sizes = m.read("weight_shape").flatten().tolist() if len(shape.shape) == 1 and shape.nbytes <= 64 else []
    sizes = sizes[1:] if len(sizes) == 3 else sizes  # [E, N, K] of stacked experts
    if len(sizes) != 2 or sizes[0] != rows or not 1 <= sizes[1] <= columns * 32:
        raise m.error(shape, "weight_shape does not fit weight_packed", sizes, f"[{rows}, K] for {rows} x {columns} words")
    n, k = rows, int(sizes[1])
    packed = Packed.of(columns, width, k, m.schemes.packed_densely)
    if packed is None:
        dense, padded = Packed.words(width, k, True), Packed.words(width, k, False)
        raise m.error(m.main, f"columns do not fit {k} codes of {width} bits", columns, f"{dense} (dense) or {padded} (padded)")
    m.need("weight_scale", _SCALES)
    block = m.block(n, k)
    zeros = _zero_info(m, n, k, block, width) if not symmetric else None
    perm = groups = None
    if (index := m.find("weight_g_idx")) is not None:
        m.need("weight_g_idx", (torch.int32, torch.int64))
        check_act_order_length(index, k)
        if index.shape != (k,):
            raise m.error(index, "an activation order does not fit its weight", list(index.shape), [k])
        count = -(-k // block[1])
        try:
            perm, groups = column_order(m.read("weight_g_idx"), block[1], count)
        except ValueError as error:
            raise m.error(index, "not an activation order", error, f"group numbers 0..{count - 1}, or all -1") from None
        if (perm is not None or groups is not None) and not m.scheme.weights.by_group_order and not m.scheme.loose:
            m.oddities.append("weight_g_idx holds an activation order that the config does not mention")
    elif m.scheme.weights.by_group_order:
        m.oddities.append("the config says that columns are in activation order, but there is no weight_g_idx")
    spec = m.spec(
        n, k, types.unsigned(width, symmetric=symmetric), block,
        zero="none" if symmetric else "int", act_order=perm is not None, ragged=groups is not None,
    )  # fmt: skip

    def build() -> Parts:
        codes = packed.codes(m.read("weight_packed"), k, perm)
        zero = None if zeros is None else _read_zeros(m, zeros, spec, width)
        return m.parts(spec, codes, zero=zero, perm=perm, group_index=groups)

    return "pack-quantized", spec, build


def _zero_info(m: _Module, n: int, k: int, block: tuple[int, int], width: int) -> TensorInfo:
    """Zero points, packed along N in words or, in older files and for whole tensors, one int8 each."""
    info = m.need("weight_zero_point", (torch.int32, torch.int8))
    grid = -(-n // block[0]), -(-k // block[1])
    if info.dtype == torch.int8:
        allowed = {grid, (n,)} if grid == (n, 1) else ({grid, (1,), ()} if grid == (1, 1) else {grid})
    else:
        allowed = {(Packed.words(width, grid[0], dense), grid[1]) for dense in (True, False)}
    if info.shape not in allowed:
        raise m.error(
            info, "zero points do not fit the scales", f"{info.dtype} {list(info.shape)}", " or ".join(map(str, allowed))
        )
    return info


def _read_zeros(m: _Module, info: TensorInfo, spec: LinearSpec, width: int) -> Tensor:
    zero = zero_points(m.read("weight_zero_point"), spec.grid, width, m.schemes.packed_densely)
    if zero is None:
        raise m.error(
            info, "zero points are out of range", f"not {width}-bit integers", f"{-(1 << width - 1)}..{(1 << width - 1) - 1}"
        )
    return zero


def _int_quantized(m: _Module) -> _Plan:
    """One signed integer per int8; fewer than 8 bits (W4A8, W4AFP8) are packed, since that is all they hold."""
    n, k = m.matrix("weight", (torch.int8,))
    width, symmetric = _integers(m)
    m.need("weight_scale", _SCALES)
    block = m.block(n, k)
    plain = width == 8 and symmetric
    zeros = None if symmetric else _zero_info(m, n, k, block, width)
    weight = types.int8 if plain else types.unsigned(width, symmetric=symmetric)
    spec = m.spec(n, k, weight, block, zero="none" if symmetric else "int")

    def build() -> Parts:
        raw = m.read("weight")
        codes = raw.view(torch.uint8) if plain else narrow_integers(raw, width)
        if codes is None:
            half = 1 << (width - 1)
            raise m.error(
                m.main, f"values do not fit {width} bits", f"{int(raw.min())}..{int(raw.max())}", f"{-half}..{half - 1}"
            )
        zero = None if zeros is None else _read_zeros(m, zeros, spec, width)
        return m.parts(spec, codes, zero=zero)

    return "int-quantized", spec, build


def _floats(m: _Module, width: int) -> None:
    """Hold minifloat codes of `width` bits against the config."""
    args = m.scheme.weights
    if not args.floating or args.num_bits != width:
        raise m.error(m.main, "codes do not fit their config group", f"{args.type} {args.num_bits} bits", f"float {width} bits")
    if not args.symmetric and (zeros := m.find("weight_zero_point")) is not None:
        raise m.error(zeros, "minifloats with zero points are not supported yet", "symmetric: false", "symmetric: true")


def _float_quantized(m: _Module) -> _Plan:
    n, k = m.matrix("weight", tuple(_FP8))
    _floats(m, 8)
    scale, weight = m.source.tensors[f"{m.base}.weight_scale"], _FP8[m.main.dtype]
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        spec = m.spec(n, k, weight, m.block(n, k), scale_dtype=torch.float8_e8m0fnu)
        return "mxfp8-quantized", spec, lambda: m.parts(spec, m.read("weight").view(torch.uint8), _e8m0(m))
    m.need("weight_scale", _SCALES)
    spec = m.spec(n, k, weight, m.block(n, k))
    label = m.scheme.format if m.scheme.format == "naive-quantized" else "float-quantized"
    return label, spec, lambda: m.parts(spec, m.read("weight").view(torch.uint8))


def _e8m0(m: _Module) -> Tensor:
    return m.read("weight_scale").view(torch.float8_e8m0fnu)


def _micro_packed(m: _Module) -> _Plan:
    """NVFP4, MXFP4 and MXFP6: a little-endian bit stream along K, which is the canonical layout as it stands."""
    n, columns = m.matrix("weight_packed", (torch.uint8,))
    width = 6 if m.scheme.weights.num_bits == 6 else 4
    _floats(m, width)
    k = columns * 8 // width
    if m.find("weight_global_scale") is None and (m.scheme.format == E5M3 or m.scheme.weights.group_size == 16):
        m.need("weight_scale", (torch.uint8,))
        spec = m.spec(n, k, types.float4_e2m1, m.block(n, k), scale_dtype=torch.bfloat16)
        return E5M3, spec, lambda: m.parts(spec, m.read("weight_packed"), e5m3_scales(m.read("weight_scale")))
    if m.find("weight_global_scale") is None:
        m.need("weight_scale", (torch.uint8, torch.float8_e8m0fnu))
        weight = types.float4_e2m1 if width == 4 else types.float6_e2m3
        spec = m.spec(n, k, weight, m.block(n, k), scale_dtype=torch.float8_e8m0fnu)
        return f"mxfp{width}-pack-quantized", spec, lambda: m.parts(spec, m.read("weight_packed"), _e8m0(m))
    m.need("weight_scale", (torch.float8_e4m3fn,))
    m.number("weight_global_scale", (torch.float32,))
    spec = m.spec(n, k, types.float4_e2m1, m.block(n, k), scale2_block=(n, k))

    def build() -> Parts:
        divisor = m.read("weight_global_scale").reshape(1, 1).double()
        if not 1e-35 < float(divisor) < float("inf"):  # with less the scales are no float32
            info = m.source.tensors[f"{m.base}.weight_global_scale"]
            raise m.error(info, "a global scale that nothing can be divided by", float(divisor), "a number above 1e-35")
        return m.parts(spec, m.read("weight_packed"), scale2=divisor.reciprocal())

    return "nvfp4-pack-quantized", spec, build


def _mx_int(m: _Module) -> _Plan:
    """AutoRound's MXINT4: a sign and three binary digits, -1.75 to 1.75, two to a byte, the lower first, under E8M0 scales.

    As integers they are up to 7 quarters: the scales are a quarter of the stored ones, which bfloat16 holds.
    """
    if not (m.scheme.loose and m.scheme.weights.scale_dtype == "torch.uint8"):
        raise m.error(m.main, "minifloats that the config calls integers", m.scheme.weights.type, "float, or AutoRound's mx_int")
    n, columns = m.matrix("weight_packed", (torch.uint8,))
    if m.scheme.weights.num_bits != 4:
        raise m.error(m.main, "codes do not fit their config", f"mx_int {m.scheme.weights.num_bits} bits", "4 bits")
    m.need("weight_scale", E8M0)
    spec = m.spec(n, 2 * columns, types.uint4b8, m.block(n, 2 * columns), scale_dtype=torch.bfloat16)

    def build() -> Parts:
        stored = m.read("weight_packed")
        negative = (stored & 0x88) >> 3  # 1 in each half whose value has a minus sign
        value = stored & 0x77
        codes = torch.where(negative & 1 == 1, 8 - (value & 7), 8 + (value & 7))
        codes |= torch.where(negative & 16 == 16, 8 - (value >> 4), 8 + (value >> 4)) << 4
        exponent = m.read("weight_scale").view(torch.uint8).int()
        scale = torch.ldexp(torch.ones(exponent.shape), exponent - 129).masked_fill(exponent == 255, torch.nan).bfloat16()
        return m.parts(spec, codes, scale)

    return "mxint4", spec, build


READER = CompressedTensorsReader()

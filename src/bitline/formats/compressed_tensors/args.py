"""QuantizationArgs: how compressed-tensors describes the quantization of weights or activations."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bitline import types
from bitline.types import ActSpec, ScalarType

E5M3 = "nvfp4-e5m3-pack-quantized"  # AutoRound's own format: unsigned E5M3 scales without a global scale
_ACT_ORDERS = ("group", "weight", "static", "dynamic")


class QuantizationArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """compressed-tensors' QuantizationArgs, whose schema allows no other keys. A null strategy follows from group_size.

    The last three say how the scales were calibrated and change nothing here. symmetric is true where it is absent, and zero
    points must then agree.
    """

    num_bits: int = 8
    type: str = "int"
    symmetric: bool | msgspec.UnsetType = msgspec.UNSET
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | Literal["local"] = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: Any = None

    def __post_init__(self) -> None:
        if self.type.lower() not in ("int", "float"):
            raise ValueError(f"type is {self.type!r}, expected 'int' or 'float'")
        if isinstance(self.actorder, str) and self.actorder.lower() not in _ACT_ORDERS:
            raise ValueError(f"actorder is {self.actorder!r}, expected one of {', '.join(_ACT_ORDERS)}")
        if not 1 <= self.num_bits <= 16:
            raise ValueError(f"num_bits is {self.num_bits}, expected 1..16")
        if self.group_size is not None and self.group_size < -1:
            raise ValueError(f"group_size is {self.group_size}, expected -1 or more")
        if self.effective_strategy in ("group", "tensor_group") and (self.group_size or 0) < 1:
            raise ValueError(f"strategy {self.effective_strategy!r} needs a group_size, found {self.group_size}")
        if self.effective_strategy == "block":
            _ = self.block

    @property
    def is_symmetric(self) -> bool:
        """False where the config says so."""
        return self.symmetric is not False

    @property
    def effective_strategy(self) -> str:
        """ "tensor", "channel", "group", "block", "token", "tensor_group" or "attn_head"."""
        if self.strategy is not None:
            return self.strategy.lower()
        if not self.group_size:
            return "tensor"
        return "channel" if self.group_size == -1 else "group"

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a scale block. Older files write "128x128" for [128, 128]."""
        sizes = self.block_structure
        try:
            rows, columns = (int(s) for s in (sizes.lower().split("x") if isinstance(sizes, str) else sizes or ()))
        except ValueError:
            rows = columns = 0
        if rows < 1 or columns < 1:
            raise ValueError(f"block_structure is {sizes!r}, expected two positive sizes")
        return rows, columns

    @property
    def row_block(self) -> tuple[int, int] | None:
        """The scale block of groups of one row, None where the config names none."""
        return (1, self.group_size) if self.group_size is not None and self.group_size > 0 else None

    def scale_block(self, n: int, k: int) -> tuple[int, int] | None:
        """The scale block of an [n, k] weight; None for a strategy that weights do not have."""
        blocks = {"tensor": (n, k), "channel": (1, k), "group": self.row_block, "tensor_group": self.row_block}
        return self.block if self.effective_strategy == "block" else blocks.get(self.effective_strategy)

    @property
    def has_nvfp4_groups(self) -> bool:
        """True for groups of 16 columns, as NVFP4 has; those of MX have 32."""
        return self.group_size == 16

    @property
    def is_float(self) -> bool:
        """True for minifloat codes."""
        return self.type.lower() == "float"

    @property
    def has_group_act_order(self) -> bool:
        """True where the config says that columns were grouped in activation order and a g_idx was kept."""
        return self.actorder is True or str(self.actorder).lower() in ("group", "dynamic")


def act_spec(args: QuantizationArgs) -> ActSpec | None:
    """input_activations as an ActSpec, None for 16 bits; ValueError where an ActSpec cannot express them."""
    if args.num_bits >= 16:
        return None
    known: dict[tuple[bool, int], ScalarType] = {
        (False, 8): types.int8, (False, 4): types.int4, (True, 8): types.float8_e4m3fn, (True, 4): types.float4_e2m1,
    }  # fmt: skip
    strategy = args.effective_strategy
    dtype = known.get((args.is_float, args.num_bits))
    granularity: Any = {"token": "token", "tensor": "tensor", "group": "group", "tensor_group": "group"}.get(strategy)
    if dtype is None or granularity is None or (not args.dynamic and granularity != "tensor"):
        when = "dynamic" if args.dynamic else "static"
        raise ValueError(f"input_activations are {args.type} {args.num_bits} bits {when} per {strategy}, which is not supported")
    scale: Literal["float", "e8m0", "e4m3", "e5m3"] = "float"
    if granularity == "group" and (args.is_float or args.scale_dtype == "torch.uint8"):
        if strategy == "tensor_group":
            scale = "e5m3" if args.scale_dtype == E5M3 else "e4m3"
        elif args.scale_dtype == "torch.uint8" or args.num_bits == 4:
            scale = "e8m0"
    size = args.group_size or 0 if granularity == "group" else 0
    return ActSpec(dtype, bool(args.dynamic), granularity, size, args.is_symmetric, scale)

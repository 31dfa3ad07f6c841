"""GluonHopperLinearKernel: weight-only linear on an H100 or H200, one packed layout for every number of rows."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.hopper import layout
from bitline.kernels.hopper.eager import Bound
from bitline.kernels.hopper.launch import prepare, run
from bitline.kernels.hopper.scheme import Scheme, scheme_of
from bitline.kernels.providers.common import installed
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight


class GluonHopperLinearKernel(Kernel):
    """4- and 8-bit integers, E2M1 and E4M3 with 16-bit inputs; up to 16 rows at the memory's pace, then by wgmma.

    Up to 16 rows, scales of 64 and more columns multiply float32 sums; finer ones, and all above 16 rows, multiply the
    weight in the input's dtype, as torch's dequantized weight is rounded.
    """

    platforms = ("cuda",)
    backend = "gluon"
    priority = 20
    measured = ("sm90",)
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Hopper itself (sm90), and the version of Triton whose Gluon the device code is written in."""
        if platform.vendor != "cuda" or platform.capability != 90:
            return no(
                f"the device code is for sm90's wgmma and TMA; this is {platform.arch or platform.vendor}", "an H100 or H200"
            )
        if platform.interpreted:
            return no("Triton's interpreter cannot run Gluon")
        there = installed(platform, "triton")
        return _version() if there else there

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only; groups of any multiple of 16 columns, cut or not, or a scale a row, block or tensor."""
        found = scheme_of(spec)
        return found if isinstance(found, Verdict) else YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """words (`layout`); scale and zero [tiles, groups, 8, 2]; alpha [1], or [3] (`_folded`); perm int32 [K]. None: empty."""
        spec, scheme = weight.spec, _scheme(weight.spec)
        if weight.device.type == "cuda":
            prepare()
        words = layout.pack_words(weight.codes, scheme.width, spec.k, scheme.flip)
        if scheme.format.startswith("e4m3") and scheme.half:
            words = layout.byte_pairs(words)
        elif scheme.format.startswith("e"):
            words = layout.spread(words, scheme.width, scheme.half)
        row = (torch.arange(spec.n, device=weight.device) + spec.block_offset[0]) // spec.block[0]
        absent = torch.empty(0, device=weight.device)
        whole = spec.scale2_block == (spec.n, spec.k)  # one factor for all of the weight, which is applied to the sums
        scale = weight.scale if whole or weight.scale2 is None else weight.scales()
        alpha = weight.scale2.reshape(1).double() if whole and weight.scale2 is not None else torch.ones(1, device=weight.device)
        if scheme.bias:
            scale, alpha = _biased(scale, alpha, scheme.bias)
        scale = scale.to(torch.float32 if scheme.wide else spec.act_dtype)
        if scheme.format.startswith("e4m3"):
            scale, row = _poisoned(scale, row, weight)
        stepped = functools.partial(_stepped, spec=spec, scheme=scheme)
        return {
            "words": words,
            "scale": layout.pair_table(stepped(scale), row),
            "zero": absent if weight.zero is None else layout.pair_table(stepped(weight.zero), row),
            "alpha": _folded(scale, alpha, scheme.unit) if scheme.unit else alpha.float() if scheme.alpha else absent,
            "perm": absent.int() if weight.perm is None else weight.perm,
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        return run(x, packed, bias, spec)

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Bound | None:
        """See Kernel.eager."""
        bound = Bound(packed, bias, spec) if packed[0].is_cuda else None
        return bound if bound and bound.new else None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline with the shares that were measured on an H200."""
        rates = platform.rates
        size = cls.packed_bytes(spec) + m * (spec.n + spec.k) * 2
        flops = 2.0 * m * spec.n * spec.k
        share = 0.9 if m <= 16 else 0.65 if m <= 128 else 0.9 if m <= 512 else 1.0
        return max(size / (0.9 * rates.bandwidth), flops / (share * rates.bf16)) + rates.launch

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors."""
        scheme = scheme_of(spec)
        if isinstance(scheme, Verdict):
            return spec.weight_bytes()
        tiles, columns = layout.padded(spec.n, spec.k)
        rows = tiles * layout.ROWS
        entry = (4 if scheme.wide else 2) + (1 if spec.zero == "int" else 0)
        alpha = 12 if scheme.unit else 4 if scheme.alpha else 0
        return rows * columns * scheme.width // 8 + rows * scheme.groups * entry + alpha + (4 * spec.k if spec.act_order else 0)


def _scheme(spec: LinearSpec) -> Scheme:
    found = scheme_of(spec)
    if isinstance(found, Verdict):
        raise ValueError(f"{spec}: {found.reason}")
    return found


VERSIONS = ("3.6", "3.7")  # of Triton: Gluon is experimental, and the device code is for those that it has run with


@functools.cache
def _version() -> Verdict:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return YES  # asked about a platform that is not this machine
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        reason = f"the device code has run with Triton {' and '.join(VERSIONS)} alone; this is Triton {version}"
        return no(reason, f"pip install triton=={VERSIONS[-1]}.*")
    return YES


def _stepped(table: Tensor, spec: LinearSpec, scheme: Scheme) -> Tensor:
    """[rows, groups] with an entry for each step of the scheme, where groups are several or cut, and zeros for padding."""
    step, (bk, cut) = scheme.step, (spec.block[1], spec.block_offset[1])
    if step and (cut or step != bk):
        at = (torch.arange(0, spec.k, step, device=table.device) + cut) // bk
        raw = table.view(torch.uint8) if table.dtype.itemsize == 1 else table
        table = raw.index_select(1, at).view(table.dtype)
    return torch.nn.functional.pad(table, (0, scheme.groups - table.shape[1]))


def _biased(scale: Tensor, alpha: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Scales times 2**bias and over the power of two below the largest, which alpha takes: no product leaves the range."""
    wide = scale.to(torch.float32).double()  # E8M0 has no other way
    finite = wide[wide.isfinite()].abs()
    top = float(finite.max()) if finite.numel() else 0.0
    exponent = math.frexp(top)[1] - 1 if top else 0
    return (wide * 2.0 ** (bias - exponent)).float(), alpha.double() * 2.0**exponent


def _folded(scale: Tensor, alpha: Tensor, unit: int) -> Tensor:
    """alpha, the largest 2**F with which every scale is below 2**127, at most 2**127, and alpha * 2**(unit - F)."""
    finite = scale[scale.isfinite()].abs()
    top = float(finite.max()) if finite.numel() else 0.0
    exponent = math.frexp(top)[1]
    if exponent > 121:
        what = f"a scale of {top:.3g}: GluonHopperLinearKernel takes scales below 2**121"
        raise InputError(f"{what}. Look at the checkpoint, or ask for another kernel, such as kernel='TritonW4A16LinearKernel'.")
    power = 127 - max(0, exponent)
    return torch.cat((alpha.double(), alpha.new_tensor([2.0**power]).double(), alpha.double() * 2.0 ** (unit - power))).float()


def _poisoned(scale: Tensor, row: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """E4M3's code for NaN is decoded as 480 here: a row that has one gets a scale of NaN, so that its outputs are NaN."""
    codes: Any = weight.codes[:, : weight.spec.k]
    bad = torch.cat([((part & 0x7F) == 0x7F).any(1) for part in codes.split(4096)])
    if not bool(bad.any()):
        return scale, row
    scale = scale.index_select(0, row).clone()
    scale[bad] = float("nan")
    return scale, torch.arange(weight.spec.n, device=row.device)

"""QuantEmbedding: rows of a quantized table, dequantized on lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline.errors import InputError, WeightError
from bitline.kernels.reference import ReferenceLinearKernel, rebuild
from bitline.packed_module import PackedModule
from bitline.types import DTYPES, LinearSpec, dtype_name
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define("embedding(Tensor ids, Tensor[] packed, str spec, str dtype) -> Tensor")


def _embedding(ids: Tensor, packed: list[Tensor], spec: str, dtype: str) -> Tensor:
    weight = rebuild(packed, LinearSpec.parse(spec))
    if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= weight.spec.n):
        # CPU only: on a GPU the check would synchronize; the kernel asserts on an index out of range, as torch's embedding does.
        raise InputError("token ids out of range", found=f"{int(ids.min())}..{int(ids.max())}",
                         expected=f"0..{weight.spec.n - 1}")  # fmt: skip
    rows = weight.dequantize_rows(ids.reshape(-1).long(), DTYPES[dtype])
    return rows.view(*ids.shape, weight.spec.k)


def _embedding_fake(ids: Tensor, packed: list[Tensor], spec: str, dtype: str) -> Tensor:
    return ids.new_empty(*ids.shape, LinearSpec.parse(spec).k, dtype=DTYPES[dtype])


_LIBRARY.impl("embedding", _embedding, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::embedding", _embedding_fake, lib=_LIBRARY)
OP = torch.ops.bitline.embedding.default


class QuantEmbedding(PackedModule):
    """y[..., :] = W[ids] with a quantized W [N, K].

    ids: int64 or int32 of any shape; on a CPU an id out of range is an InputError. y: `dtype`. Keeps the canonical weight,
    without its bias; a weight with an input multiplier is a WeightError.
    """

    source: tuple[str, str] = ("", "")  # the layer's name and format in the checkpoint it came from

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        if weight.input_multiplier is not None:
            raise WeightError("an embedding has no input to scale", field="input_multiplier", tensor=weight.origin)
        weight = weight.with_bias(None).to(device)
        self.spec, self.dtype = weight.spec, dtype
        self.num_embeddings, self.embedding_dim = weight.shape
        packed = ReferenceLinearKernel.pack(weight)
        self._names = tuple(packed)
        for name, tensor in packed.items():
            self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., K]."""
        return OP(ids, [self.get_buffer(name) for name in self._names], self.spec.key, dtype_name(self.dtype))

    def packed_identity(self) -> str:
        """See PackedModule."""
        return f"ReferenceLinearKernel {self.spec.key} as a table, bitline {__version__}"

    def packed_bytes(self) -> int:
        """Bytes of the quantized table."""
        return sum(self.get_buffer(name).nbytes for name in self._names)

    def extra_repr(self) -> str:
        """N, K, scheme."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.spec.scheme}"

"""A checkpoint's layers under the names of SGLang's modules, and which of its tensors SGLang must not load."""

from __future__ import annotations

from bitline.engines.model_weights import ModelWeights


class CheckpointWeights(ModelWeights):
    """A checkpoint whose layers are found by the names of SGLang's modules.

    used: those that a module has taken. filtered: SGLang has loaded its tensors, without those that Bitline reads.
    """

    filtered = False

    def has_dense(self, name: str) -> bool:
        """Whether the files have an unquantized matrix for a module of this name."""
        return f"{name}.weight" in self._dense

    def own_tensors(self) -> set[str]:
        """Names, in the files, of the tensors that Bitline reads: of quantized layers, and of layers fused with them."""
        quantized = {tensor for record in self.records.values() for tensor in record.tensors}
        return quantized | {self._dense[f"{name}.weight"] for name in self.used if self.has_dense(name)}

"""BitlineConfig: how a model runs on Bitline, as transformers' `quantization_config`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitline.errors import InputError
from bitline.model.meta_model import floating_dtype
from bitline.select import Policy
from bitline.types import DTYPES, dtype_name

METHOD = "bitline"


class BitlineConfig(QuantizationConfigMixin):
    """`AutoModelForCausalLM.from_pretrained(path, quantization_config=BitlineConfig())` runs a quantized checkpoint on Bitline.

    It says how to run, not what the files hold: formats are read from the files, as by `bitline.load_model`. It needs
    `bitline.hf.install()` where the checkpoint has a quantization config of its own, or is a GGUF file.

    Args:
        policy: How kernels are chosen: any form that `Policy.of` accepts, or the fields of a Policy as a dict.
        dtype: Of activations and unquantized weights, a torch.dtype or its name; by default from_pretrained's `dtype`.
        merge: Pack layers with one input as one, see `bitline.load_model`; by default on GPUs.
        native_step: The native decode step on a CPU in bfloat16, see `bitline.load_model`; by default where that uses it.
        verify: Compare every layer with the reference after loading; by default where `$BITLINE_VERIFY` is set.

    Raises:
        InputError: For an unknown argument, or a dtype that is no floating-point one.
        NoKernelError: For an unknown policy.
    """

    def __init__(
        self,
        policy: Policy | str | dict[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        merge: bool | None = None,
        native_step: bool | None = None,
        verify: bool | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if unknown or quant_method != METHOD:
            found = ", ".join(sorted(unknown)) or f"quant_method {quant_method!r}"
            raise InputError("BitlineConfig has no such argument", found=found,
                             expected="policy, dtype, merge, native_step, verify")  # fmt: skip
        self.quant_method = METHOD
        self.policy = _policy(policy)
        self.dtype = None if dtype is None else floating_dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        self.merge, self.native_step, self.verify = merge, native_step, verify

    def to_dict(self) -> dict[str, Any]:
        """The arguments, fit for JSON."""
        policy: Any = self.policy
        if isinstance(policy, Policy):
            values = {field.name: getattr(policy, field.name) for field in fields(policy)}
            policy = {
                k: sorted(v) if isinstance(v, frozenset) else list(v) if isinstance(v, tuple) else v for k, v in values.items()
            }
            policy["experts"] = [spec.key for spec in values["experts"]]
        return {
            "quant_method": METHOD, "policy": policy, "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "merge": self.merge, "native_step": self.native_step, "verify": self.verify,
        }  # fmt: skip

    def get_loading_attributes(self) -> dict[str, Any]:
        """All of it says how to load."""
        return self.to_dict()


def _policy(policy: Policy | str | dict[str, Any] | None) -> Policy | str | None:
    """A checked policy; None and text stay, since they stand for what the environment says when the model is loaded."""
    if isinstance(policy, dict):
        known = {field.name for field in fields(Policy)}
        if unknown := set(policy) - known:
            raise InputError("a policy has no such field", found=sorted(unknown), expected=sorted(known))
        return Policy(**policy)
    Policy.of(policy)
    return policy

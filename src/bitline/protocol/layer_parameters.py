"""Finding a layer's parameters by their role in a kernel family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitline.errors import InputError
from bitline.protocol.config import Config, family_of

# family -> role -> the names that vLLM's layers give a parameter of this role. Kernel constructors take other names by keyword.
PARAMETER_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mp": {
        "w_q": ("qweight", "weight_packed", "weight"), "w_s": ("scales", "weight_scale"),
        "w_zp": ("qzeros", "weight_zero_point"), "w_gidx": ("g_idx", "weight_g_idx"),
    },
    "int8": {
        "w_q": ("weight",), "w_s": ("weight_scale",), "i_s": ("input_scale",), "i_zp": ("input_zero_point",),
        "azp_adj": (),  # vLLM's kernels keep these column sums in the layer, ours in the packed tensors
    },
    "fp8": {
        "w_q": ("weight",), "w_s": ("weight_scale", "weight_scale_inv"), "i_s": ("input_scale",), "i_s_ub": ("input_scale_ub",),
    },
    "nvfp4": {
        "w_q": ("weight", "weight_packed"), "w_s": ("weight_scale",), "w_s2": ("weight_global_scale", "weight_scale_2"),
        "i_s": ("input_global_scale_inv",),
    },
    "mxfp4": {"w_q": ("weight", "weight_packed"), "w_s": ("weight_scale",)},
    "mxfp6": {"w_q": ("weight", "weight_packed"), "w_s": ("weight_scale",)},
    "mxfp8": {"w_q": ("weight",), "w_s": ("weight_scale",)},
}  # fmt: skip
PARAMETER_NAMES["fp8_block"] = PARAMETER_NAMES["fp8"]


class LayerParameters:
    """The parameters of one layer by role. names: role -> name, for names that are not in PARAMETER_NAMES."""

    def __init__(self, layer: Any, config: Config, names: Mapping[str, str]) -> None:
        self.layer, self.config, self.names = layer, config, names
        self.family = family_of(config)
        check_roles(names, self.family)

    def name(self, role: str) -> str | None:
        """The attribute name of the parameter of this role, None where the layer has none."""
        candidates = (self.names[role],) if role in self.names else PARAMETER_NAMES[self.family].get(role, ())
        return next((n for n in candidates if getattr(self.layer, n, None) is not None), None)

    def find(self, role: str) -> Any:
        """The parameter of this role, or None."""
        name = self.name(role)
        return None if name is None else getattr(self.layer, name)

    def need(self, role: str) -> Any:
        """The parameter of this role. An InputError where the layer has none."""
        found = self.find(role)
        if found is None:
            expected = self.names.get(role) or " or ".join(PARAMETER_NAMES[self.family][role])
            raise InputError("the layer lacks a parameter", tensor=expected, found=f"a {type(self.layer).__name__}",
                             expected=expected)  # fmt: skip
        return found

    def all(self) -> list[str]:
        """Attribute names of all parameters that the layer has."""
        return [name for role in PARAMETER_NAMES[self.family] if (name := self.name(role)) is not None]


def check_roles(roles: Mapping[str, Any], family: str) -> None:
    """Raise an InputError for a role that the family does not have."""
    known = PARAMETER_NAMES[family]
    if unknown := sorted(set(roles) - set(known)):
        raise InputError("unknown parameter role", found=", ".join(unknown), expected=", ".join(known))

"""What Bitline registers in SGLang. Parts of SGLang that have no promise of stability are named here, and tests hold them."""

from __future__ import annotations

from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.layers import linear, quantization
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bitline.sglang import hooks
from bitline.sglang.config import BitlineConfig
from bitline.sglang.methods import BitlineLinearMethod

_LOADER = "sglang.srt.model_loader.loader"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
HOOKS = {
    f"{_LOADER}._get_quantization_config": (hooks.open_checkpoint, HookType.AROUND),
    f"{_LOADER}.DefaultModelLoader.load_weights_only": (hooks.load_unquantized, HookType.AROUND),
    f"{_UPDATER}.update_weights_from_disk": (hooks.refuse_update, HookType.AROUND),
    f"{_UPDATER}.load_weights_from_distributed": (hooks.refuse_update, HookType.AROUND),
    f"{_UPDATER}.update_weights_from_tensor": (hooks.refuse_update, HookType.AROUND),
    f"{_UPDATER}.update_weights_from_ipc": (hooks.refuse_update, HookType.AROUND),
}
TABLES = ("BASE_QUANTIZATION_METHODS", "QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS")


def register() -> None:
    """Register everything once per process. SGLang applies the hooks when it has called all plug-ins."""
    for table in TABLES:
        methods = getattr(quantization, table, None)
        if methods is not None and next(iter(methods), None) != "bitline":
            _put_first(methods)
    for names, name in ((QUANTIZATION_CHOICES, "bitline"), (linear.WEIGHT_LOADER_V2_SUPPORTED, BitlineLinearMethod.__name__)):
        if name not in names:
            names.append(name)
    for target, (hook, kind) in HOOKS.items():
        if all(known is not hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, kind)


def _put_first(methods: dict[str, type]) -> None:
    """SGLang takes the first method that wants a checkpoint; ModelOpt's want theirs whatever the user asks for."""
    others = {name: method for name, method in methods.items() if name != "bitline"}
    methods.clear()
    methods.update({"bitline": BitlineConfig, **others})

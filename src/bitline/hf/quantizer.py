"""BitlineQuantizer: from_pretrained's hooks. transformers builds and places a model, Bitline's loader fills it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging

from bitline import env
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import BitlineError, CheckpointError, InputError
from bitline.formats.base import LayerRecord
from bitline.hf.config import BitlineConfig
from bitline.hf.vacated import VacatedModel
from bitline.model.load import fill_model, install_native_step
from bitline.model.meta_model import check_config_sizes, floating_dtype, keep_in_float32, set_expert_widths
from bitline.model.verify import verify as verify_loaded
from bitline.model.weight_loader import WeightLoader


class BitlineQuantizer(HfQuantizer):
    """Loads a model by `bitline.model`'s loader while transformers decides what it always decides: class, dtype, devices.

    Before transformers loads weights, the meta model's tensors are put aside (`VacatedModel`), so it places empty modules on
    their devices. After that the loader of `load_model` fills the model from the checkpoint's files.
    """

    requires_calibration = False

    def __init__(self, quantization_config: BitlineConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.pre_quantized = True  # transformers says False where it does not know the checkpoint's own method
        self.dtype: torch.dtype = torch.float32
        self._checkpoint: Checkpoint | None = None
        self._config: Any = None
        self._own_config: Any = None
        self._vacated: VacatedModel | None = None
        self._loader: WeightLoader | None = None

    # ---- what from_pretrained was asked for ------------------------------------------------------------------------------

    def keep_own_config(self, config: Any) -> None:
        """Note the checkpoint's own quantization config: the loaded model's config has it again."""
        self._own_config = copy.deepcopy(getattr(config, "quantization_config", None))

    def validate_environment(self, *_args: Any, device_map: Any = None, **_options: Any) -> None:
        """Refuse offloading: to disk, and to the CPU beside a GPU."""
        if not isinstance(device_map, dict):
            return
        places = {str(place) for place in device_map.values()}
        if "disk" in places:
            modules = [name for name, place in device_map.items() if str(place) == "disk"]
            raise InputError(
                "packed layers cannot be offloaded to disk", found=f"{len(modules)} modules on disk: {', '.join(modules[:3])}",
                expected="every module on a device", fix="more max_memory, more devices, or fewer bits",
            )  # fmt: skip
        if "cpu" in places and len(places) > 1 and any(not place.startswith("cpu") for place in places):
            raise InputError(
                "packed layers cannot be offloaded to the CPU: each kernel has its own layout", found=sorted(places),
                expected="the CPU alone, or GPUs alone", fix="more max_memory for the GPUs, or device_map='cpu'",
            )  # fmt: skip

    def update_device_map(self, device_map: Any) -> Any:
        """A map to the CPU alone with one name for it: accelerate takes two names for two devices."""
        if isinstance(device_map, dict) and all(str(place).partition(":")[0] == "cpu" for place in device_map.values()):
            return dict.fromkeys(device_map, "cpu")
        return device_map

    def update_attn_implementation(self, config: Any) -> Any:
        """Keep the config, which a GGUF header may correct; refuse transformers' tensor parallelism."""
        if getattr(config, "distributed_config", None) is not None:
            raise InputError(
                "Bitline's layers do not run under transformers' tensor parallelism", found="tp_plan or distributed_config",
                expected="neither", fix="device_map='auto' spreads the layers over the GPUs",
            )  # fmt: skip
        self._config = config
        return config

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of the BitlineConfig, else from_pretrained's; torch's default where that is None (a GGUF file)."""
        asked = self.quantization_config.dtype or dtype
        self.dtype = torch.get_default_dtype() if asked is None else floating_dtype(asked)
        return self.dtype

    def read_header(self, gguf_file: str) -> None:
        """Open a GGUF file, before the model is built from its config."""
        self._checkpoint = open_checkpoint(gguf_file)
        if self._config is not None:
            set_expert_widths(self._config, self._checkpoint)

    def get_state_dict(self, _gguf_file: str, _model: Any) -> dict[str, Any]:
        """Nothing of a GGUF file for transformers to load."""
        return {}

    # ---- loading ---------------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, checkpoint_files: Any = None, **_options: Any
    ) -> Any:  # fmt: skip
        """Open the checkpoint, and put the model's tensors aside. Runs where new tensors are on the meta device."""
        with torch.device("cpu"):
            checkpoint = self._checkpoint or _open(checkpoint_files)
            check_config_sizes(checkpoint)
            keep_in_float32(model, self.dtype)
            records = checkpoint.layers()
            asked, device_of = self.quantization_config, self._device_of
            self._loader = WeightLoader(
                model,
                checkpoint,
                device_of,
                self.dtype,
                asked.policy,
                _progress_bar(),
                asked.merge,
                _has_other_head(model, checkpoint),
            )
            self._vacated = VacatedModel(model, _packed_bytes(self._loader, records))
        if isinstance(device_map, dict):
            _check_complete(device_map, self._vacated.tensor_names())
        return model

    def _device_of(self, name: str) -> torch.device:
        assert self._vacated is not None
        return self._vacated.device_of(name)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of the module that a placeholder stands for, so that `device_map="auto"` counts packed sizes."""
        return float(getattr(param, "bitline_bytes", param.element_size()))

    def _process_model_after_weight_loading(self, model: Any, **_options: Any) -> Any:
        """Fill the model from the checkpoint, as `load_model` does."""
        assert self._vacated is not None and self._loader is not None
        hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
        self._vacated.restore()
        fill_model(self._loader)
        _keep_hooks(model, hooks)
        self._restore_config(model)
        if {device.type for device in self._vacated.devices()} == {"cpu"}:
            install_native_step(model, self.dtype, self.quantization_config.policy, self.quantization_config.native_step)
        if env.verify() if self.quantization_config.verify is None else self.quantization_config.verify:
            verify_loaded(model)
        self._loader = self._vacated = None
        return model

    def _restore_config(self, model: Any) -> None:
        """The checkpoint's own quantization config takes the BitlineConfig's place, so that a saved config fits the files."""
        if self._own_config is not None:
            model.config.quantization_config = self._own_config
        elif hasattr(model.config, "quantization_config"):
            del model.config.quantization_config

    # ---- what the loaded model can do ------------------------------------------------------------------------------------

    def is_serializable(self, **_options: Any) -> bool:
        """No: there is no file format of packed layers. Adapters can be saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Adapters on it are."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Each layer is one operator to a compiler."""
        return True

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        raise BitlineError(
            "packed layers cannot become plain ones", fix="model.bitline_weights[name]().dequantize() has a layer's weight"
        )


def _open(checkpoint_files: Any) -> Checkpoint:
    """The checkpoint of the files that transformers chose."""
    if not checkpoint_files:
        raise CheckpointError("there is no checkpoint file to load", expected="safetensors or GGUF files")
    files = {Path(file).absolute() for file in checkpoint_files}
    first = Path(checkpoint_files[0])
    checkpoint = open_checkpoint(first.parent if first.suffix == ".safetensors" else first)
    found = {Path(info.file).absolute() for info in checkpoint.source.tensors.values()}
    if found != files:
        raise CheckpointError(
            "transformers chose other files than the folder's checkpoint", file=first.parent,
            found=", ".join(sorted(f.name for f in files)), expected=", ".join(sorted(f.name for f in found)),
            fix="leave out variant=, and keep one checkpoint in a folder",
        )  # fmt: skip
    return checkpoint


def _has_other_head(model: Any, checkpoint: Checkpoint) -> bool:
    """Whether the model's class is another one than the checkpoint was saved from."""
    if checkpoint.is_gguf:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return type(model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return type(model).__name__ not in (checkpoint.config.get("architectures") or [type(model).__name__])


def _packed_bytes(loader: WeightLoader, records: list[LayerRecord]) -> dict[str, int]:
    """Bytes of quantized layers in the files, by the model's module. Wrong names are for the loader to report."""
    found: dict[str, int] = {}
    for record in records:
        place = loader.names.expert_place(record.name, layer=True)
        try:
            name = loader.names.module_name(record.name) if place is None else place.module
        except CheckpointError:
            continue
        if name is not None:
            found[name] = found.get(name, 0) + record.nbytes
    return found


def _check_complete(device_map: dict[str, Any], names: list[str]) -> None:
    """Refuse a device map that leaves tensors without a device."""
    if "" in device_map:
        return
    lost = [name for name in names if not any(name == key or name.startswith(f"{key}.") for key in device_map)]
    if lost:
        raise InputError("the device map has no device for some tensors", found=", ".join(lost[:3]),
                         expected=f"a device for all {len(names)}", fix="add the module, or '' for all others")  # fmt: skip


def _keep_hooks(model: Any, hooks: dict[str, Any]) -> None:
    """Give modules that were replaced their predecessors' hooks of accelerate."""
    for name, hook in hooks.items():
        module = model.get_submodule(name)
        if not hasattr(module, "_hf_hook"):
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(module, hook)


def _progress_bar() -> Callable[[int, int], None]:
    """A progress bar of transformers, which `disable_progress_bar` turns off."""
    bar: Any = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = transformers_logging.tqdm(total=total, desc="Packing weights")
        bar.update(1)
        if done == total:
            bar.close()

    return show

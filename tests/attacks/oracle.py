"""An independent reader of checkpoints without any code of Bitline, against which every weight that loads is checked.

Each family is dequantized with numpy alone, from the descriptions in docs/formats.md (GGUF with the gguf package). The oracle is
lenient: it reads what it can, and raises Unreadable for files that have no valid reading. What Bitline loads must be what the
oracle reads; whether a refusal is necessary is tested elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle_ct
import oracle_float
import oracle_gguf
import oracle_int
import oracle_other
import oracle_quark
import oracle_torchao
from oracle_files import Files, Layer, Unreadable, read_files
from oracle_stacks import unstack

_CT_PACKINGS = ("auto_round:llm_compressor", "auto_round:llm_compressor_nvfp4_e5m3", "auto_round:fp8_static")


def _mxfp8(files: Files) -> dict[str, Layer]:
    """The layout of fp8 with scale blocks of 32 columns."""
    files.config["weight_block_size"] = [1, 32]
    return oracle_float.fp8(files)


# Readers by quant_method.
FAMILIES: dict[str, Callable[[Files], dict[str, Layer]]] = {
    "gptq": oracle_int.layers, "awq": oracle_int.layers, "compressed-tensors": oracle_ct.layers, "fp8": oracle_float.fp8,
    "fbgemm_fp8": oracle_float.fp8,
    "mxfp8": _mxfp8,
    "mxfp4": oracle_float.mxfp4, "bitsandbytes": oracle_other.bitsandbytes, "quark": oracle_quark.layers,
    "hqq": oracle_other.hqq, "torchao": oracle_torchao.layers,
}  # fmt: skip


_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# Families with stacked experts, and the dtypes of stacked codes.
_STACKED = {
    oracle_ct.layers: ("I32", "U8", "I8", *_FP8), oracle_float.fp8: ("I8", *_FP8), oracle_float.modelopt: ("U8", "I8", *_FP8),
}  # fmt: skip


def _family(files: Files) -> Callable[[Files], dict[str, Layer]]:
    method = files.config["quant_method"]
    if method in oracle_int.AUTO_ROUND:
        packing = files.config.get("packing_format")
        if packing in _CT_PACKINGS or str(files.config.get("data_type")).startswith("mx_int"):
            return oracle_ct.layers
        floats = packing is None and str(files.config.get("data_type")).startswith("fp")
        return oracle_float.fp8 if packing == "auto_round:fp8" or floats else oracle_int.layers
    if method.startswith("modelopt"):
        return oracle_float.modelopt
    if method in FAMILIES:
        return FAMILIES[method]
    return _guess(files)


def _guess(files: Files) -> Callable[[Files], dict[str, Layer]]:
    """For a config without a known method: by tensor names, and by keys that only one family writes."""
    config, suffixes = files.config, {name.rpartition(".")[2] for name in files.tensors}
    if "config_groups" in config:
        return oracle_ct.layers
    if {"autoround_version", "packing_format"} & config.keys():
        config["quant_method"] = "auto-round"
        return _family(files)
    if "qweight" in suffixes:
        config["quant_method"] = "awq" if {"w_bit", "q_group_size", "zero_point"} & config.keys() else "gptq"
        return oracle_int.layers
    if {"load_in_4bit", "load_in_8bit"} & config.keys():
        return oracle_other.bitsandbytes
    if not any(re.search(r"weight_packed|weight_scale|absmax|SCB|W_q|qdata|_blocks", name) for name in files.tensors):
        return lambda files: {}
    raise Unreadable(f"quant_method {config['quant_method']!r}")


def layers(path: Path) -> dict[str, Layer]:
    """Every quantized layer of a checkpoint by name, or Unreadable with the reason."""
    path = Path(path)
    if path.is_dir() and not list(path.glob("*.safetensors*")):
        path = min(path.glob("*.gguf"))
    try:
        if path.suffix == ".gguf":
            return oracle_gguf.layers(path)
        files = read_files(path)
        family = _family(files)
        if family in _STACKED:
            unstack(files, _STACKED[family])
        return family(files)
    except Unreadable:
        raise
    except Exception as error:  # what the oracle fails on has no valid reading
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def same(found: np.ndarray, wanted: np.ndarray, tolerance: float = 0.0) -> bool:
    """Bit-equal except the sign of zero, NaN equal to NaN; or within a tolerance relative to a row's largest value."""
    if found.shape != wanted.shape:
        return False
    if tolerance == 0.0 or np.array_equal(found, wanted, equal_nan=True):
        return np.array_equal(found, wanted, equal_nan=True)
    with np.errstate(all="ignore"):
        allowed = (
            tolerance * np.nanmax(np.abs(wanted), axis=-1, keepdims=True) + 2.0**-126
        )  # and anything below the smallest normal number
        return bool(((np.abs(found - wanted) <= allowed) | (found == wanted) | (np.isnan(found) & np.isnan(wanted))).all())

"""Write the seeds: `python fuzz/make_corpus.py` rewrites fuzz/corpus/TARGET/* from the valid checkpoints of tests/attacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fuzz_targets import FAMILIES

import bases_gguf  # isort: skip  (found once fuzz_targets is imported)
from bases import ARRAY, BOOL, STRING, U32, entry, gguf_bytes, one_matrix, pair, q8_0, safetensors_bytes  # isort: skip

CORPUS = Path(__file__).parent / "corpus"
# One base for each code path of the readers.
CONFIGS = (
    "gptq", "gptq_dynamic", "awq", "gemv_fast", "packed", "packed_preset", "two_groups", "int8", "fp8_blocks", "nvfp4", "mxfp4",
    "auto_round_mixed", "auto_round_fp8", "auto_round_mxfp4", "bnb4", "bnb8", "quark4", "quark_by_name", "quark_nvfp4", "hqq",
    "torchao", "fp8_block", "fp8_static", "modelopt_nvfp4", "modelopt_awq", "modelopt_mixed", "gpt_oss",
)  # fmt: skip
WEIGHTS = (
    "gptq_act_order3", "gptq_ragged", "auto_round_awq", "awq5", "gemv", "packed_act_order", "padded3", "int8_zeros", "nvfp4",
    "mxfp6", "bnb_odd", "bnb4", "quark_int4_zeros", "quark_mx_fp6_e2m3", "hqq_3bit_32", "hqq_across", "torchao", "fp8_experts",
    "modelopt_w4a8", "modelopt_w8a8", "gpt_oss",
)  # fmt: skip
EMPTY = b'{"e":{"dtype":"U8","shape":[0,3],"data_offsets":[0,0]}}'
GGUF = ("Q4_0", "Q8_0", "Q4_K", "IQ1_M", "NVFP4")


def seeds() -> dict[str, dict[str, bytes]]:
    """The seeds, by target and name."""
    tensors = FAMILIES["packed"]()[0]
    whole = safetensors_bytes({"a": tensors[next(iter(tensors))][:1], "__metadata__": {"format": "pt"}})
    header = safetensors_bytes({**tensors, "__metadata__": {"format": "pt"}})
    length = 8 + int.from_bytes(header[:8], "little")
    shards = {"metadata": {"total_size": 48}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    return {
        "safetensors": {"header": header[8:length], "file": whole, "empty": EMPTY},
        "index": {"two": json.dumps(shards).encode(), "one": b'{"weight_map":{"c":"./one.safetensors"}}'},
        "gguf": {kind: bases_gguf.file(kind)[0] for kind in GGUF} | {"experts": _experts(), "values": _values()},
        "config": {name: _config(name) for name in CONFIGS},
        "weights": {name: name.encode() + b"\n\n" + bytes([4, i, 5, 0x40]) for i, name in enumerate(WEIGHTS)},
    }


def _config(name: str) -> bytes:
    return name.encode() + b"\n" + json.dumps({"model_type": "llama", "quantization_config": FAMILIES[name]()[1]}).encode()


def _experts() -> bytes:
    return gguf_bytes([], [entry("a.weight", [32, 4, 2], 8, 0)], q8_0(8, 32))


def _values() -> bytes:
    pairs = [
        pair("general.alignment", U32, 64), pair("tokens", ARRAY, (STRING, ["a", "bc"])), pair("flags", ARRAY, (BOOL, [1, 0])),
        pair("split.count", U32, 1),
    ]  # fmt: skip
    return gguf_bytes(pairs, *one_matrix(), align=64)


def main() -> None:
    """Replace the folder."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    for target, files in seeds().items():
        (CORPUS / target).mkdir(parents=True)
        for name, data in files.items():
            (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()

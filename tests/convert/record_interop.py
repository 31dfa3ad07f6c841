"""Write interop.json: how other tools dequantize converted GPTQ and AWQ files, with the hash of each file.

    python tests/convert/record_interop.py

It needs packages that the tests' environment does not have: gptqmodel, autoawq and xllamacpp (`pip install --no-deps` is enough
for the modules that are used). test_convert_interop.py checks the hashes, so that a change in what is written requires a new
record; where the packages are installed it runs the same comparison.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from expected import CHECKPOINTS, LOSSLESS  # noqa: E402
from external_decoders import awq, digest, gptqmodel  # noqa: E402
from gguf_models import largest_logprob_difference  # noqa: E402

import bitline  # noqa: E402

RECORD = HERE / "interop.json"
HOW = {
    "gptq": "each layer loaded into TorchLinear, v1 zero points converted by GPTQModel, PackableQuantLinear.dequantize_weight",
    "awq": "dequantize_gemm of the package's packing_utils",
}
TOOLS = {
    "gptq": {"gptqmodel": gptqmodel},
    "awq": {"gptqmodel": lambda f: awq(f, "gptqmodel"), "autoawq": lambda f: awq(f, "awq")},
}

LLAMA_CPP = ("llama", "llama3", "mistral", "qwen2", "qwen3")
LLAMA_CPP_HOW = (
    "random models of two layers in Q4_0: log probabilities of the ten likeliest tokens after six random prompts, against "
    "transformers in float32; llama.cpp rounds inputs to 8 bits and keeps keys and values in float16"
)


def compare(folder: Path, weights: dict[str, torch.Tensor]) -> int:
    """Assert that a tool's weights equal Bitline's bit for bit after one rounding to the scales' dtype. -> number of layers."""
    records = bitline.open_checkpoint(folder).layers()
    assert {record.name for record in records} == weights.keys()
    for record in records:
        weight = record.weight()
        assert torch.equal(weights[record.name], weight.dequantize(weight.spec.scale_dtype)), record.name
    return len(records)


def main() -> None:
    """Convert every fixture, compare, write the record."""
    record: dict[str, object] = {
        "what": "layers of converted fixtures that a tool dequantizes to the same bits as Bitline, and the hash of the files",
        "torch": torch.__version__, "tools": {}, "files": {},
    }  # fmt: skip
    for to, tools in TOOLS.items():
        names = [name for name, targets in LOSSLESS.items() if to in targets.split()]
        versions = {tool: version("autoawq" if tool == "autoawq" else "gptqmodel") for tool in tools}
        record["tools"][to] = {"versions": versions, "how": HOW[to]}  # type: ignore[index]
        files = record["files"].setdefault(to, {})  # type: ignore[attr-defined]
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result"
                bitline.convert(CHECKPOINTS / name, result, to=to)
                equal = {tool: compare(result, dequantize(result)) for tool, dequantize in tools.items()}
                files[name] = {"sha256": digest(result), "equal_layers": equal}
    with tempfile.TemporaryDirectory() as folder:
        worst = {kind: round(largest_logprob_difference(kind, Path(folder) / kind), 4) for kind in LLAMA_CPP}
    record["llama.cpp"] = {"versions": {"xllamacpp": version("xllamacpp")}, "how": LLAMA_CPP_HOW, "worst_difference": worst}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Importing Bitline imports torch and no optional package."""

import functools
import json
import subprocess
import sys

import pytest

from bitline.platform import PACKAGES

OPTIONAL = (*PACKAGES, "transformers", "gguf", "vllm", "sentencepiece", "matplotlib", "tokenizers", "hypothesis", "pytest")


@functools.cache
def modules_after(code):
    report = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import bitline\nbitline.QuantLinear, bitline.choose, bitline.quantize, bitline.QuantizedWeight",
        "import bitline\nspec = bitline.LinearSpec(64, 128, bitline.types.uint4b8, (1, 32))\nbitline.choose(spec, 'cuda:sm90')",
        "import bitline.testing",
    ],
)
def test_no_optional_package_is_imported(code):
    loaded = modules_after(code)
    added = loaded - modules_after("import torch")
    assert not [name for name in OPTIONAL if name in added]
    assert "bitline" in added


def test_importing_bitline_alone_does_not_import_torch():
    assert "torch" not in modules_after("import bitline")


def test_no_gpu_context_is_created():
    code = "import bitline, torch\nbitline.Platform.detect()\nbitline.QuantLinear\nassert not torch.cuda.is_initialized()"
    assert "torch" in modules_after(code)


def test_every_public_name_exists():
    names = "bitline.__all__"
    code = f"import bitline\nassert all(hasattr(bitline, n) for n in {names})\nassert dir(bitline) == sorted({names})"
    assert modules_after(code)


def test_an_unknown_name_is_an_attribute_error():
    import bitline

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        bitline.nothing_of_the_kind  # noqa: B018

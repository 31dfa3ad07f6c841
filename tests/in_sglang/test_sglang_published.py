"""The stubs have the signatures of the published SGLang: set BITLINE_SGLANG_WHEEL to a wheel of it to compare them."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"
WHEEL = os.environ.get("BITLINE_SGLANG_WHEEL", "")
MOVED = {  # a stub's file -> where the published package has its names
    "sglang/srt/layers/utils.py": "sglang/srt/layers/utils/common.py",
    "sglang/srt/layers/moe/fused_moe_triton.py": "sglang/srt/layers/moe/fused_moe_triton/layer.py",
}
FILES = sorted(str(path.relative_to(STUBS)) for path in STUBS.rglob("*.py") if path.read_text() and path.name != "version.py")

published = pytest.mark.skipif(not WHEEL, reason="BITLINE_SGLANG_WHEEL names no wheel")


def read(name):
    with zipfile.ZipFile(WHEEL) as archive:
        return archive.read(name).decode()


def arguments(node):
    """A function's arguments without annotations."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return [d for d in decorators if d in ("staticmethod", "classmethod", "abstractmethod", "property")], ast.unparse(node.args)


def names(text):
    """Functions, methods with their arguments, classes with their bases, and assigned names, by qualified name."""
    found = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = arguments(node)
            elif isinstance(node, ast.ClassDef):
                found[prefix + node.name] = "class"
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({prefix + t.id: "value" for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(text).body, "")
    return found


@published
@pytest.mark.parametrize("file", FILES)
def test_the_stub_has_published_signatures(file):
    ours, theirs = names((STUBS / file).read_text()), names(read(MOVED.get(file, file)))
    own = {n: s for n, s in ours.items() if "stub" not in n.lower() and not n.rpartition(".")[2].startswith("_method")}
    inherited = {"FusedMoE.__init__", "WeightUpdater.get_model"}
    different = {n: (s, theirs.get(n)) for n, s in own.items() if theirs.get(n) != s and n not in inherited}
    assert not different


@published
def test_attributes_that_layers_give_bitline():
    linear = read("sglang/srt/layers/linear.py")
    for line in ("self.kv_tp_group = kv_tp_group", "self.v_head_size =", "self.total_num_kv_heads = total_num_kv_heads",
                 "self.output_sizes = output_sizes", "self.use_presharded_weights ="):  # fmt: skip
        assert line in linear
    assert "self.shard_indices = self._get_indices(" in read("sglang/srt/layers/vocab_parallel_embedding.py")
    assert "DefaultModelLoader.load_weights_only(model, weights, target_device)" in read("sglang/srt/model_loader/loader.py")
    updater = read("sglang/srt/model_executor/model_runner_components/weight_updater.py")
    assert "self.get_model()" in updater


@published
def test_the_standard_fused_layers():
    text = read("sglang/srt/model_loader/auto_loader.py")
    for part in ("q_proj", "k_proj", "v_proj"):
        assert f'("qkv_proj", "{part}"' in text
    for part in ("gate_proj", "up_proj"):
        assert f'("gate_up_proj", "{part}"' in text


@published
def test_the_published_hook_registry_applies_the_hooks(tmp_path):
    import shutil

    shutil.copytree(STUBS, tmp_path / "stubs")
    (tmp_path / "stubs/sglang/srt/plugins/hook_registry.py").write_text(read("sglang/srt/plugins/hook_registry.py"))
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "import bitline.sglang; bitline.sglang.register()\n"
        "from bitline.sglang import plugin\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "HookRegistry.apply_hooks()\n"
        "assert HookRegistry._patched == set(plugin.HOOKS), HookRegistry._patched\n"
        "from sglang.srt.model_loader.loader import DefaultModelLoader\n"
        "model = torch.nn.Linear(1, 1); model.load_weights = list\n"
        "DefaultModelLoader.load_weights_only(model, iter(()), torch.device('cpu'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "stubs")], check=True)

"""A format is one file plus one fixture: in Bitline itself, or in a third-party package that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bitline import formats, open_checkpoint

HERE = Path(__file__).parent
FIXTURE = HERE / "fixture"
READ = """
import json, sys, bitline
from bitline.formats import discovery
from safetensors.torch import load_file
opened = bitline.open_checkpoint(sys.argv[1])
expected = load_file(sys.argv[1] + "/expected.safetensors")
equal = {record.name: record.weight().dequantize().equal(expected[record.name]) for record in opened.layers()}
unquantized = [record.name for record in bitline.open_checkpoint(sys.argv[2]).layers()]
print(json.dumps([opened.format, equal, unquantized, discovery.plugin_failures]))
"""


def install(package: Path, target: Path, build: Path) -> None:
    """Install a package into target with pip, without network and without a build environment."""
    shutil.copytree(package, build / package.name)  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", target, build / package.name], check=True)


def run(target: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages that are installed in target."""
    paths = [str(target), *(p for p in sys.path if p)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False)


def unquantized(folder: Path) -> Path:
    """A checkpoint that is not quantized."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(FIXTURE / "expected.safetensors", folder / "model.safetensors")
    return folder


def test_an_installed_package_adds_a_format(tmp_path):
    install(HERE / "toy", tmp_path / "site", tmp_path)
    done = run(tmp_path / "site", "-c", READ, FIXTURE, unquantized(tmp_path / "unquantized"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["toy", {"model.layers.0.mlp.up_proj": True}, [], {}]


def test_a_failing_plugin_is_reported_and_the_others_work(tmp_path):
    for package in ("toy", "broken"):
        install(HERE / package, tmp_path / "site", tmp_path)
    done = run(tmp_path / "site", "-c", READ, FIXTURE, unquantized(tmp_path / "unquantized"))
    assert done.returncode == 0, done.stderr
    name, equal, dense, failures = json.loads(done.stdout)
    assert (name, equal, dense) == ("toy", {"model.layers.0.mlp.up_proj": True}, [])
    assert failures.keys() == {"gone", "half", "leaves", "trips"}
    assert failures["leaves"] == "SystemExit: goodbye" and failures["trips"] == "KeyError: 'no such key'"
    for failed in failures:
        assert re.search(rf"format plug-in {failed} \(broken_formats.*\) failed to", done.stderr)


def test_a_module_with_a_reader_is_a_built_in_format(tmp_path, monkeypatch):
    """Any module below bitline.formats that has a READER is a built-in format."""
    source = (HERE / "toy" / "toy_format.py").read_text()
    (tmp_path / "toy.py").write_text(f"{source}\n\nREADER = ToyReader()\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    try:
        opened = open_checkpoint(FIXTURE)
        assert opened.format == "toy"
        for name, expected in load_file(FIXTURE / "expected.safetensors").items():
            assert opened.layer(name).weight().dequantize().equal(expected)
    finally:
        sys.modules.pop("bitline.formats.toy", None)


@pytest.mark.parametrize("guide", ["adding-a-format.md"])
def test_the_guide_shows_this_file(guide):
    shown = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "docs" / guide).read_text(), flags=re.S)
    assert shown[0] == (HERE / "toy" / "toy_format.py").read_text()

"""What SGLang's `load_plugins` gets from Bitline, and what it leaves alone."""

import importlib
import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_registering_again_changes_nothing(sglang):
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
    from sglang.srt.layers import linear, quantization
    from sglang.srt.plugins.hook_registry import HookRegistry

    from bitline.sglang import plugin, register

    def state():
        tables = [list(getattr(quantization, table)) for table in plugin.TABLES]
        hooks = {target: len(found) for target, found in HookRegistry._hooks.items()}
        return tables, list(QUANTIZATION_CHOICES), list(linear.WEIGHT_LOADER_V2_SUPPORTED), hooks

    before = state()
    register()
    assert state() == before
    tables, choices, supported, hooks = before
    assert tables == [["bitline", "awq"]] * 3  # first, since SGLang takes the first method that wants a checkpoint
    assert choices.count("bitline") == supported.count("BitlineLinearMethod") == 1
    assert hooks == dict.fromkeys(plugin.HOOKS, 1)
    assert HookRegistry._patched == set(plugin.HOOKS)


def test_any_checkpoint_is_taken_where_the_user_asks_for_it(sglang):
    from sglang.srt.layers.quantization import get_quantization_config

    config = get_quantization_config("bitline")
    assert config.override_quantization_method({"quant_method": "modelopt_fp8"}, "bitline") == "bitline"
    assert config.override_quantization_method({"quant_method": "awq"}, None) is None
    assert config.from_config({}).get_name() == "bitline"
    assert config.get_min_capability() <= 0
    assert config.get_config_filenames() == []


def test_a_release_without_cpu_methods_is_fine(sglang, monkeypatch, caplog):
    from sglang.srt.layers import quantization

    from bitline.sglang import register

    monkeypatch.delattr(quantization, "CPU_QUANTIZATION_METHODS")
    with caplog.at_level(logging.WARNING):
        register()
    assert not caplog.records


def test_another_release_is_one_warning(sglang, monkeypatch, caplog):
    from bitline.sglang import register

    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.4.1")
    with caplog.at_level(logging.WARNING):
        register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0.4.1" in record.getMessage()
    assert "0.5.23" in record.getMessage()


def test_a_release_that_does_not_fit_is_one_error_and_no_exception(sglang, monkeypatch, caplog):
    from bitline.sglang import register

    monkeypatch.delitem(sys.modules, "bitline.sglang.plugin")
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    with caplog.at_level(logging.WARNING):
        register()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Bitline is off" in record.getMessage()


def test_the_entry_point_is_a_function():
    text = (HERE.parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nbitline = "bitline.sglang:register"' in text
    entry = EntryPoint("bitline", "bitline.sglang:register", "sglang.srt.plugins")
    assert entry.load() is importlib.import_module("bitline.sglang").register


@pytest.mark.parametrize("stubs", [False, True])
def test_importing_the_plugin_imports_neither_torch_nor_sglang(stubs):
    code = "import sys, bitline.sglang\nprint([m for m in ('torch', 'sglang', 'vllm') if m in sys.modules])"
    paths = f"import sys; sys.path.insert(0, {str(HERE / 'stubs')!r})\n" if stubs else ""
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_sglang_registering_says_that_bitline_is_off():
    code = "import bitline.sglang\nbitline.sglang.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert "Bitline is off" in done.stderr

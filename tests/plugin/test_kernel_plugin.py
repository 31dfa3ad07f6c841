"""Kernels of installed packages: one that conforms is listed, ranked and chosen; broken ones affect no other kernel."""

from __future__ import annotations

import json
import re

import pytest
from test_plugin import FIXTURE, HERE, install, run

USE = """
import json, sys, torch, bitline
from pathlib import Path
from bitline import LinearSpec, Platform, Policy
from bitline.cli.doctor import doctor_report
from bitline.cli.explain import explain_report
from bitline.kernels import registry
from bitline.testing import check, check_kernel, inputs, random_weight
from bitline.types import int8

toy = registry.kernel_by_name("ToyInt8LinearKernel")
specs = [LinearSpec(n, k, int8, (1, k), act_dtype=torch.float32) for n, k in ((48, 70), (13, 257))]
passed = len(check_kernel(toy, specs).passed)
(source,) = [e.source for e in registry.entries() if e.kernel is toy]
plan = explain_report(Path(sys.argv[1]), Platform.parse("cpu:aarch64"), Policy(), "float32")["plans"][0]
layer = bitline.QuantLinear(random_weight(specs[0], 1), kernel="ToyInt8LinearKernel")
check(layer(x := inputs(3, specs[0])), x, random_weight(specs[0], 1))
(row,) = [k for k in doctor_report()["kernels"] if k["kernel"] == "ToyInt8LinearKernel"]
print(json.dumps([passed, source, plan["kernel"], layer.choice.best.name, row["ran"], row["ok"], row["scheme"]]))
"""
BROKEN = """
import json, logging, sys, torch, bitline
from bitline.cli.doctor import doctor_report
from bitline.kernels import registry

spec = bitline.quantize(torch.randn(64, 128), "W4A16", group_size=32).spec
choice = bitline.choose(spec)
refused = {c.name: c.verdict.reason for c in choice.candidates if c.name in ("RaisingSupport", "TupleVerdict")}
choice.explain()
report = doctor_report()
of = {k["kernel"]: k for k in report["kernels"]}
print(json.dumps([choice.best.name, bitline.choose(spec, "cuda:sm90").best.name, refused, report["plugin_failures"],
                  of["RaisingSupport"]["detail"], of["TupleVerdict"]["detail"], of["ReferenceLinearKernel"]["ok"],
                  "Unregistered" in of]))
"""


def test_an_installed_package_adds_a_kernel(tmp_path):
    for package in ("toy", "toy_kernel"):  # the toy format too, whose checkpoint has a layer to explain
        install(HERE / package, tmp_path / "site", tmp_path)
    done = run(tmp_path / "site", "-c", USE, FIXTURE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [2, "toy", *["ToyInt8LinearKernel"] * 2, True, True, "int8 channel"]


def test_packages_that_fail_are_named_and_harmless(tmp_path):
    install(HERE / "broken_kernels", tmp_path / "site", tmp_path)
    done = run(tmp_path / "site", "-c", BROKEN)
    assert done.returncode == 0, done.stderr
    best, hopper, refused, failures, raising_support, tuple_verdict, reference, unregistered = json.loads(done.stdout)
    assert not {best, hopper} & {"RaisingSupport", "TupleVerdict"} and reference and not unregistered
    assert "no_such_attribute" in refused["RaisingSupport"] and "no Verdict" in refused["TupleVerdict"]
    assert "no_such_attribute" in raising_support and tuple_verdict == "supports none of the schemes tried"
    assert failures == {
        "missing": failures["missing"],
        "exits": "SystemExit: goodbye",
        "not_callable": "TypeError: 7 is neither a Kernel class nor a function that registers some",
        "not_a_kernel": failures["not_a_kernel"],
        "name_taken": failures["name_taken"],
        "raises": "RuntimeError: out of order",
    }
    assert "NoSuchKernel" in failures["missing"] and "neither a Kernel class" in failures["not_a_kernel"]
    assert "ReferenceLinearKernel is registered already" in failures["name_taken"]
    for name in failures:
        assert re.search(rf"kernel plug-in {name} \(broken_kernels.*\) failed to load", done.stderr)


@pytest.mark.parametrize("guide", ["adding-a-kernel.md"])
def test_the_guide_shows_this_file(guide):
    shown = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "docs" / guide).read_text(), flags=re.S)
    assert shown[0] == (HERE / "toy_kernel" / "toy_kernel.py").read_text()

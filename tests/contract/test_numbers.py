"""Every sentence of the contract has a test, and every test a sentence."""

import ast
from pathlib import Path

from must import sentences

TESTS = Path(__file__).parents[1]


def named() -> dict[int, list[str]]:
    """The tests under each number, found in their source, so that one that is skipped counts too."""
    found: dict[int, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "must":
                        assert call.args and not call.keywords, f"{file.name}: {node.name} names no sentence"
                        for number in call.args:
                            assert isinstance(number, ast.Constant) and type(number.value) is int, f"{file.name}: {node.name}"
                            found.setdefault(number.value, []).append(f"{file.name}: {node.name}")
    return found


def test_every_sentence_has_a_test_and_every_test_a_sentence():
    written, tested = sentences(), named()
    assert list(written) == list(range(1, len(written) + 1)) and len(written) >= 20
    assert not written.keys() - tested.keys(), "sentences without a test"
    assert not {number: tests for number, tests in tested.items() if number not in written}, "tests of no sentence"


def test_every_sentence_says_must_once():
    assert {number: text for number, text in sentences().items() if text.count("MUST") != 1} == {}

"""Regular expressions out of a config: the same answers as `re`, in bounded time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitline.formats.common.bounded_regex import MAX_PATTERNS, MatchBudget, Pattern, PatternError

ATOMS = [
    "a", "b", ".", "[ab]", "[^a]", "[a-c_]", r"\w", r"\d", r"\S", "(?=a)", "(?!b)", r"\b", r"\B", "^", "$", r"\Z", "(a|ab)",
    "(?:)", "(?<=a)", "(?<!ab)", "x?", "(a|b|)",
]  # fmt: skip
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{3,}", "*?", "+?", "??"]


def _extend(inner):
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda part: f"(?!{part})"),
    )


PATTERNS = st.tuples(st.sampled_from(["", "", "", "(?i)", "(?a)"]), st.recursive(st.sampled_from(ATOMS), _extend, max_leaves=8))


@settings(max_examples=1500, deadline=None, database=None, derandomize=True)
@given(PATTERNS.map("".join), st.text("abAx1_.é", min_size=1, max_size=9))
def test_backtracking_and_simulation_answer_as_re_does(text, name):
    default, simulated = Pattern(text), Pattern(text)
    simulated._cost = None  # never `re`
    expected = re.match(text, name) is not None, re.search(text, name) is not None
    assert (simulated.match(name), simulated.search(name)) == expected
    assert (default.match(name), default.search(name)) == expected


@pytest.mark.parametrize(
    "text",
    [
        r".*self_attn\.(q|k|v|o)_proj$", r"model\.layers\.(0|1|2|30)\..*", ".*lm_head", "^(?!.*lm_head).*$", r".*\.mlp\..*_proj",
        r"re:visual.*", r".*mlp\.experts\.\d+\.(gate|up)_proj", r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z_]+",
    ],
)  # fmt: skip
def test_patterns_of_real_configs_use_re(text):
    pattern = Pattern(text)
    assert pattern._is_cheap("model.layers.30.mlp.experts.117.gate_proj", searching=False) and pattern.budget.steps == 0


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$", "(.*)*x", "(a|a)*b", "(a|aa)+$", "a?" * 30 + "a" * 30 + "b", "(?:){1000000000}x", r"(?:\b){1000000000}x",
        ".*.*.*.*.*.*=.*x", "((a{0,1000}){0,1000}){0,1000}!!", "(x+x+)+y", r"^(([a-z])+.)+[A-Z]([a-z])+$",
    ],
)  # fmt: skip
def test_exponential_patterns_take_few_steps(text):
    pattern = Pattern(text)
    for name in ("a" * 60 + "!", "model.layers.0." + "a" * 1000 + "!"):
        assert not pattern.match(name) and not pattern.search(name)
    assert pattern.budget.steps < 100_000


def test_invalid_and_unsupported_patterns():
    for text in ("(a", "[z-a]", "*", "a{1180591620717411303424}", "(" * 5000 + ")" * 5000, "a" * 30_000):
        with pytest.raises(PatternError):
            Pattern(text)
    for text in (r"(.)+\1", "(?>a+)+", "(?i:(a+)+)x"):
        with pytest.raises(PatternError, match="not supported"):
            Pattern(text).match("aaaa")


def test_patterns_of_one_config_share_a_budget():
    budget = MatchBudget()
    for i in range(MAX_PATTERNS):
        Pattern(f"a{i}", budget)
    with pytest.raises(PatternError, match="more than"):
        Pattern("b", budget)
    with pytest.raises(PatternError, match="takes too long"):
        Pattern("(?!(a+)+$).*b").search("a" * 4000 + "!")

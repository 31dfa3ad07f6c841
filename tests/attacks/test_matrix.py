"""Every kind of invalid value for every tensor, header entry and config value of every base: see matrix.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import bases_gguf
import matrix
import matrix_gguf
import pytest
from bases import FAMILIES
from matrix import Case
from outcomes import check_error, outcome, temporary_folder, time_limit


def check_case(case: Case) -> str | None:
    """What is wrong with the outcome, None where it is right."""
    with temporary_folder() as folder, time_limit():
        try:
            path = case.build(folder)
            error = outcome(path)
            if error is None:
                return f"{case.name} loads" if case.refused else None
            check_error(error, path, located=case.located)
        except Exception as error:
            return f"{case.name}: {type(error).__name__}: {error}"
    return None


# Of the cases of a family `make test` takes every eighth.
STEPS = [pytest.param(8, id="eighth"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("base", FAMILIES)
def test_family(base, step):
    cases = list(matrix.attacks(base))
    assert len({case.name for case in cases}) == len(cases) > 200
    wrong = [what for case in cases[::step] if (what := check_case(case))]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("ggml", bases_gguf.TYPES)
def test_gguf(ggml, step):
    cases = list(matrix_gguf.attacks(ggml))
    assert len({case.name for case in cases}) == len(cases) > 60
    wrong = [what for case in cases[::step] if (what := check_case(case))]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])


def test_write_corpus_writes_checkpoints(tmp_path):
    script = Path(__file__).with_name("write_corpus.py")
    pattern = "^gptq/tensor/up_proj.g_idx/|^gguf-Q4_K/dims|^file-"
    done = subprocess.run([sys.executable, script, tmp_path, pattern], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 20 and (tmp_path / "gptq/tensor/up_proj.g_idx/missing/model.safetensors").is_file()

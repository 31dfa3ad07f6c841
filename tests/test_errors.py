"""Messages and base classes of the errors."""

import pytest

import bitline
from bitline.errors import BitlineError, CheckpointError

PARENTS = {
    "CheckpointError": ValueError, "WeightError": ValueError, "NoKernelError": ValueError, "PlatformError": ValueError,
    "InputError": ValueError, "OutOfMemoryError": MemoryError,
}  # fmt: skip


def test_the_message_has_every_part():
    error = CheckpointError(
        "cannot read it", file="a/b.safetensors", tensor="w.scale", field="dtype", found="I8", expected="F16", fix="convert it"
    )
    text = str(error)
    assert text == (
        "cannot read it [file a/b.safetensors, tensor w.scale, field dtype]: found I8, expected F16. To fix it: convert it"
    )
    assert (error.what, error.file, error.tensor, error.field, error.found, error.expected, error.fix) == (
        "cannot read it", "a/b.safetensors", "w.scale", "dtype", "I8", "F16", "convert it",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "no"), ({"tensor": "t"}, "no [tensor t]"), ({"field": "bits"}, "no [field bits]"), ({"found": 0}, "no: found 0"),
        ({"expected": [1, 2]}, "no: expected [1, 2]"),
        ({"fix": "try"}, "no. To fix it: try"), ({"file": "f", "found": ""}, "no [file f]: found "),
    ],
)  # fmt: skip
def test_parts_that_are_absent_leave_nothing(facts, text):
    assert str(BitlineError("no", **facts)) == text


@pytest.mark.parametrize("name", PARENTS)
def test_errors_are_also_builtin_exceptions(name):
    kind = getattr(bitline, name)
    assert issubclass(kind, BitlineError) and issubclass(kind, PARENTS[name])
    with pytest.raises(PARENTS[name], match="what happened"):
        raise kind("what happened")

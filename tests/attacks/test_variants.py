"""The bases of corpus_variants are valid. Their weights are checked against reference decoders in tests/formats."""

import pytest
from corpus_variants import BASES, build

import bitline


@pytest.mark.parametrize("base", BASES)
def test_bases_are_valid(base, tmp_path):
    checkpoint = bitline.open_checkpoint(build(tmp_path, base, {}, {}, {}))
    assert checkpoint.layers() and checkpoint.dense_names() == []
    for record in checkpoint.layers():
        assert record.weight().spec == record.spec

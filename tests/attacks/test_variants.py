"""What corpus_variants' attacks are made of is valid. Their weights are held against slow decoders in tests/formats."""

import pytest
from corpus_variants import BASES, build

import bitline


@pytest.mark.parametrize("base", BASES)
def test_what_the_attacks_are_made_of_is_valid(base, tmp_path):
    checkpoint = bitline.open_checkpoint(build(tmp_path, base, {}, {}, {}))
    assert checkpoint.layers() and checkpoint.dense_names() == []
    for record in checkpoint.layers():
        assert record.weight().spec == record.spec

"""transformers' doors are open during each test of this folder."""

import pytest


@pytest.fixture(autouse=True)
def installed():
    import bitline.hf

    bitline.hf.install()
    yield
    bitline.hf.uninstall()

"""The real humming-kernels wheel on every accepted layer. Run by test_humming.py in a process with it on its path.

Its layer config, compatibility check and tile heuristics are plain Python that asks a GPU only for its properties; here these are
faked for several architectures. Nothing is compiled.
"""

import sys
from types import SimpleNamespace

import humming.tune
import pytest
import torch
from humming import device
from humming.schema import HummingInputSchema, HummingWeightSchema
from humming.schema.humming import is_humming_schema_compatible
from humming_specs import CASES

from bitline.kernels.providers import humming as adapter
from bitline.testing.generators import random_weight


class Rates(dict):
    def __missing__(self, key):
        return 500.0

    def __contains__(self, key):
        return True


def fake_device(sm):
    """A GPU of that architecture with an H200's properties."""
    device.current_device._value = SimpleNamespace(
        index=0, name="NVIDIA H200", is_ppu=False, sm_count=132, max_threads_per_block=1024, max_threads_per_sm=2048,
        max_registers_per_sm=65536, sm_major=sm // 10, sm_minor=sm % 10, sm_version=sm, l2_cache_size=50 << 20,
        l2_cache_size_mb=50.0, default_smem_size=49152, max_smem_size=232448, memory_bandwidth_gbps=4800.0,
        tensorcore_tops=Rates(),
    )  # fmt: skip
    device.DeviceInfo._instances[0] = device.current_device


LAYERS = [
    (kernel, spec, sm)
    for kernel, _, specs in CASES for spec in specs for sm in (75, 90, 120)
    if sm >= kernel.min_capability and (sm >= 80 or spec.act_dtype == torch.float16)
]  # fmt: skip


def schema_of(config):
    names = ("b_dtype", "bs_dtype", "weight_scale_group_size", "weight_scale_group_size_n", "weight_scale_type",
             "weight_scale_2_type", "has_zero_point")  # fmt: skip
    return HummingWeightSchema(**{name: getattr(config, name) for name in names})


@pytest.mark.parametrize("kernel", dict.fromkeys(kernel for kernel, _, _ in LAYERS))
def test_every_accepted_layer_has_tiles(kernel):
    for _, spec, sm in (layer for layer in LAYERS if layer[0] is kernel):
        fake_device(sm)
        adapter._layer_config.cache_clear()
        config = adapter._layer_config(kernel.humming_scheme(spec), spec, torch.device("cuda", 0))
        tensors = adapter._tensors(random_weight(spec, 1), kernel.humming_scheme(spec))
        schema_of(config).validate_tensors(tensors, config.shape_n, config.shape_k, config.param_dtype)
        assert is_humming_schema_compatible(HummingInputSchema(a_dtype=config.a_dtype), schema_of(config), spec.act_dtype)
        for m in (1, 7, 17, 65, 256, 4096):
            chosen = humming.tune._get_heuristics_config.__wrapped__(config, m, gemm_type="dense")
            rows, columns = chosen["block_shape"][1:]
            assert config.shape_n % rows == 0 and config.shape_k % columns == 0, (spec, m, chosen)
            for group in (config.weight_scale_group_size, config.input_scale_group_size):
                assert not group or group % columns == 0 or columns % group == 0, (spec, m, chosen)


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rs", __file__]))

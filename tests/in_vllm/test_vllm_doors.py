"""What Bitline uses of vLLM that is not public, held at its names and signatures: a new release that changes one fails here."""

import dataclasses
import importlib
import inspect

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import vllm
import vllm.model_executor.kernels.linear as theirs
from vllm.platforms import current_platform

import bitline.vllm
from bitline.vllm import kernels, plugin


@pytest.fixture(autouse=True)
def registered():
    bitline.vllm.register()


def test_this_release_is_one_of_the_tested():
    assert vllm.__version__.startswith(bitline.vllm.TESTED)


@pytest.mark.parametrize("module, name", plugin.DOORS)
def test_a_door_exists(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None


CONSTRUCTORS = {
    "mp": ("c", "w_q_param_name", "w_s_param_name", "w_zp_param_name"), "int8": ("c", "layer_param_names"),
    "fp8": ("c", "layer_param_names"), "fp8_a16": ("c", "layer_param_names"), "fp8_block": ("config",), "nvfp4": ("config",),
    "mxfp4": ("config",), "mxfp6": ("config",), "mxfp8": ("c",),
}  # fmt: skip


@pytest.mark.parametrize("kind", kernels.TABLES)
def test_a_kernels_base_class_is_built_and_called_as_ours(kind):
    base, ours = kernels._BASES[kind], kernels.kernel_class(kind, False)
    assert tuple(inspect.signature(base.__init__).parameters)[1:] == CONSTRUCTORS[kind]
    assert not inspect.isabstract(ours), ours.__abstractmethods__
    for name in ("process_weights_after_loading", "apply_weights"):
        parameters = [p for p in inspect.signature(getattr(base, name)).parameters if p != "kwargs"]
        assert parameters == [p for p in inspect.signature(getattr(ours, name)).parameters if p != "_options"]


FIELDS = {
    "MPLinearLayerConfig": {
        "full_weight_shape", "partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points", "out_type",
    },
    "Int8ScaledMMLinearLayerConfig": {"is_static_input_scheme", "is_channelwise", "input_symmetric"},
    "FP8ScaledMMLinearLayerConfig": {"weight_quant_key", "activation_quant_key", "weight_shape", "input_dtype", "out_dtype"},
    "NvFp4LinearLayerConfig": set(), "MxFp4LinearLayerConfig": {"activation_quant_key"},
    "MxFp6LinearLayerConfig": {"weight_quant_key", "activation_quant_key"},
    "Mxfp8LinearLayerConfig": {"weight_shape", "bmm_batch_size"},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_config_has_the_fields_that_are_translated(name):
    assert {field.name for field in dataclasses.fields(getattr(theirs, name))} == FIELDS[name]


@pytest.mark.parametrize("kind", kernels.TABLES)
def test_registering_again_changes_nothing(kind):
    listed = getattr(theirs, kernels.TABLES[kind])[current_platform._enum]
    before = list(listed)
    bitline.vllm.register()
    assert listed == before
    assert listed[0] is kernels.kernel_class(kind, False) and listed[-1] is kernels.kernel_class(kind, True)
    assert listed.count(listed[0]) == 1


def test_compiled_graphs_belong_to_one_choice_of_kernels(monkeypatch):
    """vLLM keeps compiled graphs by a hash of its variables; a graph holds kernels' names and layouts."""
    from vllm import envs

    before = envs.compile_factors()["BITLINE_KERNELS"]
    assert before == envs.compile_factors()["BITLINE_KERNELS"]
    monkeypatch.setenv("BITLINE_DISABLED_KERNELS", "CPUWNA16LinearKernel")
    assert envs.compile_factors()["BITLINE_KERNELS"] != before


def test_reasons_name_every_kernel_that_refused():
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    config = MPLinearLayerConfig((256, 512), (256, 512), scalar_types.uint4b8, "no dtype", 64, False)
    ok, reason = kernels.kernel_class("mp", False).can_implement(config)
    assert not ok and "no dtype" in reason


def test_the_method_of_experts_is_called_as_ours():
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    from bitline.vllm.experts import BitlineExpertsMethod

    assert not inspect.isabstract(BitlineExpertsMethod), BitlineExpertsMethod.__abstractmethods__
    theirs_apply, our_apply = (list(inspect.signature(c.apply).parameters) for c in (FusedMoEMethodBase, BitlineExpertsMethod))
    assert theirs_apply == our_apply
    assert "no_compile_layers" in {field.name for field in dataclasses.fields(ForwardContext)}

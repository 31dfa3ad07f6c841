"""What quantization="bitline" does not run in SGLang is an error that says so, before anything is served."""

import pytest
import torch

from bitline.errors import BitlineError, CheckpointError, InputError


@pytest.fixture
def models(sglang):
    import sglang_models

    return sglang_models


def opened(models, path, **changes):
    """A config of this checkpoint, as SGLang has it when it makes layers."""
    model = models.load(path, **changes)
    return model.lm_head.quant_config


def test_a_fused_layer_without_an_entry(models, checkpoint):
    class Block(models.Block):
        gate_up = "w13_proj"

    class Other(models.Llama):
        block = Block

    with pytest.raises(
        BitlineError, match=r"which layers SGLang's model fuses.*mlp\.w13_proj.*packed_modules_mapping.*To fix it"
    ):
        models.load(checkpoint("ct-w4a16"), model_class=Other)


def test_a_declared_fused_layer_runs(models, checkpoint):
    class Block(models.Block):
        gate_up = "w13_proj"

    class Other(models.Llama):
        block = Block
        packed_modules_mapping = {"w13_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    model = models.load(checkpoint("ct-w4a16"), model_class=Other)
    assert model.model.layers[0].mlp.gate_up_proj(torch.zeros(1, 256))[0].shape == (1, 1024)


def test_a_mapping_that_leaves_a_part_out(models, checkpoint):
    class Other(models.Llama):
        packed_modules_mapping = {"gate_up_proj": ["gate_proj"]}  # noqa: RUF012

    with pytest.raises(CheckpointError, match=r"no modules for 2 of 14 quantized layers.*up_proj"):
        models.load(checkpoint("ct-w4a16"), model_class=Other)


def test_a_quantized_layer_without_a_module(models, checkpoint):
    class Block(models.Block):
        def __init__(self, *args):
            super().__init__(*args)
            del self.mlp.down_proj

    class Other(models.Llama):
        block = Block

        def __init__(self, config, quant_config=None):
            super().__init__(config, quant_config)
            quant_config.checkpoint.used -= {n for n in quant_config.checkpoint.used if "down_proj" in n}

    with pytest.raises(CheckpointError, match=r"no modules for 2 of 14 quantized layers.*down_proj.*To fix it"):
        models.load(checkpoint("ct-w4a16"), model_class=Other)


def test_modules_of_another_rank_of_a_pipeline_are_not_missed(models, checkpoint):
    from sglang.srt.layers.utils import PPMissingLayer

    class Half(models.Llama):
        def __init__(self, config, quant_config=None):
            super().__init__(config, quant_config)
            self.model.layers[1] = PPMissingLayer()
            quant_config.checkpoint.used -= {n for n in quant_config.checkpoint.used if ".layers.1." in n}

        def load_weights(self, weights):
            super().load_weights((name, tensor) for name, tensor in weights if ".layers.1." not in name)

    model = models.load(checkpoint("ct-w4a16"), model_class=Half)
    assert not any(".self_attn." in name or ".mlp." in name for name in model.seen)


def test_quantized_experts(models, checkpoint):
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    config = opened(models, checkpoint("ct-w4a16"))
    assert config.get_quant_method(FusedMoE(), "model.layers.0.mlp.experts") is None  # none of them is quantized
    records = config.checkpoint.records
    records["model.layers.0.mlp.experts.0.down_proj"] = records["model.layers.0.mlp.down_proj"]
    with pytest.raises(BitlineError, match=r"quantized experts.*layers\.0\.mlp\.experts.*To fix it"):
        config.get_quant_method(FusedMoE(), "model.layers.0.mlp.experts")


def test_layers_that_the_model_reads_itself(models, checkpoint):
    from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelRepeatedLinear

    config = opened(models, checkpoint("ct-w4a16"))
    records = config.checkpoint.records
    records["model.layers.0.self_attn.kv_b_proj"] = records["model.layers.0.self_attn.o_proj"]
    with pytest.raises(BitlineError, match=r"latent attention.*kv_b_proj.*To fix it"):
        ColumnParallelLinear(256, 256, quant_config=config, prefix="model.layers.0.self_attn.kv_b_proj")
    with pytest.raises(BitlineError, match=r"RepeatedLinear.*qkv_proj.*To fix it"):
        MergedColumnParallelRepeatedLinear(256, [256], [256], quant_config=config, prefix="model.layers.0.self_attn.qkv_proj")


def test_weights_that_are_cut_already(models, checkpoint):
    from sglang.srt.layers.linear import ColumnParallelLinear

    config = opened(models, checkpoint("ct-w4a16"))
    layer = ColumnParallelLinear(
        256, 256, False, quant_config=config, prefix="model.layers.0.self_attn.o_proj", use_presharded_weights=True
    )
    with pytest.raises(BitlineError, match=r"cut already.*o_proj.*To fix it"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("shape", [(256, 200), (128, 256)])
def test_a_layer_of_another_shape(models, checkpoint, shape):
    from sglang.srt.layers.linear import RowParallelLinear

    config = opened(models, checkpoint("ct-w4a16"))
    layer = RowParallelLinear(*shape, False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")
    with pytest.raises(CheckpointError, match=r"does not fit SGLang's model.*o_proj.*found.*expected.*To fix it"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_bias_that_the_model_has_not(models, checkpoint):
    from sglang.srt.layers.linear import QKVParallelLinear

    config = opened(models, checkpoint("gptq-bias"))
    layer = QKVParallelLinear(256, 64, 4, 2, bias=False, quant_config=config, prefix="model.layers.0.self_attn.qkv_proj")
    with pytest.raises(CheckpointError, match=r"found a bias, expected a layer without one"):
        layer.quant_method.process_weights_after_loading(layer)


def test_loading_without_the_filter(models, checkpoint):
    from sglang.srt.layers.linear import RowParallelLinear

    config = opened(models, checkpoint("ct-w4a16"))
    layer = RowParallelLinear(256, 256, False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")
    config.checkpoint.filtered = False
    with pytest.raises(BitlineError, match=r"without Bitline's filter.*o_proj.*To fix it"):
        layer.quant_method.process_weights_after_loading(layer)


def test_layers_before_the_checkpoint_is_open(sglang):
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization import get_quantization_config

    config = get_quantization_config("bitline").from_config({})
    with pytest.raises(BitlineError, match=r"before Bitline had opened the checkpoint.*To fix it"):
        LinearBase(1, 1, quant_config=config, prefix="o_proj")


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "layered", "pt"])
def test_other_loaders(models, checkpoint, load_format):
    with pytest.raises(InputError, match=rf"default loader.*{load_format}.*To fix it"):
        models.load(checkpoint("ct-w4a16"), load_format=load_format)


def test_gguf_and_unquantized_checkpoints(models, checkpoint, tmp_path):
    import shutil

    import vllm_models

    folder = checkpoint("gguf-q4_0").parent if checkpoint("gguf-q4_0").is_file() else checkpoint("gguf-q4_0")
    shutil.copy(checkpoint("ct-w4a16") / "config.json", folder / "config.json")
    with pytest.raises(InputError, match=r"folders with safetensors.*To fix it"):
        models.load(folder)
    plain = vllm_models.save(tmp_path, vllm_models.llama(), {}, set(), None)
    with pytest.raises(BitlineError):
        models.load(plain)


def test_updates_of_a_running_model(models, checkpoint):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import DefaultModelLoader

    updater = WeightUpdater()
    updater.model = torch.nn.Linear(1, 1)
    assert updater.update_weights_from_disk("elsewhere", "auto") == (True, "updated")
    updater.model = models.load(checkpoint("ct-w4a16"))
    for done, message in (
        updater.update_weights_from_disk("elsewhere", "auto"), updater.load_weights_from_distributed([]),
        updater.update_weights_from_tensor([]), updater.update_weights_from_ipc(None),
    ):  # fmt: skip
        assert not done
        assert "cannot be updated" in message
    with pytest.raises(BitlineError, match="cannot be updated in place"):
        DefaultModelLoader.restore_weights_before_loading(updater.model, torch.device("cpu"))


def test_asking_about_a_layer_does_not_take_it(models, checkpoint):
    config = opened(models, checkpoint("ct-mixed"))
    config.checkpoint.used.clear()
    assert not config.is_linear_unquantized("model.layers.0.self_attn.qkv_proj")
    assert config.is_linear_unquantized("model.layers.0.self_attn.other_proj")
    assert not config.checkpoint.used


def test_renamed_modules_are_found(models, checkpoint):
    from sglang.srt.models.utils import WeightsMapper

    config = opened(models, checkpoint("ct-w4a16"))
    config.apply_weight_name_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    config.open(checkpoint("ct-w4a16"), None, {})
    assert all(name.startswith("language_model.model.layers.") for name in config.checkpoint.records)
    config.checkpoint.used.add("language_model.model.layers.0.mlp.down_proj")
    assert "model.layers.0.mlp.down_proj.weight_packed" in config.checkpoint.own_tensors()

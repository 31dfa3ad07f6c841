"""replace_linears: any torch module's layers by name, and errors that leave the module as it was."""

import copy
import json
import logging
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitline
import tiny
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.model.merge import MergedRows

REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")
SIZES = {"q_proj": (32, 64), "k_proj": (32, 64), "v_proj": (32, 64), "out": (64, 32)}


class Mixer(nn.Module):
    """Three linear layers of one input, and one behind them."""

    def __init__(self):
        super().__init__()
        for name, (n, k) in SIZES.items():
            self.add_module(name, nn.Linear(k, n, bias=name == "out"))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Forecaster(nn.Module):
    """A model of no library: a convolution, mixers, a batch normalization, an output layer."""

    def __init__(self, blocks=2):
        super().__init__()
        self.stem = nn.Conv1d(3, 64, 5, padding=2)
        self.blocks = nn.ModuleList(Mixer() for _ in range(blocks))
        self.scale = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 7)
        self.register_buffer("window", torch.hann_window(64), persistent=False)

    def forward(self, series):
        x = self.stem(series).transpose(1, 2) * self.window
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale(x.transpose(1, 2)).mean(-1))


SERIES = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))


def random_model(make=Forecaster, **options):
    torch.manual_seed(0)
    return make(**options).eval()


def save(folder, model, prefix="", skip=("head",), scheme="W4A16", extra=None):
    """Write a model's linear layers as compressed-tensors and give it the dequantized weights. -> (folder, model)"""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, done = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith(skip):
            qw = bitline.quantize(module.weight.detach(), scheme, group_size=32)
            tensors[f"{name}.weight_packed"] = qw.codes.contiguous().view(torch.int32)
            tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_shape"] = qw.scale.contiguous(), torch.tensor(qw.shape)
            module.weight.data = qw.dequantize()
            done.add(f"{name}.weight")
    tensors |= {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in done}
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()} | (extra or {})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*head"],
              "config_groups": {"group_0": {"targets": ["Linear", "Embedding"], "weights": weights}}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")
    return folder, model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("forecaster"), random_model())


def run(model, x=SERIES):
    with torch.inference_mode():
        return model(x)


def state_of(module):
    """Everything that a failure must not change: modules, tensors with their bits and versions, attributes."""
    parts = {name: (id(part), sorted(part.__dict__), part.training) for name, part in module.named_modules()}
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name: (id(t), t._version, t.requires_grad, t.dtype, str(t.device)) for name, t in named}
    return parts, tensors, [t.clone() for _, t in named if not t.is_meta]


def refused(module, checkpoint, error=bitline.CheckpointError, **options):
    """The error of a call, which must not have changed the module."""
    before = state_of(module)
    with pytest.raises(error) as caught:
        bitline.replace_linears(module, checkpoint, **options)
    after = state_of(module)
    assert before[:2] == after[:2] and all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    return caught.value


# ---- what is replaced ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True])
def test_equals_the_dequantized_model_bit_for_bit(saved, opened):
    folder, dense = saved
    module = Forecaster().eval()
    seen = []
    done = bitline.replace_linears(module, bitline.open_checkpoint(folder) if opened else str(folder), policy=REFERENCE,
                                   progress=lambda *at: seen.append(at))  # fmt: skip
    assert torch.equal(run(module), run(dense))
    assert len(done.layers) == 8 and all(type(module.get_submodule(name)) is QuantLinear for name in done.layers)
    assert type(module.head) is nn.Linear and "head.weight" in done.tensors and "scale.running_mean" in done.tensors
    assert not (done.dequantized or done.kept or done.unused) and seen[-1][0] == seen[-1][1]
    assert {c.layer for c in bitline.verify(module)} == set(done.layers)
    assert module.bitline_checkpoint.path == folder and not module.training


def test_the_default_kernel_in_bfloat16(saved):
    folder, dense = saved
    module = Forecaster().eval()
    bitline.replace_linears(module, folder, dtype=torch.bfloat16)
    assert {t.dtype for t in module.state_dict().values() if t.is_floating_point()} >= {torch.bfloat16}
    assert module.window.dtype == module.stem.weight.dtype == module.blocks[0].out.spec.act_dtype == torch.bfloat16
    exact, torchs = run(dense), run(copy.deepcopy(dense).bfloat16(), SERIES.bfloat16()).float()
    mine = run(module, SERIES.bfloat16()).float()
    assert (mine - exact).abs().max() <= 2 * (torchs - exact).abs().max() + 2**-7 * exact.abs().max()
    bitline.verify(module)


def test_the_modules_own_dtype_mode_and_gradients_stay(saved):
    module = Forecaster().to(torch.bfloat16).train()
    extra = nn.Parameter(torch.ones(3))
    module.extra = extra
    done = bitline.replace_linears(module, saved[0], strict=False)
    assert module.blocks[1].q_proj.spec.act_dtype == torch.bfloat16 and module.training
    assert done.kept == ("extra",) and module.extra is extra and extra.requires_grad
    assert not module.head.weight.requires_grad and module.head.weight.dtype == torch.bfloat16


def test_quantized_layers_alone(saved):
    folder, dense = saved
    module = random_model()
    module.head.weight.data += 1
    head, norm = module.head.weight, module.blocks[0].norm.weight
    done = bitline.replace_linears(module, folder, tensors=False, policy=REFERENCE)
    assert len(done.layers) == 8 and module.head.weight is head and module.blocks[0].norm.weight is norm
    assert done.tensors == () and "head.weight" in done.kept and "head.weight" in done.unused
    x = torch.randn(4, 32)
    assert torch.equal(module.blocks[1].out(x), dense.blocks[1].out(x))  # its bias came with the layer


def test_a_part_of_a_checkpoint_under_other_names(tmp_path):
    folder, dense = save(tmp_path, random_model(), prefix="net.encoder.", extra={"net.decoder.weight": torch.ones(4, 4)})

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            inner = Forecaster()
            self.conv, self.layers, self.bn, self.head = inner.stem, inner.blocks, inner.scale, inner.head
            self.window = inner.window

        forward = Forecaster.forward
        stem = property(lambda self: self.conv)
        blocks = property(lambda self: self.layers)
        scale = property(lambda self: self.bn)

    table = {"stem": "conv", "blocks": "layers", "scale.": "bn"}
    for rename in (table, lambda name: re.sub("^stem", "conv", re.sub("^blocks", "layers", re.sub("^scale", "bn", name)))):
        module = Renamed().eval()
        done = bitline.replace_linears(module, folder, prefix="net.encoder", rename=rename, policy=REFERENCE)
        assert torch.equal(run(module), run(dense)) and done.unused == ("net.decoder.weight",)
        assert "layers.0.q_proj" in done.layers and module.layers[0].q_proj.source[0] == "net.encoder.blocks.0.q_proj"


def test_names_that_are_left_out(saved):
    module = random_model(blocks=1)
    assert "blocks.1.k_proj" in refused(module, saved[0]).found
    done = bitline.replace_linears(module, saved[0], rename={"blocks.1": None})
    assert len(done.layers) == 4 and {name.partition(".q")[0] for name in done.unused} >= {"blocks.1"}
    assert sorted(n for n in done.unused if n.endswith("norm.bias")) == ["blocks.1.norm.bias"]


def test_the_meta_device(saved):
    folder, dense = saved
    with torch.device("meta"):
        module = Forecaster().eval()
    problem = refused(module, folder)
    assert problem.tensor == "window" and "meta device" in str(problem)  # no file has it
    module.window = torch.hann_window(64)
    bitline.replace_linears(module, folder, policy=REFERENCE)
    assert not any(t.is_meta for t in module.state_dict().values()) and torch.equal(run(module), run(dense))


def test_under_a_default_device_of_the_caller(saved):
    folder, dense = saved
    with torch.device("meta"):
        module = Forecaster().eval()
        module.window = torch.hann_window(64, device="cpu")
        bitline.replace_linears(module, folder, policy=REFERENCE)
    assert torch.equal(run(module), run(dense))


def test_tied_parameters_and_a_quantized_embedding(tmp_path):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.unembed = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 50, bias=False)
            self.other = nn.Linear(64, 64, bias=False)
            self.again = nn.Linear(64, 64, bias=False)
            self.unembed.weight, self.again.weight = self.embed.weight, self.other.weight

        def forward(self, ids):
            return self.unembed(self.again(self.other(self.norm(self.embed(ids)))))

    dense = random_model(Language)
    for skip in ((), ("embed", "unembed"), ("other", "again")):
        folder, dense = save(tmp_path / "-".join(("all", *skip)), random_model(Language), skip=(*skip, "unembed", "again"))
        from safetensors.torch import load_file

        tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if not n.startswith(("unembed", "again"))}
        save_file(tensors, folder / "model.safetensors")
        dense.unembed.weight, dense.again.weight = dense.embed.weight, dense.other.weight
        module = random_model(Language)
        done = bitline.replace_linears(module, folder, policy=REFERENCE)
        packed = {name for name, part in module.named_modules() if isinstance(part, QuantLinear | QuantEmbedding)}
        wanted = {"embed", "unembed", "other", "again"} - {*skip}
        assert packed == set(done.layers) == wanted and done.kept == ()
        if "embed" in skip:
            assert module.unembed.weight is module.embed.weight
        assert torch.equal(run(module, torch.arange(50)), run(dense, torch.arange(50)))


def test_layers_with_one_input_are_merged_where_asked(saved):
    folder, dense = saved
    apart, together = Forecaster().eval(), Forecaster().eval()
    bitline.replace_linears(apart, folder, dtype=torch.bfloat16)
    done = bitline.replace_linears(together, folder, dtype=torch.bfloat16, merge=True)
    assert isinstance(together.blocks[0].q_proj, MergedRows) and together.blocks[0].qkv_proj.out_features == 96
    assert "blocks.0.q_proj" in done.layers
    exact, error = run(dense), (run(apart, SERIES.bfloat16()).float() - run(dense)).abs().max()
    assert (run(together, SERIES.bfloat16()).float() - exact).abs().max() <= 2 * error + 2**-7 * exact.abs().max()
    bitline.verify(together)


def test_a_merged_model_that_fails_is_as_it_was(saved):
    """The last tensor of the files does not fit, when the first mixer is merged already."""
    module = Forecaster()
    module.blocks[1].out = nn.Linear(48, 64)
    problem = refused(module, saved[0], merge=True)
    assert problem.tensor == "blocks.1.out" and "different shape" in str(problem)
    assert type(module.blocks[0].q_proj) is nn.Linear and "forward" not in module.blocks[0].__dict__


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, ids):
        return super().forward(ids) + 1


def test_modules_with_a_forward_of_their_own_keep_it(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.twice, self.plain = Shifted(50, 64), Doubled(64, 32), nn.Linear(32, 32)

        def forward(self, ids):
            return self.plain(self.twice(self.table(ids)))

    folder, dense = save(tmp_path, random_model(Odd))
    module = random_model(Odd)
    done = bitline.replace_linears(module, folder, policy=REFERENCE)
    assert done.layers == ("plain",) and done.dequantized == ("table", "twice") and type(module.twice) is Doubled
    assert torch.equal(run(module, torch.arange(50)), run(dense, torch.arange(50)))


@pytest.mark.parametrize("layers", [1, 2])
def test_torchs_own_encoder(tmp_path, layers):
    """Its forward reads weights itself: attention's output projection, and all of them on a fused path."""

    def make():
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    folder, dense = save(tmp_path, random_model(make))
    module, x = random_model(make), torch.randn(2, 5, 64)
    done = bitline.replace_linears(module, folder, policy=REFERENCE)
    assert len(done.layers) == 2 * layers and len(done.dequantized) == layers and done.dequantized[0].endswith("out_proj")
    exact = run(dense.double(), x.double()).float()
    assert torch.allclose(run(module, x), exact, atol=1e-5)
    with pytest.raises(bitline.InputError, match="reads the weight of a packed layer"):
        nn.functional.linear(x, module.layers[0].linear1.weight)


def test_a_model_of_transformers_that_the_caller_built(tmp_path):
    pytest.importorskip("transformers")
    folder, dense = tiny.compressed(tmp_path, tiny.llama())
    model = tiny.llama()
    bitline.replace_linears(model, folder, policy=REFERENCE)
    ids = torch.tensor([[1, 5, 9]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    with pytest.raises(bitline.BitlineError, match="packed weights"):
        model.save_pretrained(tmp_path / "saved")


def test_two_checkpoints_for_two_parts(saved, tmp_path):
    other, dense = save(tmp_path, random_model(Mixer), scheme="W4A16")
    module = random_model()
    bitline.replace_linears(module, saved[0], rename={"blocks.0": None}, strict=False, policy=REFERENCE)
    done = bitline.replace_linears(module, other, rename={"": "blocks.0"}, strict=False, policy=REFERENCE)
    assert set(done.layers) == {f"blocks.0.{name}" for name in SIZES} and len(module.bitline_weights) == 8
    x = torch.randn(1, 5, 64)
    assert torch.equal(run(module.blocks[0], x), run(dense, x)) and torch.equal(
        run(module.blocks[1], x), run(saved[1].blocks[1], x)
    )
    assert "a packed layer already" in str(refused(module, saved[0]))


# ---- what is refused -----------------------------------------------------------------------------------------------------


def test_layers_without_a_module_are_named(saved):
    module = Forecaster()
    module.attention = module._modules.pop("blocks")
    problem = refused(module, saved[0])
    assert problem.tensor == "blocks.0.k_proj" and "8 quantized layers of the checkpoint have no module" in str(problem)
    assert "blocks.0.out" in problem.found and "attention.0" in problem.expected and "rename=" in problem.fix
    renamed = refused(module, saved[0], rename={"blocks": "atention"})
    assert "blocks.0.k_proj (as atention.0.k_proj)" in renamed.found
    assert "no quantized layer" in str(refused(module, saved[0], prefix="decoder"))
    assert "8 quantized layers" in str(refused(module, saved[0], strict=False))  # nothing at all would be replaced


def test_tensors_without_a_parameter_are_named(saved):
    module = Forecaster()
    module.output = module._modules.pop("head")
    problem = refused(module, saved[0])
    assert problem.tensor == "head.bias" and "2 tensors of the checkpoint have no parameter" in str(problem)
    done = bitline.replace_linears(module, saved[0], strict=False)
    assert done.unused == ("head.bias", "head.weight") and done.kept == ("output.bias", "output.weight")


def test_parameters_that_no_file_has_are_named(saved):
    module = Forecaster()
    module.temperature, module.blocks[0].gate = nn.Parameter(torch.ones(1)), nn.Linear(64, 64)
    problem = refused(module, saved[0])
    assert "3 parameters of the module are in no file" in str(problem) and "blocks.0.gate.bias" in problem.found


def test_shapes_that_differ(saved):
    module = Forecaster()
    module.blocks[1].q_proj = nn.Linear(64, 48, bias=False)
    problem = refused(module, saved[0])
    assert (problem.tensor, problem.found, problem.expected) == ("blocks.1.q_proj", "[32, 64]", "[48, 64]")
    module = Forecaster()
    module.head = nn.Linear(64, 9)
    assert refused(module, saved[0], dtype=torch.bfloat16).tensor in ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.blocks[0], "out", nn.Conv1d(32, 64, 1)), "Conv1d"),
        (lambda m: m.blocks[0].out.register_forward_hook(lambda *_: None), "hooks"),
        (lambda m: m.blocks[0].out.register_forward_pre_hook(lambda *_: None), "hooks"),
        (lambda m: setattr(m.blocks[0].out, "forward", lambda x: x), "forward on the instance"),
        (lambda m: setattr(m.blocks[0], "out", nn.Embedding(64, 32, max_norm=1.0)), "max_norm"),
    ],
)
def test_modules_that_cannot_be_replaced(saved, change, reason):
    module = Forecaster()
    change(module)
    problem = refused(module, saved[0])
    assert problem.tensor == "blocks.0.out" and reason in problem.found and problem.fix


def test_a_bias_that_one_side_lacks(saved):
    module = random_model()
    module.blocks[0].q_proj = nn.Linear(64, 32)
    assert "blocks.0.q_proj.bias" in refused(module, saved[0]).found
    assert "bias is missing" in str(refused(module, saved[0], tensors=False))
    bias = module.blocks[0].q_proj.bias.detach().clone()
    done = bitline.replace_linears(module, saved[0], strict=False)
    assert done.kept == ("blocks.0.q_proj.bias",) and torch.equal(module.blocks[0].q_proj.bias, bias)


def test_a_damaged_file(saved, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved[0] / name).read_bytes())
    tiny.rewrite(tmp_path, lambda t: t["blocks.1.v_proj.weight_scale"].fill_(torch.inf))
    assert refused(Forecaster(), tmp_path).tensor.startswith("blocks.1.v_proj")


def test_arguments_of_another_kind(saved):
    module, folder = Forecaster(), saved[0]
    for options in ({"dtype": torch.int8}, {"rename": "blocks"}, {"rename": lambda name: 3}):
        assert refused(module, folder, bitline.InputError, **options).expected
    refused(module, folder, bitline.PlatformError, device="cuda:77")
    with pytest.raises(bitline.InputError, match="torch module"):
        bitline.replace_linears("module", folder)
    module.blocks[0].bfloat16()
    assert "several dtypes" in str(refused(module, folder, bitline.InputError))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(bitline.InputError, match="lazy"):
        bitline.replace_linears(lazy, folder)
    with pytest.raises(bitline.CheckpointError, match="the module itself"):
        bitline.replace_linears(nn.Linear(64, 32, bias=False), folder, prefix="blocks.0.q_proj")


def test_two_layers_for_one_module(saved):
    assert "two tensors" in str(refused(Forecaster(blocks=1), saved[0], rename={"blocks.1": "blocks.0"}))


def test_nothing_is_logged_about_names_that_are_checked(saved, caplog):
    with caplog.at_level(logging.WARNING, "bitline"):
        bitline.replace_linears(Forecaster(), saved[0], dtype=torch.bfloat16)
    assert not [record for record in caplog.records if "not used" in record.message]

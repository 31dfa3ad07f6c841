"""vLLM's selection functions, family by family: foreign kernels, backends, forced and disabled kernels, and the log."""

import enum
import logging

import pytest
import torch
from test_linear_protocol import CASES, MP, matrix, quantized
from torch import nn

import bitline
from bitline.errors import InputError, NoKernelError
from bitline.kernels import linear, registry
from bitline.protocol import choosing
from bitline.protocol.adapter import protocol_class
from bitline.protocol.foreign_kernel import config_of, write_layer
from bitline.protocol.layer_kernel import FAMILIES
from bitline.protocol.layer_reader import read_layer
from bitline.select import Policy, choose

BF16 = torch.bfloat16
I8 = linear.Int8ScaledMMLinearLayerConfig(False, True, True)
BACKENDS = (
    "auto", "cutlass", "flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_cudnn", "flashinfer_b12x", "marlin", "triton",
    "deep_gemm", "torch", "aiter", "fbgemm", "emulation", "xpu", "cpu", "zentorch",
)  # fmt: skip


class Vendors(enum.Enum):
    CPU = 1
    CUDA = 2


@pytest.fixture(autouse=True)
def _forget():
    choosing._log_once.cache_clear()


@pytest.fixture
def register():
    names = []

    def add(kernel, *args, **kwargs):
        names.append(kernel.__name__)
        linear.register_linear_kernel(kernel, *args, **kwargs)

    yield add
    for name in dict.fromkeys(names):
        registry.unregister_kernel(name)


def foreign_kernel(family, **members):
    """A subclass of the family's base class, as a plug-in of an engine writes it. It keeps a dense weight in the layer."""

    def process(self, layer):
        layer.dense = nn.Parameter(read_layer(layer, self.config, self.names).dequantize(torch.float32), requires_grad=False)

    def apply(self, layer, x, bias=None):
        y = (x.float() @ layer.dense.t()).to(x.dtype)
        return y if bias is None else y + bias

    base = FAMILIES[family]
    own = {"can_implement": classmethod(lambda cls, config: (True, None)), "process_weights_after_loading": process,
           "apply_weights": apply, **members}  # fmt: skip
    return type(f"Foreign{family}", (base,), own)


@pytest.mark.parametrize(("scheme", "options", "family"), CASES)
def test_a_foreign_kernel_of_every_family_ranks_first_last_or_replaces(scheme, options, family, register):
    weight = quantized(scheme, options)
    config, kernel = config_of(weight.spec, family), foreign_kernel(family)
    runnable = lambda: [c.name for c in choose(weight.spec, "cpu").candidates if c.verdict]
    register(kernel, Vendors.CPU, family, "last")
    assert runnable()[-1] == kernel.__name__
    with pytest.raises(NoKernelError, match="registered already"):
        linear.register_linear_kernel(foreign_kernel(family), "cpu", family, "first")
    register(kernel, "cpu", family, "first", replace=True)
    assert runnable()[0] == kernel.__name__ and linear.choose_linear_kernel(config, "cpu").best.name == kernel.__name__
    other = foreign_kernel(family, apply_weights=lambda self, layer, x, bias=None: 0 * (x @ layer.dense.to(x.dtype).t()))
    x = matrix(2, 192, 3).to(BF16)
    made = linear.init_linear_kernel(config)
    assert isinstance(made, kernel) and getattr(linear, kernel.__name__) is kernel
    layer = write_layer(weight, family)
    made.process_weights_after_loading(layer)
    assert torch.equal(made.apply_weights(layer, x), (x.float() @ weight.dequantize(torch.float32).t()).to(BF16))
    assert bool(bitline.QuantLinear(weight)(x).any())
    register(other, "cpu", family, "first", replace=True)
    assert getattr(linear, kernel.__name__) is other and not bool(bitline.QuantLinear(weight)(x).any())


def test_a_foreign_kernel_with_a_minimum_capability(register):
    kernel = foreign_kernel("mp", get_min_capability=classmethod(lambda cls: 90))
    register(kernel, "cuda", "mp", "first")
    assert linear.choose_mp_linear_kernel(MP, 90) is kernel and linear.choose_mp_linear_kernel(MP, 80) is not kernel
    ok, reason = linear.is_supported_and_can_implement_kernel(kernel, MP, 80)
    assert not ok and "needs compute capability 90" in reason
    assert linear.is_supported_and_can_implement_kernel(kernel.__name__, MP, 90) == (True, "")


def test_a_foreign_kernel_that_raises_is_refused_and_selection_goes_on(register):
    def fails(cls, config):
        raise ValueError("no such hardware")

    register(foreign_kernel("mp", can_implement=classmethod(fails)), "cpu", "mp", "first")
    refused = next(c for c in linear.choose_linear_kernel(MP, "cpu").candidates if c.name == "Foreignmp")
    assert not refused.verdict and refused.verdict.reason == "ValueError: no such hardware"
    nothing = foreign_kernel("mp", can_implement=classmethod(lambda cls, config: None))
    register(nothing, "cpu", "mp", "first", replace=True)
    assert linear.choose_mp_linear_kernel(MP, "cpu") is not nothing


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_filters_fails_or_falls_back_in_every_family(name):
    for scheme, options, family in CASES:
        config = config_of(quantized(scheme, options).spec, family)
        for platform in ("cpu", "cuda:sm90", "cuda:sm100,flashinfer", "rocm:gfx942,aiter", "xpu"):
            soft = linear.choose_linear_kernel(config, platform, Policy(backend=name, strict=False))
            if soft.note or name == "auto":
                assert name == "auto" or "cannot run" in soft.note
            else:
                assert soft.best.backend == {"cpu": "native"}.get(name, name)
            if soft.note:
                with pytest.raises(ValueError, match=r"(?s)Failed to find.*backend"):
                    linear.choose_linear_kernel(config, platform, Policy(backend=name))


def test_every_kernel_has_a_backend():
    assert all(e.kernel.backend for e in registry.entries())
    with pytest.raises(ValueError, match="no kernel has"):
        linear.choose_mp_linear_kernel(MP, 90, Policy(backend="cutlas"))


def test_a_backend_without_a_kernel_for_the_family_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, "bitline"):
        for _ in range(3):
            linear.choose_mp_linear_kernel(MP, 90, Policy(backend="deep_gemm", strict=False))
    assert len(caplog.records) == 1 and "backend deep_gemm" in caplog.text and "no kernel for such layers" in caplog.text


def test_one_line_for_each_distinct_choice(caplog):
    with caplog.at_level(logging.INFO, "bitline"):
        for n in (64, 128, 64, 192):
            linear.init_linear_kernel(linear.MPLinearLayerConfig((256, n), (256, n), linear.uint4b8, BF16, 128, False, False))
    assert [r.levelname for r in caplog.records] == ["INFO"] and "mp layers run on" in caplog.text


def test_landing_on_emulation_warns_with_every_reason(caplog, monkeypatch):
    fast = frozenset(e.name for e in registry.entries() if not e.kernel.emulates)
    with caplog.at_level(logging.WARNING, "bitline"):
        made = linear.init_nvfp4_linear_kernel(policy=Policy(disabled=fast))
    assert made.impl.emulates and "emulated" in caplog.text
    families = [e for e in registry.entries() if not e.kernel.families or "nvfp4" in e.kernel.families]
    assert all(f"{e.name}: " in caplog.text for e in families if e.name in fast)


@pytest.mark.parametrize("init", ["mxfp4", "mxfp8", "nvfp4", "fp8", "int8"])
def test_every_init_function_gives_an_instance_of_its_family(init):
    key = (linear.kFp8DynamicTokenSym, linear.kFp8StaticChannelSym, (256, 256), BF16)
    made = getattr(linear, f"init_{init}_linear_kernel")(*{"fp8": key, "int8": (True, False, True)}.get(init, ()))
    assert isinstance(made, FAMILIES[init]) and made.get_min_capability() == -1
    assert isinstance(made.is_supported()[0], bool) and made.can_implement(made.config)[0]


def test_a_forced_kernel_by_class_by_name_and_for_one_init(caplog):
    forced = linear.choose_scaled_mm_linear_kernel(I8, None, "cpu", force_kernel=linear.ReferenceLinearKernel)
    assert forced.__name__ == "ReferenceLinearKernel"
    key = (linear.kFp8DynamicTokenSym, linear.kFp8StaticChannelSym, (64, 64), BF16, BF16)
    assert type(linear.init_fp8_linear_kernel(*key, force_kernel="ReferenceLinearKernel")).__name__ == "ReferenceLinearKernel"
    with caplog.at_level(logging.WARNING, "bitline"):
        made = linear.init_fp8_linear_kernel(*key, force_kernel="TorchInt8ScaledMMLinearKernel")
    assert type(made).__name__ != "TorchInt8ScaledMMLinearKernel" and "TorchInt8ScaledMMLinearKernel was asked for" in caplog.text
    with pytest.raises(NoKernelError, match="NoSuchKernel"):
        linear.choose_scaled_mm_linear_kernel(I8, None, "cpu", force_kernel="NoSuchKernel")
    choosing._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "bitline"):
        policy = Policy(disabled={"ReferenceLinearKernel"})
        kernel = linear.choose_scaled_mm_linear_kernel(I8, None, "cpu", "ReferenceLinearKernel", policy)
    assert kernel.__name__ != "ReferenceLinearKernel" and "disabled" in caplog.text


def test_possible_kernels_by_platform_and_unknown_ones():
    listed = {Vendors.CUDA: [linear.TritonInt8ScaledMMLinearKernel], Vendors.CPU: ["ReferenceLinearKernel"]}
    assert linear.choose_scaled_mm_linear_kernel(I8, listed, 90).__name__ == "TritonInt8ScaledMMLinearKernel"
    assert linear.choose_scaled_mm_linear_kernel(I8, listed, "cpu").__name__ == "ReferenceLinearKernel"
    with pytest.raises(ValueError, match="Failed to find a kernel that can implement the ScaledMM"):
        linear.choose_scaled_mm_linear_kernel(I8, listed, "xpu")
    with pytest.raises(NoKernelError, match="NoSuchKernel"):
        linear.choose_scaled_mm_linear_kernel(I8, ["NoSuchKernel"], 90)


def test_disabled_kernels_by_argument_with_blanks_and_of_other_families():
    best = linear.choose_mp_linear_kernel(MP, 90).__name__
    policy = Policy(disabled={f" {best} ", "CutlassFP8ScaledMMLinearKernel", ""})
    assert linear.choose_mp_linear_kernel(MP, 90, policy).__name__ != best
    ok, reason = linear.is_supported_and_can_implement_kernel(getattr(linear, best), MP, 90, policy)
    assert not ok and "disabled" in reason
    with pytest.raises(ValueError, match="NoSuchKernel"):
        linear.choose_mp_linear_kernel(MP, 90, Policy(disabled={"NoSuchKernel"}))


def test_batch_invariance_overrules_the_backend_with_a_note():
    for scheme, options, family in CASES:
        config = config_of(quantized(scheme, options).spec, family)
        for platform in ("cpu", "cuda:sm90", "cuda:sm100,flashinfer"):
            assert linear.choose_linear_kernel(config, platform, "batch_invariant").kernel.batch_invariant
    config = linear.NvFp4LinearLayerConfig()
    asked = Policy(backend="flashinfer_cutlass", batch_invariant=True)
    choice = linear.choose_linear_kernel(config, "cuda:sm100,flashinfer", asked)
    assert choice.best.backend == "emulation" and "batch invariance overrules it" in choice.note
    assert linear.choose_linear_kernel(config, "cuda:sm100", Policy(backend="emulation", batch_invariant=True)).note == ""
    with pytest.raises(NoKernelError, match="CutlassNvFp4LinearKernel cannot run"):
        choose(config.to_spec(), "cuda:sm100", Policy(kernel="CutlassNvFp4LinearKernel", batch_invariant=True))
    with pytest.raises(NoKernelError, match="unknown policy"):
        choose(config.to_spec(), "cpu", "batch-variant")


def test_the_lowest_cost_wins_and_priority_only_breaks_ties():
    for scheme, options, family in CASES:
        config = config_of(quantized(scheme, options, 4096, 4096).spec, family)
        for platform in ("cpu:avx512,amx", "cuda:sm80", "cuda:sm90", "rocm:gfx950", "xpu"):
            choice = linear.choose_linear_kernel(config, platform, Policy())
            able = [c for c in choice.candidates if c.verdict]
            modelled = [c.kernel.cost_basis(choice.platform) != "measured" for c in able]
            # On a GPU kernels that emulate come last, unless their cost was measured there.
            last = [c.kernel.emulates and platform[:3] != "cpu" and m for c, m in zip(able, modelled, strict=True)]
            assert last == sorted(last)
            for part in (False, True):
                same = [c for c, at_end in zip(able, last, strict=True) if at_end == part]
                assert same == sorted(same, key=lambda c: (c.score, -c.priority, c.name))


def test_parameter_names_in_every_form_of_vllm():
    listed = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    kernel = linear.ReferenceLinearKernel
    bound = protocol_class(registry.kernel_by_name("ReferenceLinearKernel"), "int8")
    roles = dict(zip(("w_q", "w_s", "i_s", "i_zp", "azp_adj"), listed, strict=True))
    assert bound(I8, *listed).names == bound(I8, layer_param_names=listed).names == roles
    assert bound(I8, **{f"{role}_param_name": name for role, name in roles.items()}).names == roles
    assert kernel(MP, "w", "s", None, None).names == {"w_q": "w", "w_s": "s"}
    with pytest.raises(ValueError, match="more names"):
        kernel(MP, *"abcde")
    with pytest.raises(ValueError, match="unknown parameter role"):
        kernel(MP, w_x_param_name="w")


def test_a_layer_that_differs_from_its_config_goes_to_the_next_best_kernel(caplog, register):
    """An int8 config may have no shape; a kernel for some shapes then refuses the layer when its weights are processed."""

    class Squares(registry.kernel_by_name("ReferenceLinearKernel")):
        emulates = False

        @classmethod
        def can_implement(cls, spec):
            return bitline.types.YES if spec.n == spec.k else bitline.types.no("not square")

        @classmethod
        def cost(cls, spec, platform, m):
            return 1e-9

    register(Squares, "cpu", "int8")
    weight = quantized("W8A8", {})
    layer, x = write_layer(weight, "int8"), matrix(3, 192, 1).to(BF16)
    made = linear.init_int8_linear_kernel(True, False, True)
    assert type(made).__name__ == "Squares"
    with caplog.at_level(logging.WARNING, "bitline"):
        made.process_weights_after_loading(layer)
    assert "not square" in caplog.text and layer._bitline_kernel == bitline.choose(weight.spec).best.name
    assert torch.equal(made.apply_weights(layer, x), bitline.QuantLinear(weight)(x))
    with pytest.raises(ValueError, match="cannot run this layer"):
        type(made)(I8).process_weights_after_loading(write_layer(weight, "int8"))


def test_processing_with_another_kernel_removes_the_first_ones_buffers():
    weight = quantized("W4A16", {"group_size": 32})
    config, layer = config_of(weight.spec, "mp"), write_layer(weight, "mp")
    first, second = linear.CPUWNA16LinearKernel, linear.ReferenceLinearKernel
    seen = []
    for kernel in (first, second, first):
        kernel(config).process_weights_after_loading(layer)
        seen.append(sorted(name for name, _ in layer.named_buffers()))
    assert seen[0] == seen[2] != seen[1]


def test_a_reloaded_weight_is_processed_again():
    one, two = quantized("W4A16", {"group_size": 32}), bitline.quantize(matrix(64, 192, 9).to(BF16), "W4A16", group_size=32)
    config, layer, x = config_of(one.spec, "mp"), write_layer(one, "mp"), matrix(3, 192, 1).to(BF16)
    made, other = linear.init_linear_kernel(config), write_layer(two, "mp")
    made.process_weights_after_loading(layer)
    for name, param in other.named_parameters():
        getattr(layer, name).load_column_parallel_weight(param.data)
    made.process_weights_after_loading(layer)
    assert torch.equal(made.apply_weights(layer, x), bitline.QuantLinear(two, kernel=type(made).__name__)(x))


def test_a_g_idx_that_the_config_does_not_announce_is_not_ignored():
    weight = quantized("W4A16", {"group_size": 32})
    config, layer = config_of(weight.spec, "mp"), write_layer(weight, "mp")
    regular = torch.arange(192) // 32
    for trivial in (regular, regular + 6, torch.zeros(192), torch.empty(0)):  # + 6: the shard of a second rank
        layer.weight_g_idx = nn.Parameter(trivial.int(), requires_grad=False)
        assert not read_layer(layer, config, {}).spec.act_order
    order = regular[torch.randperm(192, generator=torch.Generator().manual_seed(1))]
    layer.weight_g_idx = nn.Parameter(order.int(), requires_grad=False)
    found = read_layer(layer, config, {})
    assert found.spec.act_order
    expected = (weight.unpacked().float() - 8) * weight.scales()[:, order]
    assert torch.equal(found.dequantize(torch.float32), expected)
    layer.weight_g_idx = nn.Parameter((order + 3).int(), requires_grad=False)
    with pytest.raises(InputError, match="no scales for"):
        read_layer(layer, config, {})

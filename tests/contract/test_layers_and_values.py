"""The contract, sentences 16 to 29: configs against tensors, and the values of weights."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
import pytest
import torch
from bases import FAMILIES, LAYER, group, json_tensor, safetensors_bytes, torchao_metadata, write
from must import must
from outcomes import outcome, replace_file
from safetensors.torch import load_file

import bitline
from bitline import CheckpointError, native
from bitline.types import ActSpec, float4_e2m1, float8_e4m3fn, int8

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"


def read(path: Path) -> dict[str, bitline.QuantizedWeight]:
    return {record.name: record.weight() for record in bitline.open_checkpoint(path).layers()}


def refused(folder: Path, tensors: dict[str, Any], config: Any, match: str | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        read(write(folder, tensors, config))
    return caught.value


def changed(base: str, suffix: str, tensor: torch.Tensor | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base with one tensor of its layer replaced or removed."""
    tensors, config = FAMILIES[base]()
    name = f"{LAYER}.{suffix}"
    tensors = {key: value for key, value in tensors.items() if key != name}
    return (tensors if tensor is None else tensors | {name: tensor}), config


# ---- configs ------------------------------------------------------------------------------------------------------------


@must(16)
@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("gptq", {"quant_method": "mystery"}), ("gptq", {"quant_method": ""}), ("gptq", {"quant_method": 0}),
        ("gptq", {"quant_method": "aqlm"}), ("gptq", {"checkpoint_format": "mystery"}), ("gptq", {"format": "marlin"}),
        ("awq", {"version": "mystery"}), ("packed", {"format": "mystery"}), ("modelopt_nvfp4", {"quant_algo": "MYSTERY"}),
        ("auto_round", {"packing_format": "auto_round:mystery"}), ("variant_mxint4", {"packing_format": "auto_round:mystery"}),
        ("quark4", {"export": {"pack_method": "mystery"}}), ("quark4", {"export": {"weight_format": "mystery"}}),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_methods_and_formats(base, change, tmp_path):
    tensors, config = FAMILIES[base]()
    error = refused(tmp_path, tensors, config | change)
    value = next(iter(change.values()))
    value = next(iter(value.values())) if isinstance(value, dict) else value
    assert repr(value).lower() in str(error).lower() or (value and str(value).lower() in str(error))


# Options of other producers, and options that may have any value.
FREE = {
    ("auto-round", "checkpoint_format"), ("auto-round", "desc_act"), ("auto-round", "version"), ("auto-round", "zero_point"),
    ("compressed-tensors", "version"), ("hqq", "quant_config"),
}  # fmt: skip
GARBAGE: tuple[Any, ...] = ("mystery", -7, 2.5, ["mystery"], {"mystery": 1})
NAMES = ("ignore", "targets", "modules_to_not_convert", "layer_quant_config", "dynamic", "extra_config", "quantized_layers")
# Options of a Quark spec that the shapes of the tensors determine too, for scales and schemes without groups.
BY_SHAPE = ("dtype", "qscheme", "group_size", "ch_axis")


def options(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from options(inner, (*path, key))
    if path:
        yield path


def with_option(config: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = inner = json.loads(json.dumps(config))
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return config


def free(method: str, base: str, at: tuple[Any, ...]) -> bool:
    """Whether an option may have any value, or is a module name."""
    if (method, at[0]) in FREE or (at[0] in NAMES and len(at) > 1) or (len(at) > 1 and at[-2] == "targets"):
        return True
    if method != "quark":
        return False
    grouped = base in ("quark4", "quark_nvfp4") and at[-2:-1] != (1,)
    return len(at) < 3 or (at[-1] in BY_SHAPE and not grouped)


@must(17)
@pytest.mark.parametrize("base", [name for name in FAMILIES if name != "quark_by_name"])
def test_unknown_option_values_are_refused(base, tmp_path):
    """Every option in turn gets values that no producer writes."""
    tensors, config = FAMILIES[base]()
    write(tmp_path, tensors, config)
    accepted = []
    for at in options(config):
        if free(config["quant_method"], base, at):
            continue
        for garbage in GARBAGE[: 3 if at[-1] in NAMES else None]:
            replace_file(tmp_path / "config.json", json.dumps({"quantization_config": with_option(config, at, garbage)}).encode())
            with contextlib.suppress(CheckpointError):
                read(tmp_path)
                accepted.append((at, garbage))
    assert not [(at, value) for at, value in accepted if (at, value) != (("activation_scale_ub",), 2.5)]  # a valid number


@must(17)
@pytest.mark.parametrize(
    ("base", "at", "value"),
    [
        ("fp8_exponents", ("scale_fmt",), "ue4m3"), ("fp8_static", ("fmt",), "e3m4"), ("auto_round", ("act_bits",), "8"),
        ("auto_round_awq", ("act_bits",), 8), ("bnb4", ("bnb_4bit_quant_type",), "nf3"), ("bnb8", ("load_in_8bit",), "yes"),
        ("packed", ("config_groups", "group_0", "weights", "rotated"), True),
        ("packed", ("config_groups", "group_0", "lora"), {}),
        ("packed_act_order", ("config_groups", "group_0", "weights", "actorder"), "mystery"), ("hqq", ("quant_config",), 4),
        ("gpt_oss", ("modules_to_not_convert",), "lm_head"), ("gptq", ("dynamic",), {"-:.*gate": "no"}),
        ("quark_int8", ("global_quant_config", "input_tensors", "is_dynamic"), "false"),
        ("quark_int4", ("global_quant_config", "weight", "symmetric"), "no"),
        ("quark_fp4", ("global_quant_config", "weight", "scale_format"), "e9m9"),
        ("quark_nvfp4", ("global_quant_config", "input_tensors", 0, "ch_axis"), 0), ("gptq", ("pack_dtype",), "int64"),
        ("variant_divided", ("weight_scale_semantics",), "mystery"),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_option_values_are_named(base, at, value, tmp_path):
    tensors, config = FAMILIES[base]()
    error = refused(tmp_path, tensors, with_option(config, at, value))
    assert str(at[-1]) in str(error) or str(value) in str(error)


@must(17)
@pytest.mark.parametrize(
    ("base", "option", "value"),
    [("variant_ao_mx", "is_swizzled_scales", "yes"), ("variant_ao_mx", "is_swizzled_scales", 1),
     ("torchao_fp8", "act_quant_kwargs", 8),
     ("variant_ao_nvfp4", "act_quant_kwargs", {"_type": "QuantizeTensorToNVFP4Kwargs"}), ("torchao", "target_dtype", "int4"),
     ("torchao", "activation_quantization", "mystery"), ("torchao", "block_size", 32),
     ("variant_ao_mx", "elem_dtype", "mystery")],
    ids=str,
)  # fmt: skip
def test_unknown_values_in_a_torchao_description(base, option, value, tmp_path):
    tensors, config = FAMILIES[base]()
    kind, data = (json.loads(tensors["__metadata__"][f"{LAYER}.weight"])[key] for key in ("_type", "_data"))
    text = json.dumps({"_type": kind, "_data": data | {option: value}})
    error = str(refused(tmp_path, tensors | {"__metadata__": {f"{LAYER}.weight": text}}, config))
    assert option in error or str(value) in error


@must(18)
@pytest.mark.parametrize("change", [{"checkpoint_format": "gptq_v2"}, {"sym": True}], ids=str)
def test_two_configs_that_contradict_each_other(change, tmp_path):
    """No tensor shows it: zero points would be off by one, or ignored."""
    tensors, config = FAMILIES["gptq"]()
    write(tmp_path, tensors, config)
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    assert outcome(tmp_path) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match="contradict each other") as caught:
        read(tmp_path)
    assert caught.value.field in change


@must(18)
@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("gptq", {"bits": 8}), ("gptq", {"bits": 3}), ("gptq", {"group_size": 16}), ("awq", {"bits": 8}),
        ("awq", {"group_size": 64}),
        ("auto_round", {"bits": 2}), ("gemv", {"group_size": 64}), ("fp8_block", {"weight_block_size": [16, 16]}),
        ("modelopt_nvfp4", {"quant_algo": "FP8"}), ("gptq", {"quant_method": "awq", "checkpoint_format": None}),
        ("awq", {"quant_method": "gptq"}),
        ("packed", {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}),
        ("fp8", {"quant_method": "gptq", "bits": 4, "format": None}), ("gptq", {"quant_method": "fp8"}),
        ("hqq", {"quant_method": "bitsandbytes"}),
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_contradict_the_tensors(base, change, tmp_path):
    tensors, config = FAMILIES[base]()
    assert refused(tmp_path, tensors, config | change).tensor


@must(19)
@pytest.mark.parametrize(
    ("base", "suffixes"),
    [
        ("gptq", "qweight qzeros scales g_idx bias"), ("awq", "qweight qzeros scales"), ("gemv", "qweight qzeros scales"),
        ("packed", "weight_packed weight_scale weight_zero_point weight_shape weight_g_idx"),
        ("int8", "weight_scale input_scale input_zero_point"), ("fp8", "weight_scale input_scale"),
        ("nvfp4", "weight_packed weight_scale weight_global_scale input_global_scale"), ("mxfp4", "weight_packed weight_scale"),
        ("fp8_block", "weight_scale_inv"), ("modelopt_nvfp4", "weight_scale weight_scale_2 input_scale"),
        ("bnb4", "weight weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map"), ("bnb8", "SCB"),
        ("quark4", "weight weight_scale weight_zero_point"), ("hqq", "W_q scale zero shape packing axis group_size"),
        ("torchao", "_weight_qdata _weight_scale _weight_zero_point"),
    ],
)  # fmt: skip
def test_tensors_of_another_dtype_or_shape(base, suffixes, tmp_path):
    for suffix in suffixes.split():
        stored = FAMILIES[base]()[0][f"{LAYER}.{suffix}"]
        others = [stored.to(torch.float64 if stored.dtype != torch.float64 else torch.int64), torch.cat([stored.reshape(-1)] * 3)]
        others += [stored.reshape(*stored.shape, 1, 1, 1), stored[:0] if stored.dim() else stored.reshape(1)[:0]]
        for other in others:
            error = refused(tmp_path, *changed(base, suffix, other))
            assert error.tensor and error.tensor.startswith(LAYER), (suffix, error)


@must(20)
@pytest.mark.parametrize("base", FAMILIES)
def test_no_layer_goes_missing(base, tmp_path):
    """Without one of its tensors a layer is refused, or is still there."""
    tensors, config = FAMILIES[base]()
    names = {record.name for record in bitline.open_checkpoint(write(tmp_path, tensors, config)).layers()}
    for name in tensors:
        if name == "__metadata__":
            continue
        write(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name}, config)
        with contextlib.suppress(CheckpointError):
            assert read(tmp_path).keys() == names, f"without {name}"


@must(20)
@pytest.mark.parametrize("base", [b for b in FAMILIES if b not in ("bnb_as_bfloat16", "gpt_oss")])
def test_codes_without_a_config_are_refused(base, tmp_path):
    tensors, _ = FAMILIES[base]()
    if not any(name.endswith((".qweight", ".weight_packed", ".W_q", "_qdata", ".weight")) for name in tensors):
        pytest.skip("its codes have other names")
    refused(tmp_path, tensors, None, "does not account for")


@must(21)
@pytest.mark.parametrize(
    ("base", "suffix", "change"),
    [
        ("int4", "weight", lambda t: t.fill_(8)), ("int4", "weight", lambda t: t.fill_(-9)),
        ("torchao", "_weight_qdata", lambda t: t.fill_(8)), ("torchao", "_weight_zero_point", lambda t: t.fill_(-9)),
        ("packed_old_zeros", "weight_zero_point", lambda t: t.fill_(8)), ("gptq", "g_idx", lambda t: t.fill_(2)),
        ("gptq", "g_idx", lambda t: t.fill_(-3)), ("packed_act_order", "weight_g_idx", lambda t: t.fill_(2)),
        ("quark_int2", "weight", lambda t: t.fill_(2)), ("quark_int8", "weight_zero_point", lambda t: t.fill_(1)),
        ("hqq", "axis", lambda t: t.fill_(2)), ("bnb4", "weight.quant_map", lambda t: t.fill_(0.5)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_values_out_of_range_are_refused(base, suffix, change, tmp_path):
    value = change(FAMILIES[base]()[0][f"{LAYER}.{suffix}"].clone())
    assert refused(tmp_path, *changed(base, suffix, value)).tensor == f"{LAYER}.{suffix}"


@must(22)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("base", FAMILIES)
def test_scales_are_finite(base, value, tmp_path):
    """And biases, offsets and activation scales. All other floats of a base are codes."""
    tensors, config = FAMILIES[base]()
    codes = ("weight", "weight_packed", "W_q", "_weight_qdata", "qweight")
    for name, tensor in tensors.items():
        if isinstance(tensor, dict) or not tensor.dtype.is_floating_point or name.rpartition(".")[2] in codes:
            continue
        if tensor.dtype.itemsize == 1 and (tensor.dtype == torch.float8_e8m0fnu or value == value):
            continue  # E8M0 and E4M3 have no infinity
        bad = tensor.clone().float()
        bad.view(-1)[0] = value
        write(tmp_path, tensors | {name: bad.to(tensor.dtype)}, config)
        try:
            weights = read(tmp_path)
        except CheckpointError as error:
            assert error.tensor
            continue
        kept = [part for weight in weights.values() for part in weight.tensors().values() if part.dtype.is_floating_point]
        assert all(torch.isfinite(part.float()).all() for part in kept), name
        assert all(torch.isfinite(weight.dequantize()).all() for weight in weights.values()), name


@must(22)
def test_the_nan_of_e8m0_reaches_the_weight(tmp_path):
    scale = torch.full((32, 2), 120, dtype=torch.uint8)
    scale[3, 1] = 255
    weight = read(write(tmp_path, *changed("mxfp4", "weight_scale", scale)))[LAYER].dequantize()
    assert weight[3, 32:].isnan().all() and weight.isnan().sum() == 32


@must(22)
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_zero_and_negative_scales_are_valid(value, tmp_path):
    write(tmp_path, *changed("gptq", "scales", torch.full((2, 32), value).half()))
    assert outcome(tmp_path) is None


@must(23)
def test_ignored_modules_stay_dense_and_a_contradiction_is_a_warning(tmp_path):
    tensors, config = FAMILIES["packed"]()
    plain = {"lm_head.weight": torch.randn(8, 64).half(), "model.norm.weight": torch.ones(64)}
    checkpoint = bitline.open_checkpoint(write(tmp_path, tensors | plain, config))
    assert set(checkpoint.dense_names()) == set(plain)
    assert [record.name for record in checkpoint.layers()] == [LAYER] and checkpoint.layers()[0].oddities == ()
    assert torch.equal(checkpoint.read("lm_head.weight"), plain["lm_head.weight"])
    for base, key in (("packed", "ignore"), ("awq", "modules_to_not_convert"), ("fp8_static", "ignored_layers"),
                      ("modelopt_nvfp4", "ignore"), ("quark4", "exclude")):  # fmt: skip
        tensors, config = FAMILIES[base]()
        (record,) = bitline.open_checkpoint(write(tmp_path, tensors, config | {key: [LAYER]})).layers()
        assert record.weight() and any("not quantized" in warning or "ignore" in warning for warning in record.oddities), base


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
SCHEMES: dict[str, tuple[str, dict[str, Any] | None, ActSpec | None]] = {
    "none": ("packed", None, None),
    "int8 static": ("int8", None, ActSpec(int8, False, "tensor", symmetric=False)),
    "fp8 static": ("fp8", None, ActSpec(float8_e4m3fn, False, "tensor")),
    "fp8 dynamic": ("fp8_rows", None, ActSpec(float8_e4m3fn, True, "token")),
    "int8 dynamic": ("int4", None, ActSpec(int8, True, "token")),
    "int8 dynamic asymmetric": ("int4", {"symmetric": False}, ActSpec(int8, True, "token", symmetric=False)),
    "fp8 groups": ("fp8_block", None, ActSpec(float8_e4m3fn, True, "group", 32)),
    "fp8 ue8m0": ("fp8_exponents", None, ActSpec(float8_e4m3fn, True, "group", 32, scale="e8m0")),
    "nvfp4": ("nvfp4", None, ActSpec(float4_e2m1, True, "group", 16, scale="e4m3")),
    "modelopt": ("modelopt_fp8", None, ActSpec(float8_e4m3fn, False, "tensor")),
    "quark": ("quark_int8", None, ActSpec(int8, False, "tensor")),
}  # fmt: skip


@must(24)
@pytest.mark.parametrize("name", SCHEMES)
def test_activation_quantization_is_in_the_spec(name, tmp_path):
    base, change, act = SCHEMES[name]
    tensors, config = FAMILIES[base]()
    if change:
        config["config_groups"]["group_0"]["input_activations"] |= change
    (record,) = bitline.open_checkpoint(write(tmp_path, tensors, config)).layers()
    assert record.spec.act == act == record.weight().spec.act
    if act is not None and not act.dynamic:
        assert record.weight().input_scale is not None and (record.weight().input_zero is None) == act.symmetric


@must(24)
@pytest.mark.parametrize(
    "acts",
    [{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8], "dynamic": True},
     {"num_bits": 3, "type": "int", "strategy": "token", "dynamic": True}, {"num_bits": 8, "strategy": "channel"}],
    ids=str,
)  # fmt: skip
def test_activations_that_an_actspec_cannot_express_are_refused(acts, tmp_path):
    tensors, _ = FAMILIES["int8"]()
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    refused(tmp_path, tensors, group(weights, acts, format="int-quantized"), "not supported")


# ---- values -------------------------------------------------------------------------------------------------------------


def same(one: dict[str, bitline.QuantizedWeight], two: dict[str, bitline.QuantizedWeight]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].spec == two[name].spec and one[name].tensors().keys() == two[name].tensors().keys()
        and all(torch.equal(_bytes(part), _bytes(two[name].tensors()[field])) for field, part in one[name].tensors().items())
        for name in one
    )  # fmt: skip


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@must(25)
@pytest.mark.parametrize("base", FAMILIES)
def test_a_layer_is_independent_of_sharding_and_order(base, tmp_path):
    tensors, config = FAMILIES[base]()
    whole = read(write(tmp_path, tensors, config))
    (tmp_path / "model.safetensors").unlink()
    metadata = {"__metadata__": tensors["__metadata__"]} if "__metadata__" in tensors else {}
    names = [name for name in tensors if name != "__metadata__"]
    files = {f"{i}.safetensors": names[::-1][i::3] for i in range(3)}
    for file, part in files.items():
        (tmp_path / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part} | metadata))
    assert same(read(tmp_path), whole)
    weight_map = {name: file for file, part in files.items() for name in part}
    replace_file(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    assert same(read(tmp_path), whole)


@must(26)
@pytest.mark.parametrize("base", FAMILIES)
def test_shards_concatenate_to_the_whole(base, tmp_path):
    for weight in read(write(tmp_path, *FAMILIES[base]())).values():
        whole = weight.dequantize()
        for dim in (0, 1):
            for world in (2, 3):
                shards = [weight.shard(dim, rank, world).dequantize() for rank in range(world)]
                assert torch.equal(_bytes(torch.cat(shards, dim)), _bytes(whole))


@must(26)
@pytest.mark.parametrize("kind", bases_gguf.TYPES)
def test_shards_of_every_ggml_type(kind, tmp_path):
    replace_file(tmp_path / "model.gguf", bases_gguf.file(kind)[0])
    ((_, weight),) = read(tmp_path).items()
    for dim, world in ((0, 4), (1, 3)):
        shards = [weight.shard(dim, rank, world).dequantize() for rank in range(world)]
        assert torch.equal(torch.cat(shards, dim), weight.dequantize())


@must(27)
@pytest.mark.parametrize("base", [*FAMILIES, *bases_gguf.TYPES])
def test_reading_gives_the_same_bits_each_time(base, tmp_path, monkeypatch):
    """A second time, with another number of threads, and without the native core."""
    if base in FAMILIES:
        write(tmp_path, *FAMILIES[base]())
    else:
        replace_file(tmp_path / "model.gguf", bases_gguf.file(base)[0])
    first, threads = read(tmp_path), torch.get_num_threads()
    assert same(read(tmp_path), first)
    try:
        torch.set_num_threads(3 if threads != 3 else 2)
        assert same(read(tmp_path), first)
    finally:
        torch.set_num_threads(threads)
    native.core()
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setattr(native, "_reason", "disabled by a test")
    assert native.core() is None and same(read(tmp_path), first)


@must(28)
@pytest.mark.parametrize("case", sorted(path.parent.name for path in FIXTURES.glob("*/expected.safetensors")))
def test_producers_weights_bit_for_bit(case):
    weights, expected = read(FIXTURES / case), load_file(FIXTURES / case / "expected.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name].dequantize(tensor.dtype), tensor) for name, tensor in expected.items())


@must(28)
@pytest.mark.parametrize(
    ("base", "suffix"),
    [("gptq", "scales"), ("awq", "scales"), ("packed", "weight_scale"), ("fp8_rows", "weight_scale"), ("nvfp4", "weight_scale"),
     ("fp8_block", "weight_scale_inv"), ("mxfp4", "weight_scale"), ("quark4", "weight_scale"),
     ("modelopt_w8a16", "weight_scale")],
)  # fmt: skip
def test_scales_keep_their_bits(base, suffix, tmp_path):
    tensors, config = FAMILIES[base]()
    stored = tensors[f"{LAYER}.{suffix}"]
    scale = read(write(tmp_path, tensors, config))[LAYER].scale
    stored = stored.t() if base in ("gptq", "awq", "quark4") else stored
    assert scale.dtype.itemsize == stored.dtype.itemsize and torch.equal(_bytes(scale), _bytes(stored))


@must(29)
@pytest.mark.parametrize(
    ("base", "suffix", "says"),
    [("gptq", "lora_A", "lora_A"), ("packed", "weight_scale_2", "weight_scale_2"), ("fp8_per_row", "input_scale", "input_scale"),
     ("variant_ao_nvfp4", "_weight_act_pre_scale", "_weight_act_pre_scale"), ("bnb8", "smooth_scale", "smooth_scale")],
)  # fmt: skip
def test_unknown_tensors_of_a_module_are_a_warning_and_refused_when_it_is_read(base, suffix, says, tmp_path):
    tensors, config = FAMILIES[base]()
    (before,) = bitline.open_checkpoint(write(tmp_path, tensors, config)).layers()
    (record,) = bitline.open_checkpoint(write(tmp_path, *changed(base, suffix, torch.ones(1)))).layers()
    assert len(record.oddities) == len(before.oddities) + 1 and says in record.oddities[-1] and "not used" in record.oddities[-1]
    if suffix == "input_scale":  # known, and not needed by a dynamic scheme
        assert record.weight().spec == record.spec
        return
    with pytest.raises(bitline.CheckpointError, match=rf"nothing uses.*{suffix}"):
        record.weight()


@must(29)
@pytest.mark.parametrize(
    ("base", "change", "more"),
    [
        ("packed", {"transform_config": {"config_groups": {"R1": {}}}}, {}),
        ("auto_round_mxfp4", {"rotation_config": {"a": 1}}, {}),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}), ("packed", {"format": "marlin-24"}, {}),
        ("modelopt_nvfp4", {"quant_algo": "NVFP4_SVD"}, {}), ("gptq", {"is_marlin_format": True}, {}),
        ("quark4", {}, {"input_rotation": torch.ones(4)}), ("quark4", {}, {"input_prescale": torch.ones(4)}),
        ("hqq", {}, {"quant_scale": torch.tensor(1, dtype=torch.uint8)}), ("bnb8", {}, {"weight_format": torch.tensor(1).byte()}),
        ("bnb4", {}, {"weight.quant_state.bitsandbytes__nf4": json_tensor({"rotation": 1})}),
        ("torchao", {}, {"__metadata__": torchao_metadata(kind="Int4TilePackedTo4dTensor")}),
        ("fp8_static", {}, {"weight_zp": torch.ones(1)}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_unsupported_transforms_are_refused(base, change, more, tmp_path):
    tensors, config = copy.deepcopy(FAMILIES[base]())
    tensors |= {name if name.startswith("__") else f"{LAYER}.{name}": value for name, value in more.items()}
    refused(tmp_path, tensors, config | change)

"""Platforms: parsing, printing, detecting, rates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitline import Platform, PlatformError
from bitline.platform import CPU_FEATURES, PACKAGES, cpu_features, installed_packages

EXAMPLES = [
    "cpu", "cpu:avx2", "cpu:avx512,amx", "cpu:avx512_bf16,zen", "cpu:neon,dotprod,i8mm", "cpu:aarch64", "cpu:x86_64,cores=64",
    "cpu:zentorch,avx512", "cuda:sm70", "cuda:sm75", "cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm90", "cuda:sm100",
    "cuda:sm103", "cuda:sm120", "cuda:sm121", "cuda:sm90,flashinfer,humming", "rocm:gfx90a", "rocm:gfx942", "rocm:gfx950",
    "rocm:gfx1100", "rocm:gfx1151", "rocm:gfx1201", "rocm:gfx942,aiter", "xpu", "xpu:vllm_xpu_kernels",
    "cpu:avx2,no_native",
]  # fmt: skip


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_round_trip(text):
    platform = Platform.parse(text)
    assert Platform.parse(str(platform)) == platform and hash(platform) == hash(Platform.parse(text))
    assert platform.vendor == text.partition(":")[0]
    rates = platform.rates
    assert all(rates.of(kind) > 0 for kind in ("bf16", "fp16", "fp32", "int8", "fp8")) and rates.bandwidth > 1e9


@given(
    features=st.sets(st.sampled_from(CPU_FEATURES)),
    packages=st.sets(st.sampled_from(sorted(PACKAGES))),
    cores=st.integers(1, 500),
)
def test_any_cpu_round_trip(features, packages, cores):
    words = sorted(features) + sorted(packages) + [f"cores={cores}"]
    platform = Platform.parse("cpu:" + ",".join(words))
    assert platform.features >= features and platform.packages == packages and platform.cores == cores
    assert Platform.parse(str(platform)) == platform


def test_implied_features_and_architectures():
    amx = Platform.parse("cpu:amx")
    assert amx.features >= {"amx", "avx512", "avx512_bf16", "avx512_vnni", "avx2"} and amx.arch == "x86_64"
    assert Platform.parse("cpu:i8mm").arch == "aarch64"
    assert Platform.parse(" CUDA:SM_90a ").arch == "sm90" and Platform.parse("cuda:sm90").capability == 90
    assert Platform.parse("cuda:sm120").capability == 120 and Platform.parse("rocm:gfx942").capability == 0
    for text, device in (("cpu", "cpu"), ("cuda:sm90", "cuda"), ("rocm:gfx942", "cuda"), ("xpu", "xpu")):
        platform = Platform.parse(text)
        assert platform.device_type == device and ("triton" in platform.packages) == (text != "cpu")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "unknown platform"), ("tpu", "'tpu'"), ("cuda", "no architecture"), ("rocm:", "no architecture"),
        ("cuda:gfx942", "gfx942"),
        ("rocm:sm90", "sm90"), ("cuda:sm9", "sm9"), ("cpu:avx1024", "avx1024"), ("cpu:sm90", "sm90"), ("xpu:avx512", "avx512"),
        ("cpu:cores=0", "cores=0"), ("cpu:cores=x", "cores=x"), ("cuda:sm90,notapackage", "notapackage"),
        ("rocm:gfxzzz", "gfxzzz"),
    ],
)  # fmt: skip
def test_unknown_words_are_named(text, word):
    with pytest.raises(PlatformError, match=word) as caught:
        Platform.parse(text)
    assert "expected" in str(caught.value)


def test_an_unknown_architecture_has_its_nearest_older_relative_s_rates():
    assert Platform.parse("cuda:sm87").rates == Platform.parse("cuda:sm86").rates
    assert Platform.parse("cuda:sm110").rates == Platform.parse("cuda:sm103").rates
    assert Platform.parse("rocm:gfx943").rates == Platform.parse("rocm:gfx942").rates
    assert Platform.parse("cuda:sm60").rates.bandwidth > 0


def test_more_cores_are_not_slower():
    few, many = (Platform.parse(f"cpu:avx512,cores={c}").rates for c in (2, 16))
    assert many.bf16 > few.bf16 and many.bandwidth > few.bandwidth
    avx2, avx512, bf16, amx = (Platform.parse(f"cpu:{f}").rates.bf16 for f in ("avx2", "avx512", "avx512_bf16", "amx"))
    assert avx2 <= avx512 <= min(bf16, amx)  # a virtual core with AMX is measured below a Zen 5 core


def test_detect_the_cpu(monkeypatch):
    here = Platform.detect()
    assert here.vendor == "cpu" and here.cores == torch.get_num_threads() and here.features <= set(CPU_FEATURES)
    assert here == Platform.detect("cpu") == Platform.detect(torch.device("cpu"))
    assert here.packages == frozenset(installed_packages()) and set(installed_packages()) <= set(PACKAGES)
    assert not here.interpreted or "TRITON_INTERPRET" in __import__("os").environ
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Platform.detect().interpreted
    if here.arch == "x86_64" and "avx512" in cpu_features():
        assert "avx2" in cpu_features()


def test_detect_a_device_that_is_not_here():
    if not torch.cuda.is_available():
        with pytest.raises(PlatformError, match="GPU"):
            Platform.detect("cuda")
    with pytest.raises(PlatformError, match="no platform"):
        Platform.detect("meta")

"""How each kernel is tested on each platform: (platform, how, test). docs/kernels.md is generated from this and the kernels."""

CI = "runs in CI"
INTERPRETED = "interpreted in CI"
COMPILED = "compiled in CI"
H200 = "run on an H200"
PACKAGE = "runs in CI with its package"
CONTRACT = "called in CI as its package's signature says"
TORCH = "called in CI as torch's own checks ask"

_COMPILE = "tests/kernels/test_triton_compile.py::test_compiles"
_W4 = "tests/kernels/test_triton_w4a16.py::test_conformance"
_MINIFLOAT = "tests/kernels/test_triton_minifloat.py::"
_RDNA = "tests/kernels/test_triton_w4a16.py::test_amd_tile_configs"
_HOPPER = "tests/kernels/test_hopper_compile.py::test_compiles"
_GPU = "tests/gpu/test_kernels_gpu.py::"
_TORCH_CPU = "tests/kernels/test_torch_cpu.py::test_through_a_layer"
_EMULATION = "tests/kernels/test_emulation.py::test_a_family_is_emulated_exactly"
_FP8 = _GPU + "test_fp8_conformance"
_SCALED = "tests/kernels/test_triton_scaled_mm.py::"
_ZEN = "tests/providers/real_zentorch.py::"
_FLASHINFER = "tests/providers/test_flashinfer.py::test_computes_what_the_spec_says"
_MICRO = "tests/kernels/test_torch_microscaled.py::test_computes_what_the_spec_says"
_GPUS = "tests/providers/test_gpu_providers.py::"
_ARK = "tests/providers/real_ark.py::"
_XPU = "tests/providers/test_xpu.py::"
_HUMMING = "tests/providers/test_humming.py::test_computes_what_the_spec_says"

_HUMMING_GPU = "tests/gpu/test_humming_gpu.py::test_conformance"
_BLOCK_FP8 = "tests/gpu/test_block_fp8_gpu.py::test_conformance"
_MARLIN = [
    ("cpu", INTERPRETED, _MINIFLOAT + "test_marlin_aliases"), ("cuda", COMPILED, _COMPILE), ("cuda", COMPILED, _HOPPER),
    ("cuda", H200, _GPU + "test_marlin_conformance"),
]  # fmt: skip
_INTEGERS = [("cuda", COMPILED, _COMPILE), ("cuda", COMPILED, _HOPPER)]

PROOFS: dict[str, list[tuple[str, str, str]]] = {
    "ReferenceLinearKernel": [
        ("cpu", CI, "tests/test_testing.py::test_the_reference_conforms"),
        ("cuda", H200, "tests/test_testing.py::test_the_reference_conforms_on_a_gpu"),
    ],
    "BatchInvariantLinearKernel": [
        ("cpu", CI, "tests/kernels/test_emulation.py::test_outputs_do_not_depend_on_the_batch"),
        ("cuda", H200, _GPU + "test_batch_invariant_conformance"),
    ],
    "EmulationNvFp4LinearKernel": [("cpu", CI, _EMULATION), ("cuda", H200, _GPU + "test_emulation_conformance")],
    "EmulationMxFp4LinearKernel": [("cpu", CI, _EMULATION), ("cuda", H200, _GPU + "test_emulation_conformance")],
    "EmulationMxfp6LinearKernel": [("cpu", CI, _EMULATION), ("cuda", H200, _GPU + "test_emulation_conformance")],
    "EmulationMxfp8LinearKernel": [("cpu", CI, _EMULATION), ("cuda", H200, _GPU + "test_emulation_conformance")],
    "CPUWNA16LinearKernel": [("cpu", CI, "tests/kernels/test_native_cpu.py::test_conformance")],
    "CPUBatchInvariantLinearKernel": [
        ("cpu", CI, "tests/kernels/test_native_cpu.py::test_batch_invariance")
    ],
    "TorchInt4PackLinearKernel": [("cpu", CI, _TORCH_CPU)],
    "TorchInt8PackLinearKernel": [("cpu", CI, _TORCH_CPU)],
    "TorchInt8ScaledMMLinearKernel": [("cpu", CI, _TORCH_CPU), ("cuda", H200, _GPU + "test_int8_conformance")],
    "ArkWNA16LinearKernel": [("cpu", PACKAGE, _ARK + "test_conforms")],
    "ArkInt8WNA16LinearKernel": [("cpu", PACKAGE, _ARK + "test_int8_activations_are_close_and_by_name_alone")],
    "ZentorchWNA16LinearKernel": [("cpu", PACKAGE, _ZEN + "test_w4a16_conforms")],
    "ZentorchInt8ScaledMMLinearKernel": [("cpu", PACKAGE, _ZEN + "test_w8a8_computes_by_its_own_definition")],
    "TritonW4A16LinearKernel": [
        ("cpu", INTERPRETED, _W4), ("cuda", COMPILED, _COMPILE), ("rocm", COMPILED, _COMPILE),
        ("cuda", H200, _GPU + "test_triton_conformance"),
    ],
    "TritonMinifloatLinearKernel": [
        ("cpu", INTERPRETED, _MINIFLOAT + "test_conformance"), ("cuda", COMPILED, _COMPILE), ("rocm", COMPILED, _COMPILE),
        ("cuda", H200, _GPU + "test_minifloat_conformance"),
    ],
    "TritonFakeQuantLinearKernel": [
        ("cpu", INTERPRETED, "tests/kernels/test_triton_fake_quant.py::test_conformance"), ("cuda", COMPILED, _COMPILE),
        ("rocm", COMPILED, _COMPILE), ("cuda", H200, _GPU + "test_fake_quant_conformance"),
    ],
    "TritonInt8ScaledMMLinearKernel": [
        ("cpu", INTERPRETED, _SCALED + "test_int8"), ("cuda", COMPILED, _COMPILE), ("rocm", COMPILED, _COMPILE),
        ("cuda", H200, _GPU + "test_int8_conformance"),
    ],
    "TritonFp8BlockScaledMMKernel": [
        ("cpu", INTERPRETED, _SCALED + "test_fp8_blocks"), ("cuda", COMPILED, _COMPILE), ("rocm", COMPILED, _COMPILE),
        ("cuda", H200, _GPU + "test_block_conformance"),
    ],
    "GluonHopperLinearKernel": [
        ("cuda", COMPILED, _HOPPER),
        ("cuda", H200, "tests/gpu/test_hopper_gpu.py::test_conformance"),
    ],
    "GluonHopperW4A8LinearKernel": [
        ("cuda", COMPILED, "tests/kernels/test_hopper_w4a8_compile.py::test_compiles"),
        ("cuda", H200, "tests/gpu/test_hopper_w4a8_gpu.py::test_conformance"),
    ],
    "GluonHopperScaledMMLinearKernel": [
        ("cuda", COMPILED, "tests/kernels/test_hopper_scaled_compile.py::test_compiles"),
        ("cuda", H200, "tests/gpu/test_hopper_scaled_gpu.py::test_conformance"),
    ],
    "PerTensorTorchFP8ScaledMMLinearKernel": [("cuda", H200, _FP8)],
    "RowWiseTorchFP8ScaledMMLinearKernel": [("cuda", H200, _FP8)],
    "ChannelWiseTorchFP8ScaledMMLinearKernel": [("cuda", H200, _FP8)],
    "BlockWiseTorchFP8ScaledMMLinearKernel": [("cuda", H200, _GPU + "test_block_conformance")],
    "CutlassInt8ScaledMMLinearKernel": [("cuda", H200, _GPU + "test_int8_conformance")],
    "CutlassFP8ScaledMMLinearKernel": [("cuda", H200, _FP8)],
    "CutlassFp8BlockScaledMMKernel": [("cuda", H200, _GPU + "test_block_conformance")],
    "MarlinNvFp4LinearKernel": _MARLIN,
    "MarlinMxFp4LinearKernel": _MARLIN,
    "MarlinMxfp8LinearKernel": _MARLIN,
    "MarlinFP8ScaledMMLinearKernel": _MARLIN,
    "MarlinLinearKernel": _INTEGERS,
    "MacheteLinearKernel": [("cuda", COMPILED, _HOPPER)],
    "ExllamaLinearKernel": _INTEGERS,
    "ConchLinearKernel": _INTEGERS,
    "RDNAHybridW4A16LinearKernel": [("rocm", COMPILED, _COMPILE)],
    "CPUInt8ScaledMMLinearKernel": [("cpu", CI, "tests/kernels/test_aliases.py::test_the_cpu_int8_kernel_conforms")],
    "CutlassW4A8LinearKernel": [("cuda", COMPILED, "tests/kernels/test_hopper_w4a8_compile.py::test_compiles")],
    "ROCmFP8ScaledMMLinearKernel": [("rocm", TORCH, "tests/kernels/test_torch_fp8_fnuz.py::test_computes_what_the_spec_says")],
    "RDNA3W4A16LinearKernel": [("cpu", INTERPRETED, _RDNA), ("rocm", COMPILED, _COMPILE)],
    "DeepGemmFp8BlockScaledMMKernel": [
        ("cuda", CONTRACT, _GPUS + "test_computes_what_the_spec_says"), ("cuda", H200, _BLOCK_FP8),
    ],
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": [
        ("cuda", CONTRACT, _GPUS + "test_dispatch_on_m"), ("cuda", H200, _BLOCK_FP8),
    ],
    "HummingLinearKernel": [("cuda", CONTRACT, _HUMMING), ("cuda", H200, _HUMMING_GPU)],
    "HummingInt8ScaledMMLinearKernel": [("cuda", CONTRACT, _HUMMING), ("cuda", H200, _HUMMING_GPU)],
    "HummingFP8ScaledMMLinearKernel": [("cuda", CONTRACT, _HUMMING), ("cuda", H200, _HUMMING_GPU)],
    "FbgemmNvFp4LinearKernel": [("cuda", CONTRACT, _GPUS + "test_computes_what_the_spec_says")],
    "AiterInt8ScaledMMLinearKernel": [("rocm", CONTRACT, _GPUS + "test_computes_what_the_spec_says")],
    "XPUwNa16LinearKernel": [("xpu", CONTRACT, _XPU + "test_computes_what_the_spec_says")],
    "XPUFP8ScaledMMLinearKernel": [("xpu", CONTRACT, _XPU + "test_computes_what_the_spec_says")],
    "XPUMxFp8LinearKernel": [("xpu", CONTRACT, _XPU + "test_computes_what_the_spec_says")],
    "XPUW4A8IntLinearKernel": [("xpu", CONTRACT, _XPU + "test_w4a8_is_right_to_half_precision")],
    "CutlassNvFp4LinearKernel": [("cuda", TORCH, _MICRO)],
    "TorchNvFp4LinearKernel": [("cuda", TORCH, _MICRO)],
    "TorchMxfp8LinearKernel": [("cuda", TORCH, _MICRO)],
    "FlashInferCutlassNvFp4LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
    "FlashInferTrtllmNvFp4LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
    "FlashInferCudnnNvFp4LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
    "FlashInferB12xNvFp4LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
    "FlashInferMxFp4LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
    "FlashInferCutlassMxfp8LinearKernel": [("cuda", CONTRACT, _FLASHINFER)],
}  # fmt: skip

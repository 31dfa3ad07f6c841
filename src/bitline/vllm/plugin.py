"""What Bitline registers in vLLM. Every part of vLLM and torch that is not public is named in DOORS, which tests hold."""

from __future__ import annotations

import hashlib

from vllm import envs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.platforms import current_platform

from bitline import tuning
from bitline.kernels import registry
from bitline.platform import Platform
from bitline.select import Policy
from bitline.version import __version__
from bitline.vllm import inductor, kernels
from bitline.vllm.config import BitlineConfig
from bitline.vllm.engine_args import install
from bitline.vllm.loader import BitlineModelLoader

# Attributes that have no promise of stability: (module, attribute).
DOORS = (
    ("vllm.envs", "environment_variables"),
    ("vllm.envs", "compile_factors"),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    ("vllm.model_executor.layers.quantization", "QUANTIZATION_METHODS"),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
    ("vllm.model_executor.layers.linear", "QKVParallelLinear"),
    ("vllm.forward_context", "get_forward_context"),
    *(("vllm.model_executor.layers.fused_moe", name) for name in ("RoutedExperts", "FusedMoEMethodBase", "GateLinear")),
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.track_weights_loading"),
    *(("vllm.model_executor.kernels.linear", table) for table in kernels.TABLES.values()),
    *(("torch._inductor.scheduler", f"SchedulerNode.{name}") for name in ("recompute_size_and_body", "set_read_writes")),
)


def register(mode: str) -> None:
    """Register everything once per process. mode: "kernels" or "all"."""
    if QUANTIZATION_METHODS.count("bitline") == 0:
        register_quantization_config("bitline")(BitlineConfig)
        register_model_loader("bitline")(BitlineModelLoader)
        # vLLM keeps compiled graphs in a cache folder. Ours hold a kernel's name and its layout, so a graph is only
        # valid for the same choice of kernels; vLLM's environment variables are part of the folder's name.
        envs.environment_variables["BITLINE_KERNELS"] = fingerprint
    install(serve_all=mode == "all")
    kernels.register()
    if current_platform.is_cpu():
        inductor.install()


def fingerprint() -> str:
    """A hash of all that a compiled graph depends on: what the choice of a kernel does, without the layer, and the compiler."""
    platform = kernels.this_platform()
    names = sorted(entry.name for entry in registry.entries())
    parts = [__version__, inductor.NAME, str(platform), repr(Policy.of(None)), *names]
    times = tuning.path_of(platform) if platform == Platform.detect(platform.vendor) else None
    if times is not None and times.is_file():
        parts.append(hashlib.sha256(times.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

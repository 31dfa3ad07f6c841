"""Runs models on ranks, each a process: python ranks.py RANK WORLD FOLDER DEVICE. The folder has cases.json.

DEVICE is cpu, with a gloo group, or cuda, with NCCL and a GPU for each rank.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import bitline
from bitline import native
from bitline.errors import BitlineError
from bitline.parallel import TensorParallel

IDS = [[1, 5, 9, 77, 3, 60, 22]]
SECONDS = 600


def logits(path: str, tp: Any, dtype: torch.dtype, kernel: str, ids: Any = IDS, **options: Any) -> tuple[torch.Tensor, Any]:
    """Of a checkpoint's model: (float32 [T, V], the model)."""
    policy = bitline.Policy() if kernel == "auto" else bitline.Policy(kernel=kernel, strict=False)
    model = bitline.load_model(path, dtype=dtype, policy=policy, tp=tp, native_step=False, **options)
    return forward(model, ids), model


def forward(model: Any, ids: Any = IDS) -> torch.Tensor:
    """float32 [T, V]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor(ids, device=model.device)).logits
    return logits[0].float().cpu()


def decoded(model: Any) -> tuple[torch.Tensor, int]:
    """Logits of a prompt of three tokens and of those after it, one by one: (float32 [T, V], native calls of decoder layers)."""
    core, cache, calls, rows = native.core(), transformers.DynamicCache(config=model.config), [], []
    step = core.decode_layers if core else None
    if core:  # (fields, scalars, layers, ...)
        core.decode_layers = lambda *a: calls.extend([1] * a[2]) or step(*a)
    with torch.inference_mode():
        for ids in (IDS[0][:3], *([token] for token in IDS[0][3:] * 4)):
            rows.append(model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1:].float())
    if core:
        core.decode_layers = step
    return torch.cat(rows), len(calls)


def held(model: Any) -> int:
    """Bytes of all parameters and of the packed layers' buffers."""
    packed = sum(m.packed_bytes() for m in model.modules() if hasattr(m, "packed_bytes"))
    return packed + sum(p.nbytes for p in model.parameters())


def greedy(model: Any, count: int, **options: Any) -> list[int]:
    """Tokens of transformers' own generation."""
    return model.generate(
        torch.tensor(IDS, device=model.device), max_new_tokens=count, do_sample=False, pad_token_id=0, **options
    )[0].tolist()


def exchanged(model: Any, tp: TensorParallel) -> list[int]:
    """Collective operations of a forward pass of one token, and the bytes that this rank gets from others."""
    found, gather, total = [0, 0], tp._gather_flat, tp.shared.sum if tp.shared else None

    def counted(function: Any, flat: torch.Tensor, *rest: Any) -> Any:
        if (result := function(flat, *rest)) is not None:
            found[0] += 1
            found[1] += (tp.world - 1) * flat.nbytes
        return result

    tp._gather_flat = functools.partial(counted, gather)  # type: ignore[method-assign]
    if tp.shared:
        tp.shared.sum = functools.partial(counted, total)  # type: ignore[method-assign]
    with torch.inference_mode():
        model(torch.tensor([[5]], device=model.device))
    tp._gather_flat = gather  # type: ignore[method-assign]
    if tp.shared:
        del tp.shared.sum
    return found


def shapes(model: Any) -> dict[str, list[int]]:
    """[N, K] of quantized linear layers, by the names that they have on one rank."""
    wrapped = (".layer.linear", ".linear", ".embedding")
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, bitline.QuantLinear) and ".experts." not in name:
            suffix = next((s for s in wrapped if name.endswith(s)), "")
            found[name.removesuffix(suffix)] = [module.spec.n, module.spec.k]
    return found


def experts(model: Any) -> dict[str, dict[str, Any]]:
    """Of each experts module, this rank's number of experts, their bytes, and pairs of token and expert of one token's pass."""
    found: dict[str, dict[str, Any]] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "num_experts"):
            count = module.num_experts
            found[name] = {"experts": count, "bytes": held(module)}
            note = lambda _m, args, n=name, e=count: found[n].update(pairs=int(((args[1] < e) & (args[2] != 0)).sum()))
            hooks.append(module.register_forward_pre_hook(note))  # after the one that leaves other ranks' experts out
    forward(model, [[5]])
    for hook in hooks:
        hook.remove()
    return found


def main(rank: int, world: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    results, said = {}, {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        tp = TensorParallel(
            exact_activation_scales=case.get("exact", True), expert_parallel=rank in case.get("expert_parallel", [])
        )
        if case.get("decode"):
            for how, native_step in (("native", True), ("modules", False)):
                model = bitline.load_model(case["path"], dtype=torch.bfloat16, tp=tp, native_step=native_step)
                results[f"{name} {how}"], calls = decoded(model)
                checked = [check.kernel for check in bitline.verify(model)]
                said[f"{name} {how}"] = {"calls": calls, "checked": checked.count("native decode step")}
            continue
        try:
            found, model = logits(case["path"], tp, getattr(torch, case["dtype"]), case["kernel"], case.get("ids", IDS),
                                  merge=case.get("merge", False), device=device)  # fmt: skip
        except BitlineError as error:
            said[name] = str(error)
            continue
        results[name] = found
        said[name] = {
            "bytes": held(model), "modules": sorted({type(m).__name__ for m in model.modules()}), "shapes": shapes(model),
            "exchanged": exchanged(model, tp), "unquantized": sum(p.nbytes for p in model.parameters()),
            "experts": experts(model), "read": sorted(model.bitline_checkpoint.source.reads),
        }  # fmt: skip
        if case.get("tokens"):
            said[name]["tokens"] = greedy(model, case["tokens"])
            said[name]["static"] = greedy(model, case["tokens"], cache_implementation="static")
    save_file(results, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def run(
    folder: Path, world: int, cases: dict[str, dict[str, Any]], device: str = "cpu"
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Start the ranks and wait for them: (logits by case, what else they found by case) of each rank."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world), str(folder), device], stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(error[-3000:] for error in errors)
    ranks = range(world)
    return [(load_file(folder / f"rank{r}.safetensors"), json.loads((folder / f"rank{r}.json").read_text())) for r in ranks]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

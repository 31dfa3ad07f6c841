"""The named attacks. Each is built in an empty folder from a small valid checkpoint; README.md says how to add one."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bases import (
    ARRAY,
    BOOL,
    F32,
    FAMILIES,
    I32,
    LAYER,
    PAIRS,
    Q4_K,
    Q8_0,
    STRING,
    TYPE_F32,
    U32,
    U64,
    entry,
    fp8,
    gguf_bytes,
    gptq,
    json_tensor,
    llama_folder,
    model_tensors,
    one_matrix,
    packed,
    pair,
    q8_0,
    safetensors_bytes,
    text,
    torchao,
    torchao_metadata,
    with_pair,
    write,
)  # fmt: skip

Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Attack:
    """One attack. says: a regular expression for the message. tensor, file: what the error names. See README.md for the rest."""

    name: str
    build: Build
    says: str = ""
    tensor: str | None = None
    file: str | None = None
    model: bool = False
    huge: bool = False
    harmless: bool | None = False


ATTACKS: list[Attack] = []


def attack(name: str, **facts: Any) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        ATTACKS.append(Attack(name, build, **facts))
        return build

    return add


def family(
    base: str, name: str, *, says: str = "", tensors: Any = None, config: Any = None, suffix: str | None = None, **facts: Any
):
    """An attack that edits the tensors (a function of the dict) or the config (a function, or values) of a base."""

    def build(folder: Path) -> Path:
        data, settings = FAMILIES[base]()
        if tensors:
            tensors(data)
        if callable(config):
            config(settings)
        elif config:
            settings.update(config)
        return write(folder, data, settings)

    ATTACKS.append(Attack(f"{base}-{name}", build, says, f"{LAYER}.{suffix}" if suffix else None, **facts))


def put(suffix: str, value: torch.Tensor | None):
    """Replace one tensor of the layer, or remove it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[f"{LAYER}.{suffix}"]
        else:
            tensors[f"{LAYER}.{suffix}"] = value

    return change


def poke(suffix: str, value: float, at: int = 3):
    """Replace one element of one tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{suffix}"].view(-1)[at] = value

    return change


TWO = {"a": torch.zeros(4), "b": torch.ones(4)}
PICKLE = b"cposix\nsystem\n(S'touch owned'\ntR."  # runs a command when it is loaded
DEEP = b"[" * 200_000 + b"]" * 200_000


# ---- one safetensors file ------------------------------------------------------------------------------------------------


def header(name: str, says: str, change: Any, tensor: str | None = None, **facts: Any) -> None:
    ATTACKS.append(
        Attack(f"header-{name}", lambda f: write(f, TWO, header=change), says, tensor, file="model.safetensors", **facts)
    )


def raw_file(name: str, says: str, change: Callable[[bytes], bytes], **facts: Any) -> None:
    def build(folder: Path) -> Path:
        path = folder / "model.safetensors"
        path.write_bytes(change(safetensors_bytes(TWO)))
        return path

    ATTACKS.append(Attack(f"file-{name}", build, says, file="model.safetensors", **facts))


raw_file("empty", "length is impossible", lambda raw: b"")
raw_file("truncated-in-its-length", "length is impossible", lambda raw: raw[:5])
raw_file("truncated-in-its-header", "length is impossible", lambda raw: raw[:40])
raw_file("truncated-in-its-data", "truncated", lambda raw: raw[:-3])
raw_file("with-bytes-after-it", "belong to no tensor", lambda raw: raw + b"x")
raw_file("header-length-zero", "length is impossible", lambda raw: bytes(8) + raw[8:])
raw_file("header-length-2^63", "length is impossible", lambda raw: struct.pack("<Q", 1 << 63) + raw[8:], huge=True)
raw_file("header-length-past-the-end", "length is impossible", lambda raw: struct.pack("<Q", len(raw)) + raw[8:])
raw_file("git-lfs-pointer", "git lfs pull", lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
raw_file("pickle-in-disguise", "not a safetensors file", lambda raw: b"\x80\x04" + PICKLE * 3)
raw_file("zip-in-disguise", "not a safetensors file", lambda raw: b"PK\x03\x04" + bytes(60))
raw_file("gguf-in-disguise", "not a safetensors file", lambda raw: gguf_bytes(PAIRS, *one_matrix()))

header("not-json", "not valid JSON", lambda h: b'{"a": ')
header("a-list", "header is not JSON", lambda h: b"[1, 2]")
header("not-utf8", "not valid JSON", lambda h: b'{"\xff\xfe": 1}')
header("key-twice", "given twice", lambda h: b'{"a": {}, "a": {}}')
header("nested-deeply", "nested too deeply", lambda h: b'{"a":' + DEEP + b"}")
header("nan", "not valid JSON", lambda h: b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}')
header("number-of-5000-digits", "not valid JSON", lambda h: b'{"a": {"shape": [' + b"9" * 5000 + b"]}}")
header("shape-negative", "shape is not valid", lambda h: h["a"].update(shape=[-4]), "a")
header("shape-fraction", "shape is not valid", lambda h: h["a"].update(shape=[4.0]), "a")
header("shape-truth-value", "shape is not valid", lambda h: h["a"].update(shape=[True]), "a")
header("shape-text", "shape is not valid", lambda h: h["a"].update(shape="4"), "a")
header("shape-overflows", "do not fit its shape", lambda h: h["a"].update(shape=[1 << 32, 1 << 32]), "a", huge=True)
header("shape-wraps-to-the-right-size", "do not fit its shape", lambda h: h["a"].update(shape=[(1 << 62) + 4]), "a", huge=True)
header("shape-of-65-dimensions", "shape is not valid", lambda h: h["a"].update(shape=[1] * 64 + [4]), "a")
header("shape-2^70", "shape is not valid", lambda h: h["a"].update(shape=[1 << 70]), "a")
header("shape-of-strides-that-overflow", "shape is not valid", tensor="c",
       change=lambda h: h.update(c={"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [32, 32]}))  # fmt: skip
header("dtype-unknown", "dtype is not known", lambda h: h["a"].update(dtype="F42"), "a")
header("dtype-number", "dtype is not known", lambda h: h["a"].update(dtype=7), "a")
header("dtype-of-another-size", "do not fit its shape", lambda h: h["a"].update(dtype="F64"), "a")
header("offsets-overlap", "overlaps", lambda h: h["b"].update(data_offsets=[8, 24]), "b")
header("offsets-leave-a-gap", "gap", lambda h: h["b"].update(data_offsets=[20, 36]), "b")
header("offsets-reversed", "data_offsets are not valid", lambda h: h["a"].update(data_offsets=[16, 0]), "a")
header("offsets-past-the-end", "gap|truncated", lambda h: h["b"].update(data_offsets=[1 << 60, (1 << 60) + 16]), huge=True)
header("offsets-missing", "data_offsets are not valid", lambda h: h["a"].pop("data_offsets") and None, "a")
header("entry-a-number", "dtype", lambda h: h.update(a=3), "a")
header("metadata-not-text", "__metadata__", lambda h: h.update(__metadata__={"a": 1}))
header("name-empty", "not printable", lambda h: h.update({"": h.pop("a")}))
header("name-moves-the-cursor", "not printable", lambda h: h.update({"\x1b[2Ja": h.pop("a")}))
header("name-of-a-million-characters", "not printable", lambda h: h.update({"a" * 1_000_000: h.pop("a")}))


# ---- special files -------------------------------------------------------------------------------------------------------


def special_file(name: str, says: str, make: Callable[[Path], Any], entry_name: str = "model.safetensors", **facts: Any) -> None:
    """Something made by `make` at the path of a weights file, opened as the folder and by its own path."""

    def build(folder: Path, whole: bool) -> Path:
        make(folder / entry_name)
        return folder if whole else folder / entry_name

    for whole in (True, False):
        where = "in-a-folder" if whole else "opened-directly"
        ATTACKS.append(Attack(f"{name}-{where}", lambda f, w=whole: build(f, w), says, **facts))


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is limited to about a hundred characters
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


ANY = "no weights|neither a file|no such file|cannot|no file|too short"
for suffix in ("safetensors", "gguf"):
    special_file(f"pipe-{suffix}", ANY, os.mkfifo, f"model.{suffix}")
    special_file(f"socket-{suffix}", ANY, _socket, f"model.{suffix}")
    special_file(f"device-{suffix}", ANY, lambda p: p.symlink_to("/dev/zero"), f"model.{suffix}")
    special_file(f"link-to-itself-{suffix}", ANY, lambda p: p.symlink_to(p.name), f"model.{suffix}")
    special_file(f"link-to-nothing-{suffix}", ANY, lambda p: p.symlink_to("gone"), f"model.{suffix}")
    special_file(f"folder-{suffix}", ANY, lambda p: p.mkdir(), f"model.{suffix}")
special_file("pickle", "pickle is never loaded", lambda p: p.write_bytes(PICKLE), "pytorch_model.bin")
special_file("checkpoint-file", "pickle is never loaded", lambda p: p.write_bytes(PICKLE), "model.ckpt")


@attack("folder-empty", says="no weights")
def _(folder: Path) -> Path:
    return folder


@attack("path-missing", says="no such file")
def _(folder: Path) -> Path:
    return folder / "gone"


@attack("path-with-nul", says="cannot|no such file")
def _(folder: Path) -> Path:
    return folder / "model\0.safetensors"


@attack("path-too-long", says="cannot|no such file")
def _(folder: Path) -> Path:
    return folder / ("m" * 5000 + ".safetensors")


@attack("unreadable", says="cannot be read", file="model.safetensors")
def _(folder: Path) -> Path:
    path = write(folder, TWO) / "model.safetensors"
    path.chmod(0)
    return path


@attack("safetensors-named-gguf", says="not a GGUF file", file="model.gguf")
def _(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(safetensors_bytes(TWO))
    return folder


# ---- index and shards ----------------------------------------------------------------------------------------------------


def index(name: str, says: str, weight_map: Any = None, *, raw: bytes | None = None, change: Any = None, **facts: Any) -> None:
    def build(folder: Path) -> Path:
        for tensor, file in (("a", "one.safetensors"), ("b", "two.safetensors")):
            (folder / file).write_bytes(safetensors_bytes({tensor: TWO[tensor]}))
        text = raw if raw is not None else json.dumps({"weight_map": weight_map}).encode()
        (folder / "model.safetensors.index.json").write_bytes(text)
        if change:
            change(folder)
        return folder

    facts.setdefault("file", "model.safetensors.index.json")
    ATTACKS.append(Attack(f"index-{name}", build, says, **facts))


WEIGHT_MAP = {"a": "one.safetensors", "b": "two.safetensors"}
index("names-a-missing-shard", "missing", WEIGHT_MAP | {"c": "three.safetensors"})
for what, shard in {
    "leaves-the-folder": "../one.safetensors", "leaves-it-in-a-subfolder": "x/../../one.safetensors", "absolute": "/etc/passwd",
    "backslash": "..\\one.safetensors", "nul": "one\0.safetensors", "empty": "", "dot": ".", "drive": "C:one.safetensors",
    "line-end": "one.safetensors\n",
}.items():  # fmt: skip
    index(f"shard-{what}", "outside the checkpoint's folder", WEIGHT_MAP | {"a": shard})
index("shard-a-number", "outside the checkpoint's folder", WEIGHT_MAP | {"a": 1})
index("shard-name-too-long", "cannot be read", WEIGHT_MAP | {"a": "s" * 5000}, file=None)
index("shard-is-a-pipe", "missing", WEIGHT_MAP | {"c": "pipe"}, change=lambda f: os.mkfifo(f / "pipe"))
index("shard-is-the-config", "not a safetensors file", WEIGHT_MAP | {"c": "config.json"}, file="config.json",
      change=lambda f: (f / "config.json").write_text("{}" + " " * 50))  # fmt: skip
index("shards-exchanged", "does not hold", {"a": "two.safetensors", "b": "one.safetensors"}, tensor="a")
index("tensor-in-no-shard", "does not hold", WEIGHT_MAP | {"c": "one.safetensors"}, tensor="c")
index("tensor-in-two-shards", "two files hold", WEIGHT_MAP, tensor="a", file="two.safetensors",
      change=lambda f: (f / "two.safetensors").write_bytes(safetensors_bytes(TWO)))  # fmt: skip
index("a-list", "not a JSON object", raw=b"[]")
index("map-a-list", "no weight_map", ["a", "b"])
index("map-empty", "no weight_map", {})
index("map-missing", "no weight_map", raw=b'{"metadata": {}}')
index("not-json", "not valid JSON", raw=b"<html>404</html>")
index("nested-deeply", "nested too deeply", raw=b'{"weight_map": ' + DEEP + b"}")
index("key-twice", "given twice", raw=b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
index("too-large", "too large", raw=b"{", change=lambda f: os.truncate(f / "model.safetensors.index.json", 65 << 20), huge=True)


@attack("two-files-hold-a-tensor", says="two files hold", tensor="a", file="two.safetensors")
def _(folder: Path) -> Path:
    for name in ("one", "two"):
        (folder / f"{name}.safetensors").write_bytes(safetensors_bytes({"a": TWO["a"]}))
    return folder


@attack("shard-of-a-series-missing", says="shards are missing")
def _(folder: Path) -> Path:
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors_bytes(TWO))
    return folder


# ---- config.json ---------------------------------------------------------------------------------------------------------


def config(name: str, says: str, value: Any, **facts: Any) -> None:
    facts.setdefault("file", "config.json")
    ATTACKS.append(Attack(f"config-{name}", lambda f: write(f, gptq()[0], config=value), says, **facts))


config("a-list", "not a JSON object", [])
config("a-text", "not a JSON object", "llama")
config("empty", "not valid JSON", b"")
config("not-json", "not valid JSON", b"{'model_type': 'llama'}")
config("not-utf8", "not valid JSON", b'{"model_type": "\xff"}')
config("nested-deeply", "nested too deeply", b'{"a":' + DEEP + b"}")
config("nested-objects", "nested too deeply", b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
config("key-twice-with-two-values", "given twice", b'{"model_type": "llama", "model_type": "gpt2"}')
config("number-of-5000-digits", "not valid JSON", b'{"hidden_size": ' + b"9" * 5000 + b"}")
config("too-large", "too large", b"{" + b" " * (64 << 20), huge=True)
config(
    "without-quantization", "does not account for", {"model_type": "llama"}, file="model.safetensors", tensor=f"{LAYER}.qweight"
)
config("quantization-text", "not an object", {"quantization_config": "gptq"})
config("quantization-list", "not an object", {"quantization_config": [gptq()[1]]})
config("method-absent", "names no method", {"quantization_config": {"bits": 4}})
config("method-number", "names no method", {"quantization_config": {"quant_method": 4}})
config("method-list", "names no method", {"quantization_config": {"quant_method": ["gptq"]}})
config("method-unknown", "mystery.*is not known", {"quantization_config": {"quant_method": "mystery"}})
config("method-unsupported", "not supported yet", {"quantization_config": {"quant_method": "aqlm"}})
config("method-of-a-megabyte", "is not known", {"quantization_config": {"quant_method": "\x1b[2J" * 200_000}})
config("method-none", "does not account for", {"quantization_config": {"quant_method": "none"}}, file="model.safetensors")


def no_config(name: str, make: Callable[[Path], Any]) -> None:
    """Without a config FP8 codes look like weights: an unreadable config.json must not pass for an absent one."""

    def build(folder: Path) -> Path:
        write(folder, fp8()[0])
        (folder / "config.json").unlink()
        make(folder / "config.json")
        return folder

    ATTACKS.append(Attack(f"config-{name}", build, "config.json is no file", file="config.json"))


no_config("a-pipe", os.mkfifo)
no_config("a-folder", lambda p: p.mkdir())
no_config("a-link-to-nothing", lambda p: p.symlink_to("gone"))
no_config("a-link-to-itself", lambda p: p.symlink_to(p.name))
no_config("a-device", lambda p: p.symlink_to("/dev/zero"))
for base in ("fp8", "int8"):
    family(base, "without-config", says="does not account for", config=lambda c: c.update(quant_method="none"), suffix="weight")


# ---- GPTQ, AWQ, AutoRound ------------------------------------------------------------------------------------------------

BAD_BITS = {
    "text": "4", "negative": -4, "zero": 0, "one": 1, "33": 33, "fraction": 4.0, "true": True, "null": None, "list": [4],
    "2^70": 1 << 70, "nan": float("nan"),
}  # fmt: skip
BAD_GROUPS = {"zero": 0, "minus-five": -5, "text": "32", "fraction": 32.0, "true": True, "list": [32], "minus-2^70": -(1 << 70)}
for base in ("gptq", "awq", "auto_round"):
    for what, value in BAD_BITS.items():
        family(base, f"bits-{what}", says="bits", config={"bits": value}, file="config.json")
    for what, value in BAD_GROUPS.items():
        family(base, f"group-size-{what}", says="group_size", config={"group_size": value}, file="config.json")
    family(base, "group-size-contradicts", says="disagree about groups", config={"group_size": 16}, suffix="scales")
    family(base, "group-size-2^62", says="disagree about groups", config={"group_size": 1 << 62}, suffix="scales", huge=True)
    for suffix in ("qweight", "scales", "qzeros"):
        family(base, f"{suffix}-missing", says=f"lacks|does not account|{suffix}", tensors=put(suffix, None))
        whole = FAMILIES[base]()[0][f"{LAYER}.{suffix}"]
        family(base, f"{suffix}-one-dimension", says="matrix", tensors=put(suffix, whole.view(-1)), suffix=suffix)
        family(
            base,
            f"{suffix}-empty",
            says="matrix",
            tensors=put(suffix, FAMILIES[base]()[0][f"{LAYER}.{suffix}"][:0]),
            suffix=suffix,
        )
        family(base, f"{suffix}-dtype", says="dtype", tensors=put(suffix, torch.zeros(8, 32, dtype=torch.int64)), suffix=suffix)
    family(base, "scale-nan", says="NaN", tensors=poke("scales", float("nan")), suffix="scales")
    family(base, "scale-infinite", says="NaN or infinite", tensors=poke("scales", float("inf")), suffix="scales")
    family(base, "scales-too-few", says="scales|groups", tensors=put("scales", torch.ones(1, 32).half()))
    family(base, "scales-too-narrow", says="fit|disagree|interleave", tensors=put("scales", torch.ones(2, 31).half()))
    family(base, "qzeros-too-wide", says="disagree about bits", tensors=put("qzeros", torch.zeros(2, 5).int()), suffix="qzeros")
    family(base, "qzeros-too-many", says="do not fit", tensors=put("qzeros", torch.zeros(3, 4).int()), suffix="qzeros")
    family(base, "bias-too-long", says="bias", tensors=put("bias", torch.zeros(33)), suffix="bias")
    family(base, "bias-integer", says="bias", tensors=put("bias", torch.zeros(32).int()), suffix="bias")
    family(base, "bias-nan", says="bias", tensors=put("bias", torch.full((32,), float("nan"))), suffix="bias")
    family(base, "scales-negative", tensors=put("scales", -torch.ones(2, 32).half()), harmless=True)
    family(base, "scales-zero", tensors=put("scales", torch.zeros(2, 32).half()), harmless=True)
    family(base, "sym-text", says="sym|zero_point", config={"sym": "yes", "zero_point": "yes"}, file="config.json")

for bits in (2, 3, 8):
    family("gptq", f"bits-contradict-{bits}", says="disagree about bits|does not fit", config={"bits": bits})
    family("awq", f"bits-contradict-{bits}", says="disagree about bits|AWQ of these bits", config={"bits": bits})
family(
    "gptq",
    "called-awq",
    says="quant_method may be wrong",
    config={"quant_method": "awq", "checkpoint_format": None},
    suffix="qweight",
)
family("awq", "called-gptq", says="quant_method may be wrong", config={"quant_method": "gptq"}, suffix="qweight")
family("gptq", "format-unknown", says="not supported yet", config={"checkpoint_format": "gptq_v9"}, file="config.json")
family("gptq", "format-number", says="not supported yet", config={"checkpoint_format": 2}, file="config.json")
family("gptq", "formats-contradict", says="contradict", config={"format": "gptq_v2"}, file="config.json")
family("gptq", "marlin", says="not supported yet", config={"is_marlin_format": True}, file="config.json")
family("gptq", "packed-in-64-bits", says="not supported yet", config={"pack_dtype": "int64"}, file="config.json")
family("gptq", "desc-act-number", says="desc_act", config={"desc_act": 1}, file="config.json")
family("gptq", "symmetric-with-qzeros", config={"sym": True}, harmless=True)  # qzeros are ignored, with a warning: see the test
family("gptq", "g-idx-out-of-range", says="g_idx", tensors=poke("g_idx", 2), suffix="g_idx")
family("gptq", "g-idx-2^31", says="g_idx", tensors=poke("g_idx", (1 << 31) - 1), suffix="g_idx", huge=True)
family("gptq", "g-idx-far-negative", says="g_idx", tensors=poke("g_idx", -5), suffix="g_idx")
family("gptq", "g-idx-fractions", says="g_idx", tensors=put("g_idx", torch.zeros(64)), suffix="g_idx")
family("gptq", "g-idx-too-short", says="g_idx", tensors=put("g_idx", torch.zeros(63).int()), suffix="g_idx")
family("gptq", "g-idx-too-deep", says="g_idx", tensors=put("g_idx", torch.zeros(64, 1).int()), suffix="g_idx")
family("gptq", "g-idx-of-uneven-groups", tensors=put("g_idx", torch.zeros(64).int()), harmless=True)
family("awq", "version-unknown", says="not supported yet", config={"version": "marlin"}, file="config.json")
family("awq", "version-number", says="not supported yet", config={"version": 3}, file="config.json")

# Patterns that backtrack exponentially; the last one is refused for it.
ENDLESS = ["(a+)+$", "(.*)*x", "(a|a)*b", "(.*.*)*=", "a?" * 40 + "a" * 40 + "b", "(?:){1000000000}x", r"^(([a-z])+.)+[A-Z]$"]
LONG = LAYER.replace("up_proj", "a" * 60)


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace(LAYER, LONG)] = tensors.pop(name)


for i, pattern in enumerate(ENDLESS):
    dynamic, targets = (
        {"dynamic": {pattern: {"bits": 8}, f".*{pattern}": {"bits": 8}}},
        [f"re:{pattern}", f"re:.*{pattern}", "Linear"],
    )
    family("gptq", f"endless-pattern-{i}", tensors=renamed, config=dynamic, harmless=None)
    family("auto_round", f"endless-pattern-{i}", tensors=renamed, config={"extra_config": dynamic["dynamic"]}, harmless=None)
    family("packed", f"endless-target-{i}", tensors=renamed, harmless=True,
           config=lambda c, t=targets: c["config_groups"]["group_0"].update(targets=t))  # fmt: skip
    family("packed", f"endless-ignore-{i}", tensors=renamed, harmless=True, config={"ignore": targets[:2]})
family("packed", "target-back-reference", harmless=None,
       config=lambda c: c["config_groups"]["group_0"].update(targets=[r"re:(.)+\1", "Linear"]))  # fmt: skip
BAD_PATTERNS = {"unclosed": "(a", "range": "[z-a]", "repeat": "*", "long": "a" * 30_000,
                "deep": "(" * 5000 + "a" + ")" * 5000, "2^70": "a{1180591620717411303424}"}  # fmt: skip
for what, pattern in BAD_PATTERNS.items():
    family("gptq", f"pattern-{what}", says="regular expression", config={"dynamic": {pattern: {"bits": 8}}}, file="config.json")
    family("auto_round", f"pattern-{what}", config={"extra_config": {"x|" + pattern: {}}}, harmless=None)
    family("packed", f"target-{what}", says="regular expression", file="config.json",
           config=lambda c, p=pattern: c["config_groups"]["group_0"].update(targets=[f"re:{p}"]))  # fmt: skip
    family("packed", f"ignore-{what}", says="regular expression", config={"ignore": [f"re:{pattern}"]}, file="config.json")
family(
    "gptq",
    "too-many-patterns",
    says="patterns",
    config={"dynamic": {f"a{i}.*": {} for i in range(10_001)}},
    file="config.json",
)
for what, value in {"list": [1], "text": "x", "value-text": {"a": "x"}, "bits-text": {"a": {"bits": "8"}}}.items():
    family("gptq", f"dynamic-{what}", says="dynamic|override", config={"dynamic": value}, file="config.json")
    family("auto_round", f"extra-config-{what}", says="extra_config|override", config={"extra_config": value}, file="config.json")


# ---- compressed-tensors --------------------------------------------------------------------------------------------------


def weights(**changes: Any):
    return lambda c: c["config_groups"]["group_0"]["weights"].update(changes)


for what, value in BAD_BITS.items():
    family("packed", f"bits-{what}", says="not valid|do not fit|bits", config=weights(num_bits=value))
for what, value in BAD_GROUPS.items():
    family("packed", f"group-size-{what}", says="not valid|group_size", config=weights(group_size=value), file="config.json")
family("packed", "group-size-contradicts", says="scales do not fit", config=weights(group_size=16), suffix="weight_scale")
family(
    "packed", "group-size-2^62", says="scales do not fit", config=weights(group_size=1 << 62), suffix="weight_scale", huge=True
)
family("packed", "bits-contradict", says="columns do not fit", config=weights(num_bits=8), suffix="weight_packed")
family("packed", "type-unknown", says="not valid", config=weights(type="complex"), file="config.json")
family("packed", "type-contradicts", says="do not fit", config=weights(type="float"), suffix="weight_packed")
family("packed", "strategy-unknown", says="not quantized this way", config=weights(strategy="mystery"))
family("packed", "strategy-number", says="not valid", config=weights(strategy=3), file="config.json")
family("packed", "blocks-unlikely", says="not valid|scales", config=weights(strategy="block", block_structure="0x9"))
family("packed", "groups-a-list", says="not valid", config={"config_groups": []}, file="config.json")
family("packed", "targets-a-text", says="not valid", file="config.json",
       config=lambda c: c["config_groups"]["group_0"].update(targets="Linear"))  # fmt: skip
family("packed", "targets-nothing", says="no config group targets it", suffix="weight_packed",
       config=lambda c: c["config_groups"]["group_0"].update(targets=[]))  # fmt: skip
family("packed", "preset-unknown", says="not valid", config={"config_groups": {"W9A9": ["Linear"]}}, file="config.json")
family("packed", "ignore-a-text", says="not valid", config={"ignore": "lm_head"}, file="config.json")
family("packed", "format-unknown", says="not supported yet", config={"format": "mystery"}, file="config.json")
family("packed", "format-moves-the-cursor", says=r"not supported yet.*x1b", config={"format": "\x1b[2J" * 9}, file="config.json")
family(
    "packed",
    "format-sparse",
    says="not supported yet",
    config={"sparsity_config": {"format": "sparse-bitmask"}},
    file="config.json",
)
family("packed", "rotated", says="rotated", config={"transform_config": {"config_groups": {"R1": {}}}}, file="config.json")
family("packed", "version-strange", config={"version": "9" * 4000 + "." + "9" * 4000}, harmless=True)
for what, value in {
    "too-wide": [32, 999], "too-tall": [33, 64], "negative": [32, -64], "zero": [32, 0], "transposed": [64, 32],
    "one-number": [64], "three-numbers": [32, 64, 1], "2^62": [32, 1 << 62], "narrower": [32, 9],
}.items():  # fmt: skip
    family(
        "packed",
        f"shape-{what}",
        says="weight_shape|columns do not fit",
        tensors=put("weight_shape", torch.tensor(value)),
        huge=True,
    )
family("packed", "shape-fractions", says="dtype", tensors=put("weight_shape", torch.tensor([32.0, 64.0])), suffix="weight_shape")
family("packed", "shape-missing", says="lacks a tensor", tensors=put("weight_shape", None))
family("packed", "scale-missing", says="lacks a tensor", tensors=put("weight_scale", None))
family("packed", "codes-missing", says="scales without codes", tensors=put("weight_packed", None), suffix="weight_scale")
family("packed", "zeros-missing", says="lacks a tensor", tensors=put("weight_zero_point", None))
family(
    "packed", "codes-one-dimension", says="matrix", tensors=put("weight_packed", torch.zeros(256).int()), suffix="weight_packed"
)
family(
    "packed", "codes-of-64-bits", says="dtype", tensors=put("weight_packed", torch.zeros(32, 4).long()), suffix="weight_packed"
)
family("packed", "codes-empty", says="matrix", tensors=put("weight_packed", torch.zeros(0, 8).int()), suffix="weight_packed")
family("packed", "scale-dtype", says="dtype", tensors=put("weight_scale", torch.zeros(32, 2).int()), suffix="weight_scale")
family(
    "packed",
    "scale-shape",
    says="scales do not fit",
    tensors=put("weight_scale", torch.ones(2, 32).half()),
    suffix="weight_scale",
)
family("packed", "scale-nan", says="NaN", tensors=poke("weight_scale", float("nan")), suffix="weight_scale")
family("packed", "scale-infinite", says="infinite", tensors=poke("weight_scale", float("-inf")), suffix="weight_scale")
family("packed", "scale-negative", tensors=put("weight_scale", -torch.ones(32, 2).half()), harmless=True)
family("packed", "scale-zero", tensors=put("weight_scale", torch.zeros(32, 2).half()), harmless=True)
family(
    "packed",
    "zeros-shape",
    says="zero points",
    tensors=put("weight_zero_point", torch.zeros(5, 2).int()),
    suffix="weight_zero_point",
)
family("packed", "zeros-out-of-range", says="zero points are out of range", suffix="weight_zero_point",
       tensors=put("weight_zero_point", torch.full((32, 2), 8, dtype=torch.int8)))  # fmt: skip
family("packed", "g-idx-out-of-range", says="act-order index", tensors=poke("weight_g_idx", 2), suffix="weight_g_idx")
family("packed", "g-idx-negative", says="act-order index", tensors=poke("weight_g_idx", -2), suffix="weight_g_idx")
family("packed", "g-idx-partly-unused", says="act-order index", tensors=poke("weight_g_idx", -1), suffix="weight_g_idx")
family(
    "packed", "g-idx-too-long", says="act-order index", tensors=put("weight_g_idx", torch.zeros(65).int()), suffix="weight_g_idx"
)
family("packed", "g-idx-fractions", says="dtype", tensors=put("weight_g_idx", torch.zeros(64)), suffix="weight_g_idx")
family("packed", "g-idx-unused", tensors=put("weight_g_idx", torch.full((64,), -1)), harmless=True)
family("packed", "bias-too-short", says="bias", tensors=put("bias", torch.zeros(31)), suffix="bias")
family("packed", "bias-a-number", says="bias", tensors=put("bias", torch.tensor(1.0)), suffix="bias")
family("packed", "bias-infinite", says="bias", tensors=put("bias", torch.full((32,), float("inf"))), suffix="bias")
family("int8", "codes-wider-than-bits", says="values do not fit 4 bits", config=weights(num_bits=4), suffix="weight")
family("int8", "input-scale-zero", says="positive", tensors=poke("input_scale", 0, 0), suffix="input_scale")
family("int8", "input-scale-negative", says="positive", tensors=poke("input_scale", -1, 0), suffix="input_scale")
family("int8", "input-scale-many", says="single number", tensors=put("input_scale", torch.ones(3).half()), suffix="input_scale")
family("int8", "input-scale-missing", says="lacks a tensor", tensors=put("input_scale", None))
family("int8", "input-zero-fraction", says="dtype", tensors=put("input_zero_point", torch.ones(1)), suffix="input_zero_point")
family("fp8", "input-scale-nan", says="NaN", tensors=poke("input_scale", float("nan"), 0), suffix="input_scale")
family("fp8", "scale-nan", says="NaN", tensors=poke("weight_scale", float("nan"), 0), suffix="weight_scale")
family("fp8", "scales-too-many", says="scales do not fit", tensors=put("weight_scale", torch.ones(7)), suffix="weight_scale")
family("fp8", "bits-contradict", says="do not fit", config=weights(num_bits=4), suffix="weight")
family("nvfp4", "global-scale-zero", says="global scale", tensors=poke("weight_global_scale", 0, 0), suffix="weight_global_scale")
family(
    "nvfp4",
    "global-scale-negative",
    says="global scale",
    tensors=poke("weight_global_scale", -1, 0),
    suffix="weight_global_scale",
)
family("nvfp4", "global-scale-nan", says="global scale", tensors=poke("weight_global_scale", float("nan"), 0),
       suffix="weight_global_scale")  # fmt: skip
family("nvfp4", "global-scale-tiny", says="global scale", tensors=poke("weight_global_scale", 1e-45, 0),
       suffix="weight_global_scale")  # fmt: skip
family("nvfp4", "input-scale-nan", says="NaN", tensors=poke("input_global_scale", float("nan"), 0), suffix="input_global_scale")
family("nvfp4", "input-scale-missing", says="lacks a tensor", tensors=put("input_global_scale", None))
family("nvfp4", "scale-dtype", says="dtype", tensors=put("weight_scale", torch.ones(32, 4).half()), suffix="weight_scale")
family("mxfp4", "scale-shape", says="scales do not fit", tensors=put("weight_scale", torch.zeros(32, 3, dtype=torch.uint8)))
family("mxfp4", "scale-nan", tensors=put("weight_scale", torch.full((32, 2), 255, dtype=torch.uint8)), harmless=True)


# ---- bitsandbytes --------------------------------------------------------------------------------------------------------

STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any):
    """Replace values in quant_state; None removes a key."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        values = json.loads(bytes(tensors[f"{LAYER}.{STATE}"].tolist())) | changes
        tensors[f"{LAYER}.{STATE}"] = json_tensor({key: value for key, value in values.items() if value is not None})

    return change


for what, value in {
    "empty": b"", "not-json": b"{'a': 1}", "a-list": b"[1]", "not-utf8": b"\xff", "key-twice": b'{"shape": 1, "shape": 2}',
    "nested-deeply": b"[" * 2000, "nan": b'{"nested_offset": NaN}',
}.items():  # fmt: skip
    family("bnb4", f"state-{what}", says="quant_state is not", tensors=put(STATE, json_tensor(value)), suffix=STATE)
family(
    "bnb4", "state-too-long", says="not a short text", suffix=STATE, tensors=put(STATE, torch.zeros(1 << 20, dtype=torch.uint8))
)
family("bnb4", "state-missing", says="lacks its quant_state", tensors=put(STATE, None), suffix="weight.absmax")
family("bnb4", "state-unknown-key", says="unknown keys", tensors=state(rotation=1), suffix=STATE)
family("bnb4", "state-contradicts-its-name", says="contradicts its own name", tensors=state(quant_type="fp4"), suffix=STATE)
for what, value in {
    "flat": [2048], "three": [2, 16, 64], "text": "32x64", "zero": [0, 64], "negative": [-32, -64], "true": [True, 2048],
    "fraction": [32.0, 64], "2^70": [1 << 70, 1],
}.items():  # fmt: skip
    family("bnb4", f"shape-{what}", says="not that of a linear layer", tensors=state(shape=value), suffix=STATE)
family("bnb4", "shape-2^39", says="codes do not fit", tensors=state(shape=[1 << 39, 1 << 39]), suffix="weight", huge=True)
family("bnb4", "shape-smaller", says="codes do not fit", tensors=state(shape=[31, 64]), suffix="weight")
for what, value in {"zero": 0, "negative": -64, "text": "64", "2^62": 1 << 62}.items():
    family("bnb4", f"block-{what}", says="block size", tensors=state(blocksize=value), suffix=STATE)
    family("bnb4", f"nested-block-{what}", says="block size", tensors=state(nested_blocksize=value), suffix=STATE)
family("bnb4", "block-contradicts", says="does not fit", tensors=state(blocksize=128), suffix="weight.absmax")
family("bnb4", "nested-block-contradicts", says="does not fit", tensors=state(nested_blocksize=16), suffix="weight.nested_absmax")
for what, value in {"text": "0.1", "infinite": 1e308, "missing": None, "2^2000": 1 << 2000}.items():
    family("bnb4", f"offset-{what}", says="nested_offset", tensors=state(nested_offset=value), suffix=STATE)
family("bnb4", "table-of-another-type", says="not the table of nf4", tensors=poke("weight.quant_map", 0.5),
       suffix="weight.quant_map")  # fmt: skip
family("bnb4", "table-nan", says="not the table", tensors=poke("weight.quant_map", float("nan")), suffix="weight.quant_map")
family("bnb4", "absmax-missing", says="lacks a tensor", tensors=put("weight.absmax", None), suffix="weight.absmax")
family("bnb4", "nested-absmax-infinite", says="infinite", suffix="weight.absmax",
       tensors=poke("weight.nested_absmax", float("inf"), 0))  # fmt: skip
family("bnb4", "nested-table-short", says="does not fit", tensors=put("weight.nested_quant_map", torch.ones(255)),
       suffix="weight.nested_quant_map")  # fmt: skip
family("bnb4", "codes-of-8-bits", says="dtype", tensors=put("weight", torch.zeros(1024, 1, dtype=torch.int64)), suffix="weight")
family("bnb8", "tile-order-of-a-gpu", says="tile order of a GPU", suffix="weight_format",
       tensors=put("weight_format", torch.tensor(1, dtype=torch.uint8)))  # fmt: skip
family("bnb8", "order-a-list", says="weight_format does not fit", suffix="weight_format",
       tensors=put("weight_format", torch.zeros(7, dtype=torch.uint8)))  # fmt: skip
family("bnb8", "scales-short", says="SCB does not fit", tensors=put("SCB", torch.ones(31)), suffix="SCB")
family("bnb8", "scales-nan", says="NaN", tensors=poke("SCB", float("nan")), suffix="SCB")
family("bnb8", "scales-missing", says="does not account for", tensors=put("SCB", None), suffix="weight")
family("bnb8", "codes-missing", says="lacks a tensor", tensors=put("weight", None), suffix="weight")
family("bnb8", "codes-one-dimension", says="not the matrix", tensors=put("weight", torch.zeros(64, dtype=torch.int8)),
       suffix="weight")  # fmt: skip
family("bnb8", "bias-too-long", says="bias", tensors=put("bias", torch.ones(33)), suffix="bias")


# ---- AWQ, versions gemv and gemv_fast ------------------------------------------------------------------------------------

for base in ("gemv", "gemv_fast"):
    family(base, "version-of-the-other", says="another dtype", suffix="qweight",
           config={"version": "gemv" if base == "gemv_fast" else "gemv_fast"})  # fmt: skip
    family(base, "two-versions", says="two versions", config={"checkpoint_format": "gemm"}, file="config.json")
    family(base, "bits-contradict", says="has 4 bits", config={"bits": 8}, suffix="qweight")
    family(base, "group-size-larger", says="about groups", config={"group_size": 64}, suffix="scales")
    family(base, "group-size-smaller", says="about groups", config={"group_size": 16}, suffix="scales")
    family(base, "group-size-1", says="scales does not fit", config={"group_size": 1}, suffix="scales")
    family(base, "group-size-2^62", says="about groups", config={"group_size": 1 << 62}, suffix="scales", huge=True)
    family(base, "scales-missing", says="lacks a tensor", tensors=put("scales", None), suffix="scales")
    family(base, "scales-all-zero", says="about groups", suffix="scales",
           tensors=lambda t: t[f"{LAYER}.scales"].zero_())  # fmt: skip
    family(base, "scales-nan", says="NaN", tensors=poke("scales", float("nan"), 0), suffix="scales")
    family(base, "zeros-missing", says="lacks a tensor", tensors=put("qzeros", None), suffix="qzeros")
    family(base, "zeros-short", says="qzeros does not fit", suffix="qzeros",
           tensors=put("qzeros", torch.zeros(32, 3, dtype=torch.int32 if base == "gemv" else torch.float16)))  # fmt: skip
    family(base, "codes-empty", says="not the matrix", suffix="qweight",
           tensors=put("qweight", torch.zeros(0, 8, dtype=torch.int32 if base == "gemv" else torch.int16)))  # fmt: skip
family("gemv_fast", "columns-not-in-runs", says="64 columns at a time", suffix="qweight",
       tensors=put("qweight", torch.zeros(8, 72, dtype=torch.int16)))  # fmt: skip
family("gemv_fast", "zeros-infinite", says="infinite", tensors=poke("qzeros", float("inf"), 0), suffix="qzeros")
family("gemv_fast", "zeros-of-another-dtype", says="another dtype", suffix="qzeros",
       tensors=put("qzeros", torch.zeros(32, 32)))  # fmt: skip


# ---- Quark ---------------------------------------------------------------------------------------------------------------


def quark(**changes: Any):
    """Replace values in the weight's spec."""
    return lambda c: c["global_quant_config"]["weight"].update(changes)


for what, value in {"unknown": "int5", "missing": None, "list": ["uint4"], "of-16-bits": "int16"}.items():
    family("quark4", f"dtype-{what}", says="not supported yet", config=quark(dtype=value), suffix="weight")
family("quark4", "scheme-unknown", says="not supported yet", config=quark(qscheme="per_channel"), suffix="weight")
family("quark4", "dtype-contradicts", says="another dtype", config=quark(dtype="fp4"), suffix="weight")
for what, value in {"zero": 0, "text": "32", "2^62": 1 << 62, "contradicts": 16, "missing": None}.items():
    family("quark4", f"group-size-{what}", says="about groups", config=quark(group_size=value), suffix="weight_scale")
family("quark4", "axis", says="about groups", config=quark(ch_axis=0), suffix="weight_scale")
family("quark4", "pack-method-unknown", says="pack_method", file="config.json", config={"export": {"pack_method": "x" * 9000}})
family("quark4", "export-a-list", says="export is not an object", file="config.json", config={"export": []})
family("quark4", "not-quantized", says="does not say how", file="config.json", config={"global_quant_config": {}})
family("quark4", "weight-a-text", says="neither a spec", file="config.json", config={"global_quant_config": {"weight": "uint4"}})
family("quark4", "layer-a-text", says="not an object", file="config.json", config={"layer_quant_config": {"*": "uint4"}})
family("quark4", "pattern-endless", harmless=True, config={"layer_quant_config": {"*a*a*a*a*a*a*a*a*a*a*a*a*b" * 5: {}}})
family("quark4", "pattern-long", says="too large", file="config.json", config={"layer_quant_config": {"*a" * 9000: {}}})
family("quark4", "output-quantized", says="output_tensors", file="config.json",
       config=lambda c: c["global_quant_config"].update(output_tensors={"dtype": "fp8_e4m3"}))  # fmt: skip
family("quark4", "symmetric-with-zeros", says="there are zero points", suffix="weight_zero_point",
       config=quark(dtype="int4", symmetric=True))  # fmt: skip
family("quark4", "zeros-missing", says="lacks a tensor", tensors=put("weight_zero_point", None), suffix="weight_zero_point")
family("quark4", "zeros-short", says="does not fit", tensors=put("weight_zero_point", torch.zeros(2, 3).int()),
       suffix="weight_zero_point")  # fmt: skip
family("quark4", "scales-transposed", says="do not fit", tensors=put("weight_scale", torch.ones(32, 2).half()), suffix="weight")
family("quark4", "scales-nan", says="NaN", tensors=poke("weight_scale", float("nan")), suffix="weight_scale")
family("quark4", "weight-missing", says="lacks a tensor", tensors=put("weight", None), suffix="weight")
family("quark4", "scales-missing", says="does not account for", tensors=put("weight_scale", None), suffix="weight")
family("quark4", "rotated", says="transformed", tensors=put("input_rotation", torch.ones(4, 4).to(torch.int8)),
       suffix="input_rotation")  # fmt: skip
family("quark_nvfp4", "scale-of-scales-missing", says="lacks a tensor", tensors=put("weight_scale_2", None),
       suffix="weight_scale_2")  # fmt: skip
family("quark_nvfp4", "scale-of-scales-nan", says="NaN", tensors=put("weight_scale_2", torch.tensor(float("nan"))),
       suffix="weight_scale_2")  # fmt: skip
for what, number in {"zero": 0.0, "negative": -1.0, "nan": float("nan"), "tiny": 1e-40}.items():
    family("quark_nvfp4", f"input-scale-{what}", says="without a float32 reciprocal", suffix="input_scale_2",
           tensors=put("input_scale_2", torch.tensor(number)))  # fmt: skip
family("quark_nvfp4", "scales-of-another-dtype", says="another dtype", suffix="weight_scale",
       tensors=put("weight_scale", torch.ones(32, 4)))  # fmt: skip
family("quark_nvfp4", "three-specs", says="neither a spec nor two", file="config.json",
       config=lambda c: c["global_quant_config"]["weight"].append({}))  # fmt: skip


# ---- HQQ -----------------------------------------------------------------------------------------------------------------

for what, value in {
    "one-number": [2048], "zero": [0, 64], "negative": [-32, -64], "2^62": [1 << 62, 1 << 62], "larger": [64, 64],
}.items():  # fmt: skip
    family("hqq", f"shape-{what}", says="shape", tensors=put("shape", torch.tensor(value)), huge=True)
family("hqq", "shape-missing", says="lacks a tensor", tensors=put("shape", None), suffix="shape")
for what, value in {"unknown": b"5bit_u8", "long": b"4" * 90_000, "not-ascii": b"\xff\xfe", "empty": b""}.items():
    family("hqq", f"packing-{what}", says="packing that is not known", suffix="packing",
           tensors=put("packing", torch.tensor(list(value), dtype=torch.uint8)))  # fmt: skip
family("hqq", "packing-contradicts", says="codes do not fit", suffix="W_q",
       tensors=put("packing", torch.tensor(list(b"8bit_u8"), dtype=torch.uint8)))  # fmt: skip
for what, number in {"zero": 0, "negative": -32, "not-a-divisor": 33, "2^31": (1 << 31) - 1}.items():
    family("hqq", f"group-size-{what}", says="groups do not fill", suffix="W_q",
           tensors=put("group_size", torch.tensor(number, dtype=torch.int32)))  # fmt: skip
family("hqq", "group-size-contradicts", says="does not fit", tensors=put("group_size", torch.tensor(16, dtype=torch.int32)))
family("hqq", "axis-2", says="a matrix does not have", tensors=put("axis", torch.tensor(2, dtype=torch.int32)), suffix="axis")
family("hqq", "axis-a-list", says="axis does not fit", tensors=put("axis", torch.ones(3).int()), suffix="axis")
family("hqq", "scales-quantized", says="not supported yet", suffix="W_q",
       tensors=put("quant_scale", torch.tensor(1, dtype=torch.uint8)))  # fmt: skip
family("hqq", "scales-missing", says="lacks a tensor", tensors=put("scale", None), suffix="scale")
family("hqq", "scales-nan", says="NaN", tensors=poke("scale", float("nan")), suffix="scale")
family("hqq", "zeros-infinite", says="infinite", tensors=poke("zero", float("inf")), suffix="zero")
family("hqq", "zeros-short", says="does not fit", tensors=put("zero", torch.ones(63, 1).half()), suffix="zero")


# ---- torchao: the file's metadata describes the layer --------------------------------------------------------------------


def ao(name: str, says: str, metadata: Any = None, *, tensors: Any = None, suffix: str | None = "_weight_qdata", **facts: Any):
    """An attack on the description of a layer or on its tensors."""

    def build(folder: Path) -> Path:
        data, settings = torchao()
        if tensors:
            tensors(data)
        describe = torchao_metadata() if metadata is None else metadata
        return write(folder, data, settings, header=lambda h: h.update(__metadata__=describe))

    ATTACKS.append(Attack(f"torchao-{name}", build, says, f"{LAYER}.{suffix}" if suffix else None, **facts))


ao("as-it-should-be", "", suffix=None, harmless=True)
ao("metadata-missing", "does not describe", {})
ao("metadata-of-a-megabyte", "does not describe", {f"{LAYER}.weight": "x" * (1 << 20)})
ao("metadata-of-a-million-values", "more memory than the whole file", {f"{LAYER}.weight": "{" * (1 << 20)}, suffix=None)
ao("metadata-not-json", "not valid JSON", {f"{LAYER}.weight": "{'a'}"})
ao("metadata-nested-deeply", "not valid JSON", {f"{LAYER}.weight": "[" * 60_000})
ao("metadata-a-list", "not a JSON object", {f"{LAYER}.weight": "[]"})
ao("data-missing", "has no _data", {f"{LAYER}.weight": '{"_type": "Int8Tensor"}'})
ao("kind-of-kernels", "not supported yet", torchao_metadata(kind="Int4TilePackedTo4dTensor"))
ao("kind-code", "not supported yet", torchao_metadata(kind="__import__('os').system('touch owned')"))
ao("kind-contradicts", "another dtype", torchao_metadata(kind="Float8Tensor"))
for what, value in {"text": "1x32", "zero": [1, 0], "one": [32], "2^70": [1, 1 << 70], "true": [True, 32]}.items():
    ao(f"block-{what}", "block_size of a weight", torchao_metadata({"block_size": value}))
ao("block-contradicts", "does not fit", torchao_metadata({"block_size": [1, 16]}), suffix="_weight_scale")
for what, value in {"text": "int4", "unknown": {"_data": "int9"}, "missing": None, "list": {"_data": [4]}}.items():
    ao(f"target-{what}", "target_dtype", torchao_metadata({"target_dtype": value}))
ao("target-too-narrow", "do not fit 2 bits", torchao_metadata({"target_dtype": {"_data": "int2"}}), suffix="_weight_zero_point")
ao("codes-too-wide", "values do not fit 4 bits", tensors=poke("_weight_qdata", 9))
ao("zeros-too-wide", "zero points do not fit", tensors=poke("_weight_zero_point", -9), suffix="_weight_zero_point")
ao("scales-nan", "NaN", tensors=poke("_weight_scale", float("nan")), suffix="_weight_scale")
ao("scales-missing", "lacks a tensor", tensors=put("_weight_scale", None), suffix="_weight_scale")
ao("inputs-unknown", "inputs quantized this way", torchao_metadata({"activation_quantization": "int3_per_moon"}))
ao("factors-short", "act_pre_scale", tensors=put("_weight_act_pre_scale", torch.ones(63)), suffix="_weight_act_pre_scale")


@attack("layer-without-a-name", harmless=True)  # not a layer, and no parameter of a model
def _(folder: Path) -> Path:
    tensors, settings = packed()
    return write(folder, {name.removeprefix(f"{LAYER}."): tensor for name, tensor in tensors.items()}, settings)


@attack("layer-with-an-empty-name", says="no name")
def _(folder: Path) -> Path:
    tensors, settings = packed()
    return write(folder, {name.removeprefix(LAYER): tensor for name, tensor in tensors.items()}, settings)


# ---- GGUF ----------------------------------------------------------------------------------------------------------------


def gguf(name: str, says: str, pairs: list[bytes] | None = None, tensors: Any = None, tensor: str | None = None, *,
         harmless: bool = False, huge: bool = False, model: bool = False, edit: Any = None, **more: Any) -> None:  # fmt: skip
    def build(folder: Path) -> Path:
        entries, data = tensors() if callable(tensors) else (tensors or one_matrix())
        raw = gguf_bytes(PAIRS if pairs is None else pairs, entries, data, **more)
        (folder / "model.gguf").write_bytes(edit(raw) if edit else raw)
        return folder / "model.gguf"

    ATTACKS.append(Attack(f"gguf-{name}", build, says, tensor, "model.gguf", model, huge, harmless))


W, ROWS = "blk.0.ffn_up.weight", q8_0(32, 64)
SIZE = len(gguf_bytes(PAIRS, *one_matrix()))
gguf("empty", "too short", edit=lambda raw: b"")
gguf("magic-only", "too short", edit=lambda raw: raw[:4])
for at in (30, 60, 200, SIZE - len(ROWS) - 60):
    gguf(f"cut-at-{at}", "outside the file|cannot be true", edit=lambda raw, at=at: raw[:at])
gguf("truncated-in-its-data", "outside the file", edit=lambda raw: raw[:-1], tensor=W)
gguf("magic-wrong", "not a GGUF file", magic=b"GGML")
for version in (0, 1, 4, 1 << 31):
    gguf(f"version-{version}", "version", version=version)
gguf("big-endian", "big-endian", version=3 << 24)
gguf(
    "2^60-tensors",
    "tensor count cannot be true",
    tensors=None,
    edit=lambda raw: raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:],
    huge=True,
)
gguf("2^60-values", "metadata count cannot be true", edit=lambda raw: raw[:16] + struct.pack("<Q", 1 << 60) + raw[24:], huge=True)
gguf("one-tensor-too-many", "outside the file|cannot be true|not printable|UTF-8|dimensions",
     edit=lambda raw: raw[:8] + struct.pack("<Q", 2) + raw[16:])  # fmt: skip
gguf("one-value-too-many", ".", edit=lambda raw: raw[:16] + struct.pack("<Q", len(PAIRS) + 1) + raw[24:])
gguf("key-of-2^63-bytes", "ends outside", [struct.pack("<Q", 1 << 63) + b"x" * 40], huge=True)
gguf("key-not-utf8", "not UTF-8", [pair(b"\xff\xfe", U32, 1)])
gguf("key-twice", "comes twice", PAIRS + [PAIRS[0]])
gguf("string-of-2^62-bytes", "ends outside", PAIRS + [pair("a", STRING, struct.pack("<Q", 1 << 62))], huge=True)
gguf("array-of-2^61-numbers", "ends outside", PAIRS + [pair("a", ARRAY, struct.pack("<IQ", U64, 1 << 61))], huge=True)
gguf("array-of-2^61-strings", "ends outside", PAIRS + [pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 61))], huge=True)
gguf("array-of-2^61-arrays", "ends outside", PAIRS + [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1 << 61))], huge=True)
gguf("array-nested-10000-deep", "nests too deeply", PAIRS + [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000 + bytes(64))])
gguf("array-of-10^7-truth-values", "is too long",
     edit=lambda raw: raw[:24] + text("a") + struct.pack("<IIQ", ARRAY, BOOL, 10**7) + bytes(10**7) + raw[24:])  # fmt: skip
gguf("array-of-nothing", "does not have", PAIRS + [pair("a", ARRAY, struct.pack("<IQ", 99, 1))])
gguf("array-string-too-long", "ends outside", PAIRS + [pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 63))], huge=True)
gguf("value-type-unknown", "does not have", PAIRS + [pair("a", 13, b"")])
gguf("truth-value-two", "truth value", PAIRS + [pair("a", BOOL, 2)])
ALIGNMENTS = (
    ("zero", U32, 0), ("three", U32, 3), ("2^40+1", U64, (1 << 40) + 1), ("text", STRING, "32"), ("fraction", F32, 32.0),
    ("negative", I32, -32), ("true", BOOL, 1), ("list", ARRAY, (U32, [32])),
)  # fmt: skip
for what, kind, value in ALIGNMENTS:
    gguf(f"alignment-{what}", "general.alignment", PAIRS + [pair("general.alignment", kind, value)])
gguf("alignment-2^40", "outside the file", PAIRS + [pair("general.alignment", U64, 1 << 40)], tensor=W, huge=True)
gguf("split", "split over several", PAIRS + [pair("split.count", U32, 3)])
gguf("tensor-without-dimensions", "number of dimensions", tensors=([entry(W, [], Q8_0, 0)], ROWS), tensor=W)
gguf("tensor-of-5-dimensions", "number of dimensions", tensors=([entry(W, [32, 1, 1, 1, 1], Q8_0, 0)], ROWS), tensor=W)
gguf(
    "tensor-of-2^32-1-dimensions",
    "number of dimensions",
    tensors=([entry(W, [32], Q8_0, 0, (1 << 32) - 1)], ROWS),
    tensor=W,
    huge=True,
)
gguf("tensor-with-an-empty-dimension", "empty dimension", tensors=([entry(W, [64, 0], Q8_0, 0)], ROWS), tensor=W)
gguf("tensor-overflows", "larger than the file", tensors=([entry(W, [1 << 62, 4], Q8_0, 0)], ROWS), tensor=W, huge=True)
gguf(
    "tensor-wraps",
    "larger than the file",
    tensors=([entry(W, [1 << 32, 1 << 32, 1 << 32, 32], TYPE_F32, 0)], ROWS),
    tensor=W,
    huge=True,
)
gguf("tensor-half-a-block", "end on a block", tensors=([entry(W, [48, 32], Q8_0, 0)], ROWS), tensor=W)
gguf("tensor-half-a-superblock", "end on a block", tensors=([entry(W, [64, 32], Q4_K, 0)], ROWS), tensor=W)
gguf("tensor-past-the-end", "outside the file", tensors=([entry(W, [64, 32], Q8_0, 1 << 40)], ROWS), tensor=W, huge=True)
gguf("tensor-misaligned", "not aligned", tensors=([entry(W, [64, 32], Q8_0, 8)], ROWS + bytes(8)), tensor=W)
gguf("tensors-overlap", "overlaps", tensors=([entry(W, [64, 32], Q8_0, 0), entry("b", [64, 32], Q8_0, 64)], ROWS * 2), tensor="b")
gguf("tensor-twice", "comes twice", tensors=([entry(W, [64, 32], Q8_0, 0), entry(W, [64, 32], Q8_0, 2176)], ROWS * 2), tensor=W)
gguf("tensor-name-empty", "not printable", tensors=([entry("", [64, 32], Q8_0, 0)], ROWS))
gguf("tensor-name-moves-the-cursor", "not printable", tensors=([entry("\x1b[2J", [64, 32], Q8_0, 0)], ROWS))
gguf("tensor-name-not-utf8", "UTF-8", tensors=([entry(b"\xff", [64, 32], Q8_0, 0)], ROWS))
gguf("tensor-name-of-2^40-bytes", "outside the file", tensors=([struct.pack("<Q", 1 << 40) + b"abcd" * 10], ROWS), huge=True)
for number, what in (
    (99, "unknown ggml type"),
    (4, "has removed"),
    ((1 << 32) - 1, "unknown ggml type"),
    (9, "Q8_1 is not"),
):
    gguf(f"tensor-type-{number}", what, tensors=([entry(W, [256, 1], number, 0)], bytes(4096)), tensor=W)
gguf("stack-of-experts", ".", tensors=([entry(W, [64, 8, 4], Q8_0, 0)], ROWS), harmless=True)
gguf("scale-nan", "NaN", tensors=([entry(W, [64, 32], Q8_0, 0)], b"\xff\x7f" + ROWS[2:]), tensor=W)
gguf("bias-too-long", "bias", tensor="blk.0.ffn_up.bias",
     tensors=([entry(W, [64, 32], Q8_0, 0), entry("blk.0.ffn_up.bias", [33], TYPE_F32, 2176)], ROWS + bytes(132)))  # fmt: skip
gguf("bias-nan", "bias", tensor="blk.0.ffn_up.bias",
     tensors=([entry(W, [64, 32], Q8_0, 0), entry("blk.0.ffn_up.bias", [32], TYPE_F32, 2176)], ROWS + b"\xff" * 128))  # fmt: skip
gguf("nothing-in-it", ".", [], ([], b""), harmless=True)
gguf("bytes-after-it", ".", edit=lambda raw: raw + bytes(99), harmless=True)

# ---- whole models --------------------------------------------------------------------------------------------------------

gguf("model", ".", tensors=model_tensors, model=True, harmless=True)
ARCHITECTURES = (
    ("number", U32, 7), ("list", ARRAY, (STRING, ["llama"])), ("unknown", STRING, "mystery"), ("empty", STRING, ""),
    ("not-utf8", STRING, text(b"\xff\xfe")), ("of-a-megabyte", STRING, "x" * 1_000_000),
)  # fmt: skip
for what, kind, value in ARCHITECTURES:
    gguf(f"architecture-{what}", ".", with_pair("general.architecture", kind, value), model_tensors, model=True)
gguf("architecture-absent", ".", PAIRS[1:], model_tensors, model=True)
gguf("without-metadata", ".", [], model_tensors, model=True)
COUNTS = (
    ("text", STRING, "one"), ("negative", I32, -1), ("zero", U32, 0), ("2^40", U64, 1 << 40), ("2^32-1", U32, (1 << 32) - 1),
    ("two", U32, 2), ("fraction", F32, 1.5), ("list", ARRAY, (U32, [1, 1])), ("nan", F32, float("nan")),
)  # fmt: skip
for what, kind, value in COUNTS:
    gguf(f"block-count-{what}", ".", with_pair("llama.block_count", kind, value), model_tensors, model=True, huge=True)
for key in ("llama.embedding_length", "llama.feed_forward_length", "llama.vocab_size", "llama.attention.head_count",
            "llama.attention.head_count_kv"):  # fmt: skip
    for what, kind, value in (("2^40", U64, 1 << 40), ("zero", U32, 0), ("text", STRING, "x"), ("list", ARRAY, (U32, [3, 4, 5])),
                              ("negative", I32, -64), ("odd", U32, 7)):  # fmt: skip
        if key == "llama.vocab_size" and what == "list":
            continue
        gguf(f"{key.rpartition('.')[2]}-{what}", ".", with_pair(key, kind, value), model_tensors, model=True, huge=what == "2^40")


def instead(name: str, dims: list[int], kind: int) -> Any:
    """The model's tensors, one of them with another shape or type."""

    def tensors() -> tuple[list[bytes], bytes]:
        entries, data = model_tensors()
        data += bytes(-len(data) % 32)
        return [e for e in entries if not e.startswith(text(name))] + [entry(name, dims, kind, len(data))], data + bytes(40_000)

    return tensors


for name, dims, kind, what in (
    ("blk.0.attn_q.weight", [64, 63], TYPE_F32, "rows"), ("blk.0.attn_q.weight", [64], TYPE_F32, "one-dimension"),
    ("blk.0.attn_k.weight", [64, 3, 2], TYPE_F32, "three-dimensions"), ("blk.0.attn_q.weight", [64, 64], 26, "integers"),
    ("blk.0.attn_norm.weight", [64], 26, "integers"), ("output_norm.weight", [1], TYPE_F32, "too-short"),
    ("token_embd.weight", [63, 50], TYPE_F32, "columns"), ("blk.0.attn_q.weight", [64, 63], Q8_0, "quantized-rows"),
):  # fmt: skip
    gguf(f"{name}-{what}", "shape|does not fit|unquantized tensor", tensors=instead(name, dims, kind), model=True)


def further_layer() -> tuple[list[bytes], bytes]:
    entries, data = model_tensors()
    return [*entries, entry("blk.3.attn_norm.weight", [64], TYPE_F32, len(data))], data + bytes(256)


gguf("tensor-of-a-further-layer", "layers that the configuration does not have", tensors=further_layer, model=True,
     tensor="blk.3.attn_norm.weight")  # fmt: skip


def model(name: str, says: str = ".", *, change: Any = None, tensors: Any = None, edit: Any = None, **facts: Any) -> None:
    """An attack on a whole safetensors model: other config values, tensors or files."""

    def build(folder: Path) -> Path:
        llama_folder(folder, **(change or {}))
        if tensors:
            from tiny import rewrite

            rewrite(folder, tensors)
        if edit:
            edit(folder)
        return folder

    ATTACKS.append(Attack(f"model-{name}", build, says, model=True, **facts))


HUGE: dict[str, dict[str, Any]] = {
    "layers-10^9": {"num_hidden_layers": 10**9}, "layers-2^70": {"num_hidden_layers": 1 << 70},
    "hidden-2^40": {"hidden_size": 1 << 40}, "intermediate-2^40": {"intermediate_size": 1 << 40},
    "vocab-2^40": {"vocab_size": 1 << 40}, "heads-2^40": {"num_attention_heads": 1 << 40}, "head-dim-2^40": {"head_dim": 1 << 40},
    "labels-10^10": {"num_labels": 10**10}, "nested-layers-10^9": {"text_config": {"num_hidden_layers": 10**9}},
    "layers-of-another-model-10^9": {"model_type": "qwen2", "num_hidden_layers": 10**9},
    "gpt2-positions-2^36": {"model_type": "gpt2", "n_positions": 1 << 36},
    "experts-10^9": {"model_type": "mixtral", "num_local_experts": 10**9},
}  # fmt: skip
for what, change in HUGE.items():
    model(what, "configuration|lacks|shape|no module|buffers", change=change, huge=True)
for what, change in {
    "layers-fewer": {"num_hidden_layers": 1}, "layers-none": {"num_hidden_layers": 0}, "layers-more": {"num_hidden_layers": 3},
    "layers-negative": {"num_hidden_layers": -2}, "layers-text": {"num_hidden_layers": "two"},
    "layers-fraction": {"num_hidden_layers": 2.5}, "hidden-other": {"hidden_size": 32}, "hidden-zero": {"hidden_size": 0},
    "hidden-negative": {"hidden_size": -64}, "heads-zero": {"num_attention_heads": 0}, "heads-odd": {"num_attention_heads": 7},
    "kv-heads-zero": {"num_key_value_heads": 0}, "vocab-other": {"vocab_size": 101}, "type-unknown": {"model_type": "mystery"},
    "type-number": {"model_type": 5}, "type-list": {"model_type": ["llama"]}, "type-null": {"model_type": None},
    "not-causal": {"model_type": "t5"},
    "activation-unknown": {"hidden_act": "mystery"}, "rope-text": {"rope_parameters": "yes"},
    "rope-unknown": {"rope_parameters": {"rope_type": "mystery", "rope_theta": 1.0}}, "dtype-unknown": {"dtype": "float99"},
    "pad-token-outside": {"pad_token_id": 10**6},
}.items():  # fmt: skip
    model(what, change=change)
model("parameter-missing", "lacks 1", tensors=lambda t: t.pop("model.norm.weight"), tensor="model.norm.weight")
model("layer-missing", "lacks", tensors=lambda t: [t.pop(k) for k in list(t) if "layers.1.mlp.up_proj" in k])
model("layer-too-many", "no module for a quantized layer",
      tensors=lambda t: t.update({k.replace("rs.1.", "rs.7."): v.clone() for k, v in t.items() if "rs.1." in k}))  # fmt: skip
model("plain-layer-too-many", "layers that the configuration does not have", tensor="model.layers.2.input_layernorm.weight",
      tensors=lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}))  # fmt: skip
model("parameter-twice", "two tensors map to one parameter", tensors=lambda t: t.update({"norm.weight": torch.zeros(64)}))
model("layer-plain-and-packed", "hold the weight of one layer|nothing uses",
      tensors=lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(160, 64)}))  # fmt: skip
model("parameter-of-another-shape", "different shape", tensors=lambda t: t.update({"model.norm.weight": torch.ones(63)}),
      tensor="model.norm.weight")  # fmt: skip
model(
    "parameter-integer",
    "unquantized tensor",
    tensors=lambda t: t.update({"model.norm.weight": torch.ones(64).int()}),
    tensor="model.norm.weight",
)
model("parameter-fp8", "lacks a tensor",
      tensors=lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}))  # fmt: skip
model("without-config", ".", edit=lambda f: (f / "config.json").unlink())
model("generation-config-a-list", "generation_config", edit=lambda f: (f / "generation_config.json").write_text("[]"))
model("generation-config-damaged", "generation_config", edit=lambda f: (f / "generation_config.json").write_text("{"))
model("generation-config-nested-deeply", "generation_config", edit=lambda f: (f / "generation_config.json").write_bytes(DEEP))
model("nested-900-deep", change={"x": json.loads("[" * 900 + "]" * 900)}, harmless=None)

EVIL = "from pathlib import Path\nPath(__file__).with_name('owned').touch()\nclass Evil: pass\n"
MAP = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


def code(folder: Path) -> None:
    (folder / "evil.py").write_text(EVIL)


model("own-code", change={"auto_map": MAP}, edit=code, harmless=True)
model("own-code-of-an-unknown-type", change={"auto_map": MAP, "model_type": "evil"}, edit=code)
model("own-code-where-there-is-no-other", change={"auto_map": MAP, "model_type": "t5"}, edit=code)
model("own-code-map-a-list", change={"auto_map": [1]}, edit=code, harmless=True)
model(
    "kernel-from-the-hub",
    change={"attn_implementation": "kernels-community/evil", "_attn_implementation": "evil/evil"},
    harmless=True,
)


# ---- tokenizers ----------------------------------------------------------------------------------------------------------

TOKENS: dict[str, tuple[int, Any]] = {
    "model": (STRING, "gpt2"), "tokens": (ARRAY, (STRING, ["a", "b", "c", "ab"])), "merges": (ARRAY, (STRING, ["a b"])),
    "token_type": (ARRAY, (I32, [1, 1, 1, 1])), "bos_token_id": (U32, 0), "eos_token_id": (U32, 1),
}  # fmt: skip
TOKENIZERS: dict[str, dict[str, tuple[int, Any]]] = {
    "tokens-a-number": {"tokens": (U32, 3)}, "tokens-numbers": {"tokens": (ARRAY, (U32, [1, 2]))},
    "tokens-none": {"tokens": (ARRAY, (STRING, []))}, "tokens-the-same": {"tokens": (ARRAY, (STRING, ["a", "a", "a"]))},
    "tokens-lists": {"tokens": (ARRAY, (ARRAY, []))}, "merges-malformed": {"merges": (ARRAY, (STRING, ["x", "y z w"]))},
    "merges-numbers": {"merges": (ARRAY, (U32, [1]))}, "model-a-number": {"model": (U32, 1)},
    "model-unknown": {"model": (STRING, "mystery")}, "types-texts": {"token_type": (ARRAY, (STRING, ["a"]))},
    "bos-a-text": {"bos_token_id": (STRING, "x")}, "bos-2^31": {"bos_token_id": (U32, 1 << 31)},
    "bos-negative": {"bos_token_id": (I32, -5)},
}  # fmt: skip


def gguf_with_tokenizer(folder: Path, changes: dict[str, tuple[int, Any]]) -> Path:
    """The model with a tokenizer of four tokens, with these changes."""
    pairs = [pair(f"tokenizer.ggml.{key}", kind, value) for key, (kind, value) in (TOKENS | changes).items()]
    (folder / "model.gguf").write_bytes(gguf_bytes(PAIRS + pairs, *model_tensors()))
    return folder / "model.gguf"

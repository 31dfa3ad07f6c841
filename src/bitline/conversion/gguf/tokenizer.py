"""A tokenizer's files as GGUF metadata. One whose splitting into words has no name in llama.cpp is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitline.conversion.gguf.writer import (
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    Array,
    Value,
)
from bitline.conversion.original import Original
from bitline.errors import BitlineError, ConversionError
from bitline.formats.io.json_object import read_config

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens
_KEY = "tokenizer.ggml"
_MOST_PADDING = 1 << 16  # entries; an embedding has a few rows more than there are tokens, to a round number
# Special tokens that the format has a key for; one is spelled so.
_IDS = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Expressions that split a text before byte-pair encoding, and llama.cpp's names for them (its table of pre-tokenizers).
_SPLITS = {
    _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + _WORDS + r"\p{N}" + _REST: "qwen2",
}  # fmt: skip


def tokenizer_metadata(original: Original, vocab_size: int) -> dict[str, Value | Array]:
    """The tokenizer.* keys; of a folder without a tokenizer, those that let llama.cpp load the weights alone."""
    folder = original.folder
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return {f"{_KEY}.model": Value(STRING, "no_vocab")}
    try:
        special = _special(folder, vocab_size)
        pieces = (folder / "tokenizer.model").is_file()
        tokens = _sentencepiece(folder, vocab_size) if pieces else _byte_pairs(folder, vocab_size, special)
    except BitlineError:
        raise
    except Exception as error:  # tokenizer files come in every kind of broken, and each library raises its own
        raise ConversionError("the tokenizer cannot be written into a gguf file", file=folder,
                              found=f"{type(error).__name__}: {error}") from error  # fmt: skip
    out: dict[str, Value | Array] = dict(tokens)
    for kind, number in special.special_token_ids.items():
        if kind in _IDS:
            out[f"{_KEY}.{_IDS[kind]}_token_id"] = Value(U32, number)
    for kind, wanted in special.add_special_token.items():
        if kind in ("bos", "eos", "sep"):
            out[f"{_KEY}.add_{kind}_token"] = Value(BOOL, int(wanted))
    if isinstance(special.chat_template, str):
        out["tokenizer.chat_template"] = Value(STRING, special.chat_template)
    return out


def _special(folder: Path, vocab_size: int) -> Any:
    import gguf

    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (folder / name).is_file():
            read_config(folder / name)  # bounded, and an error that names the file
    return gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)


def _byte_pairs(folder: Path, vocab_size: int, special: Any) -> dict[str, Value | Array]:
    whole = read_config(folder / "tokenizer.json")
    model = whole.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        found = f"{model.get('type')}{' with byte fallback, and no tokenizer.model' if model.get('byte_fallback') else ''}"
        raise _refused(folder, "the tokenizer is of a kind that is not written into gguf files", found, "byte-level BPE")
    names: dict[int, str] = {number: text for text, number in model["vocab"].items()}
    kinds: dict[int, int] = {}
    for token in whole.get("added_tokens") or []:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = _CONTROL if token.get("special") else _USER
    _check_size(folder, max(names, default=-1) + 1, vocab_size)
    tokens = [names.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [kinds.get(i, _NORMAL) if i in names else _UNUSED for i in range(vocab_size)]
    return {
        f"{_KEY}.model": Value(STRING, "gpt2"), f"{_KEY}.pre": Value(STRING, _splitting(folder, whole.get("pre_tokenizer"))),
        f"{_KEY}.tokens": Array(STRING, tokens), f"{_KEY}.token_type": Array(I32, types),
        f"{_KEY}.merges": Array(STRING, list(special.merges)), f"{_KEY}.add_space_prefix": Value(BOOL, 0),
    }  # fmt: skip


def _splitting(folder: Path, pre: Any) -> str:
    """llama.cpp's name for how a text is split into words."""
    steps = pre.get("pretokenizers") if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    match [step if isinstance(step, dict) else {} for step in steps or []]:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ] if expression in _SPLITS:
            return _SPLITS[expression]
    found = json.dumps(pre, ensure_ascii=False)
    raise _refused(
        folder,
        "the tokenizer splits words in a way that has no name here",
        found,
        ", ".join(["gpt-2", "smollm", *_SPLITS.values()]),
    )


def _sentencepiece(folder: Path, vocab_size: int) -> dict[str, Value | Array]:
    import gguf

    if gguf.vocab.SentencePieceProcessor is None:
        raise BitlineError("a tokenizer.model needs the sentencepiece package", fix="pip install 'bitline[models]'")
    found = list(gguf.SentencePieceVocab(folder).all_tokens())
    _check_size(folder, len(found), vocab_size)
    found += [(f"[PAD{i}]".encode(), -10000.0, _UNUSED) for i in range(len(found), vocab_size)]
    return {
        f"{_KEY}.model": Value(STRING, "llama"), f"{_KEY}.pre": Value(STRING, "default"),
        f"{_KEY}.tokens": Array(STRING, [text.decode("utf-8", "surrogateescape") for text, _, _ in found]),
        f"{_KEY}.scores": Array(F32, [score for _, score, _ in found]),
        f"{_KEY}.token_type": Array(I32, [int(kind) for _, _, kind in found]),
    }  # fmt: skip


def _check_size(folder: Path, tokens: int, vocab_size: int) -> None:
    if tokens > vocab_size:
        raise _refused(folder, "the tokenizer has more tokens than the model", tokens, vocab_size)
    if vocab_size > tokens + _MOST_PADDING:
        raise _refused(folder, "the model's vocab_size does not belong to this tokenizer", f"{vocab_size} for {tokens} tokens",
                       f"at most {tokens + _MOST_PADDING}")  # fmt: skip


def _refused(folder: Path, what: str, found: object, expected: object) -> ConversionError:
    fix = "move the tokenizer's files away to write the weights alone"
    return ConversionError(what, file=folder / "tokenizer.json", found=found, expected=expected, fix=fix)

"""A tokenizer's files as GGUF metadata. One whose pre-tokenization llama.cpp has no name for is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitline.conversion.gguf.writer import BOOL, F32, I32, STRING, U32, Array, Value
from bitline.conversion.source_model import SourceModel
from bitline.errors import BitlineError, ConversionError
from bitline.formats.io.json_object import read_config

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's token types
_KEY = "tokenizer.ggml"
_MAX_PADDING = 1 << 16  # unused entries: embeddings are padded to a round number of rows
# Special tokens by their GGUF key; the misspelling is the format's.
_SPECIAL_KEYS = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator", "pad": "padding",
    "mask": "mask",
}  # fmt: skip
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Pre-tokenization expressions by llama.cpp's names for them (its table of pre-tokenizers).
_PRE_TOKENIZERS = {
    _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _CONTRACTIONS + _WORDS + r"\p{N}" + _REST: "qwen2",
}  # fmt: skip


def tokenizer_metadata(source: SourceModel, vocab_size: int) -> dict[str, Value | Array]:
    """The tokenizer.* keys; without a tokenizer, those that let llama.cpp load the weights alone.

    A tokenizer that llama.cpp would run differently is a ConversionError.
    """
    folder = source.folder
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return {f"{_KEY}.model": Value(STRING, "no_vocab")}
    try:
        special = _special_vocab(folder, vocab_size)
        if (folder / "tokenizer.model").is_file():
            tokens = _sentencepiece(folder, vocab_size)
        else:
            tokens = _byte_level_bpe(folder, vocab_size, special)
    except BitlineError:
        raise
    except Exception as error:  # each library raises its own types for a malformed file
        raise ConversionError("the tokenizer cannot be written into a gguf file", file=folder,
                              found=f"{type(error).__name__}: {error}") from error  # fmt: skip
    out: dict[str, Value | Array] = dict(tokens)
    for kind, number in special.special_token_ids.items():
        if kind in _SPECIAL_KEYS:
            out[f"{_KEY}.{_SPECIAL_KEYS[kind]}_token_id"] = Value(U32, number)
    for kind, wanted in special.add_special_token.items():
        if kind in ("bos", "eos", "sep"):
            out[f"{_KEY}.add_{kind}_token"] = Value(BOOL, int(wanted))
    if isinstance(special.chat_template, str):
        out["tokenizer.chat_template"] = Value(STRING, special.chat_template)
    return out


def _special_vocab(folder: Path, vocab_size: int) -> Any:
    import gguf

    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (folder / name).is_file():
            read_config(folder / name)  # bounds its size and nesting, with an error that names the file
    return gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)


def _byte_level_bpe(folder: Path, vocab_size: int, special: Any) -> dict[str, Value | Array]:
    tokenizer = read_config(folder / "tokenizer.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        found = f"{model.get('type')}{' with byte fallback, and no tokenizer.model' if model.get('byte_fallback') else ''}"
        raise _refusal(folder, "this type of tokenizer is not written into gguf files", found, "byte-level BPE")
    tokens: dict[int, str] = {number: text for text, number in model["vocab"].items()}
    added_types: dict[int, int] = {}
    for token in tokenizer.get("added_tokens") or []:
        tokens[token["id"]] = token["content"]
        added_types[token["id"]] = _CONTROL if token.get("special") else _USER_DEFINED
    _check_vocab_size(folder, max(tokens, default=-1) + 1, vocab_size)
    padded = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [added_types.get(i, _NORMAL) if i in tokens else _UNUSED for i in range(vocab_size)]
    pre_tokenizer = _pre_tokenizer_name(folder, tokenizer.get("pre_tokenizer"))
    return {
        f"{_KEY}.model": Value(STRING, "gpt2"), f"{_KEY}.pre": Value(STRING, pre_tokenizer),
        f"{_KEY}.tokens": Array(STRING, padded), f"{_KEY}.token_type": Array(I32, types),
        f"{_KEY}.merges": Array(STRING, list(special.merges)), f"{_KEY}.add_space_prefix": Value(BOOL, 0),
    }  # fmt: skip


def _pre_tokenizer_name(folder: Path, pre: Any) -> str:
    """llama.cpp's name of a pre-tokenizer."""
    steps = pre.get("pretokenizers") if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    match [step if isinstance(step, dict) else {} for step in steps or []]:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ] if expression in _PRE_TOKENIZERS:
            return _PRE_TOKENIZERS[expression]
    found = json.dumps(pre, ensure_ascii=False)
    known = ", ".join(["gpt-2", "smollm", *_PRE_TOKENIZERS.values()])
    raise _refusal(folder, "llama.cpp has no name for the tokenizer's pre-tokenizer", found, known)


def _sentencepiece(folder: Path, vocab_size: int) -> dict[str, Value | Array]:
    import gguf

    if gguf.vocab.SentencePieceProcessor is None:
        raise BitlineError("a tokenizer.model needs the sentencepiece package", fix="pip install 'bitline[models]'")
    tokens = list(gguf.SentencePieceVocab(folder).all_tokens())
    _check_vocab_size(folder, len(tokens), vocab_size)
    tokens += [(f"[PAD{i}]".encode(), -10000.0, _UNUSED) for i in range(len(tokens), vocab_size)]
    return {
        f"{_KEY}.model": Value(STRING, "llama"), f"{_KEY}.pre": Value(STRING, "default"),
        f"{_KEY}.tokens": Array(STRING, [text.decode("utf-8", "surrogateescape") for text, _, _ in tokens]),
        f"{_KEY}.scores": Array(F32, [score for _, score, _ in tokens]),
        f"{_KEY}.token_type": Array(I32, [int(token_type) for _, _, token_type in tokens]),
    }  # fmt: skip


def _check_vocab_size(folder: Path, tokens: int, vocab_size: int) -> None:
    if tokens > vocab_size:
        raise _refusal(folder, "the tokenizer has more tokens than the model", tokens, vocab_size)
    if vocab_size > tokens + _MAX_PADDING:
        raise _refusal(folder, "the model's vocab_size does not belong to this tokenizer", f"{vocab_size} for {tokens} tokens",
                       f"at most {tokens + _MAX_PADDING}")  # fmt: skip


def _refusal(folder: Path, what: str, found: object, expected: object) -> ConversionError:
    fix = "move the tokenizer's files away to write the weights alone"
    return ConversionError(what, file=folder / "tokenizer.json", found=found, expected=expected, fix=fix)

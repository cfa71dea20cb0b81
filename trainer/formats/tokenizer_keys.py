"""The target's tokenizer as a GGUF's keys: copied from the target's own GGUF, or made from its folder.

llama.cpp loads no model without a vocabulary, but a DFlash drafter's is only printed from, never tokenised with.  So a
pre-tokenizer that is not known here is called `default`, and that is said.  Left out: SentencePiece and WordPiece folders."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from trainer.formats import gguf as files

# By the regular expression that tokenizer.json splits with.
PRE = {r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
       r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35"}
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5               # llama.cpp's token types
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def keys(target: Path, vocab_size: int) -> tuple[list[tuple[str, Any, Any, Any]], list[str]]:
    """target: a GGUF, or a folder with tokenizer.json -> (key, value, GGUFValueType, element type or None) each, and what is to be
    said.  UserError for what is neither, or has another vocabulary."""
    found, said = _of_folder(target, vocab_size) if target.is_dir() else (_of_gguf(target), [])
    tokens = next((value for key, value, *_ in found if key == "tokenizer.ggml.tokens"), [])
    if len(tokens) != vocab_size:
        raise UserError(f"--target {target}: {len(tokens)} tokens, the drafter's target has {vocab_size}")
    return found, said


def _of_gguf(path: Path) -> list:
    reader = files.open_file(path)
    return [(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
            for name, field in reader.fields.items() if name.startswith("tokenizer.") and name != files.MASK]


def _of_folder(folder: Path, vocab_size: int) -> tuple[list, list[str]]:
    from gguf import GGUFValueType as V
    data, more = _json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json", needed=False)
    model = data.get("model") or {}
    if model.get("type") != "BPE" or not _has(data.get("pre_tokenizer"), "ByteLevel"):
        raise UserError(f"--target {folder}: its tokenizer is no byte-level BPE; give the target's GGUF instead")
    table = dict(model["vocab"]) | {token["content"]: token["id"] for token in data.get("added_tokens", [])}
    added = {token["id"]: CONTROL if token.get("special") else USER for token in data.get("added_tokens", [])}
    names = {i: name for name, i in table.items()}
    if max(names) >= vocab_size:
        raise UserError(f"--target {folder}: token {max(names)}, the drafter's target has {vocab_size} rows")
    tokens = [names.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    kinds = [added.get(i, NORMAL) if i in names else UNUSED for i in range(vocab_size)]
    pre = next((name for pattern, name in PRE.items() if _has(data.get("pre_tokenizer"), pattern)), "default")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = [("tokenizer.ggml.model", "gpt2", V.STRING, None), ("tokenizer.ggml.pre", pre, V.STRING, None),
             ("tokenizer.ggml.tokens", tokens, V.ARRAY, V.STRING), ("tokenizer.ggml.token_type", kinds, V.ARRAY, V.INT32),
             ("tokenizer.ggml.merges", merges, V.ARRAY, V.STRING), ("tokenizer.ggml.add_bos_token", bool(more.get("add_bos_token")), V.BOOL, None)]
    for ours, theirs in SPECIAL.items():
        word = more.get(f"{ours}_token")
        if (word := word.get("content") if isinstance(word, dict) else word) in table:
            found.append((f"tokenizer.ggml.{theirs}_token_id", table[word], V.UINT32, None))
    said = [] if pre != "default" else ["note: the pre-tokenizer of this folder is not known by name here; it is called default, llama.cpp warns, and "
                                        "drafting is not touched by it"]
    return found, said


def _has(tree: Any, word: str) -> bool:
    if isinstance(tree, dict):
        return any(_has(value, word) for value in tree.values())
    if isinstance(tree, list):
        return any(_has(value, word) for value in tree)
    return tree == word


def _json(path: Path, needed: bool = True) -> dict:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise UserError(f"--target: {path.parent} holds no {path.name}") from None
    except ValueError:
        raise UserError(f"--target: {path} is no JSON") from None

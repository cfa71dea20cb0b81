"""Prompts: identified, split once by hash, and written out as token ids with the target's own chat template.

A prompt's id is a hash of its messages, so the split is stable when the list grows and a held-out prompt is known for
good (convention 7).  Loss masks come from spans of tokens, never from a search for the answer's text (pitfall T1).
Left out: files (prompt_sets), truncation and packing.  A prompt runs whole or not at all.
"""
from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
SALT = "hsdraft"             # of the split; fixed, so that a prompt is held out on every box or on none
ROLES = ("system", "developer", "user", "assistant", "tool")
SENTINELS = ("Kq7 sentinel one vX", "Zw4 other sentinel jY")     # unlike in their first and last characters, no blanks around


@dataclass(frozen=True)
class Prompt:
    """messages: {"role", "content"} each, the last one not the assistant's; answer: the assistant's, where the file gives it;
    category: as the file names it, "" where it does not."""

    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    category: str = ""

    @property
    def id(self) -> str:
        """sha256 hex of the canonical JSON of the messages; answer and category are no part of it."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Split:
    train: list[Prompt]
    held_out: list[Prompt]
    duplicates: int                 # prompts dropped because an earlier one has the same messages


def split(prompts: Iterable[Prompt], held_out_fraction: float, salt: str) -> Split:
    """Each prompt's own hash decides, so adding prompts moves none from one side to the other.  Order is kept.

    Raises UserError when a side would be empty: without held-out prompts no acceptance could be trusted.
    """
    unique = {}
    total = 0
    for prompt in prompts:
        total += 1
        unique.setdefault(prompt.id, prompt)
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for key, prompt in unique.items():
        share = int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:8], "big") / 2 ** 64
        sides[share < held_out_fraction].append(prompt)
    if not all(sides):
        none = "to hold out" if sides[0] else "to train on"
        raise UserError(f"{len(unique)} prompts with {held_out_fraction:g} held out leave none {none}; add prompts or change the fraction")
    return Split(*sides, total - len(unique))


def judges(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """The `count` prompts that acceptance is measured on, each once: the first by their ids, which are as good as drawn, so that
    they stay the same wherever they stand in the list, and hsprod serve and hsprod eval measure on the same."""
    unique = {prompt.id: prompt for prompt in prompts}
    return [unique[key] for key in sorted(unique)[:count]]


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 hex of the set of ids; the order of the list is no part of it."""
    return hashlib.sha256("\n".join(sorted({prompt.id for prompt in prompts})).encode()).hexdigest()


def thinking_mode(tokenizer, wanted: bool | None) -> bool | None:
    """What the extraction contract says of thinking: None where the template knows no switch.

    wanted None takes the template's own default, told apart by rendering both ways.  UserError: wanted, and no switch.
    """
    probe = [{"role": "user", "content": "a"}]
    off, on = (_text(tokenizer, probe, choice, True) if tokenizer.chat_template else "" for choice in (False, True))
    if off == on:
        if wanted:
            raise UserError("--thinking: this target's chat template has no such switch")
        return None
    return _text(tokenizer, probe, None, True) == on if wanted is None else wanted


def render(tokenizer, prompt: Prompt, thinking: bool | None) -> list[int]:
    """Token ids up to where the assistant begins; the plain text's ids on a target without a chat template."""
    if not tokenizer.chat_template:
        return tokenizer(_plain(prompt.messages)).input_ids
    return tokenizer(_text(tokenizer, prompt.messages, thinking, True), add_special_tokens=False).input_ids


def render_conversation(tokenizer, messages: Iterable[dict[str, str]], thinking: bool | None,
                        eos_ids: frozenset[int]) -> tuple[list[int], list[bool]]:
    """A conversation with its assistant turns -> ids (T,), loss mask (T,): True on the assistant's own tokens.

    A token is the assistant's when it lies wholly inside the turn's text; the end token right after it is, too.
    Without a chat template: one user turn and one assistant turn, joined, and the end token.  Raises UserError when
    the template rewrites or drops an assistant's text (old reasoning may go: templates mean that).
    """
    messages = list(messages)
    if not tokenizer.chat_template:
        first = tokenizer(_plain(messages[:-1])).input_ids
        rest = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        return first + rest, [False] * len(first) + [True] * len(rest)
    text = _text(tokenizer, messages, thinking, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _span(tokenizer, messages, turn, thinking, text)
            for t, (a, b) in enumerate(offsets):
                mask[t] |= start <= a and b <= end and a < b
            after = next((t for t, (a, _) in enumerate(offsets) if a >= end), None)
            if after is not None and ids[after] in eos_ids:
                mask[after] = True
    return ids, mask


def _span(tokenizer, messages: list[dict[str, str]], turn: int, thinking: bool | None, text: str) -> tuple[int, int]:
    """Characters [start, end) of one assistant turn in `text`: what two renderings with other content have in common
    lies around it.  A template may write reasoning out of the content: the turn then starts where it does."""
    content = messages[turn]["content"]
    swapped = [messages[:turn] + [{"role": "assistant", "content": text}] + messages[turn + 1:] for text in SENTINELS]
    one, other = (_text(tokenizer, conversation, thinking, False) for conversation in swapped)
    before = os.path.commonprefix([one, other])
    after = os.path.commonprefix([one[::-1], other[::-1]])[::-1]
    if not text.startswith(before):
        before = os.path.commonprefix([before, text])
    start, end = len(before), len(text) - len(after)
    said, given = "".join(text[start:end].split()), "".join(content.split())
    if not text.endswith(after) or end < start or not given.endswith(said):
        raise UserError(f"message {turn}: the chat template does not write the assistant's text as it stands, so its tokens "
                        "cannot be found")
    return start, end


def _text(tokenizer, messages: Iterable[dict[str, str]], thinking: bool | None, open_turn: bool) -> str:
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_turn, **switch)


def _plain(messages: Iterable[dict[str, str]]) -> str:
    contents = [message["content"] for message in messages]
    if len(contents) != 1:
        raise UserError(f"this target has no chat template, so a prompt is one text; this one has {len(contents)} messages")
    return contents[0]

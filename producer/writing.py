"""`hsprod generate`: the target answers, and the text appears as it is decoded, with a drafter or without.

The text goes to standard output, all that is said about it to standard error.  Left out: batches and a server; this is
for trying a drafter and for seeing what it does."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common import logs
from common.drafter import acceptance
from common.drafter.model import Drafter
from common.errors import UserError
from producer import lengths, prompt_sets, prompts as prompt_files
from producer.config import Generate
from producer.fitting import check_sizes, fit_drafter, read_drafter
from producer.progress import say
from producer.sampling import Sampling
from producer.speculate import Decoded, Length, Limit, OnTokens, first_divergence, margin, plain, speculate
from producer.target import Target, load

UNFINISHED = "\N{REPLACEMENT CHARACTER}"        # what a tokenizer writes for the first bytes of a character


class TextStream:
    """Tokens in, text out, without ever giving out a part of a character that the next token may complete.

    feed and flush, joined, are decode(all tokens).  Only tokens since the last whole character, and those fed with it, are
    decoded again, so that a long text costs no more a token than a short one."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._window, self._given = decode, [], 0      # _given: characters of the window's text given out

    def feed(self, new: list[int]) -> str:
        self._window += new
        text = self._decode(self._window)
        whole = text.rstrip(UNFINISHED)
        out, self._given = whole[self._given:], max(self._given, len(whole))
        if whole == text and (start := self._decode(new)) and text.endswith(start):
            self._window, self._given = list(new), len(start)        # these stay: some decoders strip what begins a text
        return out

    def flush(self) -> str:
        """What is left when the text ends, whole or not."""
        out = self._decode(self._window)[self._given:]
        self._window, self._given = [], 0
        return out


@dataclass(frozen=True)
class Writer:
    """One target, perhaps a drafter, and how to decode."""

    target: Target
    drafter: Drafter | None
    limit: Limit
    sampling: Sampling
    block_size: int | None
    chunk: int | None
    length: Length | None = None

    def decode(self, ids: list[int], key: str, on_tokens: OnTokens | None = None) -> Decoded:
        how = dict(chunk=self.chunk, sampling=self.sampling, key=key, on_tokens=on_tokens)
        if self.drafter is None:
            return plain(self.target, ids, self.limit, **how)
        room = self.drafter.config.max_position_embeddings
        if len(ids) + self.limit.max_new_tokens > room:
            raise UserError(f"a prompt of {len(ids)} tokens and {self.limit.max_new_tokens} new ones: this drafter knows {room} "
                            "positions; lower --max-new-tokens, or leave the drafter out")
        return speculate(self.target, self.drafter, ids, self.limit, block_size=self.block_size, length=self.length, **how)

    def write(self, ids: list[int], key: str, put: Callable[[str], None]) -> Decoded:
        """Decode one prompt, putting out its text piece by piece."""
        text = TextStream(lambda tokens: self.target.tokenizer.decode(tokens, skip_special_tokens=True,
                                                                      clean_up_tokenization_spaces=False))
        decoded = self.decode(ids, key, lambda new: put(text.feed(new)))
        put(text.flush())
        return decoded

    def compare(self, ids: list[int], decoded: Decoded) -> tuple[bool, str]:
        """Plain decoding of the same prompt beside what was decoded: are the texts the same, and in words (S3: where they part, how
        near the choice was)."""
        own = plain(self.target, ids, self.limit, chunk=self.chunk)
        place = first_divergence(own.tokens, decoded.tokens)
        said = "identical" if place is None else (f"other from new token {place} on, where the target's first choice led by "
                                                  f"{margin(self.target, ids + own.tokens[:place]):.3g} in logits")
        faster = f", {rate(decoded) / rate(own):.2f}x as fast" if len(own.tokens) > 1 < len(decoded.tokens) else ""
        return place is None, f"plain decoding: {summary(own)}; texts {said}{faster}"


def run(settings: Generate) -> int:
    """The exit code: 1 where --compare found another text in fp32, where speculation may change none."""
    if (settings.prompt is None) == (settings.prompts is None):
        raise UserError("give either a prompt or --prompts FILE")
    if settings.drafter is None and (
            settings.compare or settings.block_size or settings.force or settings.verify_len != lengths.FULL):
        raise UserError("--compare, --block-size, --verify-len and --force are about a drafter: give --drafter DIR")
    sampling = Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=settings.seed)
    if settings.compare and sampling.temperature:
        raise UserError("--compare is for greedy decoding: two samples of one distribution differ; use --temperature 0")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if encoding := logs.replacing(sys.stdout):
        say(f"note: standard output is {encoding}: what it cannot hold is written as ?; set PYTHONIOENCODING=utf-8")
    asked, found = read(settings), read_drafter(settings) if settings.drafter else None
    if found:
        check_sizes(settings, found[0].config)
    target = load(settings.target, dtype=settings.dtype, device=settings.device, experts=settings.experts, say=say)
    thinking = prompt_files.thinking_mode(target.tokenizer, settings.thinking)
    drafter = fit_drafter(settings, found, target, thinking) if found else None
    length = verify_length(settings, target, drafter, prompt_files.render(target.tokenizer, asked[0], thinking)) if drafter else None
    writer = Writer(target, drafter, Limit(settings.max_new_tokens, target.eos_ids), sampling, settings.block_size or None,
                    settings.prefill_chunk or None, length)
    differ = 0
    for number, prompt in enumerate(asked, 1):
        ids = prompt_files.render(target.tokenizer, prompt, thinking)
        if settings.compare and number == 1:                         # what first use costs is neither's
            for drafter_or_none in (drafter, None):
                Writer(target, drafter_or_none, Limit(8), sampling, writer.block_size, writer.chunk).decode(ids, "")
        decoded = writer.write(ids, prompt.id, lambda text: print(text, end="", flush=True))
        print(flush=True)
        if settings.stats:
            say((f"[{number}/{len(asked)}] " if len(asked) > 1 else "") + summary(decoded, length))
        if settings.compare:
            same, words = writer.compare(ids, decoded)
            say(words)
            differ += not same
    if differ and target.dtype == torch.float32:
        say(f"{differ} of {len(asked)} texts are not plain decoding's; in float32 all must be")
        return 1
    return 0


def read(settings: Generate) -> list[prompt_files.Prompt]:
    if settings.prompts is None:
        try:
            return [prompt_sets.parse(settings.prompt)[1]]
        except ValueError as error:
            raise UserError(f"the prompt: {error}") from None
    found = prompt_sets.read(settings.prompts)
    if settings.stats:
        say(found.line())
    return found.prompts


def verify_length(settings: Generate, target: Target, drafter: Drafter, ids: list[int]) -> Length | None:
    """What --verify-len asks for; auto is calibrated on the beginning of ids, and how long that took is said."""
    block_size, began = settings.block_size or drafter.config.block_size, time.perf_counter()
    length = lengths.make(lengths.parse(settings.verify_len, block_size), target, drafter, ids, block_size)
    if settings.stats and isinstance(length, lengths.Auto):
        say(f"verify lengths calibrated in {time.perf_counter() - began:.1f} s")
    return length


def rate(decoded: Decoded) -> float:
    """Tokens a second after the first, which the prefill gives."""
    return (len(decoded.tokens) - 1) / decoded.decode_seconds


def summary(decoded: Decoded, length: Length | None = None) -> str:
    """One line: tokens, tokens/s, of a drafter tau and accepted, and where the verify length is chosen what it came to."""
    line = f"{len(decoded.tokens)} tokens"
    if len(decoded.tokens) > 1:
        line += f", {rate(decoded):.1f} tokens/s"
    if decoded.accepted:
        line += (f", tau {acceptance.tau_pooled([decoded.accepted]):.2f} ({sum(decoded.accepted)} of {sum(decoded.offered)} drafts "
                 f"accepted in {len(decoded.accepted)} blocks)")
        if isinstance(length, lengths.Auto):
            line += (f", {1 + sum(decoded.offered) / len(decoded.offered):.1f} slots verified a block ({length.probes} of {length.blocks} "
                     "blocks so far were probes)")
    return line + f", prefill {decoded.seconds['prefill']:.2f} s"

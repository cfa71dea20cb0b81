"""`hsprod generate`: the target answers, and the text appears as it is decoded, with a drafter or without.

The text goes to standard output, all that is said about it to standard error.  Left out: batches and a server; this is
for trying a drafter and for seeing what it does."""
from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.contract import ExtractionContract, unlike
from common.drafter import acceptance, checkpoint
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from producer import identity, lengths, packed, prompts as prompt_files, selftest
from producer.config import Bench, Generate
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

    def compare(self, ids: list[int], decoded: Decoded) -> str:
        """Plain decoding of the same prompt beside what was decoded (S3: where they part, how near the choice was)."""
        own = plain(self.target, ids, self.limit, chunk=self.chunk)
        place = first_divergence(own.tokens, decoded.tokens)
        said = "identical" if place is None else (f"other from new token {place} on, where the target's first choice led by "
                                                  f"{margin(self.target, ids + own.tokens[:place]):.3g} in logits")
        faster = f", {rate(decoded) / rate(own):.2f}x as fast" if len(own.tokens) > 1 < len(decoded.tokens) else ""
        return f"plain decoding: {summary(own)}; texts {said}{faster}"


def run(settings: Generate) -> None:
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
    asked, found = read(settings), read_drafter(settings) if settings.drafter else None
    target = load(settings.target, dtype=settings.dtype, device=settings.device, experts=settings.experts, say=say)
    thinking = prompt_files.thinking_mode(target.tokenizer, settings.thinking)
    drafter = fit_drafter(settings, found, target, thinking) if found else None
    length = verify_length(settings, target, drafter, prompt_files.render(target.tokenizer, asked[0], thinking)) if drafter else None
    writer = Writer(target, drafter, Limit(settings.max_new_tokens, target.eos_ids), sampling, settings.block_size or None,
                    settings.prefill_chunk or None, length)
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
            say(writer.compare(ids, decoded))


def read(settings: Generate) -> list[prompt_files.Prompt]:
    if settings.prompts is None:
        return [prompt_files.Prompt(({"role": "user", "content": settings.prompt},))]
    return prompt_files.read(Path("/dev/stdin") if str(settings.prompts) == "-" else settings.prompts)


def read_drafter(settings: Generate | Bench) -> tuple[Drafter, dict]:
    """The folder's drafter, on the CPU in fp32, and its record; before the target, whose gigabytes a mistake should not cost.

    Raises UserError for a folder that is no whole drafter, and for more slots than its blocks have.  Where --block-size asks
    for fewer it is a drafter of such blocks from here on; one slot is no block that a drafter can have, and stays the loop's."""
    try:
        drafter, config, record = checkpoint.load(settings.drafter, "cpu", torch.float32)
    except CorruptError as error:
        raise UserError(f"--drafter {settings.drafter}: {error}") from None
    if settings.block_size > config.block_size:
        raise UserError(f"--block-size {settings.block_size}: this drafter's blocks have {config.block_size} slots at most")
    if isinstance(settings, Generate):
        lengths.parse(settings.verify_len, settings.block_size or config.block_size)
    if settings.block_size > 1:
        drafter.config = dataclasses.replace(config, block_size=settings.block_size)
    return drafter, record


def fit_drafter(settings: Generate | Bench, found: tuple[Drafter, dict], target: Target, thinking: bool | None) -> Drafter:
    """What read_drafter found, on the target's device and in its dtype.  Raises UserError for a drafter of another target or,
    without --force, contract; and for a target whose blocks cannot be verified and rolled back here."""
    (drafter, record), config = found, found[0].config
    if wrong := misfit(target, config):
        raise UserError(f"--drafter {settings.drafter} was made for another target: {wrong}")
    if not record:
        say(f"note: {settings.drafter} has no {checkpoint.RECORD}, so nothing vouches that it was trained for {target.name}")
    else:
        contract = dataclasses.replace(target.contract(config.taps, thinking), mask_token_id=config.mask_token_id)   # the stream's --mask-token
        wrong, other = strange(*compared(target, contract, record), record)
        if wrong and not settings.force:
            raise UserError(f"--drafter {settings.drafter} was trained on other data than this target's: {wrong}; --force uses it "
                            "all the same (the text stays the target's, but fewer drafts will stand)")
        if wrong:
            say(f"note: {settings.drafter} was trained on other data than this target's: {wrong}")
        if other:
            say(f"note: {settings.drafter} was trained on states computed otherwise than here: {other}")
    if config.mask_token_id != target.mask_token_id and (word := target.tokenizer.convert_ids_to_tokens(config.mask_token_id)) is not None:
        say(f"note: the mask token of {settings.drafter}, {config.mask_token_id}, is {word!r} here: where a text holds it, drafts mean little "
            "(the text stays the target's)")
    selftest.check(target, config.taps).require(target.name)
    packed.pack(drafter.to(target.device, target.dtype))
    return drafter


def verify_length(settings: Generate, target: Target, drafter: Drafter, ids: list[int]) -> Length | None:
    """What --verify-len asks for; auto is calibrated on the beginning of ids, and how long that took is said."""
    block_size, began = settings.block_size or drafter.config.block_size, time.perf_counter()
    length = lengths.make(lengths.parse(settings.verify_len, block_size), target, drafter, ids, block_size)
    if settings.stats and isinstance(length, lengths.Auto):
        say(f"verify lengths calibrated in {time.perf_counter() - began:.1f} s")
    return length


def misfit(target: Target, config: DrafterConfig) -> str:
    """Why this drafter cannot run on this target; "" where it can."""
    pairs = (("layers", config.num_target_layers, target.n_layers), ("hidden size", config.hidden_size, target.hidden_size),
             ("vocabulary", config.vocab_size, target.vocab_size))
    return "; ".join(f"{name} {theirs}, {target.name} has {ours}" for name, theirs, ours in pairs if theirs != ours)


def compared(target: Target, contract: ExtractionContract, record: dict) -> tuple[ExtractionContract, ExtractionContract | None]:
    """This target's contract, and the one that the drafter's record holds (None: a hash only).  UserError for a damaged record.

    A fingerprint of weights holds their dtype, so ours is taken in the drafter's: another dtype alone is not other weights."""
    if "extraction" not in record:
        return contract, None
    try:
        theirs = ExtractionContract.from_dict(record["extraction"])
    except CorruptError as error:
        raise UserError(f"the drafter's {checkpoint.RECORD} is damaged: {error}") from None
    dtype = getattr(torch, theirs.dtype, None)
    if isinstance(dtype, torch.dtype) and theirs.dtype != contract.dtype:
        contract = dataclasses.replace(contract, weights=identity.weights(target.model, dtype))
    return contract, theirs


def strange(contract: ExtractionContract, theirs: ExtractionContract | None, record: dict) -> tuple[str, str]:
    """'field: the drafter's -> this target's' for each that differs: those that make it another target's drafter, and those that
    move bits only (name, dtype, kernels, library versions, the experts' implementation among them).

    Old records hold a hash alone, so that any difference counts, and none but the target's name can be named."""
    if record.get("contract") == contract.hash:
        return "", ""
    if theirs is None:
        name = "" if record.get("target") == contract.target else f"target {record.get('target')}, here {contract.target}; "
        return (f"{name}contract {str(record.get('contract'))[:12]}, here {contract.hash[:12]} (taps, weights, dtype, thinking and library "
                "versions count)"), ""
    fields = unlike(theirs, contract)
    light = {name for name in fields if name in ("target", "dtype", "delta_rule") or name.startswith("versions.")}
    return tuple("; ".join(f"{name}: {values}" for name, values in fields.items() if (name in light) == bits) for bits in (False, True))


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


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

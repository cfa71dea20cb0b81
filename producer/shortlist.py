"""A draft head of K tokens, measured (table 5): what it costs, what it covers, and what becomes of tau and of tokens/s.

The lists are chosen by counts of text from the training side, never on the prompts that they are judged on.  Measured tau stands
beside the projected one, which counts a token outside the list as a certain rejection: the restricted head may do better,
because where a foreign token was its first choice, another may be right.  End tokens are in every list: every text needs one,
and they cost a row each.  Which tokens a list holds is decided in common.drafter.vocab."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common.drafter import acceptance, vocab
from common.drafter.model import Drafter
from producer import stopwatch
from producer.evaluate import PlainTexts, Prompts, accepted_at
from producer.speculate import Decoded, Limit, Network, decode, speculate
from producer.tables import digits, ms, percent, table
from producer.target import Target

ROUNDS = 15             # timings of each head
Lists = dict[int, np.ndarray]           # size -> ids [size], ascending


@dataclass(frozen=True)
class Counts:
    """counts [V]: how often each token stands in training-side text; source: which, in words; prompts: ids of its prompts."""

    counts: np.ndarray
    source: str
    prompts: frozenset[str] = field(default=frozenset())


def counted(target: Target, drafter: Drafter, prompts: Prompts, limit: Limit) -> Counts:
    """Counts of the target's own answers to training-side prompts (decoded with the drafter, for time) and of the prompts."""
    texts = [ids + speculate(target, drafter, ids, limit).tokens for _, ids in prompts]
    return Counts(vocab.count(texts, target.vocab_size), f"{len(prompts)} other prompts and the target's answers",
                  frozenset(prompt for prompt, _ in prompts))


def measure(target: Target, drafter: Drafter, prompts: Prompts, texts: PlainTexts, counts: Counts,
            sizes: list[int] | None = None) -> dict:
    """Every list on every prompt, the lists in turns -> the record; rows by size, ascending.

    sizes: None: vocab.sizes.  A row: size; bytes of the head's rows; seconds of head and choice for a block's drafts; coverage of
    the plain texts' tokens; tau, tau_projected; tokens_per_s; identical: texts equal to plain decoding's.
    Raises ValueError where a prompt is among those counted, and where no text has two tokens."""
    if shared := {prompt for prompt, _ in prompts} & counts.prompts:
        raise ValueError(f"{len(shared)} prompts were counted for the list and are measured, too")
    sizes = vocab.sizes(target.vocab_size) if sizes is None else sorted(sizes)
    lists = {size: vocab.shortlist(counts.counts, size, target.eos_ids) for size in sizes}
    plains = [texts(prompt, ids).decoded.tokens for prompt, ids in prompts]
    held_out = vocab.count(plains, target.vocab_size)
    seconds = head_seconds(target, lists, drafter.config.block_size - 1)
    specs = _decoded(target, drafter, prompts, texts.limit, lists)
    guessed = _projected(target, drafter, prompts, texts, lists)
    rows = []
    for size, ids in lists.items():
        runs = specs[size]
        rate = sum(len(run.tokens) - 1 for run in runs) / sum(run.decode_seconds for run in runs)
        rows.append({"size": size, "bytes": size * target.head[0].nbytes, "seconds": seconds[size],
                     "coverage": vocab.coverage(held_out, ids), "tau": acceptance.tau_pooled([run.accepted for run in runs]),
                     "tau_projected": acceptance.tau_pooled(guessed[size]), "tokens_per_s": rate,
                     "identical": sum(run.tokens == own for run, own in zip(runs, plains, strict=True))})
    return {"vocab_size": target.vocab_size, "source": counts.source, "counted_tokens": int(counts.counts.sum()),
            "counted_distinct": int((counts.counts > 0).sum()), "always": sorted(target.eos_ids), "prompts": len(prompts),
            "drafts": drafter.config.block_size - 1, "held_out_tokens": int(held_out.sum()), "rows": rows}


def head_seconds(target: Target, lists: Lists, drafts: int) -> dict[int, float]:
    """Median time of logits and first choice of `drafts` rows, by size, as Network computes them."""
    hidden = torch.randn(drafts, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(target.device, target.dtype)

    def call(ids: Tensor | None):
        if ids is None:
            return lambda: F.linear(hidden, target.head).argmax(-1)
        head = target.head[ids]
        return lambda: vocab.whole(F.linear(hidden, head).argmax(-1), None, ids, target.vocab_size)
    calls = {str(size): call(_restriction(target, ids)) for size, ids in lists.items()}
    with torch.inference_mode():
        taken = stopwatch.medians(calls, target.device, ROUNDS)
    return {size: taken[str(size)] for size in lists}


def _decoded(target: Target, drafter: Drafter, prompts: Prompts, limit: Limit, lists: Lists) -> dict[int, list[Decoded]]:
    order, specs = list(lists), {size: [] for size in lists}
    restricted(target, drafter, prompts[0][1], Limit(drafter.config.block_size), lists[order[0]])   # what first use costs
    for turn, (_, ids) in enumerate(prompts):
        for size in order[turn % len(order):] + order[:turn % len(order)]:
            specs[size].append(restricted(target, drafter, ids, limit, lists[size]))
    return specs


def restricted(target: Target, drafter: Drafter, ids: list[int], limit: Limit, tokens: np.ndarray) -> Decoded:
    """Greedy decoding with drafts from a list of tokens [K], ascending."""
    network = Network(drafter, target, len(ids) + limit.max_new_tokens, shortlist=_restriction(target, tokens))
    return decode(target, network, drafter.config.taps, ids, limit, drafter.config.block_size)


def _projected(target: Target, drafter: Drafter, prompts: Prompts, texts: PlainTexts, lists: Lists) -> dict[int, list[list[int]]]:
    """Accepted of each block of each text, were a token outside the list a certain rejection of the whole vocabulary's drafts."""
    walks: dict[int, list[list[int]]] = {size: [] for size in lists}
    for prompt, ids in prompts:
        kept = texts(prompt, ids)
        text = ids + kept.decoded.tokens
        judged = accepted_at(target, drafter, ids, kept, texts.limit)
        for size, tokens in lists.items():
            walks[size].append(acceptance.chain_walk(vocab.projected(judged, text, tokens), len(ids), len(text)))
    return walks


def _restriction(target: Target, ids: np.ndarray) -> Tensor | None:
    """A list of the whole vocabulary is none: the target's own head, without a copy."""
    return None if len(ids) == target.vocab_size else torch.from_numpy(ids).to(target.device)


def show(measured: dict) -> Table:
    note = (f"{measured['prompts']} held-out prompts, {measured['held_out_tokens']} tokens. Lists by the counts of {measured['source']}: "
            f"{measured['counted_tokens']} tokens, {measured['counted_distinct']} different; end tokens always in. head: logits and "
            f"choice of {measured['drafts']} drafts. covered: of the held-out texts' tokens. projected: tau, were a token outside the "
            "list a certain rejection.")
    made = table(f"5. Draft head of K tokens, of {measured['vocab_size']}", "K", "MiB", "head, ms", "covered", "tau", "projected",
                 "tokens/s", "same text", words=0, note=note)
    for row in measured["rows"]:
        made.add_row(str(row["size"]), digits(row["bytes"] / 2 ** 20), ms(row["seconds"]), percent(row["coverage"]),
                     f"{row['tau']:.2f}", f"{row['tau_projected']:.2f}", digits(row["tokens_per_s"]),
                     f"{row['identical']}/{measured['prompts']}")
    return made

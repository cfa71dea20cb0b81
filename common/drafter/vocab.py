"""A draft head of K tokens instead of V: which ones, what they cover, and how the K-token world maps back to the whole one.

With V = 248320 the draft reads a gigabyte of head for a handful of tokens; most text is written with few of them.  The text
stays the target's whatever the list is: a token that is not in it is one that is never drafted.  A list must be chosen on
other text than the one it is judged on.  Used by the decode loop, its bench and training alike.  Left out: lists that
change while decoding, and tokens merged into classes."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError

SHARES = (32, 16, 8, 4, 2, 1)       # of V: the lists that are tried by default
OUTSIDE = -1                        # the place of a token that is not in a list
STEP = 16                           # rows of a head come in multiples of this: a matrix unit's tile


def sizes(vocab_size: int) -> list[int]:
    """The default K's, ascending: V/32 .. V/2 rounded up to STEP, then V."""
    return sorted({min(vocab_size, -(-vocab_size // (share * STEP)) * STEP if share > 1 else vocab_size) for share in SHARES})


def count(texts: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """How often each token stands in these texts, [V] int64.  ValueError for an id that is none of the vocabulary's."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"ids run from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}")
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def shortlist(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> np.ndarray:
    """The `size` tokens of the largest counts [V], those of `always` first of all -> ids [size] int64, ascending.

    Of equal counts, those never seen included, the lower id goes in: it is the commoner one in a BPE vocabulary.  Ascending,
    so that equal logits are settled as on the whole vocabulary.  ValueError for a size out of 1..V or below `always`."""
    always = sorted(set(always))
    if not max(1, len(always)) <= size <= len(counts):
        raise ValueError(f"a list of {size} tokens, of {len(counts)}, {len(always)} of them always")
    rank = np.array(counts, np.int64)
    rank[always] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank, kind="stable")[:size])


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """The share of a text's tokens, given by its counts [V], that the list holds.  ValueError for a text without tokens."""
    if not counts.sum():
        raise ValueError("no token was counted")
    return float(counts[ids].sum() / counts.sum())


def whole(picked: Tensor, q: Tensor | None, ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor | None]:
    """What a restricted head drafted, in the whole vocabulary's terms.

    picked [n] int64 places in the list, q [n, K] what they were drawn from (None: picked greedily), ids [K] the list
    returns  tokens [n] int64, and q [n, V], 0 at every token that is not in the list
    """
    spread = None if q is None else q.new_zeros(len(q), vocab_size).index_copy_(1, ids, q)
    return ids[picked], spread


def places(tokens: Tensor, ids: Tensor) -> Tensor:
    """tokens (...) int64, the list ids [K] int64 ascending -> (...) int64: each token's place in the list, or OUTSIDE."""
    place = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[place] == tokens, place, OUTSIDE)


def to_d2t(ids: Tensor) -> Tensor:
    """ids [K] int64 -> d2t [K] int64, an offset as speculators and EAGLE-3 have it: token of draft id i is i + d2t[i].

    (GGUF's d2t is absolute: the ids themselves.)"""
    return ids - torch.arange(len(ids), device=ids.device)


def from_d2t(d2t: Tensor) -> Tensor:
    """The ids [K] of such a map."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def to_t2d(ids: Tensor, vocab_size: int) -> Tensor:
    """ids [K] -> t2d [V] bool: the tokens that may be drafted (speculators' second map)."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)


def projected(accepted_at: Sequence[int], text: Sequence[int], ids: np.ndarray) -> list[int]:
    """Acceptance under a list by arithmetic alone: the whole vocabulary's drafts, a token outside the list a certain rejection.

    accepted_at (T,): acceptance.simulate's, draft tokens that agree from each anchor on (below 0: not judged, stays so)
    text (T,) token ids
    returns (T,): as far as the text's tokens after the anchor are in the list
    A restricted head can do better, never worse: where a foreign token was its first choice, another may now be right."""
    inside = np.isin(np.asarray(text), ids)
    out, run = [], 0
    for anchor in range(len(text) - 1, -1, -1):
        out.append(min(accepted_at[anchor], run))                   # run: tokens right after the anchor that are in the list
        run = run + 1 if inside[anchor] else 0
    return out[::-1]


def check(ids: Tensor, vocab_size: int) -> None:
    """ValueError unless ids [K] int64 ascend strictly within 0..V-1: another order would settle equal logits another way."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise ValueError(f"a list of tokens is [K] int64, not {list(ids.shape)} {ids.dtype}")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() <= 0).any()):
        raise ValueError(f"a list of tokens must ascend within 0..{vocab_size - 1}")


def read_counts(path: Path, vocab_size: int) -> np.ndarray:
    """A file of counts: numpy's .npy with V integers, none negative.  Raises UserError."""
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'no .npy file of counts'}") from None
    right = isinstance(counts, np.ndarray) and counts.shape == (vocab_size,) and counts.dtype.kind in "iu"
    if not right or (counts < 0).any() or not counts.any():
        raise UserError(f"{path}: expected {vocab_size} integers: how often each token of the target's vocabulary stands in "
                        "training text")
    return counts.astype(np.int64)

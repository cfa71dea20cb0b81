"""Drafters that would spoil the text if anything they say could: every place for a mistake, every block size, every end (S1, S2).

What each of them leaves behind in the target's cache is compared with plain decoding's own, not only the text."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from drafters import TAPS, prompts
from test_rollback import error, states

from producer import speculate
from producer.rollback import TargetCache
from producer.speculate import Limit, decode, plain

LARGEST = 16
NEW = 1 + LARGEST * (LARGEST - 1) // 2           # the prefill's token, then blocks that keep 1, 2, .. 15 tokens
CHUNKS = (1, 7, 64, None)                        # of a prompt that is a little longer than 64
Say = Callable[[list[int], int], list[int]]      # (the right drafts, number of the block) -> what is drafted


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense(layers=8)


@pytest.fixture(scope="module")
def known(target):
    """The prompt, plain decoding's NEW tokens, and its cache as it was when n of them stood: n -> states."""
    [ids], tokens, caches, kept = prompts((66,), seed=1), [], [], {}

    def hear(new: list[int]) -> None:
        tokens.extend(new)
        kept[len(tokens)] = states(caches[-1])
    own = target.new_cache
    target.new_cache = lambda: caches.append(own()) or caches[-1]
    plain(target, ids, Limit(NEW), on_tokens=hear)
    del target.new_cache
    return ids, tokens, kept


class Told:
    """Knows the text, and says what `say` makes of it; never more than it is asked for."""

    def __init__(self, text: list[int], say: Say) -> None:
        self.text, self.say, self.context, self.blocks = text, say, 0, 0

    def extend(self, taps) -> None:
        self.context += taps.shape[2]

    def propose(self, last, slots, keep):
        right = (self.text + [7] * slots)[self.context + 1:self.context + keep]
        self.blocks += 1
        return torch.tensor(self.say(right, self.blocks - 1), dtype=torch.long), None


def wrong_at(slot: int, right: list[int]) -> list[int]:
    """The right drafts, but for the one of this slot (1: the first), which is another token; those behind it are right."""
    return [token if i != slot else (token + 1) % 300 for i, token in enumerate(right, 1)]


def every_slot_in_turn(block: int) -> Say:
    return lambda right, n: wrong_at(1 + n % max(1, block - 1), right)


def chance(right: list[int], n: int) -> list[int]:
    return torch.randint(0, 320, (len(right),), generator=torch.Generator().manual_seed(n)).tolist()


SAY = {"oracle": lambda right, n: right, "always wrong": lambda right, n: [(token + 1) % 300 for token in right], "random": chance,
       "end tokens": lambda right, n: [tiny.EOS] * len(right), "mask tokens": lambda right, n: [tiny.MASK] * len(right),
       "the first again": lambda right, n: right[:1] * len(right), "one too early": lambda right, n: right[1:] + right[:1],
       "fewer each time": lambda right, n: right[:len(right) - n % 4] if n % 4 < len(right) else []}


@pytest.fixture
def caches(monkeypatch):
    """The caches that the loop makes, in order."""
    made = []
    monkeypatch.setattr(speculate, "TargetCache", lambda *args: made.append(TargetCache(*args)) or made[-1])
    return made


def same_state(cache: TargetCache, kept: dict, decoded, ids: list[int]) -> None:
    """The text's end is not committed by the loop, which needs it no more: done here."""
    length = len(ids) + len(decoded.tokens) - 1                      # the last token was never run
    if cache.length < length:
        cache.commit(decoded.accepted[-1] + 1)
    assert cache.length == length and error(states(cache), kept[len(decoded.tokens)]) < 1e-4


@pytest.mark.parametrize("block", range(1, LARGEST + 1))
def test_one_wrong_slot_at_every_place(target, known, caches, block):
    """Block n has its slot n + 1 wrong and all others right: exactly n drafts stand, whatever agrees behind the mistake."""
    ids, tokens, kept = known
    new = 1 + block * (block - 1) // 2 if block > 1 else 9
    got = decode(target, Told(ids + tokens, every_slot_in_turn(block)), TAPS, ids, Limit(new), block, chunk=CHUNKS[block % 4])
    assert got.tokens == tokens[:new]
    assert got.accepted == (list(range(block - 1)) if block > 1 else [0] * 8)
    same_state(caches[0], kept, got, ids)


@pytest.mark.parametrize("name", SAY)
def test_what_is_said_does_not_matter(target, known, caches, name):
    ids, tokens, kept = known
    got = decode(target, Told(ids + tokens, SAY[name]), TAPS, ids, Limit(17), 5, chunk=7)
    assert got.tokens == tokens[:17] and sum(n + 1 for n in got.accepted) == 16
    same_state(caches[-1], kept, got, ids)
    if name == "oracle":
        assert got.accepted == [4, 4, 4, 0]
    if name in ("always wrong", "end tokens", "mask tokens"):
        assert not any(got.accepted)


@pytest.mark.parametrize("wrong", range(4))
def test_a_text_ends_where_plain_decodings_does(target, known, caches, wrong):
    """Limits and stop tokens at every place of a block of 4 and beyond, the drafts behind the end known too; wrong: 0 is the oracle."""
    ids, tokens, kept = known
    def say(right, n):
        return wrong_at(wrong, right)
    for place in range(7):
        ends = [Limit(place + 1)]
        if tokens[place] not in tokens[:place]:
            ends.append(Limit(40, frozenset({tokens[place]})))
        for limit in ends:
            got = decode(target, Told(ids + tokens, say), TAPS, ids, limit, 4)
            assert got.tokens == tokens[:place + 1]
            assert sum(n + 1 for n in got.accepted) == place
            if place:
                same_state(caches[-1], kept, got, ids)
    assert len(set(tokens[:7])) >= 5                                 # stop tokens were met, too


@pytest.mark.parametrize("foreign", [-1, 320, 10 ** 9])
def test_a_foreign_id_never_becomes_text(target, known, foreign):
    ids, tokens, _ = known
    assert target.vocab_size == 320
    with pytest.raises(IndexError):
        decode(target, Told(ids + tokens, lambda right, n: right[:1] + [foreign] * len(right[1:])), TAPS, ids, Limit(20), 6, chunk=64)


def test_more_than_was_asked_for_is_the_drafters_fault(target, known):
    ids, tokens, _ = known
    for extra in (1, 5):
        with pytest.raises(ValueError, match=f"the drafter gave {5 + extra} tokens, at most 5"):
            decode(target, Told(ids + tokens, lambda right, n: right + [7] * extra), TAPS, ids, Limit(20), 6, chunk=64)

"""Whatever the drafter says, the text is plain decoding's (S1), and the loop counts as the simulation does (A2)."""
from __future__ import annotations

import pytest
import tiny
import torch
from drafters import BLOCK, TAPS, Random, Scheduled, prompts, trained

from producer import evaluate
from producer.rollback import RULES
from producer.speculate import PARTS, Limit, decode, first_divergence, margin, plain, speculate

LENGTHS = (3, 37, 64, 77)
KEPT = {3: [0, 15, 1, 14, 2, 13, 3, 12], 37: [4, 11, 5, 10, 6, 9, 7, 8]}         # every kept length of a 16-token block
KEPT |= {64: KEPT[37][::-1], 77: KEPT[3][::-1]}
NEW = 60 + 8 + 1                                                     # tokens that each of these schedules gives


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense(layers=8)


@pytest.fixture(scope="module")
def texts(target):
    """prompt length -> (prompt, plain decoding's tokens): end tokens are ordinary here."""
    return {len(ids): (ids, plain(target, ids, Limit(NEW)).tokens) for ids in prompts(LENGTHS)}


def test_the_tiny_texts_are_worth_testing_on(texts):
    for _, tokens in texts.values():
        assert len(tokens) == NEW and len(set(tokens)) > 20


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_kept_length_gives_plain_decodings_text(target, texts, length, rule):
    ids, tokens = texts[length]
    got = decode(target, Scheduled(ids + tokens, KEPT[length]), TAPS, ids, Limit(NEW), 16, rule=rule, chunk=20)
    assert got.tokens == tokens and got.accepted == KEPT[length]
    assert set(KEPT[3] + KEPT[37]) == set(KEPT[64] + KEPT[77]) == set(range(16))
    assert got.offered == [15] * 7 + [min(15, got.accepted[-1] + 1)]         # the last block: no slot beyond the text's limit


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_of_mixed_sizes(target, texts, length):
    ids, tokens = texts[length]
    got = decode(target, Scheduled(ids + tokens, [0, 99, 3, 1], [1, 2, 5, 16, 1, 5, 2]), TAPS, ids, Limit(60), 16)
    assert got.tokens == tokens[:60] and {0, 1, 4} < set(got.offered) and {0, 1, 3} <= set(got.accepted)


@pytest.mark.parametrize("block", [1, 2, 5, 16])
def test_bad_and_perfect_drafters(target, texts, block):
    ids, tokens = texts[37]
    never = decode(target, Scheduled(ids + tokens, [0]), TAPS, ids, Limit(40), block)
    always = decode(target, Scheduled(ids + tokens, [99]), TAPS, ids, Limit(40), block)
    chance = decode(target, Random(target.vocab_size, block), TAPS, ids, Limit(40), block)
    assert never.tokens == always.tokens == chance.tokens == tokens[:40]
    assert never.accepted == [0] * 39
    assert sum(n + 1 for n in always.accepted) == 39 and set(always.accepted[:-1]) <= {block - 1}
    assert sum(n + 1 for n in chance.accepted) == 39


def test_the_drafter_gets_each_committed_tokens_own_taps(target, texts):
    """Row t is token t's tap and no other's; the last token's is missing, for no block has seen it."""
    ids, tokens = texts[37]
    drafter = Scheduled(ids + tokens, KEPT[37])
    decode(target, drafter, TAPS, ids, Limit(NEW), 16, chunk=10)
    got = torch.cat(drafter.taps, 2)
    want = target.forward(torch.tensor([ids + tokens]), taps=TAPS).taps
    rows = got.shape[2]
    assert rows == 37 + sum(n + 1 for n in KEPT[37][:-1])            # what the last block added is not needed any more
    scale = want.abs().max()
    assert float((got - want[:, :, :rows]).abs().max() / scale) < 1e-4
    assert float((got[:, :, 1:] - want[:, :, :rows - 1]).abs().max() / scale) > 1e-2


def test_the_texts_limit_inside_a_block(target, texts):
    ids, tokens = texts[3]
    for new in range(1, 20):
        got = decode(target, Scheduled(ids + tokens, [99]), TAPS, ids, Limit(new), 8)
        assert got.tokens == tokens[:new]
        assert sum(n + 1 for n in got.accepted) == new - 1
        assert got.offered == [min(7, new - 1 - done) for done in range(0, new - 1, 8)]


def test_a_stop_token_inside_a_block(target, texts):
    ids, tokens = texts[64]
    places = {i % 8: i for i, token in enumerate(tokens[:24]) if token not in tokens[:i]}
    assert len(places) == 8                                          # every slot of a block of 8 stops a text
    for place in (0, *places.values()):                              # 0: the prefill's own token
        limit = Limit(60, frozenset({tokens[place], 318}))
        got = decode(target, Scheduled(ids + tokens, [99]), TAPS, ids, limit, 8)
        assert got.tokens == plain(target, ids, limit).tokens == tokens[:place + 1]
        assert sum(n + 1 for n in got.accepted) == place


@pytest.fixture(scope="module")
def learned(target):
    asked = prompts((12, 20), seed=5)
    return asked, trained(target, asked, 60, steps=25 if target.is_hybrid else 80)       # learned by half


def test_simulated_is_real(target, learned):
    """Exactly, on every block: taps captured in one forward against taps of prefill and verifies, which differ by rounding."""
    asked, drafter = learned
    limit = Limit(60)
    texts = evaluate.PlainTexts(target, limit, TAPS)
    met = set()
    for i, ids in enumerate(asked + prompts((9,), seed=8)):
        text, spec = texts(str(i), ids), speculate(target, drafter, ids, limit)
        assert spec.tokens == text.decoded.tokens
        assert evaluate.simulate(target, drafter, ids, text, limit) == spec.accepted
        met |= set(spec.accepted)
        shifted = evaluate.Plain(text.decoded, text.taps.roll(1, 0))
        assert i == 2 or evaluate.simulate(target, drafter, ids, shifted, limit) != spec.accepted
    assert {0, BLOCK - 1} <= met and len(met) >= 4


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_smaller_block_than_the_drafters(target, learned, block):
    asked, drafter = learned
    spec = speculate(target, drafter, asked[0], Limit(30), block_size=block)
    assert spec.tokens == plain(target, asked[0], Limit(30)).tokens and max(spec.offered) == block - 1


def test_bf16_differs_from_plain_no_more_than_the_target_from_itself():
    """Not token for token: where the target's own one-token and whole-text forwards disagree, so may a block.

    On the emitted text, one-token decoding would have said something else at no more places, nor at clearer ones, than
    three times what it does on the same text computed whole.  (Three places and a margin of 0.1 are always allowed.)"""
    target, new = tiny.hybrid(dtype=torch.bfloat16), 60
    [ids] = prompts((40,), seed=2)
    known = ids + plain(target, ids, Limit(new)).tokens
    spec = decode(target, Scheduled(known, [3, 0, 8, 1], strict=False), TAPS, ids, Limit(new), 16)
    assert sum(spec.accepted) > new // 2
    text, cache = torch.tensor([ids + spec.tokens]), target.new_cache()
    steps = [target.forward(text[:, :len(ids)], cache=cache).logits[0, -1]]
    steps += [target.forward(text[:, t:t + 1], cache=cache).logits[0, -1] for t in range(len(ids), len(ids) + new - 1)]
    whole = target.forward(text, logits_to_keep=0).logits[0, len(ids) - 1:-1].argmax(-1)
    one = torch.stack(steps).float()
    ours, floor = (one.max(-1).values - one.gather(1, said[:, None])[:, 0] for said in (torch.tensor(spec.tokens), whole))
    assert int((ours > 0).sum()) <= 3 * max(1, int((floor > 0).sum()))
    assert float(ours.max()) <= max(0.1, 3 * float(floor.max()))


def test_first_divergence():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_margin_is_first_minus_second(target):
    ids = prompts((9,))[0]
    top = sorted(target.forward(torch.tensor([ids])).logits[0, -1].tolist())[-2:]
    assert margin(target, ids) == pytest.approx(top[1] - top[0], abs=1e-6)


def test_limits():
    limit = Limit(4, (7, 9))
    assert limit.cut([1, 9, 7, 2]) == [1, 9] and limit.cut([1, 2]) == [1, 2] and limit.cut([]) == []
    assert [limit.remaining(t) for t in ([], [1], [1, 7], [1, 2, 3, 4])] == [4, 3, 0, 0]
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        Limit(0)


def test_an_empty_prompt_or_block_is_refused(target):
    for ids, block in (([], 4), ([5], 0)):
        with pytest.raises(ValueError, match="at least one"):
            decode(target, Random(9, 0), TAPS, ids, Limit(4), block)


def test_seconds_add_up(target, learned):
    asked, drafter = learned
    spec, one = speculate(target, drafter, asked[0], Limit(20)), plain(target, asked[0], Limit(20))
    assert set(spec.seconds) == {"prefill", *PARTS} and set(one.seconds) == {"prefill", "step"}
    assert all(value > 0 for value in (*spec.seconds.values(), *one.seconds.values()))
    assert spec.decode_seconds == pytest.approx(sum(spec.seconds.values()) - spec.seconds["prefill"])

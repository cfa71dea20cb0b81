"""Draft heads of K tokens in the loop: the text is the target's whatever the list, and measured is what was decoded."""
from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from drafters import BLOCK, prompts, trained

from common.drafter import acceptance, vocab
from producer import shortlist
from producer.evaluate import PlainTexts, accepted_at
from producer.sampling import Sampler, Sampling, probabilities
from producer.speculate import Limit, Network, decode, plain, speculate

NEW = 24
WARM = Sampling(temperature=1.5, seed=3)


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid()


@pytest.fixture(scope="module")
def asked():
    return [(f"p{i}", ids) for i, ids in enumerate(prompts((12, 20), seed=5))]


@pytest.fixture(scope="module")
def drafter(target, asked):
    return trained(target, [ids for _, ids in asked], 60, steps=25)


@pytest.fixture(scope="module")
def texts(target, drafter):
    return PlainTexts(target, Limit(NEW), drafter.config.taps)


class Heard:
    """A sampler that keeps the logits it was given and picks the largest."""

    def choose(self, logits):
        self.logits = logits
        return logits.argmax(-1), None


def only(logits, ids):
    """logits [..., V], all but those of a list at minus infinity."""
    return torch.full_like(logits, -torch.inf).index_copy(-1, ids, logits[..., ids])


def proposed(target, drafter, texts, asked, sampler, ids):
    """What a network drafts at the first anchor of the first text."""
    prompt, known = asked[0]
    network = Network(drafter, target, 99, sampler, ids)
    network.extend(texts(prompt, known).taps[:len(known)].unflatten(1, (len(drafter.config.taps), -1)).transpose(0, 1)[:, None])
    return network.propose(torch.tensor(texts(prompt, known).decoded.tokens[:1]), BLOCK, BLOCK)


def test_drafts_are_the_best_of_the_list_under_their_own_ids(target, drafter, texts, asked):
    heard, ids = Heard(), torch.arange(3, target.vocab_size, 7)
    free, _ = proposed(target, drafter, texts, asked, heard, None)
    wanted = ids[heard.logits[:, ids].argmax(-1)]
    assert not torch.equal(free, wanted) and len(wanted) == BLOCK - 1
    got, q = proposed(target, drafter, texts, asked, None, ids)
    assert torch.equal(got, wanted) and q is None


def test_sampled_drafts_say_what_they_were_drawn_from(target, drafter, texts, asked):
    heard, ids = Heard(), torch.arange(3, target.vocab_size, 7)
    proposed(target, drafter, texts, asked, heard, None)
    drawn, q = proposed(target, drafter, texts, asked, Sampler(WARM, "k"), ids)
    torch.testing.assert_close(q, probabilities(only(heard.logits, ids), WARM), rtol=1e-4, atol=1e-9)
    assert bool((q.gather(1, drawn[:, None]) > 0).all()) and set(drawn.tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_the_whole_vocabulary_is_no_restriction_bit_for_bit(target, drafter, texts, asked, sampling):
    everything = torch.arange(target.vocab_size)
    free, free_q = proposed(target, drafter, texts, asked, Sampler(sampling, "k"), None)
    got, q = proposed(target, drafter, texts, asked, Sampler(sampling, "k"), everything)
    assert torch.equal(free, got) and (q is free_q is None or torch.equal(q, free_q))
    for key, (_, ids) in zip("a", asked):
        one = speculate(target, drafter, ids, Limit(NEW), sampling=sampling, key=key)
        network = Network(drafter, target, 99, Sampler(sampling, f"{key}:draft"), everything)
        two = decode(target, network, drafter.config.taps, ids, Limit(NEW), BLOCK, sampler=Sampler(sampling, key))
        assert one.tokens == two.tokens and one.accepted == two.accepted


@pytest.mark.parametrize("size", [1, 160])
def test_the_text_is_plain_decodings_whatever_the_list(target, drafter, texts, asked, size):
    taus = []
    for prompt, ids in asked:
        own = texts(prompt, ids).decoded.tokens
        best = vocab.shortlist(vocab.count([own], target.vocab_size), size)
        for tokens in (best, np.arange(target.vocab_size - size, target.vocab_size)):
            got = shortlist.restricted(target, drafter, ids, Limit(NEW), tokens)
            assert got.tokens == own
            taus.append(acceptance.tau_pooled([got.accepted]))
    assert size < 160 or max(taus) > 1.5                             # a list of the text's own tokens: some drafts stand


def test_a_restricted_head_is_never_worse_than_the_projection_at_an_anchor(target, drafter, texts, asked):
    """And in the loop it accepts exactly what its own simulation says."""
    better = 0
    for prompt, ids in asked:
        kept = texts(prompt, ids)
        text = torch.tensor(ids + kept.decoded.tokens)
        counts, judged = vocab.count([kept.decoded.tokens], target.vocab_size), accepted_at(target, drafter, ids, kept, texts.limit)
        for tokens in (vocab.shortlist(counts, 20), np.flatnonzero(counts)[::2]):
            real = acceptance.simulate(drafter, lambda at: F.embedding(at, target.embedding),
                                       lambda y, rows=tokens: only(F.linear(y, target.head), torch.from_numpy(rows)),
                                       text, kept.taps, len(ids))
            guessed = vocab.projected(judged, text.tolist(), tokens)
            assert all(r >= g for r, g in zip(real, guessed, strict=True))
            better += sum(r > g for r, g in zip(real, guessed))
            looped = shortlist.restricted(target, drafter, ids, texts.limit, tokens).accepted
            assert looped == acceptance.chain_walk(real, len(ids), len(text))
    assert better > 0


def test_the_record_is_what_was_decoded(target, drafter, texts, asked):
    others = [(f"o{i}", ids) for i, ids in enumerate(prompts((9, 11), seed=6))]
    counts = shortlist.counted(target, drafter, others, Limit(NEW))
    assert counts.counts.sum() == 9 + 11 + 2 * NEW and counts.prompts == {"o0", "o1"}
    measured = shortlist.measure(target, drafter, asked, texts, counts, [target.vocab_size, 48])
    assert [row["size"] for row in measured["rows"]] == [48, target.vocab_size]
    for row in measured["rows"]:
        tokens = vocab.shortlist(counts.counts, row["size"], target.eos_ids)
        assert set(target.eos_ids) <= set(tokens.tolist())
        runs = [shortlist.restricted(target, drafter, ids, Limit(NEW), tokens) for _, ids in asked]
        assert row["tau"] == acceptance.tau_pooled([run.accepted for run in runs]) and row["identical"] == 2
        assert row["bytes"] == row["size"] * 64 * 4 and row["seconds"] > 0 and row["tokens_per_s"] > 0
        said = [token for prompt, ids in asked for token in texts(prompt, ids).decoded.tokens]
        assert row["coverage"] == sum(token in tokens for token in said) / len(said)
    whole = measured["rows"][-1]
    assert whole["tau"] == whole["tau_projected"] > measured["rows"][0]["tau_projected"] and whole["coverage"] == 1
    assert shortlist.show(measured).row_count == 2


def test_a_list_is_never_chosen_on_the_texts_it_is_measured_on(target, drafter, texts, asked):
    counts = shortlist.counted(target, drafter, asked[:1], Limit(4))
    with pytest.raises(ValueError, match="1 prompts were counted"):
        shortlist.measure(target, drafter, asked, texts, counts)


def test_end_tokens_are_drafted_from_every_list(target, drafter):
    """A text that ends: its last block may hold the end token, however rare it was in what was counted."""
    ids = prompts((12,), seed=5)[0]
    tokens = plain(target, ids, Limit(NEW)).tokens
    end = next(token for i, token in enumerate(tokens[3:], 3) if token not in tokens[:i])
    limit = Limit(NEW, frozenset({end}))
    listed = vocab.shortlist(np.zeros(target.vocab_size, np.int64), 16, {end})
    assert end in listed
    assert shortlist.restricted(target, drafter, ids, limit, listed).tokens == plain(target, ids, limit).tokens


def test_a_drafter_that_was_trained_on_a_list_drafts_from_it_everywhere(target, drafter, texts, asked):
    """Loop, report and simulation take the list from the drafter; bench compares no lists with it."""
    from common.errors import UserError
    from producer import evaluate, sections
    ids, own = torch.arange(3, target.vocab_size, 7), copy.copy(drafter)
    own._buffers = dict(drafter._buffers, shortlist=ids)
    assert drafter.shortlist is None and own.shortlist is ids
    got, _ = proposed(target, own, texts, asked, None, None)
    assert torch.equal(got, proposed(target, drafter, texts, asked, None, ids)[0]) and torch.isin(got, ids).all()
    report = evaluate.evaluate(target, own, asked, texts, seed=0)
    lists = [shortlist.restricted(target, drafter, known, Limit(NEW), ids.numpy()) for _, known in asked]
    assert report["tau"] == acceptance.tau_pooled([d.accepted for d in lists]) == report["tau_simulated"] and report["identical"] == 2
    scene = sections.Scene(target, own, Limit(NEW), BLOCK, asked, asked, [])
    with pytest.raises(UserError, match=f"trained to draft {len(ids)} tokens only"):
        sections.measure_shortlist(scene, {}, lambda *_: None)

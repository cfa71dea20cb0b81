"""What is measured on this box alone is what the decode loop does on the same texts (pitfall A2), on texts never trained on."""
import dataclasses

import numpy as np
import pytest
import torch

from common import metrics
from common.capture import Capture, from_bf16, to_bf16
from common.drafter.cache import ContextCache
from common.drafter.checkpoint import checkpoint_hash
from common.drafter.model import Drafter
from tests.trainer.small import HIDDEN, MASK, TAPS, VOCAB, captures, config, loop
from trainer import offline
from trainer.offline import TEXTS, Offline, parted, prompt_hash, span, summary, walk
from trainer.order import aside_index, index_of

B = 4
MANY = captures(70)


@pytest.mark.parametrize("mask, expected", [
    ("000111", (3, 6)), ("111", (0, 3)), ("0110011", (1, 3)), ("0001", (3, 4)), ("000", (3, 3)), ("", (0, 0))])
def test_the_first_answer(mask, expected):
    assert span(np.array([c == "1" for c in mask], np.bool_)) == expected


def test_two_samples_of_one_prompt_are_known_by_its_ids_alone():
    ids, mask = np.arange(9, dtype=np.int32), np.arange(9) >= 4
    other = ids.copy()
    other[4:] += 1
    assert prompt_hash(ids, mask) == prompt_hash(other, mask) == prompt_hash(ids[:6], mask[:6])
    assert prompt_hash(ids, np.arange(9) >= 5) != prompt_hash(ids, mask) != prompt_hash(ids + 1, mask)


def trace(attention: str, shortlist: torch.Tensor | None):
    """A drafter far from its start, and a greedy text that its own drafts wrote with errors, so that every length of prefix occurs;
    taps are what a capture holds: bf16."""
    generator = torch.Generator().manual_seed(5)
    drafter = Drafter(config(attention), generator)
    drafter.shortlist = shortlist
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    head = head if shortlist is None else head[shortlist]
    bits = to_bf16(torch.randn(len(TAPS) + 1, 60, HIDDEN, generator=generator).numpy())
    taps = torch.from_numpy(from_bf16(bits[:-1])).transpose(0, 1).flatten(1)
    ids = torch.randint(0, VOCAB - 1, (60,), generator=generator)
    for anchor in range(7, 59, B):
        keep = int(torch.randint(0, B, (), generator=generator))
        ids[anchor + 1:anchor + 1 + keep] = drafts(drafter, embedding, head, ids, taps, anchor)[:keep][:59 - anchor]
    none = np.zeros(0, np.int32)
    return drafter, embedding, head, taps, Capture(ids.numpy().astype(np.int32), np.arange(60) >= 7, bits[:-1], bits[-1], none, none)


def drafts(drafter, embedding, head, ids, taps, anchor) -> torch.Tensor:
    """One block of the decode loop, through the cache as the loop has it."""
    cache = ContextCache(drafter.config, 60, "cpu", torch.float32)
    drafter.extend(cache, taps[:anchor])
    picked = (drafter.draft(cache, embedding[torch.tensor([int(ids[anchor])] + [MASK] * (B - 1))]) @ head.T).argmax(-1)[1:]
    return picked if drafter.shortlist is None else drafter.shortlist[picked]


def real_loop(drafter, embedding, head, ids, taps, start) -> list[int]:
    """What the producer's loop does with a target whose argmax is this text; its last token is a stop token."""
    counts, text = [], ids.tolist()
    while start + 1 < len(text):
        draft = drafts(drafter, embedding, head, ids, taps, start).tolist()
        agreed = 0
        while agreed < len(draft) and text[start + 1 + agreed:start + 2 + agreed] == [draft[agreed]]:
            agreed += 1
        hop = min(agreed + 1, len(text) - 1 - start)
        counts.append(hop - 1)
        start += hop
    return counts


@pytest.mark.parametrize("attention", ["causal", "bidi", "mixed"])
@pytest.mark.parametrize("listed", [False, True])
def test_on_one_fixed_greedy_trace_simulated_acceptance_is_the_loops(attention, listed):
    shortlist = torch.arange(0, VOCAB, 2) if listed else None
    drafter, embedding, head, taps, capture = trace(attention, shortlist)
    ids = torch.from_numpy(capture.ids).long()
    real = real_loop(drafter, embedding, head, ids, taps, 7)
    got = walk(drafter, embedding, head, capture, 60)
    assert got == real and len(set(real)) >= 3 and sum(a + 1 for a in got) == 60 - 1 - 7
    for shifted in (6, 8):                                              # the first anchor is the answer's first token, no other
        assert walk(drafter, embedding, head, dataclasses.replace(capture, loss_mask=np.arange(60) >= shifted), 60) != real
    assert walk(drafter, embedding, head, capture, 30) == real_loop(drafter, embedding, head, ids[:30], taps, 7)


def test_a_text_without_two_tokens_of_answer_gives_no_block():
    drafter, embedding, head, _, capture = trace("causal", None)
    for mask in (np.zeros(60, np.bool_), np.arange(60) == 59, np.arange(60) >= 0):
        assert walk(drafter, embedding, head, dataclasses.replace(capture, loss_mask=mask), 60) == []
    assert walk(drafter, embedding, head, capture, 7) == []


def test_summary_by_hand():
    made = summary([[3, 0], [], [1]], [(1, 7), (3, 4), (5, 8)], B)
    assert made["tau"] == 1 + 4 / 3 and made["tau_prompt"] == 1 + (1.5 + 1) / 2 and made["verifies"] == 3
    assert made["tokens_decoded"] == 7 == (7 - 1 - 1) + (8 - 1 - 5), "the first token of each answer is the prefill's"
    assert made["accepted"] == [[3, 0], [], [1]] and made["acceptance_by_slot"] == [1.0, 1.0, 1.0]
    assert made["tau_interval"][0] <= made["tau"] <= made["tau_interval"][1]


REAL = {"tau": 2.0, "tau_interval": [1.8, 2.2], "tau_simulated": 2.0}


@pytest.mark.parametrize("real, simulated, dtype, parts", [
    ({}, (2.1, [1.9, 2.3]), "float32", 0),                              # as it should be
    ({}, (3.0, [2.3, 3.5]), "float32", 1),                              # past both intervals, a third lower
    ({}, (3.0, [2.2, 3.5]), "float32", 0),                              # chance may do that
    ({}, (2.4, [2.3, 2.5]), "float32", 0),                              # certain, but other prompts may do that
    ({"tau": 3.0, "tau_interval": [2.8, 3.2], "tau_simulated": 3.0}, (1.5, [1.4, 1.6]), "float32", 0),    # better than here is no fault
    ({"tau_simulated": 2.05}, None, "float32", 1),                      # on the same texts, rounding apart, they are one number
    ({"tau_simulated": 1.95}, None, "float32", 1),
    ({"tau_simulated": 2.03}, None, "float32", 0),
    ({"tau_simulated": 2.15}, None, "bfloat16", 0),
    ({"tau_simulated": 2.3}, None, "bfloat16", 1),
    ({"tau_simulated": 4.0}, (4.0, [3.5, 4.5]), "float32", 2)])         # speculators#738
def test_when_it_is_an_alarm(real, simulated, dtype, parts):
    made = simulated and {"tau": simulated[0], "tau_interval": simulated[1]}
    assert len(parted(REAL | real, made, dtype)) == parts


def test_a_run_measures_at_every_checkpoint_what_its_own_reading_has_passed(tmp_path):
    made = loop(tmp_path / "run", steps=60, samples=MANY, plan={"eval_every": 20, "replay": 1})
    made.go()
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "offline")
    assert [(row["step"], row["texts"]) for row in rows] == [(40, 1), (60, 1)], "20 steps of 2 visits reach 20 samples, 60 reach 61"
    assert rows[-1]["tokens"] == made.run.tokens and made.offline.last["tau"] == rows[-1]["tau"]
    expected = walk(made.run.drafter, made.embedding, made.head, MANY[aside_index(0)], 64)
    assert rows[-1]["accepted"] == [expected]
    held = MANY[aside_index(0)]
    trained = [MANY[index_of(n)] for n in range(60)]
    same = any((c.ids[:4] == held.ids[:4]).all() for c in trained)
    assert rows[-1]["repeated_prompts"] == made.offline.repeated == int(same)


def test_a_closed_stream_is_measured_on_all_that_is_held_aside_up_to_16(tmp_path):
    many = captures(32 * (TEXTS + 2))
    made = loop(tmp_path / "run", steps=5, samples=many)
    made.run.close_stream(len(many))
    made.go()
    assert made.offline.last["texts"] == TEXTS
    resumed = Offline(made.run, made.samples, made.embedding, made.head, max_tokens=64)
    assert resumed.last == metrics.read(tmp_path / "run" / "metrics.jsonl", "offline")[-1] and resumed.line() == made.offline.line()


def test_a_prompt_that_is_trained_on_too_is_counted_and_said(tmp_path, caplog):
    samples = captures(64)
    rng = np.random.default_rng(1)
    for i, capture in enumerate(samples):                               # prompts of random tokens: none twice by chance
        samples[i] = dataclasses.replace(capture, ids=np.concatenate([rng.integers(0, VOCAB - 1, 4), capture.ids[4:]]).astype(np.int32))
    samples[5] = dataclasses.replace(samples[5], ids=np.concatenate([samples[63].ids[:4], samples[5].ids[4:]]))
    for closed, expected in ((63, 0), (64, 1)):
        made = loop(tmp_path / str(closed), steps=5, samples=samples)
        made.run.close_stream(closed)
        made.go()
        assert made.offline.repeated == expected
        assert ("trained on, too" in caplog.text) == bool(expected)


def test_without_a_text_there_is_no_row_and_the_line_says_why(tmp_path):
    made = loop(tmp_path / "run", steps=5, samples=captures(20))
    made.go()
    assert not metrics.read(tmp_path / "run" / "metrics.jsonl", "offline") and "the last of each 32" in made.offline.line()


def test_what_is_cut_is_counted_and_measuring_leaves_no_trace_in_the_run(tmp_path, monkeypatch):
    made = loop(tmp_path / "a", steps=10, samples=MANY, plan={"max_tokens": 20})
    made.run.close_stream(len(MANY))
    made.go()
    assert made.offline.last["rows_cut"] == sum(max(0, MANY[aside_index(n)].tokens - 20) for n in range(2)) > 0
    monkeypatch.setattr(offline.Offline, "measure", lambda *_: None)
    bare = loop(tmp_path / "b", steps=10, samples=MANY, plan={"max_tokens": 20})
    bare.run.close_stream(len(MANY))
    bare.go()
    hashes = [checkpoint_hash(run.run.checkpoints()[-1]) for run in (made, bare)]
    assert hashes[0] == hashes[1]


def test_the_producers_own_loop_accepts_what_is_simulated_here():
    """Through the whole chain, on a small hybrid target: decoded with speculation, captured, walked from the bf16 that travels."""
    from producer.speculate import Limit, speculate
    from tests.producer import drafters, tiny
    target = tiny.hybrid()
    asked = drafters.prompts((12, 20, 9, 15), seed=5)
    drafter = drafters.trained(target, asked[:2], 40, steps=25)
    seen = []
    for ids in asked:
        stop = speculate(target, drafter, ids, Limit(40)).tokens[30]   # so that the text ends as texts do, before its limit
        decoded = speculate(target, drafter, ids, Limit(60, frozenset({stop})))
        text = ids + decoded.tokens
        capture = target.capture(text, np.arange(len(text)) >= len(ids), drafter.config.taps, "id")
        assert decoded.tokens[-1] == stop and walk(drafter, target.embedding, target.head, capture, 1000) == decoded.accepted
        seen += decoded.accepted
    assert len(set(seen)) >= 3

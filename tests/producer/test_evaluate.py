"""The report's numbers are those of the texts; plain decoding is done once; what differs is listed, with the margin."""
from __future__ import annotations

import dataclasses
import json

import msgpack
import pytest
import tiny
import torch
from drafters import BLOCK, TAPS, prompts, trained

from common.drafter.acceptance import rooms
from common.errors import UserError
from producer import evaluate
from producer.speculate import Decoded, Limit, margin, plain, speculate
from protocol.events import LocalError, Report
from protocol.frames import MAX_DOCUMENT, decode, encode

LIMIT = Limit(40)


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid()


@pytest.fixture(scope="module")
def asked():
    return [(f"id{i}", ids) for i, ids in enumerate(prompts((12, 20, 9), seed=5))]


@pytest.fixture(scope="module")
def drafter(target, asked):
    return trained(target, [ids for _, ids in asked[:2]], 40, steps=25)


@pytest.fixture(scope="module")
def texts(target):
    return evaluate.PlainTexts(target, LIMIT, TAPS)


def test_the_report(target, asked, drafter, texts):
    calls = []
    report = evaluate.evaluate(target, drafter, asked, texts, seed=0, progress=lambda *of: calls.append(of))
    specs = [speculate(target, drafter, ids, LIMIT) for _, ids in asked]
    blocks = [n for spec in specs for n in spec.accepted]
    assert json.loads(json.dumps(report, allow_nan=False)) == report and msgpack.unpackb(msgpack.packb(report)) == report
    assert report["prompts"] == report["identical"] == 3 and report["divergences"] == []
    assert report["verifies"] == len(blocks) and report["tokens_decoded"] == 120
    assert report["tau"] == pytest.approx((120 - 3) / len(blocks)) == pytest.approx(report["tau_simulated"])
    assert report["tau_prompt"] == pytest.approx(sum(39 / len(spec.accepted) for spec in specs) / 3)
    assert report["tau_interval"][0] <= report["tau"] <= report["tau_interval"][1]
    assert report["texts"] == [{"prompt": f"id{i}", "accepted": spec.accepted} for i, spec in enumerate(specs)]
    assert report["accepted_histogram"] == [blocks.count(n) for n in range(BLOCK)]
    assert len(report["acceptance_by_slot"]) == len(report["acceptance_given_previous"]) == BLOCK - 1
    judged = [n for spec, (_, ids) in zip(specs, asked)
              for n, room in zip(spec.accepted, rooms(spec.accepted, len(ids), len(ids) + 40, BLOCK)) if room >= 2]
    assert report["acceptance_by_slot"][1] == pytest.approx(sum(n >= 2 for n in judged) / len(judged))
    assert report["eta"] == pytest.approx(report["spec_tokens_per_s"] / report["plain_tokens_per_s"])
    cycle = report["draft_seconds"] + report["verify_seconds"]
    assert report["eta_theory"] == pytest.approx(report["tau"] * report["step_seconds"] / cycle)
    assert report["eta"] == pytest.approx(report["tau"] * report["step_seconds"] / (cycle + report["commit_seconds"]))
    assert {done for done, _ in calls} == {0, 1, 2} and {of for _, of in calls} == {3}


def test_plain_texts_are_decoded_once_and_their_time_taken_anew(target, asked, drafter, monkeypatch):
    decoded = []
    monkeypatch.setattr(evaluate, "plain", lambda t, ids, limit, **told: decoded.append(limit) or plain(t, ids, limit, **told))
    texts = evaluate.PlainTexts(target, LIMIT, TAPS)
    first = evaluate.evaluate(target, drafter, asked[:2], texts, seed=0)
    assert decoded.count(LIMIT) == 2 + 2
    second = evaluate.evaluate(target, drafter, asked[:2], texts, seed=0)
    assert decoded.count(LIMIT) == 2 + 2 + 2 and second["tau"] == first["tau"]
    decoded.clear()
    monkeypatch.setattr(evaluate, "TIMED", 1)
    evaluate.evaluate(target, drafter, asked, texts, seed=0)
    assert decoded.count(LIMIT) == 1 + 1, "the third prompt's text is new; one of three is timed"
    with pytest.raises(ValueError, match="other tokens than before"):
        texts("id0", [5, 6])


def test_a_text_that_differs_is_listed_with_the_targets_margin(target, asked, drafter, texts):
    """The plain text is falsified at one place: to the report that is a text that speculation changed there."""
    def false(prompt, ids):
        kept = texts(prompt, ids)
        if prompt != "id1":
            return kept
        tokens = list(kept.decoded.tokens)
        tokens[17] = (tokens[17] + 1) % 300
        return dataclasses.replace(kept, decoded=Decoded(tokens, seconds=kept.decoded.seconds))
    false.taps, false.limit = texts.taps, texts.limit
    report = evaluate.evaluate(target, drafter, asked, false, seed=0)
    ids = asked[1][1]
    want = margin(target, ids + texts("id1", ids).decoded.tokens[:17])
    assert report["identical"] == 2
    assert report["divergences"] == [{"prompt": "id1", "position": 17, "margin": pytest.approx(want)}]


def test_the_texts_end_is_not_a_rejection(target, asked, drafter):
    """A text that stops in its first block: the slots behind the stop were not judged."""
    ids = asked[0][1]
    third = evaluate.PlainTexts(target, LIMIT, TAPS)("a", ids).decoded.tokens[2]
    report = evaluate.evaluate(target, drafter, asked[:1], evaluate.PlainTexts(target, Limit(40, (third,)), TAPS), seed=0)
    assert report["tokens_decoded"] == 3 and len(report["acceptance_by_slot"]) == 1
    assert report["tau"] * report["verifies"] == pytest.approx(2)


def test_refusals(target, asked, drafter, texts):
    with pytest.raises(ValueError, match="taps"):
        evaluate.evaluate(target, drafter, asked, evaluate.PlainTexts(target, LIMIT, (0, 1)), seed=0)
    with pytest.raises(UserError, match="nothing to measure"):
        evaluate.evaluate(target, drafter, asked, evaluate.PlainTexts(target, Limit(1), TAPS), seed=0)

    class Stopped(Exception):
        pass

    def stop(done, of):
        if done == 1:
            raise Stopped
    with pytest.raises(Stopped):
        evaluate.evaluate(target, drafter, asked, texts, seed=0, progress=stop)


def test_the_kept_taps_are_the_texts(target, asked, texts):
    prompt, ids = asked[0]
    kept = texts(prompt, ids)
    want = target.forward(torch.tensor([ids + kept.decoded.tokens]), taps=TAPS).taps
    assert torch.equal(kept.taps.unflatten(1, (3, -1)), want[:, 0].transpose(0, 1))


def long_result(prompts: int, tokens: int, divergences: int = 0) -> dict:
    """The largest that so many texts give: every block accepts nothing, every list is as long as its text."""
    return {"tau": 1.0, "checkpoint": "ab" * 32, "divergences": [{"prompt": f"{i:064x}", "position": i, "margin": 0.001} for i in range(divergences)],
            "texts": [{"prompt": f"{i:064x}", "accepted": [0] * (tokens - 1)} for i in range(prompts)]}


def test_a_report_of_64_prompts_of_128_tokens_travels_whole():
    result = long_result(64, 128)
    assert evaluate.fitted(result, MAX_DOCUMENT) is result
    assert decode(encode(Report("a" * 32, result, None))).result == result


def test_what_is_too_large_travels_without_its_lists_and_says_so():
    result = long_result(2000, 512)
    with pytest.raises(LocalError, match="result of"):
        encode(Report("a" * 32, result, None))
    sent = decode(encode(Report("a" * 32, evaluate.fitted(result, MAX_DOCUMENT), None))).result
    assert sent == {"tau": 1.0, "checkpoint": "ab" * 32, "divergences": [], "texts": None, "texts_left_out": 2000}


@pytest.mark.parametrize("over", [0, 1, 57, 58, 200, 5000])
def test_divergences_go_last_first_until_it_fits(over):
    result = long_result(3, 9, 200)
    most = len(json.dumps(result | {"texts": None, "texts_left_out": 3})) - over
    sent = evaluate.fitted(result, most)
    assert len(json.dumps(sent)) <= most and sent["texts"] is None and sent["texts_left_out"] == 3
    kept = sent["divergences"]
    assert kept == result["divergences"][:len(kept)] and len(kept) + sent.get("divergences_left_out", 0) == 200
    assert (over == 0) == (len(kept) == 200) and len(kept) > 100

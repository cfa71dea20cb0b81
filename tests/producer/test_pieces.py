"""The bench's arithmetic on made-up runs: parts and remainder are the cycle, items and ratio are the whole, to the last bit but one."""
from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafters import BLOCK, TAPS, Random, prompts, trained
from hypothesis import given, settings, strategies as st

from common.errors import UserError
from producer import lossless, overhead, pairs, pieces, rates, speedup
from producer.pairs import Pair, Timed
from producer.speculate import PARTS, Decoded, Limit, decode, plain, speculate

DRAFT, VERIFY, JUDGE, LOOP, ROLLBACK, CONTEXT = range(len(PARTS))


def spec_run(accepted: list[int], offered: list[int], parts: list[float], wall: float) -> Timed:
    decoded = Decoded([0] * (1 + sum(n + 1 for n in accepted)), accepted, offered, {"prefill": 0.5} | dict(zip(PARTS, parts, strict=True)))
    return Timed(decoded, wall)


def plain_run(tokens: int, step: float, wall: float) -> Timed:
    return Timed(Decoded([0] * tokens, seconds={"prefill": 0.25, "step": step}), wall)


def two_pairs() -> list[Pair]:
    return [Pair("a", [1] * 10, plain_run(9, 1.6, 1.9), spec_run([3, 2, 0], [3, 3, 1], [0.1, 0.6, 0.02, 0.01, 0.03, 0.04], 1.4)),
            Pair("b", [1] * 30, plain_run(5, 0.8, 1.1), spec_run([3], [3], [0.05, 0.2, 0.01, 0.01, 0.0, 0.0], 0.8))]


def test_the_cycles_parts_and_remainder_are_the_whole():
    got = pieces.cycle(two_pairs())
    assert got["verifies"] == 4 and got["tau"] == 12 / 4 and got["sizes"] == {2: 1, 4: 3}
    assert got["seconds"] == pytest.approx((1.4 - 0.5 + 0.8 - 0.5) / 4)
    assert got["parts"]["verify"] == pytest.approx(0.2) and got["parts"]["context"] == pytest.approx(0.01)
    assert got["parts"]["remainder"] == pytest.approx((1.2 - 0.8 - 0.27) / 4)
    assert list(got["parts"]) == [*PARTS, "remainder"]
    assert sum(got["parts"].values()) == pytest.approx(got["seconds"], rel=1e-12)


def test_a_text_of_one_token_counts_for_nothing_and_is_said():
    short = Pair("c", [1] * 4, plain_run(1, 0.0, 9.0), spec_run([], [], [0.0] * 6, 9.0))
    assert pieces.cycle([*two_pairs(), short]) == pieces.cycle(two_pairs())
    assert pieces.plain_step([*two_pairs(), short]) == pieces.plain_step(two_pairs()) == pytest.approx((1.65 + 0.85) / 12)
    got = rates.measure([*two_pairs(), short], [])
    assert got["prompts"] == 2 and got["left_out"] == 1 and "1 prompts left out" in rates.show(got).caption


def test_rates_are_pooled_by_the_wall_clock():
    got = rates.measure(two_pairs(), [])
    assert got["plain"]["tokens_per_s"] == pytest.approx(12 / 2.5) and got["plain"]["by_prompt"] == pytest.approx([8 / 1.65, 4 / 0.85])
    assert got["speculative"]["tokens_per_s"] == pytest.approx(12 / 1.2)
    assert got["plain"]["prefill_tokens_per_s"] == pytest.approx(40 / 0.5) and got["speculative"]["prefill_tokens_per_s"] == 40.0


def made_up_pieces() -> dict:
    found = two_pairs()
    return {"block_size": 4, "L_target": pieces.plain_step(found), "cycle": pieces.cycle(found),
            "alone": {"verify": [0.1, 0.12, 0.15, 0.18], "draft": 0.03, "context": 0.005, "step": 0.2, "context_tokens": 20, "repeats": 5}}


def test_eta_and_its_formula_by_hand():
    got = speedup.measure(made_up_pieces())
    assert got["eta"] == pytest.approx((2.5 / 12) / (1.2 / 12))       # seconds a token, plain over speculative
    assert got["in_loop"]["T_t"] == pytest.approx(0.2) and got["in_loop"]["T_d"] == pytest.approx(0.0375 + 0.01)
    assert got["in_loop"]["eta_theory"] == pytest.approx(3 * (2.5 / 12) / 0.2475)
    assert got["alone"]["T_t"] == 0.18 and got["alone"]["T_d"] == pytest.approx(0.035)
    gap = {name: item["seconds"] for name, item in got["alone"]["gap"].items()}
    assert gap["short"] == pytest.approx((3 * 0.18 + 0.12) / 4 - 0.18)            # one block of 2 slots among three of 4
    assert gap["verify"] == pytest.approx(0.2 - 0.165) and gap["draft"] == pytest.approx(0.0475 - 0.035)
    assert gap["judge"] == pytest.approx(0.03 / 4) and gap["loop"] == pytest.approx(0.02 / 4) and gap["rollback"] == pytest.approx(0.03 / 4)


seconds = st.floats(1e-4, 1.0)


@given(st.lists(seconds, min_size=6, max_size=6), seconds, seconds, st.lists(seconds, min_size=4, max_size=4), seconds, seconds)
@settings(max_examples=200)
def test_the_gap_is_explained_exactly(parts, rest, step, verify, draft, context):
    """1/eta = (all items) / (tau L): eta over eta_theory and what each item costs add up to one, whatever the numbers."""
    run = Pair("a", [1], plain_run(9, 8 * step, 0.25 + 8 * step), spec_run([3, 2, 0], [3, 3, 1], parts, 0.5 + sum(parts) + rest))
    got = speedup.measure({"L_target": step, "cycle": pieces.cycle([run]), "alone": {"verify": verify, "draft": draft, "context": context}})
    for way in ("in_loop", "alone"):
        row = got[way]
        assert row["ratio"] + sum(item["share"] for item in row["gap"].values()) == pytest.approx(1, abs=1e-9)
        assert got["eta"] / row["eta_theory"] == pytest.approx(row["ratio"], rel=1e-9)
        assert row["T_t"] + row["T_d"] + sum(item["seconds"] for item in row["gap"].values()) == pytest.approx(got["cycle"], rel=1e-9)


def test_inside_and_outside_are_the_part():
    parts = {"draft": 0.2, "verify": 1.0, "remainder": 0.1}
    found = {"draft": (0.1, 0.2), "verify": (0.5, 2.0 / 3)}
    on_cpu, on_gpu = overhead.split(parts, found, False), overhead.split(parts, found, True)
    assert on_cpu["draft"]["inside"] == pytest.approx(0.1) and on_cpu["verify"]["inside"] == pytest.approx(0.75)
    assert on_gpu["draft"]["inside"] == pytest.approx(0.1) and on_gpu["verify"]["inside"] == pytest.approx(0.5)
    assert on_cpu["remainder"] == on_gpu["remainder"] == {"inside": 0.0, "outside": 0.1}
    for split in (on_cpu, on_gpu):
        assert all(part["inside"] + part["outside"] == parts[name] for name, part in split.items())
    alone = overhead.within({"parts": on_cpu | {"context": {"inside": 0.0, "outside": 0.2}}, "step": {"inside": 1.0, "outside": 3.0}},
                            {"step": 2.0, "verify": 4.0, "draft": 1.0})
    assert alone == {"step": 0.5, "verify": pytest.approx(3.0), "draft": pytest.approx(0.25)}


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid()


@pytest.fixture(scope="module")
def drafter(target):
    return trained(target, prompts((12,), seed=5), 40, steps=8)


def test_every_operator_falls_into_the_part_that_called_it(target, drafter):
    """Marked from outside, the loop's text is its own; each part is met once a cycle; parts hold their own operators."""
    [ids] = prompts((12,), seed=5)
    decoded, events = overhead.profiled(target, drafter, ids, Limit(5), BLOCK)
    assert decoded.tokens == speculate(target, drafter, ids, Limit(5)).tokens
    cycles = len(decoded.accepted)
    marks = [event for event in events if event.name.startswith(overhead.MARK)]
    met = {part: sum(event.name == overhead.MARK + part for event in marks) for part in PARTS}
    assert met == dict.fromkeys(PARTS, cycles) | {"context": cycles - 1}         # the last block: a rollback is begun and not needed
    inside = overhead.inside(events, False)
    assert all(0 <= inside[part][0] <= inside[part][1] for part in PARTS) and inside["verify"][0] > 0 and inside["draft"][0] > 0

    def names(part):
        return {child.name for event in marks if event.name == overhead.MARK + part for child in event.cpu_children}
    assert "aten::argmax" in names("judge") and "aten::argmax" not in names("verify")
    assert "aten::embedding" in names("verify") and "aten::embedding" not in names("draft") | names("rollback")
    operators, whole = overhead.steps_inside(target, ids, Limit(3))
    assert 0 < operators < whole


def test_pieces_alone_have_every_size(target, drafter, monkeypatch):
    monkeypatch.setattr(pieces, "REPEATS", 2)
    ids = prompts((12,), seed=5)
    runs = pairs.decode(target.device, lambda ids, most: plain(target, ids, Limit(most or 10)),
                        lambda ids, most: speculate(target, drafter, ids, Limit(most or 10)), [("a", ids[0])])
    told = []
    got = pieces.alone(target, drafter, runs, BLOCK, lambda done, of: told.append((done, of)))
    assert len(got["verify"]) == BLOCK and got["context_tokens"] == int(12 + 9 / 2) and told[-1] == (pieces.REPEATS, pieces.REPEATS + 1)
    assert all(value > 0 for value in (*got["verify"], got["step"], got["draft"], got["context"]))


def test_pairs_take_turns_and_hold_the_whole_clock(target):
    calls = []

    def way(name):
        def decoded(ids, most):
            calls.append((name, most))
            return plain(target, ids, Limit(4 if most is None else most))
        return decoded
    got = pairs.decode(target.device, way("plain"), way("spec"), [("a", [5, 6]), ("b", [7])])
    assert calls == [("plain", 8), ("spec", 8), ("plain", None), ("spec", None), ("spec", None), ("plain", None)]
    assert [pair.prompt for pair in got] == ["a", "b"] and all(p.plain.new == 3 for p in got)
    for run in (run for pair in got for run in (pair.plain, pair.spec)):
        assert run.wall > sum(run.decoded.seconds.values()) and run.decoding == run.wall - run.decoded.seconds["prefill"]
    with pytest.raises(UserError, match="nothing to measure"):
        pairs.decode(target.device, lambda ids, _most: plain(target, ids, Limit(1)), way("spec"), [("a", [5])])


def test_departures_by_hand():
    logits = torch.tensor([[1.0, 3.0, 0.0], [2.0, 2.0, 0.0], [0.0, 1.0, 0.5]])
    assert lossless.departures(logits, [1, 0, 2]).tolist() == [0.0, 0.0, 0.5]
    assert lossless.departures(logits, [0, 1, 1]).tolist() == [2.0, 0.0, 0.0]
    assert lossless.summed([torch.tensor([0.0, 0.5]), torch.tensor([2.0])]) == {"places": 3, "departures": 2, "largest_margin": 2.0}


def test_a_changed_text_is_found_named_and_measured(target):
    """Both shapes of forward speak of the token they stand before: the plain text departs nowhere, a changed token does there."""
    [ids] = prompts((9,))
    tokens = plain(target, ids, Limit(12)).tokens
    other = [*tokens[:7], (tokens[7] + 1) % 300, *tokens[8:]]
    for rows in (lossless.whole, lossless.steps):
        assert lossless.departures(rows(target, ids, tokens), tokens).max() == 0
        gaps = lossless.departures(rows(target, ids, other), other)
        assert gaps[:7].max() == 0 and gaps[7] > 0
        assert lossless.departures(rows(target, ids, tokens[:1]), tokens[:1]).tolist() == [0.0]
    same, changed = (Pair(name, ids, Timed(Decoded(tokens), 1.0), Timed(Decoded(text), 1.0)) for name, text in (("x", tokens), ("y" * 64, other)))
    got = lossless.measure(target, [same, changed])
    assert got["prompts"] == 2 and got["identical"] == 1 and got["floor"]["departures"] == 0 and got["floor"]["places"] == 24
    assert [(row["prompt"], row["position"]) for row in got["differing"]] == [("y" * 64, 7)] and got["differing"][0]["margin"] > 0
    assert got["speculative"]["departures"] >= 1 and len(lossless.show(got)) == 2


def test_any_proposer_leaves_no_departure_in_fp32(target):
    [ids] = prompts((9,))
    run = Timed(plain(target, ids, Limit(12)), 1.0)
    spec = Timed(decode(target, Random(target.vocab_size, 1), TAPS, ids, Limit(12), 4), 1.0)
    got = lossless.measure(target, [Pair("x", ids, run, spec)])
    assert got["identical"] == 1 and got["speculative"]["departures"] == 0 and len(lossless.show(got)) == 1


PP = {"build_commit": "b1", "model_type": "llama 3B Q4_0", "backends": "Vulkan", "n_prompt": 512, "n_gen": 0, "avg_ts": 900.0, "stddev_ts": 2.0}
TG = PP | {"n_prompt": 0, "n_gen": 128, "n_depth": 4096, "avg_ts": 41.2}


def test_llama_bench_files(tmp_path):
    whole, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    whole.write_text(json.dumps([PP, TG], indent=2))
    lines.write_text(json.dumps(PP) + "\n" + json.dumps(TG) + "\n")
    assert rates.read_llama_bench(whole) == rates.read_llama_bench(lines) == [PP, TG]
    assert [rates.test_name(row) for row in (PP, TG, PP | {"n_gen": 128})] == ["pp512", "tg128 @ d4096", "pp512+tg128"]
    shown = rates.show(rates.measure(two_pairs(), [PP, TG]))
    cells = [list(column.cells) for column in shown.columns]
    assert cells[1][2:] == ["", "41.2"] and cells[3][2:] == ["900", ""]
    assert cells[0][3] == "llama.cpp b1 llama 3B Q4_0 Vulkan, tg128 @ d4096"


@pytest.mark.parametrize("text", ["", "| model | size |\n| --- | --- |\n", "[]", "{}", '[{"n_prompt": 512}]', "[1]",
                                  '{"n_prompt": 0, "n_gen": 0, "avg_ts": 1}',
                                  json.dumps(PP) + "\n" + json.dumps({"n_gen": 1})])
def test_what_is_no_llama_bench_file_is_one_line(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(UserError, match="llama-bench -o json") as caught:
        rates.read_llama_bench(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        rates.read_llama_bench(tmp_path / "none")

"""The choice of the experts' implementation: what can run here, the fastest by a table of times, and an old stream's kept."""
from __future__ import annotations

import dataclasses
import importlib.util
import logging
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, strategies as st

from common.errors import UserError
from producer import daemon, experts, identity, selftest
from producer.config import Generate, Serve
from producer.speculate import Limit, plain
from producer.target import load
from protocol.store import SampleStore

TAPS = (1, 2, 3)
needs_interpreter = pytest.mark.skipif(importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
                                       reason="these targets are on the CPU: triton's interpreter, and no GPU, is needed")


def now(target) -> str:
    return target.model.config._experts_implementation


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_each_of_transformers_own_can_be_set_and_is_in_the_contract(name):
    target = tiny.hybrid()
    experts.use(target.model, name)
    assert now(target) == name == target.contract(TAPS, None).versions["experts"]


def test_triton_on_a_cpu_is_the_persons_mistake_and_changes_nothing():
    target = tiny.hybrid()
    own = now(target)
    with pytest.raises(UserError, match="--experts triton: triton cannot run here: Triton kernels run on a GPU; choose another of eager"):
        experts.use(target.model, "triton")
    assert now(target) == own


def test_what_a_library_refuses_is_said(monkeypatch):
    def refuses(*_args, **_kwargs):
        raise RuntimeError("grouped gemm is not supported on gfx1151\nmore")
    target = tiny.hybrid()
    monkeypatch.setattr(experts.F, "grouped_mm", refuses)
    with pytest.raises(UserError, match="grouped_mm cannot run here: RuntimeError: grouped gemm is not supported on gfx1151; choose"):
        experts.use(target.model, "grouped_mm")
    monkeypatch.delattr(experts.F, "grouped_mm")
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    assert "has no grouped_mm" in experts.obstacle(target.model, "grouped_mm")


def test_a_dense_target_has_nothing_to_choose():
    target, said = tiny.dense(), []
    experts.auto(target.model, target.tokenizer, say=said.append)
    assert said == []
    with pytest.raises(UserError, match="--experts eager: this target has no experts"):
        experts.use(target.model, "eager")


@given(st.dictionaries(st.sampled_from(experts.NAMES), st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=1))
def test_the_choice(table):
    """A fastest verify, or one that a stop-watch cannot tell from it and whose plain step is no slower."""
    seconds = {name: {1: step, 16: verify} for name, (step, verify) in table.items()}
    name = experts.choose(seconds, 16)
    fastest = min(seconds, key=lambda n: seconds[n][16])
    assert seconds[name][16] <= seconds[fastest][16] * (1 + experts.EQUAL) and seconds[name][1] <= seconds[fastest][1]


def test_the_choice_by_example():
    assert experts.choose({"eager": {1: 1.0, 16: 9.0}, "grouped_mm": {1: 2.0, 16: 5.0}}, 16) == "grouped_mm"       # a cycle is one verify
    assert experts.choose({"eager": {1: 1.0, 16: 5.1}, "grouped_mm": {1: 2.0, 16: 5.0}}, 16) == "eager"
    assert experts.choose({"eager": {1: 1.0}, "grouped_mm": {1: 2.0}}, 1) == "eager"


@pytest.mark.parametrize("times, chosen", [({"eager": 1.0, "grouped_mm": 2.0}, "eager"), ({"eager": 2.0, "grouped_mm": 1.0}, "grouped_mm")])
def test_auto_sets_the_fastest_and_says_so(monkeypatch, times, chosen):
    target, said, asked = tiny.hybrid(), [], []

    def measure(_model, names, ids):
        asked.append((names, ids.shape[1]))
        return {name: {1: times[name] / 2, ids.shape[1]: times[name]} for name in names}
    monkeypatch.setattr(experts, "measure", measure)
    monkeypatch.setattr(experts, "MOST_COPIED", 1)
    experts.auto(target.model, target.tokenizer, block=9, say=said.append)
    assert asked == [(("eager", "grouped_mm"), 9)] and now(target) == chosen
    [line] = said
    assert line.startswith(f"experts: {chosen} (T=1 / T=9: eager {times['eager'] * 500:.1f} / {times['eager'] * 1000:.1f} ms, grouped_mm")
    assert "not batched_mm: a prefill of 4096 tokens would copy" in line and "not triton: Triton kernels run on a GPU" in line


def test_what_batched_mm_copies():
    """The user's target: 8 of 256 experts of 3 x 512 x 2048, in bf16; no parameter is made for it."""
    layer = torch.nn.Module()
    layer.gate_up_proj, layer.down_proj = (torch.nn.Parameter(torch.empty(256, *shape, dtype=torch.bfloat16, device="meta"))
                                           for shape in ((1024, 2048), (2048, 512)))
    assert experts.copied(layer, 8) == 4096 * 8 * 3 * 512 * 2048 * 2


def test_measuring_visits_each_in_turn_and_leaves_the_model_as_it_was(monkeypatch):
    target, seen = tiny.hybrid(), []
    own, forward = now(target), type(target.model).forward
    monkeypatch.setattr(type(target.model), "forward", lambda self, input_ids, **kw: seen.append((now(target), input_ids.shape[1])) or
                        forward(self, input_ids=input_ids, **kw))
    seconds = experts.measure(target.model, ("eager", "batched_mm"), torch.arange(5)[None])
    once = [("eager", 1), ("eager", 5), ("batched_mm", 1), ("batched_mm", 5)]
    assert seen == once * (experts.ROUNDS + 1) and now(target) == own
    assert {name: set(times) for name, times in seconds.items()} == {"eager": {1, 5}, "batched_mm": {1, 5}}
    assert all(value > 0 for times in seconds.values() for value in times.values())


def test_load_and_settings():
    assert Serve().experts == Generate(prompt="x").experts == "auto"
    said = []
    target = load("embedded", device="cpu", experts="auto", say=said.append)
    assert len(said) == 1 and said[0].startswith(f"experts: {now(target)} (T=1 / T=16")
    assert now(load("embedded", device="cpu", experts="eager")) == "eager"
    with pytest.raises(UserError, match="--experts triton"):
        load("embedded", device="cpu", experts="triton")


def stream(folder, contract) -> None:
    with SampleStore(folder / contract.hash[:16] / "samples", contract=contract.to_dict()):
        pass


def changed(contract, **versions):
    return dataclasses.replace(contract, versions=contract.versions | versions)


def test_a_stream_goes_on_with_what_it_began_with(monkeypatch, tmp_path, caplog):
    """By stop-watch another could be chosen at the next start, and a long stream would end."""
    monkeypatch.setattr(experts, "measure", lambda model, names, ids: {name: {1: 1.0, 16: float(name != "grouped_mm")} for name in names})
    caplog.set_level(logging.INFO)
    target = tiny.hybrid()
    contract = target.contract(TAPS, None)
    assert experts.begun(tmp_path, contract) is None
    stream(tmp_path, changed(contract, experts="eager", torch="1.0"))               # another contract: not this stream
    assert daemon.choose_experts(target, contract, tmp_path).versions["experts"] == "grouped_mm" == now(target)
    stream(tmp_path, changed(contract, experts="eager"))
    kept = daemon.choose_experts(target, contract, tmp_path)
    assert kept == changed(contract, experts="eager") and now(target) == "eager"
    assert "as the stream in" in caplog.messages[-1] and "not timed again" in caplog.messages[-1]


def test_a_stream_that_cannot_go_on_here_says_so(tmp_path):
    target = tiny.hybrid()
    contract = target.contract(TAPS, None)
    stream(tmp_path, changed(contract, experts="triton"))
    with pytest.raises(UserError, match="began with --experts triton: triton cannot run here: Triton kernels run on a GPU"):
        daemon.choose_experts(target, contract, tmp_path)


def test_serve_asks_the_stream_only_under_auto(monkeypatch, tmp_path):
    asked, loaded = [], []

    class Enough(Exception):
        pass

    def enough(*_args, **_kwargs):
        raise Enough
    monkeypatch.setattr(daemon, "load", lambda *_args, **kwargs: loaded.append(kwargs["experts"]) or tiny.hybrid(template=tiny.CHATML))
    monkeypatch.setattr(daemon, "choose_experts", lambda target, contract, streams: asked.append(streams) or contract)
    monkeypatch.setattr(selftest, "check", enough)
    for name in ("auto", "eager"):
        with pytest.raises(Enough):
            daemon.serve(Serve(target="embedded", device="cpu", layers="1,3", state_dir=tmp_path, bind="tcp://127.0.0.1:0", experts=name), None)
    assert loaded == [None, "eager"] and asked == [tmp_path / "streams"]


@needs_interpreter
def test_whole_model_and_its_text_under_triton():
    """fp32: the same logits within rounding at two lengths, the same greedy text, and no trace of a rejected suffix."""
    target = tiny.hybrid(experts=4)
    ids = (torch.arange(6) * 7 % 300)[None]
    target.model.set_experts_implementation("eager")
    eager = [target.forward(ids[:, :n], logits_to_keep=0).logits for n in (1, 6)]
    text = plain(target, ids[0].tolist(), Limit(6)).tokens
    target.model.set_experts_implementation("triton")
    for n, other in zip((1, 6), eager):
        assert (target.forward(ids[:, :n], logits_to_keep=0).logits - other).abs().max() < 1e-3 * other.abs().max()
    assert plain(target, ids[0].tolist(), Limit(6)).tokens == text and len(set(text)) > 2
    assert identity.versions(target.model)["experts"] == "triton"
    with selftest.experts_one_by_one(SimpleNamespace(model=target.model, text=target.text)) as alone:
        assert alone and now(target) == "triton"


@needs_interpreter
def test_a_rejected_suffix_leaves_no_trace_under_triton(monkeypatch):
    monkeypatch.setattr(selftest, "PROMPT", 9)
    monkeypatch.setattr(selftest, "BLOCK", 6)
    monkeypatch.setattr(selftest, "KEPT", 2)
    target = tiny.hybrid(experts=4)
    text = (torch.arange(15) * 11 % 300)[None]
    target.model.set_experts_implementation("triton")
    assert selftest.suffix(target, text) == (0.0, True)

"""Taps, final states and captures: which row of which layer, exactly (L1-L3, R3, R5), and alone whatever ran before."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny
import torch

from common.capture import FINAL_RULE, TAP_RULE, from_bf16, to_bf16
from common.errors import CaptureError, UserError
from producer import embedded, identity
from producer.generate import answer
from producer.sampling import Sampling
from producer.target import PROBES, Target, layer_count, load, locate

TAPS = (0, 2, 3, 6)
IDS = np.random.default_rng(0).integers(tiny.MASK + 1, 300, 75).astype(np.int32)
NO_LOSS = np.zeros(75, bool)


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request) -> Target:
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense(layers=8)


def counting(target: Target) -> Target:
    """Make every layer i add the constant 2**-i to the residual stream: mixers silenced, the MLP replaced by a constant."""
    class Constant(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, hidden):
            return torch.full_like(hidden, self.value)

    for i, layer in enumerate(target.text.layers):
        (layer.linear_attn.out_proj if hasattr(layer, "linear_attn") else layer.self_attn.o_proj).weight.data.zero_()
        layer.mlp = Constant(2.0 ** -i)
    return target


@pytest.mark.parametrize("make", [tiny.hybrid, lambda: tiny.dense(layers=8)], ids=["hybrid", "dense"])
def test_tap_i_is_the_exact_sum_of_layers_0_to_i(make):
    toy = counting(make())
    toy.text.embed_tokens.weight.data.zero_()
    with torch.no_grad():
        taps = toy.forward(torch.arange(3, 9)[None], taps=tuple(range(8))).taps
    for i in range(8):
        assert (taps[i] == sum(2.0 ** -k for k in range(i + 1))).all(), i


def test_taps_and_final_equal_the_librarys_hidden_states(target):
    ids = torch.from_numpy(IDS).long()[None]
    ours = target.forward(ids, taps=tuple(range(7)), logits_to_keep=0)
    with torch.inference_mode():
        theirs = target.model(input_ids=ids, output_hidden_states=True)
    for i in range(7):
        assert torch.equal(ours.taps[i], theirs.hidden_states[i + 1]), i
        assert not torch.equal(ours.taps[i], theirs.hidden_states[i])
    assert torch.equal(ours.final, theirs.hidden_states[-1]) and torch.equal(ours.logits, theirs.logits)
    assert torch.equal(target.logits(ours.final), theirs.logits)
    last = target.forward(ids, taps=(7,)).taps[0]                                    # before the norm
    assert torch.equal(target.text.norm(last), ours.final)


def test_no_hook_stays(target):
    def hooks():
        return sum(len(module._forward_hooks) for module in target.model.modules())
    before = hooks()
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[10 ** 6]]), taps=TAPS)
    out = target.forward(torch.tensor([[5, 6]]))
    assert hooks() == before and out.taps is None
    for bad in (-1, 8):
        with pytest.raises(ValueError, match="8 layers"):
            target.forward(torch.tensor([[5]]), taps=(bad,))


def test_logits_to_keep(target):
    ids = torch.from_numpy(IDS).long()[None]
    assert [target.forward(ids, logits_to_keep=n).logits.shape[1] for n in (1, 5, 0)] == [1, 5, 75]
    rows = target.forward(ids, logits_to_keep=torch.tensor([0, 74])).logits
    torch.testing.assert_close(rows, target.forward(ids, logits_to_keep=0).logits[:, [0, 74]])


def test_capture_is_bitwise_the_same_whatever_ran_before(target):
    alone = target.capture(IDS, NO_LOSS, TAPS)
    target.capture(IDS[::-1], NO_LOSS, TAPS)
    answer(target, [IDS[:9].tolist(), IDS[:30].tolist(), [7]], 6, Sampling(), ["a", "b", "c"])
    for again in (target.capture(IDS, NO_LOSS, TAPS), target.capture(IDS.tolist(), NO_LOSS.tolist(), TAPS)):
        for field in dataclasses.fields(alone):
            assert np.array_equal(getattr(alone, field.name), getattr(again, field.name)), field.name
    for k, tap in enumerate(TAPS):
        assert np.array_equal(target.capture(IDS, NO_LOSS, (tap,)).taps[0], alone.taps[k])
    assert np.array_equal(target.capture(IDS, NO_LOSS, tuple(range(7))).taps[list(TAPS)], alone.taps)


def test_capture_rounds_as_common_does_and_its_probes_hold(target):
    capture = target.capture(IDS, NO_LOSS, TAPS, "abc")
    out = target.forward(torch.from_numpy(IDS).long()[None], taps=TAPS, logits_to_keep=0)
    assert np.array_equal(capture.taps, to_bf16(out.taps[:, 0].numpy()))
    assert np.array_equal(capture.final, to_bf16(out.final[0].numpy()))
    head = target.head.numpy()
    assert len(capture.probe_rows) == PROBES == len(set(capture.probe_rows)) and capture.prompt == "abc"
    assert np.array_equal((from_bf16(capture.final[capture.probe_rows]) @ head.T).argmax(1), capture.probe_tokens)
    assert np.array_equal(out.logits[0, capture.probe_rows].argmax(-1).numpy(), capture.probe_tokens)


@pytest.mark.parametrize("wrong", ["head", "norm before", "norm twice", "next row"])
def test_a_final_state_that_lm_head_does_not_read_is_refused(target, monkeypatch, wrong):
    """L3: the model's logits stay right; only what we would send differs from what its head reads."""
    if wrong == "head":
        monkeypatch.setattr(target, "head", target.head.roll(1, 0))
    else:
        change = {"norm before": lambda args, out: args[0], "norm twice": lambda _args, out: target.text.norm.forward(3 * out + 1),
                  "next row": lambda _args, out: out.roll(-1, 1)}[wrong]
        forward = target.forward
        seen = []
        handle = target.text.norm.register_forward_hook(lambda _module, args, out: seen.append(change(args, out)))
        monkeypatch.setattr(target, "forward", lambda *args, **more: dataclasses.replace(forward(*args, **more), final=seen[-1]))
    try:
        with pytest.raises(CaptureError, match="final state, row"):
            target.capture(IDS, NO_LOSS, TAPS)
    finally:
        if wrong != "head":
            handle.remove()


def test_a_probe_whose_order_turns_within_rounding_is_refused(target, monkeypatch):
    """Large terms that cancel: both logits are within bf16's rounding of the model's, but the trainer's argmax would differ."""
    head = torch.zeros_like(target.head)
    head[10, :3], head[11, :3] = torch.tensor([100.0, -100.0, 1.0]), torch.tensor([100.0, -100.0, 0.9])
    forward = target.forward

    def crafted(*args, **more):
        out = forward(*args, **more)
        final, logits = out.final.clone(), torch.zeros_like(out.logits)
        final[..., :3] = 1
        logits[..., 10], logits[..., first] = 1.0, logit
        return dataclasses.replace(out, logits=logits, final=final)
    monkeypatch.setattr(target, "forward", crafted)
    monkeypatch.setattr(target, "head", head)
    first, logit = 11, 0.9
    assert set(target.capture(IDS, NO_LOSS, TAPS).probe_tokens) == {10}
    logit = 1.2
    with pytest.raises(CaptureError, match="final state, row"):
        target.capture(IDS, NO_LOSS, TAPS)


def test_probes_are_rows_that_rounding_does_not_turn(target, monkeypatch):
    forward = target.forward

    def flat(*args, **more):
        out = forward(*args, **more)
        return dataclasses.replace(out, logits=torch.zeros_like(out.logits))
    monkeypatch.setattr(target, "forward", flat)
    assert len(target.capture(IDS, NO_LOSS, TAPS).probe_rows) == PROBES              # further rows were looked at
    twins = tiny.hybrid() if target.is_hybrid else tiny.dense(layers=8)
    with torch.no_grad():
        twins.head[160:] = twins.head[:160]                                          # every first token has an equal
    with pytest.raises(CaptureError, match="no row whose first token"):
        twins.capture(IDS % 150 + 3, NO_LOSS, TAPS)


def spoil(target: Target, tap: int, change) -> torch.utils.hooks.RemovableHandle:
    """Let a broken kernel sit in layer `tap`: change its output in place, before any hook of ours reads it."""
    return target.text.layers[tap].register_forward_hook(lambda _module, _args, out: change(out[0]), prepend=True)


@pytest.mark.parametrize("change, words", [
    (lambda h: h.zero_(), "tap 3: every value"), (lambda h: h.fill_(0.5), "tap 3: every value"),
    (lambda h: h[41].zero_(), "tap 3, row 41: all zero"),
    (lambda h: h[41].copy_(h[40]), "tap 3, row 41: equals"), (lambda h: h[41, 5].fill_(float("nan")), "tap 3, row 41: not finite"),
    (lambda h: h[41, 5].fill_(float("inf")), "tap 3, row 41: not finite")])
def test_impossible_states_are_named_by_layer_and_row(target, change, words):
    def in_place(hidden):
        change(hidden)
    handle = spoil(target, 3, in_place)
    try:
        with pytest.raises(CaptureError, match=words):
            target.capture(IDS, NO_LOSS, TAPS)
    finally:
        handle.remove()


def test_capture_refuses_what_is_no_sequence_of_this_target(target):
    masked = IDS.copy()
    masked[7] = target.mask_token_id
    with pytest.raises(CaptureError, match="row 7: the mask token"):
        target.capture(masked, NO_LOSS, TAPS)
    with pytest.raises(CaptureError, match="not one sequence"):
        target.capture(IDS, NO_LOSS[1:], TAPS)
    with pytest.raises(CaptureError, match="the target has 320"):
        target.capture([5, 320], [False] * 2, TAPS)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_whole_and_split_by_cache_differ_by_rounding_only(target, length):
    """R5: the torch delta rule works in chunks of 64.  Relative to the largest value of a plane, fp32: 1e-4 at most."""
    ids = torch.from_numpy(np.resize(IDS, length)).long()[None]
    whole = target.forward(ids, taps=TAPS)
    for cut in (1, 64, length - 1):
        if cut < length:
            cache = target.new_cache()
            parts = [target.forward(piece, cache=cache, taps=TAPS) for piece in (ids[:, :cut], ids[:, cut:])]
            for one, two in ((whole.taps, torch.cat([p.taps for p in parts], 2)), (whole.final, torch.cat([p.final for p in parts], 1))):
                assert ((one - two).abs().amax((-1, -2)) / one.abs().amax((-1, -2))).max() < 1e-4
            assert cache.get_seq_length() == length


def test_contract(target):
    contract = target.contract(TAPS, None)
    assert contract.taps == TAPS and contract.n_layers == 8 and contract.hidden_size == 64 and contract.dtype == "float32"
    assert (contract.tap_rule, contract.final_rule) == (TAP_RULE, FINAL_RULE)
    assert ("torch_chunk_gated_delta_rule" in contract.delta_rule) == target.is_hybrid and contract.versions["transformers"]
    assert contract.hash == target.contract(TAPS, None).hash != target.contract(TAPS, True).hash


def test_delta_rule_names_what_will_run(monkeypatch):
    """The closure's implementation is what is called, so putting another there must change the name."""
    toy = tiny.hybrid()
    module = __import__("sys").modules[type(toy.text.layers[0].linear_attn).__module__]

    def chunk_from_elsewhere(*_args):
        raise AssertionError

    def wrap(implementation):
        return lambda *args: implementation(*args)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", wrap(chunk_from_elsewhere))
    assert "chunk_from_elsewhere" in identity.delta_rule(toy.text) and "torch_chunk" not in identity.delta_rule(toy.text)


def test_fingerprint_sees_values_names_and_dtypes():
    toys = (tiny.dense(0), tiny.dense(1), tiny.dense(0, dtype=torch.bfloat16), tiny.hybrid())
    prints = {identity.weights(toy.model) for toy in toys}
    assert len(prints) == 4 and identity.weights(tiny.dense(0).model) in prints
    toy = tiny.dense(0)
    toy.text.norm.weight.data[3] += 1e-3                                             # small tensors are hashed whole
    assert identity.weights(toy.model) not in prints


def test_tokenizer_hash_sees_the_vocabulary_not_the_last_caller():
    tok = tiny.tokenizer()
    first = identity.tokenizer(tok)
    tok(["a", "bb ccc"], padding=True, truncation=True, max_length=2)
    assert identity.tokenizer(tok) == first
    tok.add_tokens(["zebra"])
    assert identity.tokenizer(tok) != first
    assert identity.chat_template(tok) == "" != identity.chat_template(tiny.tokenizer(tiny.CHATML))


def test_mask_token_rule():
    tok = tiny.tokenizer()
    assert identity.mask_token(tok, 330, frozenset({0})) == len(tok)                 # a free row comes first
    assert identity.mask_token(tok, len(tok), frozenset({0})) == tiny.MASK
    assert identity.mask_token(tok, len(tok), frozenset({0}), 9) == 9
    for wrong in (-1, len(tok), 0):
        with pytest.raises(UserError, match="--mask-token"):
            identity.mask_token(tok, len(tok), frozenset({0}), wrong)
    tok.mask_token = None
    with pytest.raises(UserError, match="--mask-token"):
        identity.mask_token(tok, len(tok), frozenset({0}))                           # never the pad token
    tok.add_special_tokens({"additional_special_tokens": ["<repo_name>"]})
    assert identity.mask_token(tok, len(tok), frozenset({0})) == tok.convert_tokens_to_ids("<repo_name>")


def test_rescaled_logits_are_refused():
    toy = tiny.dense()
    toy.model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        Target("soft", toy.model, toy.tokenizer)
    toy = tiny.dense()
    toy.model.lm_head.register_forward_hook(lambda _module, _args, out: out * 0.999)  # by a name that nobody knows
    with pytest.raises(UserError, match="not lm_head @ final"):
        Target("scaled", toy.model, toy.tokenizer)


def test_load_from_a_folder_gives_the_same_target(tmp_path, target):
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = load(str(tmp_path), device="cpu")
    assert layer_count(str(tmp_path)) == 8 and again.dtype == torch.float32
    assert again.fingerprint == target.fingerprint and again.eos_ids == target.eos_ids and again.mask_token_id == target.mask_token_id
    ours, theirs = again.contract(TAPS, None), target.contract(TAPS, None)
    assert dataclasses.replace(ours, target=theirs.target) == theirs
    assert np.array_equal(again.capture(IDS, NO_LOSS, TAPS).taps, target.capture(IDS, NO_LOSS, TAPS).taps)
    assert load(str(tmp_path), dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    with pytest.raises(UserError, match="--dtype"):
        load(str(tmp_path), dtype="int8", device="cpu")


def test_a_checkpoint_with_a_missing_weight_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file
    toy = tiny.dense()
    toy.model.save_pretrained(tmp_path)
    toy.tokenizer.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights, model.layers.1.mlp.up_proj.weight"):
        load(str(tmp_path), device="cpu")


def test_a_target_that_is_nowhere(tmp_path):
    with pytest.raises(UserError, match="hf download nobody/nothing"):
        locate("nobody/nothing")
    with pytest.raises(UserError, match="config.json"):
        locate(str(tmp_path))


@pytest.mark.skipif(not (embedded.FOLDER / "model.safetensors").exists(), reason="the embedded target is not there yet")
def test_the_shipped_target():
    shipped = load("embedded", device="cpu")
    assert shipped.is_hybrid and shipped.n_layers == 8
    ids = shipped.tokenizer("def add(a, b):\n    return a + b\n").input_ids
    capture = shipped.capture(ids, [True] * len(ids), (1, 2, 3, 4, 5))
    assert shipped.tokenizer.decode(capture.ids) == "def add(a, b):\n    return a + b\n"

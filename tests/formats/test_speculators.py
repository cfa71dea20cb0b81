"""speculators 0.9.0 on our export in a Python of its own, and we on what it saves; every key read or refused by name."""
from __future__ import annotations

import json

import pytest
import torch
from drafters_small import LAYERS, LISTED, MODES, TAPS, B, H, V, W, drafted, fresh, noise, same
from safetensors.torch import load_file, save_file

from benchmarks import rivals
from common.drafter import checkpoint, geometry, vocab
from common.drafter.config import FULL, SLIDING
from common.errors import UserError
from trainer import imported
from trainer.formats import speculators

PYTHON = rivals.made()
needs_speculators = pytest.mark.skipif(PYTHON is None, reason="no environment for speculators: python -m benchmarks.rivals makes it (a minute, 500 MB)")
HEAD, EMBEDDING = noise(V, H, seed=5), noise(V, H, seed=6)
ALL_SLIDING = {"layer_types": (SLIDING,) * 3}
EXPRESSIBLE = {"bidi": ("bidi", {}), "mixed": ("mixed", {}), "causal": ("causal", ALL_SLIDING)}      # theirs is causal nowhere in a full layer


@pytest.fixture(scope="module")
def worker():
    with rivals.Worker(PYTHON, "tests.formats.speculators_worker") as worker:
        yield worker


def export(folder, drafter, quant="bf16"):
    head = None if drafter.shortlist is None else HEAD[drafter.shortlist].bfloat16()
    assert speculators.write(folder, drafter, {"step": 1}, quant, head=head, target=None) == []
    return folder


def both(worker, tmp_path, drafter, context: int):
    """-> their logits and ours, of the block at `context`, and what they say of the folder."""
    taps, ids = noise(context + B + 1, len(TAPS) * H), torch.arange(context + B + 1) % V
    save_file({"taps": taps, "ids": ids, "anchor": torch.tensor(context), "embedding": EMBEDDING, "head": HEAD}, tmp_path / "in")
    said = worker.ask("draft", folder=str(export(tmp_path / "d", drafter)), inputs=str(tmp_path / "in"), out=str(tmp_path / "out"))
    got = load_file(tmp_path / "out")
    assert got["where"].tolist() == list(range(context, context + B))
    block = EMBEDDING[geometry.block_inputs(ids, torch.tensor([context]), B, 2)[0]]
    head = HEAD if drafter.shortlist is None else HEAD[drafter.shortlist].bfloat16().float()
    return got["logits"], drafted(drafter, taps[:context], block) @ head.T, said


@needs_speculators
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", EXPRESSIBLE)
def test_it_loads_our_export_and_agrees(worker, tmp_path, mode, listed):
    attention, changes = EXPRESSIBLE[mode]
    drafter = fresh(attention, listed=listed, **changes)
    logits, ours, said = both(worker, tmp_path, drafter, W - B)         # inside the window for every slot, in both codes
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    assert (said["taps"], said["block"], said["mask"], said["drafted"]) == ([2, 5], B, 2, len(LISTED) if listed else V)
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-4)


@needs_speculators
def test_far_text_agrees_in_full_layers_and_past_the_window_theirs_sees_more(worker, tmp_path):
    logits, ours, _ = both(worker, tmp_path, fresh(layer_types=(FULL,) * 3, sliding_window=None), 3 * W)
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-4)
    (tmp_path / "w").mkdir()
    logits, ours, _ = both(worker, tmp_path / "w", fresh(), 3 * W)
    assert not torch.allclose(logits, ours, rtol=1e-2, atol=1e-2)       # the difference that `hstrain import` speaks of


@needs_speculators
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", EXPRESSIBLE)
def test_we_read_what_it_saves(worker, tmp_path, mode, listed):
    attention, changes = EXPRESSIBLE[mode]
    drafter = fresh(attention, listed=listed, **changes)
    worker.ask("again", folder=str(export(tmp_path / "a", drafter)), out=str(tmp_path / "b"))
    with pytest.raises(UserError, match="--target-layers"):
        imported.read(tmp_path / "b")
    found = imported.read(tmp_path / "b", LAYERS)
    assert found.drafter.config == drafter.config
    for name, value in found.drafter.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name].float()), name
    assert (found.drafter.shortlist is not None) == listed


@needs_speculators
def test_the_defaults_here_are_its_own(worker):
    theirs = worker.ask("defaults")
    assert speculators.DEFAULTS == {name: theirs[name] for name in speculators.DEFAULTS}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", EXPRESSIBLE)
def test_round_trip_is_bit_equal(tmp_path, mode, listed):
    attention, changes = EXPRESSIBLE[mode]
    drafter = fresh(attention, listed=listed, **changes)
    found = imported.read(export(tmp_path / "a", drafter))
    same(found.drafter, drafter)
    assert found.drafter.config == drafter.config and found.record == {"step": 1, "num_target_layers": LAYERS}
    export(tmp_path / "b", found.drafter)
    for name in (checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.RECORD):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("attention", MODES)
def test_a_mask_it_cannot_express_is_said_with_its_layers(tmp_path, attention):
    said = " ".join(speculators.notes(fresh(attention).config, tmp_path, "TARGET"))
    assert ("runs layer 1 (full) bidirectional" in said) == (attention == "causal") == ("WARNING" in said)


# --- what is not ours to the byte -------------------------------------------------------------------------------------------

def changed(tmp_path, *, listed=False, layers=None, **changes):
    folder = export(tmp_path / "d", fresh("mixed", listed=listed))
    data = json.loads((folder / checkpoint.CONFIG).read_text()) | changes
    if layers:
        data["transformer_layer_config"] |= layers
    data = json.loads(json.dumps(data), object_pairs_hook=lambda pairs: {name: value for name, value in pairs if value != "GONE"})
    (folder / checkpoint.CONFIG).write_text(json.dumps(data))
    return folder


def test_both_spellings_of_rope(tmp_path):
    folder = changed(tmp_path, layers={"rope_parameters": "GONE", "rope_theta": 1e4})
    assert imported.read(folder).drafter.config == fresh("mixed").config


@pytest.mark.parametrize("changes, says", [
    ({"surprise": 1}, "surprise is not known"), ({"layers": {"surprise": 1}}, "transformer_layer_config.surprise is not known"),
    ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'"), ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    ({"aux_hidden_state_layer_ids": "GONE"}, "aux_hidden_state_layer_ids is None"), ({"aux_hidden_state_layer_ids": [2.0, 5]}, "[2.0, 5]"),
    ({"aux_hidden_state_layer_ids": [0, 5]}, "taps (-1, 4)"), ({"aux_hidden_state_layer_ids": [2, LAYERS]}, "taps (1, 7)"),
    ({"mask_token_id": "GONE"}, "mask_token_id is None"), ({"block_size": "4"}, "block_size is '4'"),
    ({"draft_vocab_size": V + 1}, "draft_vocab_size"), ({"draft_vocab_size": 9}, "d2t is I64 [10]"), ({"target_hidden_size": 64}, "target_hidden_size is 64"),
    ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal is 'no'"), ({"layers": {"rope_parameters": "GONE"}}, "rope_theta is missing"),
    ({"layers": {"model_type": "llama"}}, "model_type is 'llama'"), ({"layers": {"layer_types": "GONE"}}, "layer_types"),
    ({"transformer_layer_config": []}, "transformer_layer_config")])
def test_each_wrong_key_is_named(tmp_path, changes, says):
    with pytest.raises(UserError) as error:
        imported.read(changed(tmp_path, listed=True, **changes))
    assert says in str(error.value)


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop("t2d"), "t2d is missing"), (lambda t: t.update({"d2t": t["d2t"].int()}), "d2t is I32"),
    (lambda t: t.update({"d2t": vocab.from_d2t(t["d2t"])}), "d2t"),                                        # absolute ids, as a GGUF has them
    (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d names other tokens"), (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    (lambda t: t.update({"verifier_norm.weight": torch.ones(H)}), "verifier_norm.weight is not part"),
    (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), "norm.weight is missing")])
def test_each_wrong_tensor_is_named(tmp_path, change, says):
    folder = export(tmp_path / "d", fresh(listed=True))
    tensors = load_file(folder / checkpoint.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / checkpoint.WEIGHTS)
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        imported.read(folder)

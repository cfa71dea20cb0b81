"""--draft-vocab: the list is chosen once, read back, lies beside every checkpoint, and the run drafts with it."""
import json

import numpy as np
import pytest
import torch

from common import metrics
from common.drafter import acceptance, checkpoint, vocab
from common.errors import CorruptError, UserError
from tests.trainer.small import HIDDEN, VOCAB, Listed, captures, config, loop
from trainer import shortlist
from trainer.arms import ARMS, changed
from trainer.batch import concat_taps, make_batch
from trainer.offline import Offline
from trainer.run import draws
from trainer.step import rows_of, sums

TEXTS = captures(20)
SIZE = 8


def texts_of(given):
    return [(c.ids, c.loss_mask) for c in given]


def test_the_list_is_the_commonest_supervised_tokens_of_the_first_samples_judged_on_others():
    made = shortlist.choose(texts_of(TEXTS), VOCAB, SIZE)
    assert (made["counted_samples"], made["judged_samples"], made["size"]) == (16, 4, SIZE)
    counts = [0] * VOCAB
    for capture in TEXTS[:16]:
        for token, said in zip(capture.ids.tolist(), capture.loss_mask.tolist()):
            counts[token] += said
    assert made["ids"] == sorted(sorted(range(VOCAB), key=lambda t: (-counts[t], t))[:SIZE]) and made["counted_tokens"] == sum(counts)
    told = [t for c in TEXTS[16:] for t, said in zip(c.ids.tolist(), c.loss_mask.tolist()) if said]
    assert made["coverage"] == sum(t in made["ids"] for t in told) / len(told) and made["judged_tokens"] == len(told)
    assert f"covers {made['coverage']:.2%} of" in shortlist.line(made) and "not counted" in shortlist.line(made)
    alone = shortlist.choose(texts_of(TEXTS[:4]), VOCAB, SIZE)
    assert alone["coverage"] is None and "no other sample" in shortlist.line(alone)
    with pytest.raises(UserError, match="no token of the first 1 samples is supervised"):
        shortlist.choose([(TEXTS[0].ids, np.zeros_like(TEXTS[0].loss_mask))], VOCAB, SIZE)
    with pytest.raises(UserError, match=f"--draft-vocab {VOCAB}: the target has {VOCAB} tokens"):
        shortlist.choose(texts_of(TEXTS), VOCAB, VOCAB)


def test_samples_held_aside_are_judged_on_and_not_counted():
    """40 samples: the 32nd, which no run trains on (order.py), and the last 8."""
    many = texts_of(captures(40, seed=2))
    many[31] = (np.full(2000, 22, np.int32), np.ones(2000, bool))                # would make token 22 the commonest of all
    made = shortlist.choose(many, VOCAB, SIZE)
    assert (made["counted_samples"], made["judged_samples"]) == (31, 9) and made["judged_tokens"] > 2000
    assert 22 not in made["ids"] and made["coverage"] < 0.1


def test_the_first_samples_are_those_that_hold_enough_tokens_however_the_stream_grows(monkeypatch):
    lengths = [int(c.loss_mask.sum()) for c in TEXTS]
    monkeypatch.setattr(shortlist, "TOKENS", sum(lengths[:7]))
    grown = Listed()
    first = shortlist.First(grown)
    for i, capture in enumerate(TEXTS):
        grown.append(capture)
        assert first.enough() == (i >= 6)
    assert [len(ids) for ids, _ in first.texts] == [c.tokens for c in TEXTS[:7]]
    whole = shortlist.First(Listed(TEXTS))
    assert whole.enough() and len(whole.texts) == 7


def started(folder, *, steps: int = 5, samples=TEXTS, arm: str = "ce_causal", **over):
    made = loop(folder, steps=steps, samples=list(samples), arm=arm, **over)
    first = shortlist.First(made.samples)
    first.enough()
    shortlist.settle(made.run, SIZE, first)
    made.head = shortlist.head_of(made.head, made.run.drafter.shortlist)
    made.offline = Offline(made.run, made.samples, made.embedding, made.head, max_tokens=64)
    return made


def test_a_resumed_run_reads_its_list_back_whatever_the_store_holds_by_then(tmp_path):
    first = started(tmp_path / "run")
    first.go()
    ids = first.run.drafter.shortlist.tolist()
    again = started(tmp_path / "run", samples=captures(20, seed=9))
    assert again.run.resumed and again.run.drafter.shortlist.tolist() == ids != shortlist.choose(texts_of(captures(20, seed=9)), VOCAB, SIZE)["ids"]
    [row] = metrics.read(tmp_path / "run" / "metrics.jsonl", "shortlist")
    assert row["size"] == SIZE and row["counted_samples"] == 16
    with pytest.raises(UserError, match="holds 8 tokens"):
        shortlist.settle(again.run, SIZE + 1, shortlist.First(again.samples))
    (tmp_path / "run" / shortlist.FILE).unlink()
    with pytest.raises(UserError, match="shortlist.json is gone"):
        started(tmp_path / "run")


@pytest.mark.parametrize("arm", ["ce_causal", "kl_causal"])
def test_a_run_trains_on_its_list_and_counts_what_is_outside(tmp_path, arm):
    made = started(tmp_path / "run", steps=20, arm=arm)
    made.go()
    assert made.head.shape == (SIZE, HIDDEN)
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "step")
    assert all(0 < row["outside"] < row["slots"] and row["denominator"] > 0 for row in rows)
    folder = made.run.checkpoints()[-1]
    drafter, _, record = checkpoint.load(folder, "cpu", torch.float32)
    assert torch.equal(drafter.shortlist, made.run.drafter.shortlist) and record["shortlist"] == SIZE
    assert record["shortlist_chosen"]["coverage"] == json.loads((tmp_path / "run" / shortlist.FILE).read_text())["coverage"]


def test_labels_are_places_in_the_list():
    ids, arm = torch.tensor([1, 2, 5, 9]), ARMS["ce_causal"]
    batch = make_batch(TEXTS[:3], config(), arm, anchors=9, max_tokens=64, generators=[draws(0, i) for i in range(3)])
    whole, cut = rows_of(batch, arm).labels.tolist(), rows_of(batch, arm, ids).labels.tolist()
    assert cut == [ids.tolist().index(t) if t in ids else vocab.OUTSIDE for t in whole] and len(set(cut)) == 5


def test_kl_over_the_list_is_renormalised():
    """Over a sliced head teacher and drafter are both distributions over the list alone."""
    from trainer.head import Rows, weighted_sums
    rng, ids = torch.Generator().manual_seed(0), torch.tensor([0, 3, 4, 17])
    head, hidden, finals = (torch.randn(*shape, generator=rng) for shape in ((VOCAB, HIDDEN), (6, HIDDEN), (6, HIDDEN)))
    p, q = ((x @ head.T).softmax(-1)[:, ids] for x in (finals, hidden))
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    slots = torch.arange(1, 7)
    rows = Rows(labels=torch.full((6,), vocab.OUTSIDE), weights=torch.ones(6), blocks=slots, slots=slots, block_size=8, finals=finals)
    got = weighted_sums(hidden, shortlist.head_of(head, ids), rows, "kl")
    assert got.numerator.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


def test_a_simulated_walk_drafts_from_the_list(tmp_path):
    """Its drafts are tokens of the vocabulary again, as a whole head with all others struck out gives them."""
    made = started(tmp_path / "run", steps=60)
    made.go()
    drafter, text = made.run.drafter, TEXTS[0]
    ids, taps = torch.from_numpy(text.ids).long(), concat_taps(text.taps).float()
    embed = lambda tokens: made.embedding[tokens]                                              # noqa: E731
    got = acceptance.simulate(drafter, embed, lambda y: y @ made.head.T, ids, taps, 4)
    whole = torch.randn(VOCAB, HIDDEN)
    whole[drafter.shortlist] = made.head
    outside = torch.tensor([t for t in range(VOCAB) if t not in drafter.shortlist])
    kept, drafter.shortlist = drafter.shortlist, None
    assert got == acceptance.simulate(drafter, embed, lambda y: (y @ whole.T).index_fill(-1, outside, -torch.inf), ids, taps, 4)
    assert max(got) > 0 and np.isin(text.ids, kept.numpy()).any()


def test_a_head_that_is_not_the_drafters_is_refused(tmp_path):
    made = started(tmp_path / "run")
    batch = make_batch(TEXTS[:2], made.run.config, made.arm, anchors=3, max_tokens=64, generators=[draws(0, i) for i in range(2)])
    with pytest.raises(ValueError, match="a head of 24 tokens for a drafter of 8"):
        sums(made.run.drafter, made.embedding, made.embedding, batch, made.arm)
    with pytest.raises(ValueError, match="a head of 24 tokens for a drafter of 8"):
        acceptance.simulate(made.run.drafter, lambda t: made.embedding[t], lambda y: y @ made.embedding.T, torch.from_numpy(TEXTS[0].ids).long(),
                            concat_taps(TEXTS[0].taps).float(), 4)


def test_what_is_held_aside_is_drafted_with_the_list(tmp_path):
    """Offline acceptance at a checkpoint of a run that has passed its first sample held aside."""
    made = started(tmp_path / "run", steps=20, samples=captures(40, seed=4), plan={"replay": 0})
    made.go()
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "offline")
    assert rows and rows[-1]["texts"] == 1 and 1 <= rows[-1]["tau"] <= 4


def saved(tmp_path, ids=(2, 3, 20)):
    made = loop(tmp_path / "r", steps=5, samples=TEXTS).run
    made.drafter.shortlist = torch.tensor(ids)
    return made.checkpoint()


def test_a_list_that_is_missing_strange_or_unannounced_is_refused(tmp_path):
    from safetensors.torch import save_file
    folder = saved(tmp_path)
    before, path = checkpoint.checkpoint_hash(folder), folder / checkpoint.SHORTLIST
    assert checkpoint.load(folder, "cpu", torch.float32)[0].shortlist.tolist() == [2, 3, 20]
    for tensors, says in (({"d2t": torch.tensor([2, 2])}, r"expected d2t, I64, \[3\]"), ({"d2t": torch.tensor([2.0, 2, 18])}, "expected d2t, I64"),
                          ({"t2d": torch.tensor([2, 2, 18])}, "expected d2t"), ({"d2t": torch.tensor([2, 2, 22])}, "within 0..23"),
                          ({"d2t": torch.tensor([2, 1, 18])}, "must ascend")):
        save_file(tensors, path)
        with pytest.raises(CorruptError, match=says):
            checkpoint.load(folder, "cpu", torch.float32)
    save_file({"d2t": torch.tensor([2, 2, 19])}, path)
    assert checkpoint.checkpoint_hash(folder) != before, "another list is another drafter"
    path.unlink()
    with pytest.raises(CorruptError, match="shortlist.safetensors is missing, record.json speaks of a list of 3 tokens"):
        checkpoint.load(folder, "cpu", torch.float32)
    plain = loop(tmp_path / "plain", steps=5, samples=TEXTS).run.checkpoint()
    save_file({"d2t": torch.tensor([2, 2, 18])}, plain / checkpoint.SHORTLIST)
    with pytest.raises(CorruptError, match="is there, record.json speaks of no list"):
        checkpoint.load(plain, "cpu", torch.float32)


def test_an_arm_with_a_list_is_an_arm_of_its_own():
    assert changed(ARMS["ce_causal"], draft_vocab=256).name == "ce_causal.vocab-256"

"""What reaches a training step: rows that are the token's own, and samples that fit this box's head (pitfalls L3, R1, C4)."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.capture import Capture, from_bf16, to_bf16
from common.drafter import geometry
from common.errors import CaptureError, CorruptError, UserError
from tests.trainer.small import HIDDEN, MASK, TAPS, VOCAB, captures, config
from trainer.arms import ARMS
from trainer.batch import Samples, bf16, check_probes, concat_taps, make_batch
from trainer.inbox import unmendable
from trainer.run import draws


def numbered(tokens: int, answer: int) -> Capture:
    """ids = row; tap k holds 10 k + row in every channel, exactly representable: a value says where it was taken from."""
    rows = np.arange(tokens)
    taps = np.stack([np.broadcast_to((10 * k + rows)[:, None], (tokens, HIDDEN)) for k in range(len(TAPS))]).astype(np.float32)
    none = np.zeros(0, np.int32)
    return Capture(rows.astype(np.int32), rows >= answer, to_bf16(taps), to_bf16(taps[0]), none, none)


def test_row_t_of_every_array_is_token_t():
    batch = make_batch([numbered(12, 4), numbered(7, 2)], config(), ARMS["ce_causal"], anchors=50, max_tokens=100, generators=[draws(0, i) for i in range(2)])
    assert batch.taps.shape == (2, 12, 2 * HIDDEN) and batch.tokens == 19 and batch.cut == 0
    for row in range(12):
        assert (batch.taps[0, row, :HIDDEN] == row).all() and (batch.taps[0, row, HIDDEN:] == 10 + row).all()
    assert not batch.taps[1, 7:].any(), "rows past a shorter text are zero: finite, and no context of any anchor"
    assert batch.anchors[0].tolist() == [4, 5, 6, 7, 8, 9, 10] and batch.anchors[1].tolist() == [2, 3, 4, 5] + [geometry.PADDING] * 3
    for b in range(2):
        for n, anchor in enumerate(batch.anchors[b].tolist()):
            if anchor == geometry.PADDING:
                assert not batch.supervised[b, n].any()
                continue
            assert batch.inputs[b, n].tolist() == [anchor] + [MASK] * 3
            assert batch.labels[b, n][batch.supervised[b, n]].tolist() == [anchor + j for j in range(1, 4) if anchor + j < (12, 7)[b]]


def test_texts_without_a_valid_anchor_give_padding_alone():
    batch = make_batch([numbered(5, 4), numbered(3, 2)], config(), ARMS["ce_causal"], anchors=4, max_tokens=100, generators=[draws(0, i) for i in range(2)])
    assert batch.anchors.tolist() == [[geometry.PADDING], [geometry.PADDING]] and not batch.supervised.any()


def test_what_is_longer_than_the_limit_is_cut_and_counted():
    batch = make_batch([numbered(12, 4), numbered(7, 2)], config(), ARMS["ce_causal"], anchors=50, max_tokens=9, generators=[draws(0, i) for i in range(2)])
    assert batch.cut == 3 and batch.tokens == 16 and batch.taps.shape[1] == 9
    assert batch.labels[batch.supervised].max() == 8, "no label from behind the cut"


def test_concat_puts_taps_side_by_side_in_their_order():
    capture = captures(1)[0]
    assert torch.equal(concat_taps(capture.taps)[3], torch.cat([bf16(capture.taps[0])[3], bf16(capture.taps[1])[3]]))
    assert (bf16(capture.final).float().numpy() == from_bf16(capture.final)).all()


def with_probes(head: torch.Tensor) -> Capture:
    made = captures(1)[0]
    rows = np.array([2, 5], np.int32)
    tokens = (torch.from_numpy(from_bf16(made.final[rows])) @ head.T).argmax(-1).numpy().astype(np.int32)
    return Capture(**(vars(made) | {"probe_rows": rows, "probe_tokens": tokens}))


def test_a_head_or_a_final_state_that_is_not_the_producers_is_refused_by_row():
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    capture = with_probes(head)
    check_probes(capture, head)
    with pytest.raises(CaptureError, match="row 2"):
        check_probes(capture, head.roll(1, 0))
    shifted = Capture(**(vars(capture) | {"final": np.roll(capture.final, 1, 0)}))
    with pytest.raises(CaptureError, match="row [25]: lm_head"):
        check_probes(shifted, head)


def samples_of(capture: Capture, head: torch.Tensor, contract: str = "c") -> Samples:
    store = SimpleNamespace(first=3, next=4, sample=lambda seq: SimpleNamespace(contract="c", capture=capture) if seq == 3 else None)
    return Samples(SimpleNamespace(store=store), head, contract=contract, mask_token_id=MASK)


def test_each_sample_is_checked_when_it_is_first_read():
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    good = with_probes(head)
    assert len(samples_of(good, head)) == 1 and samples_of(good, head)[0] is good
    with pytest.raises(CaptureError, match="sample 3: row 2"):
        samples_of(good, head.roll(1, 0))[0]
    with pytest.raises(CaptureError, match="another contract"):
        samples_of(good, head, contract="d")[0]
    ids = good.ids.copy()
    ids[1] = MASK
    with pytest.raises(CaptureError, match="sample 3: the mask token 23"):
        samples_of(Capture(**(vars(good) | {"ids": ids})), head)[0]


def test_a_sample_that_is_corrupt_on_this_disk_ends_the_run_with_one_line():
    def damaged(_seq: int):
        raise CorruptError("000000000003.hs: planes: checksum differs")
    samples = Samples(SimpleNamespace(store=SimpleNamespace(first=3, next=4, sample=damaged), mend=unmendable), torch.zeros(VOCAB, HIDDEN),
                      contract="c", mask_token_id=MASK)
    with pytest.raises(UserError, match="000000000003.hs: planes: checksum differs. Run hstrain once with its producer"):
        samples[0]


def test_a_sample_that_is_mended_is_read_again():
    good, broken = captures(1)[0], [True]
    def sample(_seq: int):
        if broken[0]:
            raise CorruptError("damaged")
        return SimpleNamespace(contract="c", capture=good)
    inbox = SimpleNamespace(store=SimpleNamespace(first=3, next=4, sample=sample), mend=lambda seq, _found: broken.__setitem__(0, seq != 3))
    assert Samples(inbox, torch.zeros(VOCAB, HIDDEN), contract="c", mask_token_id=MASK)[0] is good


def test_old_captures_leave_memory_and_come_again():
    texts = captures(6)
    asked = []
    store = SimpleNamespace(first=0, next=6, sample=lambda seq: asked.append(seq) or SimpleNamespace(contract="c", capture=texts[seq]))
    samples = Samples(SimpleNamespace(store=store), torch.zeros(VOCAB, HIDDEN), contract="c", mask_token_id=MASK,
                      keep_bytes=sum(v.nbytes for t in texts[:3] for v in vars(t).values() if isinstance(v, np.ndarray)))
    for i in (0, 1, 0, 2, 3, 4, 5, 5, 0):
        assert samples[i] is texts[i]
    assert asked[:3] == [0, 1, 2] and asked.count(5) == 1 and asked[-1] == 0

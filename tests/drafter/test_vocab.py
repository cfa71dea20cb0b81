"""Draft heads of K tokens: which tokens, what they cover, and nothing off by one on the way back."""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from common.drafter import vocab
from common.errors import UserError


def test_default_sizes():
    assert vocab.sizes(1024) == [32, 64, 128, 256, 512, 1024]
    assert vocab.sizes(248320) == [7760, 15520, 31040, 62080, 124160, 248320]
    assert vocab.sizes(320) == [16, 32, 48, 80, 160, 320] and vocab.sizes(10) == [10]


def test_counts_are_those_of_a_counter():
    texts = [[3, 3, 0], [], [9, 3, 1]]
    counted = Counter(token for text in texts for token in text)
    assert vocab.count(texts, 10).tolist() == [counted[token] for token in range(10)]
    for foreign in (-1, 10):
        with pytest.raises(ValueError, match="vocabulary has 10"):
            vocab.count([[foreign]], 10)


def test_a_list_holds_the_commonest_tokens_ties_by_the_lower_id():
    counts = np.array([0, 5, 2, 7, 2, 0, 2])
    wanted = [[3], [1, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6]]
    assert [vocab.shortlist(counts, size).tolist() for size in range(1, 8)] == wanted
    assert vocab.shortlist(counts, 3, always=[5, 0, 5]).tolist() == [0, 3, 5]
    for size, always in ((0, ()), (8, ()), (1, (0, 5))):
        with pytest.raises(ValueError, match="a list of"):
            vocab.shortlist(counts, size, always)


def test_coverage_is_a_share_of_tokens_not_of_kinds():
    assert vocab.coverage(np.array([6, 1, 0, 1]), np.array([0, 2])) == 0.75
    with pytest.raises(ValueError, match="no token"):
        vocab.coverage(np.zeros(4, np.int64), np.array([0]))


def test_back_to_the_whole_vocabulary():
    ids = torch.tensor([1, 4, 5])
    picked, q = torch.tensor([0, 2]), torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.125, 0.875]], dtype=torch.float64)
    tokens, spread = vocab.whole(picked, q, ids, 7)
    assert tokens.tolist() == [1, 5]
    assert spread.tolist() == [[0, 0.5, 0, 0, 0.25, 0.25, 0], [0, 0, 0, 0, 0.125, 0.875, 0]] and spread.dtype == torch.float64
    assert vocab.whole(picked, None, ids, 7)[1] is None


def test_places_and_the_maps_of_others():
    """speculators' d2t is an offset: token = i + d2t[i]; its t2d says which tokens have a draft id."""
    ids = torch.tensor([1, 4, 5])
    assert vocab.places(torch.tensor([[5, 0], [1, 6], [4, 2]]), ids).tolist() == [[2, -1], [0, -1], [1, -1]]
    assert vocab.to_d2t(ids).tolist() == [1, 3, 3] and torch.equal(vocab.from_d2t(vocab.to_d2t(ids)), ids)
    assert vocab.to_t2d(ids, 7).tolist() == [False, True, False, False, True, True, False]
    assert vocab.to_t2d(ids, 7).nonzero()[:, 0].tolist() == [i + offset for i, offset in enumerate(vocab.to_d2t(ids).tolist())]


def test_a_token_outside_the_list_is_a_certain_rejection():
    text, ids = [2, 0, 1, 9, 0, 1, 1], np.array([0, 1])              # 2 and 9 are not in the list; 2 only ever is an anchor
    assert vocab.projected([6, 5, 4, 3, 2, 1, -1], text, ids) == [2, 1, 0, 3, 2, 1, -1]
    assert vocab.projected([1, 0, 1, 2, 0, 0, -1], text, ids) == [1, 0, 0, 2, 0, 0, -1]


def test_projection_by_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(20):
        text, ids = rng.integers(0, 6, 30).tolist(), np.array([0, 1, 2, 4])
        accepted_at = [min(int(rng.integers(0, 8)), 29 - a) for a in range(29)] + [-1]
        wanted = []
        for anchor, accepted in enumerate(accepted_at):
            stands = 0
            while stands < accepted and text[anchor + 1 + stands] in ids:
                stands += 1
            wanted.append(-1 if accepted < 0 else stands)
        assert vocab.projected(accepted_at, text, ids) == wanted
        assert vocab.projected(accepted_at, text, np.arange(6)) == accepted_at


@pytest.mark.parametrize("ids", [torch.tensor([1, 1]), torch.tensor([2, 1]), torch.tensor([-1, 1]), torch.tensor([1, 5]),
                                 torch.tensor([], dtype=torch.long), torch.tensor([1.0]), torch.tensor([[1]])])
def test_lists_that_are_none(ids):
    with pytest.raises(ValueError, match="a list of tokens"):
        vocab.check(ids, 5)
    vocab.check(torch.arange(5), 5)


def test_a_file_of_counts(tmp_path):
    np.save(tmp_path / "good.npy", np.array([0, 3, 1], np.uint32))
    assert vocab.read_counts(tmp_path / "good.npy", 3).tolist() == [0, 3, 1]
    for name, wrong in (("long", np.ones(4, int)), ("float", np.ones(3)), ("negative", np.array([1, -1, 0])), ("empty", np.zeros(3, int))):
        np.save(tmp_path / f"{name}.npy", wrong)
        with pytest.raises(UserError, match=f"{name}.npy: expected 3 integers"):
            vocab.read_counts(tmp_path / f"{name}.npy", 3)
    (tmp_path / "text.npy").write_text("1 2 3")
    np.save(tmp_path / "pickle.npy", np.array([{}, 1, 2], object), allow_pickle=True)
    for name, said in (("text", "no .npy file"), ("pickle", "no .npy file"), ("absent", "No such file")):
        with pytest.raises(UserError, match=said):
            vocab.read_counts(tmp_path / f"{name}.npy", 3)

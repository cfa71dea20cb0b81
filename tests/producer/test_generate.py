"""A row's answer does not depend on who sits beside it: padding, dropped rows and randomness leave it alone."""
from __future__ import annotations

import pytest
import tiny
import torch

from common.errors import CaptureError, UserError
from producer.generate import answer, pad_left
from producer.sampling import Sampling, choose, probabilities

GREEDY = Sampling()
PROMPTS = [list(range(10, 10 + n)) for n in (3, 70, 1, 64, 20)]
KEYS = ["a", "b", "c", "d", "e"]


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    toy = tiny.hybrid() if request.param == "hybrid" else tiny.dense()
    ends = answer(toy, PROMPTS, 12, GREEDY, KEYS)
    toy.eos_ids = frozenset({ends[0][3], ends[3][6]})               # so that rows end at unlike steps
    return toy


def plain(target, prompt: list[int], n: int) -> list[int]:
    """Greedy, without a cache: the whole text again for each token."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(target.forward(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt):]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=3)], ids=["greedy", "sampled"])
def test_a_batch_gives_the_same_text_as_each_alone(target, sampling):
    together = answer(target, PROMPTS, 24, sampling, KEYS)
    assert together == [answer(target, [p], 24, sampling, [k])[0] for p, k in zip(PROMPTS, KEYS)]
    assert together[::-1] == answer(target, PROMPTS[::-1], 24, sampling, KEYS[::-1])
    if sampling is GREEDY:
        assert len(set(map(len, together))) > 1                     # rows did leave the batch at unlike steps
        assert together == [plain(target, p, 24) for p in PROMPTS]


def test_answers_end_with_the_end_token_or_at_the_limit(target):
    for n in (1, 2, 24):
        for text in answer(target, PROMPTS, n, GREEDY, KEYS):
            assert 1 <= len(text) <= n and not set(text[:-1]) & target.eos_ids
            assert len(text) == n or text[-1] in target.eos_ids


def test_seed_and_key_decide(target):
    def texts(seed: int, keys: list[str]):
        return answer(target, [[5, 6, 7]] * 3, 20, Sampling(temperature=1.5, seed=seed), keys)
    first = texts(0, ["a", "b", "a"])
    assert first == texts(0, ["a", "b", "a"]) and first[0] == first[2] != first[1]
    assert texts(1, ["a", "b", "a"])[0] != first[0]


def test_the_mask_token_ends_its_own_answer_alone_and_its_capture_is_refused(target):
    """Pitfall C4: a target that emits it must neither go on nor take its neighbours along."""
    before = answer(target, PROMPTS, 3, GREEDY, KEYS)
    token = before[1][0]
    good, target.mask_token_id = target.mask_token_id, token
    try:
        after = answer(target, PROMPTS, 3, GREEDY, KEYS)
        assert after[1] == [token]
        for row in (0, 2):
            cut = before[row][:before[row].index(token) + 1] if token in before[row] else before[row]
            assert after[row] == cut
        with pytest.raises(CaptureError, match="mask token"):
            target.capture(PROMPTS[1] + after[1], [False] * len(PROMPTS[1]) + [True], (1,))
    finally:
        target.mask_token_id = good


def test_nothing_asked_nothing_answered(target):
    assert answer(target, [], 5, GREEDY, []) == []
    for prompts, keys, n in (([[1]], [], 5), ([[]], ["a"], 5), ([[1]], ["a"], 0)):
        with pytest.raises(ValueError):
            answer(target, prompts, n, GREEDY, keys)


def test_between_is_called_before_each_forward_and_can_end_it(target):
    class Enough(Exception):
        pass
    calls = iter([None] * 3)

    def between() -> None:
        if next(calls, Enough) is Enough:
            raise Enough
    assert len(answer(target, [PROMPTS[1]], 3, GREEDY, ["b"], between=between)[0]) == 3
    with pytest.raises(Enough):
        answer(target, [PROMPTS[1]], 1, GREEDY, ["b"], between=between)


def test_pad_left():
    ids, mask, positions = pad_left([[7, 8, 9], [5]])
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]] and positions.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_probabilities():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    p = logits.double().softmax(-1)[0]
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=2.0))[0], (logits[0].double() / 2).softmax(-1))
    assert probabilities(logits, GREEDY)[0].tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=1, top_k=2))[0], torch.tensor([0, p[1], p[2], 0]) / (p[1] + p[2]))
    for top_p, kept in ((float(p[1]) - 1e-9, 1), (float(p[1]) + 1e-9, 2), (1e-9, 1), (0.999, 4)):
        found = probabilities(logits, Sampling(temperature=1, top_p=top_p))[0]
        assert int((found > 0).sum()) == kept and abs(float(found.sum()) - 1) < 1e-12


def test_draws_follow_the_distribution_and_never_leave_it():
    logits, sampling = torch.tensor([0.0, 2.0, -50.0, 1.0]), Sampling(temperature=1, top_k=3, top_p=0.99)
    p = probabilities(logits, sampling)
    generator = sampling.generator("a")
    counts = torch.bincount(torch.cat([choose(logits[None], sampling, [generator]) for _ in range(4000)]), minlength=4)
    assert counts[p == 0].sum() == 0
    assert ((counts - 4000 * p).abs() < 5 * (4000 * p * (1 - p)).sqrt() + 1e-9).all()


@pytest.mark.parametrize("uniform, token", [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2 ** -24, 3)])
def test_the_ends_of_the_uniform_number_choose_possible_tokens(monkeypatch, uniform, token):
    logits = torch.tensor([[-1e9, 1.0, -1e9, 1.0, -1e9]])
    monkeypatch.setattr(torch, "rand", lambda *_shape, generator: torch.tensor([uniform]))
    assert choose(logits, Sampling(temperature=1), [None]).tolist() == [token]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}])
def test_sampling_is_checked(wrong):
    with pytest.raises(UserError):
        Sampling(**wrong)

"""Speculative sampling gives plain sampling's distribution, whatever the drafter: chi-square on a vocabulary of 12.

The target is a Markov chain, so that the exact distribution of three tokens is a product of table rows; blocks have three
slots, so texts of three tokens come from one, two or three of them.  Seeds are fixed: each test always gives the same p-value.

Power, at N = 200 000: where the truth was off by 3 % in every cell of the first token (12 cells), or by 7 % in every cell
of three tokens together (1728), a p-value below 1e-6 comes out: `test_what_the_chi_square_can_see`.  Right rules must stay
above 1e-3; wrong ones are shown to fall below 1e-9."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from chi import p_value
from torch import Tensor

from producer.sampling import GREEDY, Sampler, Sampling, draw, probabilities, verdict

V, N, SLOTS, START = 12, 200_000, 3, 11
LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(11)) * 1.5
SAMPLINGS = {"T1": Sampling(temperature=1), "cold": Sampling(temperature=0.6), "top_k": Sampling(temperature=1.2, top_k=4),
             "top_p": Sampling(temperature=1.5, top_p=0.8), "all": Sampling(temperature=0.9, top_k=7, top_p=0.9)}


def chain(sampling: Sampling) -> Tensor:
    """[V, V]: row x is what follows token x."""
    return probabilities(LOGITS, sampling)


def joint(p: Tensor) -> Tensor:
    """[V^3]: three tokens after START."""
    return (p[START][:, None, None] * p[:, :, None] * p).flatten()


def oracle(p, last):
    return torch.stack([p[last], (p @ p)[last]], 1)                  # slot 2 knows its own marginal, not what slot 1 drew


def uniform(p, last):
    return torch.full((len(last), SLOTS - 1, V), 1 / V, dtype=p.dtype)


def skewed(p, last):
    q = (LOGITS.roll(1, 1) * 2).double().softmax(-1)
    return torch.stack([q[last], (0.5 * q + 0.5 * p)[last]], 1)


def always_wrong(p, last):
    """All mass on what the target says least, or never."""
    return F.one_hot(p[last].argmin(-1), V).to(p)[:, None].expand(-1, SLOTS - 1, -1)


def greedy(p, last):
    first = p[last].argmax(-1)
    return F.one_hot(torch.stack([first, p[first].argmax(-1)], 1), V).to(p)


DRAFTERS = [oracle, uniform, skewed, always_wrong, greedy]


def texts(p: Tensor, drafter, rule=verdict, seed: int = 0) -> tuple[Tensor, Tensor]:
    """N texts -> their first three tokens as one id (N,), the first alone (N,)."""
    generator = torch.Generator().manual_seed(seed)
    text, length, last = torch.zeros(N, 3 * SLOTS, dtype=torch.long), torch.zeros(N, 1, dtype=torch.long), torch.full((N,), START)
    for _ in range(3):
        q = drafter(p, last)
        draft = draw(q, torch.rand(N, SLOTS - 1, generator=generator, dtype=p.dtype))
        rows = p[torch.cat([last[:, None], draft], 1)]
        accepted, last = rule(rows, q, draft, torch.rand(N, SLOTS, generator=generator, dtype=p.dtype))
        new = F.pad(draft, (0, 1)).scatter(1, accepted[:, None], last[:, None])
        text.scatter_(1, length + torch.arange(SLOTS), new)          # what is behind the accepted is written over by the next block
        length += accepted[:, None] + 1
    return (text[:, 0] * V + text[:, 1]) * V + text[:, 2], text[:, 0]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_three_tokens_and_the_first_follow_the_targets_distribution(sampling, drafter):
    p = chain(sampling)
    three, first = texts(p, drafter)
    assert p_value(first, p[START]) > 1e-3
    assert p_value(three, joint(p)) > 1e-3


def accepts_if_likelier(p, q, draft, uniform):
    """Wrong: no chance for a token that the target likes less than the drafter."""
    ids = draft[..., None]
    never = torch.where(p[:, :-1].gather(-1, ids) > q.gather(-1, ids), 0.0, torch.inf)[..., 0]
    return verdict(p, q, draft, torch.cat([never, uniform[:, -1:]], 1))


def resamples_from_p(p, q, draft, uniform):
    """Wrong: after a rejection, the target's whole distribution, what was rejected included."""
    accepted, _ = verdict(p, q, draft, uniform)
    return accepted, draw(p[torch.arange(len(p)), accepted], uniform[:, -1])


def one_row_late(p, q, draft, uniform):
    """Wrong: judged by what follows the draft token, not by what stands in its place."""
    return verdict(p.roll(-1, 1), q, draft, uniform)


def one_uniform_for_all(p, q, draft, uniform):
    """Wrong: the number that rejected also chooses what comes instead."""
    return verdict(p, q, draft, uniform[:, :1].expand_as(uniform))


@pytest.mark.parametrize("rule", [accepts_if_likelier, resamples_from_p, one_row_late, one_uniform_for_all], ids=lambda f: f.__name__)
def test_wrong_rules_are_seen(rule):
    p = chain(SAMPLINGS["T1"])
    three, _ = texts(p, skewed, rule)
    assert p_value(three, joint(p)) < 1e-9


def test_what_the_chi_square_can_see():
    for p, off in ((chain(SAMPLINGS["T1"])[START], 0.03), (joint(chain(SAMPLINGS["T1"])), 0.07)):
        other = p * torch.where(torch.arange(len(p)) % 2 == 0, 1 + off, 1 - off)
        for weights, sees in ((p, False), (other, True)):
            ids = torch.multinomial(weights, N, replacement=True, generator=torch.Generator().manual_seed(4))
            assert (p_value(ids, p) < 1e-6) == sees and (sees or p_value(ids, p) > 1e-3)


def test_acceptance_is_what_the_paper_says():
    """Of one draft token: sum(min(p, q)) stand; all of an oracle's, none of what the target never says."""
    p = chain(SAMPLINGS["top_k"])
    for drafter in DRAFTERS:
        last = torch.full((N,), START)
        q = drafter(p, last)[:, :1]
        generator = torch.Generator().manual_seed(1)
        draft = draw(q, torch.rand(N, 1, generator=generator, dtype=p.dtype))
        accepted, _ = verdict(p[torch.cat([last[:, None], draft], 1)], q, draft, torch.rand(N, 2, generator=generator, dtype=p.dtype))
        expected = float(torch.minimum(p[START], q[0, 0]).sum())
        assert abs(float(accepted.double().mean()) - expected) < 4 * (expected * (1 - expected) / N) ** 0.5 + 1e-12


def test_one_block_by_hand():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    draft = torch.tensor([0, 2])

    def said(*uniform):
        return tuple(int(x) for x in verdict(p, q, draft, torch.tensor(uniform, dtype=torch.float64)))
    assert said(0.49, 0.79, 0.3) == (2, 0)                           # both stand; then the last row's own
    assert said(0.49, 0.81, 0.9) == (1, 0)                           # rest of row 1: all on token 0
    assert said(0.51, 0.0, 0.1) == (0, 1)                            # rest of row 0: all on token 1; slot 2 does not matter
    assert said(0.5, 0.0, 0.1)[0] == 0                               # at the bound itself: u * q < p, strictly
    alone = verdict(p[:1], q[:0], draft[:0], torch.tensor([0.6], dtype=torch.float64))
    assert [int(x) for x in alone] == [0, 1]                         # no draft: plain sampling


def test_where_nothing_is_left_of_p_minus_q_the_token_comes_from_p():
    """By rounding only: p a hair below q everywhere, and a uniform number in that hair."""
    q = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    p = torch.cat([q * (1 - 2 ** -20), q])
    accepted, token = verdict(p, q, torch.tensor([1]), torch.tensor([1 - 2 ** -24, 0.1], dtype=torch.float64))
    assert (int(accepted), int(token)) == (0, 0)


def test_a_judged_block_in_one_tensor():
    """judge's row: the count, then the standing drafts and the token after them; greedy: the target's own after each slot."""
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]])
    assert Sampler(GREEDY).judge(logits, torch.tensor([0, 2]), None).tolist() == [1, 0, 1, 2]
    for sampling in (Sampling(temperature=0.01), Sampling(temperature=5, top_k=1), Sampling(temperature=5, top_p=0.01)):
        assert Sampler(sampling).judge(logits, torch.tensor([0, 2]), None).tolist()[:3] == [1, 0, 1]
        assert Sampler(sampling).judge(logits, torch.tensor([0, 1]), None).tolist() == [2, 0, 1, 2]
        assert Sampler(sampling).judge(logits[:1], torch.tensor([], dtype=torch.long), None).tolist() == [0, 0]

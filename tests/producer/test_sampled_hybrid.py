"""Sampled text of the hybrid with a trained drafter: every token, given all before it, is as likely as the target alone has it.

Of each token of TEXTS texts, p, what the target would say there, is computed by one plain forward over the text; so drafts,
rejections and rollbacks lie before most tokens that are judged.  Two counts are compared with their expectation, the sum of p:
how often the target's first, second or third choice came, and how often what the drafter had picked there.  Both are sums of
surprises of mean 0, so where nothing leans they stay within 3.5 standard deviations (but for about one seed in 500; it is fixed).

Power: if every draft that is possible at all stood, the drafter's count would be off by more than 4; shown below."""
from __future__ import annotations

import pytest
import tiny
import torch
from drafters import BLOCK, TAPS, prompts, trained

from producer import sampling
from producer.sampling import Sampler, Sampling, probabilities, verdict
from producer.speculate import Limit, Network, decode

WARM = Sampling(temperature=0.7, top_k=3)
TEXTS, NEW = 60, 8                               # short, for the drafter knows only what it was trained on


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid()


@pytest.fixture(scope="module")
def drafter(target):
    return trained(target, prompts((12, 20), seed=5), 60, steps=25)


class Written:
    """The network with greedy drafts; what it picks is written down by position.  A place asked about again is written over:
    still before its token is drawn."""

    def __init__(self, network: Network) -> None:
        self.network, self.context, self.picked = network, 0, {}

    def extend(self, taps) -> None:
        self.context += taps.shape[2]
        self.network.extend(taps)

    def propose(self, last, slots, keep):
        draft, q = self.network.propose(last, slots, keep)
        self.picked |= dict(enumerate(draft.tolist(), self.context + 1))
        return draft, q


def deviations(target, drafter) -> tuple[float, float]:
    """The largest of the three choices', and the drafter's, in standard deviations."""
    off, spread, accepted, judged = torch.zeros(4).double(), torch.zeros(4).double(), 0, 0
    for i, ids in enumerate(prompts((12, 20), seed=5) * (TEXTS // 2)):
        proposer = Written(Network(drafter, target, 40))
        got = decode(target, proposer, TAPS, ids, Limit(NEW), BLOCK, sampler=Sampler(WARM, str(i)))
        text, accepted = torch.tensor(ids + got.tokens), accepted + sum(got.accepted)
        p = probabilities(target.forward(text[None], logits_to_keep=0).logits[0, len(ids) - 1:-1], WARM)
        likeliest = p.topk(3, -1)
        off[:3] += ((likeliest.indices == text[len(ids):, None]).double() - likeliest.values).sum(0)
        spread[:3] += (likeliest.values * (1 - likeliest.values)).sum(0)
        places = torch.tensor([place for place in proposer.picked if place < len(text)])
        picked = torch.tensor([proposer.picked[int(place)] for place in places])
        mine = p[places - len(ids), picked]
        off[3] += ((text[places] == picked).double() - mine).sum()
        spread[3] += (mine * (1 - mine)).sum()
        judged += len(places)
    assert judged == TEXTS * (NEW - 1) and accepted > 20
    z = off.abs() / spread.sqrt()
    return float(z[:3].max()), float(z[3])


def test_every_token_is_as_likely_as_the_target_has_it(target, drafter):
    choice, picked = deviations(target, drafter)
    assert choice < 3.5 and picked < 3.5


def test_drafts_that_stand_too_easily_are_seen(target, drafter, monkeypatch):
    monkeypatch.setattr(sampling, "verdict", lambda p, q, draft, uniform: verdict(
        p, q, draft, torch.cat([torch.zeros_like(uniform[:-1]), uniform[-1:]])))
    assert deviations(target, drafter)[1] > 4

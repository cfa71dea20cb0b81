"""Texts longer than the drafter's window, and than 64 tokens of the delta rule's chunks, through the loop that generates (W1, R5).

What the loop's drafter says from its growing cache is what the network says of the whole text in one pass with masks from
geometry: at anchors below the window, at its edge and several windows on, whatever the pieces that the context came in."""
from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
import torch.nn.functional as F
from drafters import prompts
from test_rollback import error, states

from common.drafter import geometry
from common.drafter.config import FULL, SLIDING, shape_for
from common.drafter.model import Drafter
from producer.rollback import RULES, TargetCache
from producer.sampling import Sampler, Sampling
from producer.speculate import Limit, Network, decode, plain, speculate

TAPS, W, B = (1, 3, 5), 24, 6
WARM = Sampling(temperature=1)                   # the distributions themselves are seen then, not only their first tokens
EDGES = [63, 64, 65, 127, 128, 129]


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense(layers=8)


def fresh(target, attention: str = "mixed", *kinds: str, positions: int = 8192) -> Drafter:
    """Weights far from the initial ones, so that what it sees decides what it says."""
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, attention, block_size=B,
                       sliding_window=W if SLIDING in kinds else None, num_hidden_layers=len(kinds),
                       layer_types=kinds, max_position_embeddings=positions)
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(config, generator)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return drafter.requires_grad_(False)


class Watched:
    """The network as it is, its distributions written down by anchor; only the first `count` of its drafts go on."""

    def __init__(self, network: Network, count: int) -> None:
        self.network, self.count, self.anchor, self.said = network, count, 0, {}

    def extend(self, taps) -> None:
        self.anchor += taps.shape[2]
        self.network.extend(taps)

    def propose(self, last, slots, keep):
        draft, q = self.network.propose(last, slots, keep)
        if q is not None:
            self.said[self.anchor] = q
        return draft[:self.count], None if q is None else q[:self.count]


def one_pass(target, drafter: Drafter, text: torch.Tensor, anchors: list[int]) -> torch.Tensor:
    """[N, B-1, V]: what the network says at each anchor, all in one forward over the whole text."""
    taps = target.forward(text[None], taps=TAPS).taps[:, 0].transpose(0, 1).flatten(1)
    where = torch.tensor(anchors)
    block = F.embedding(geometry.block_inputs(text, where, B, target.mask_token_id), target.embedding)
    y = drafter(block.flatten(0, 1)[None], where[None], taps[None])[0].unflatten(0, (-1, B))
    return target.logits(y[:, 1:]).double().softmax(-1)


@pytest.mark.parametrize("attention, length, chunk, count", [("mixed", 3, None, 0), ("bidi", 20, 1, B), ("causal", 70, 64, B)])
def test_drafts_in_the_loop_are_the_one_pass_networks(target, attention, length, chunk, count):
    """count 0: every position is an anchor, from below the window to more than three windows on."""
    drafter, [ids] = fresh(target, attention, SLIDING, FULL, SLIDING), prompts((length,), seed=length)
    watched = Watched(Network(drafter, target, 2, Sampler(WARM, "d")), count)
    new = 4 * W
    got = decode(target, watched, TAPS, ids, Limit(new), B, chunk=chunk)
    assert got.tokens == plain(target, ids, Limit(new)).tokens or count          # its drafts are drawn: at times not the first token
    anchors = sorted(anchor for anchor in watched.said if anchor + B <= length + new)
    assert anchors[0] == length and anchors[-1] > length + 3 * W and (count or {W - 1, W, W + 1, 2 * W, 3 * W} < set(anchors))
    text = torch.tensor(ids + got.tokens)
    want = one_pass(target, drafter, text, anchors)
    ours = torch.stack([watched.said[anchor] for anchor in anchors])
    assert float((ours - want).abs().max()) < 1e-3
    narrow = Drafter(dataclasses.replace(drafter.config, sliding_window=W - 1))
    narrow.load_state_dict(drafter.state_dict(), assign=True)
    far = [anchor >= W for anchor in anchors]                        # a window of one less is another drafter, past the edge
    assert float((ours - one_pass(target, narrow, text, anchors))[far].abs().amax((1, 2)).min()) > 1e-3


@pytest.mark.parametrize("kind, attention", [(SLIDING, "mixed"), (SLIDING, "bidi"), (FULL, "mixed")])
@pytest.mark.parametrize("distance", [W - 1, W, W + 1, 2 * W])
def test_the_windows_edge_in_the_decoding_cache(kind, attention, distance):
    """W1: one layer; a changed tap `distance` before the first drafted slot is felt there below W, and one slot on below W - 1.

    The changed row comes in a piece of the prompt, as a token of a verified block, and before the cache has grown."""
    target = tiny.dense(layers=8)
    drafter = fresh(target, attention, kind)
    for anchor, pieces in ((2 * W, (2 * W,)), (3 * W + 1, (3 * W - 5, 6)), (5 * W, (7,) * 17 + (1,))):
        assert sum(pieces) == anchor
        taps = torch.randn(3, 1, anchor, target.hidden_size, generator=torch.Generator().manual_seed(anchor))
        changed = taps.clone()
        changed[:, :, anchor + 1 - distance] += 5
        one, other = (_said(target, drafter, rows, pieces) for rows in (taps, changed))
        for slot in range(1, B):
            felt = kind == FULL or distance + slot - 1 < W
            assert torch.equal(one[slot - 1], other[slot - 1]) != felt, (anchor, slot)


def _said(target, drafter: Drafter, taps: torch.Tensor, pieces: tuple[int, ...]) -> torch.Tensor:
    network = Network(drafter, target, 2, Sampler(WARM))
    for piece in taps.split(pieces, 2):
        network.extend(piece)
    return network.propose(torch.tensor([9]), B, B)[1]


def test_the_last_position_is_used_and_none_beyond(target):
    """A text as long as the drafter's positions: the last block's slots end at the last of them."""
    [ids] = prompts((10,))
    drafter = fresh(target, "mixed", SLIDING, FULL, positions=34)
    got = speculate(target, drafter, ids, Limit(24))
    assert got.tokens == plain(target, ids, Limit(24)).tokens
    with pytest.raises(ValueError, match="34 positions"):
        speculate(target, drafter, ids, Limit(60))


@pytest.mark.parametrize("length", EDGES)
def test_whole_and_split_around_64_through_the_rolled_back_cache(target, length):
    """R5: a prefill of one part, a verified block with a rejected end, the rest token by token: the state and the rows of one
    forward over all of it, to 1e-4 of the largest value, in fp32."""
    text = torch.tensor(prompts((length + 3,), seed=length))
    whole = target.new_cache()
    want = target.forward(text[:, :length], cache=whole, taps=TAPS, logits_to_keep=0)
    for rule in RULES:
        for block in (1, 16):
            cache, wrong = TargetCache(target, rule), (text[:, length:] + 1) % 300
            cache.prefill(text[:, :length - block])
            seen = cache.verify(torch.cat([text[:, length - block:length], wrong], 1), TAPS)
            cache.commit(block)
            assert cache.length == length and error(states(cache), states(whole)) < 1e-4
            for ours, theirs in ((seen.logits[:, :block], want.logits[:, -block:]), (seen.taps[:, :, :block], want.taps[:, :, -block:])):
                assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.parametrize("length, chunk", list(zip(EDGES, (64, 7, None, 64, None, 64))))
def test_texts_that_begin_around_64(target, length, chunk):
    [ids] = prompts((length,), seed=length)
    own = plain(target, ids, Limit(8))
    assert plain(target, ids, Limit(8), chunk=chunk).tokens == own.tokens
    assert speculate(target, fresh(target, "mixed", SLIDING), ids, Limit(8), chunk=chunk).tokens == own.tokens

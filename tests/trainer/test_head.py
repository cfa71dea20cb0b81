"""Head and loss in pieces: equal to the dense computation for every loss and weight, and no more than a piece in memory (M1)."""
import dataclasses
import weakref
from collections.abc import Iterator

import pytest
import small
import torch
from torch.autograd.profiler import profile

from common.drafter.vocab import OUTSIDE
from trainer import gradients
from trainer import head as head_module
from trainer.arms import ARMS
from trainer.batch import make_batch
from trainer.gradients import FORMS, MOST_COPIES, row_losses
from trainer.head import Rows, cuts, dense, row_weights, weighted_sums
from trainer.objectives import LOSSES, NEEDS_TEACHER, dpace, slot_weights
from trainer.run import draws
from trainer.step import rows_of as step_rows

WIDTH, VOCAB, BLOCK = 16, 300, 8


def rows_of(kind: str, blocks: int = 9, *, vocab: int = VOCAB, outside: bool = True, seed: int = 0) -> Rows:
    """Blocks of 1 to B-1 supervised slots, some with holes, some labels outside the head's list."""
    rng = torch.Generator().manual_seed(seed)
    supervised = torch.rand(blocks, BLOCK, generator=rng) < 0.7
    supervised[:, 0] = False
    block, slots = supervised.nonzero().T
    labels = torch.randint(vocab, slots.shape, generator=rng)
    if outside:
        labels[torch.rand(slots.shape, generator=rng) < 0.15] = OUTSIDE
    return Rows(labels=labels, weights=slot_weights(kind, slots, torch.ones_like(slots), 4.0), blocks=3 * block, slots=slots, block_size=BLOCK,
                finals=torch.randn(len(slots), WIDTH, generator=rng), alpha=0.5 if kind == "dpace" else None)


def head_of(vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, WIDTH, generator=torch.Generator().manual_seed(1)) / 2


def hidden_of(rows: Rows) -> torch.Tensor:
    return torch.randn(len(rows.labels), WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def test_a_teacher_made_once_a_token_is_the_same(monkeypatch):
    """Rows of one token share a final state; which of them is computed changes nothing, and none is computed twice in a piece."""
    rows, made, real = rows_of("exp"), {}, head_module._logits
    sources = torch.arange(len(rows.labels)) * 7 % 10
    rows = dataclasses.replace(rows, finals=rows.finals[sources])
    for way, given in (("each", None), ("once", 100 + sources)):
        hidden, counted = hidden_of(rows), []
        monkeypatch.setattr(head_module, "_logits", lambda states, head, counted=counted: counted.append(len(states)) or real(states, head))
        sums = weighted_sums(hidden, head_of(), dataclasses.replace(rows, sources=given), "kl", piece_bytes=20 * VOCAB * 4)
        sums.numerator.backward()
        made[way] = sums.numerator, hidden.grad, sum(counted)
    assert torch.allclose(made["each"][0], made["once"][0], rtol=1e-6) and torch.allclose(made["each"][1], made["once"][1], rtol=1e-5, atol=1e-7)
    pieces = [len(sources[a:b].unique()) for a, b in cuts(rows.blocks, 20)]
    assert made["each"][2] == 2 * len(sources) and made["once"][2] == len(sources) + sum(pieces) < made["each"][2]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tile", [1, 5])
def test_tiles_equal_the_piece_at_once(monkeypatch, loss, tile):
    """Bitwise: no row knows of another.  Row 2's teacher is row 0's, and stands where it was for the next tile."""
    rng, made = torch.Generator().manual_seed(6), []
    logits, teacher = torch.randn(13, VOCAB, generator=rng), torch.randn(9, VOCAB, generator=rng)
    place, labels = torch.arange(13) % 9, torch.randint(VOCAB, (13,), generator=rng)
    place[2] = place[0]
    for size in (tile, 100):
        monkeypatch.setattr(head_module, "TILE_BYTES", 4 * VOCAB * size)
        given = logits.clone(), *((teacher.clone(), place) if loss in NEEDS_TEACHER else (None, None))
        made.append(head_module.in_tiles(*given, labels, loss, row_losses))
        assert made[-1].slope.data_ptr() == given[0].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(*made)) and len(made[0].loss) == 13


def test_a_batch_names_the_tokens_of_its_final_states():
    """Of both sequences: equal names, equal states, and as many names as different states."""
    texts = small.captures(2)
    batch = make_batch(texts, small.config(), ARMS["kl_causal"], anchors=20, max_tokens=64, generators=[draws(0, i) for i in range(len(texts))])
    rows = step_rows(batch, ARMS["kl_causal"])
    sequence = batch.supervised.nonzero()[:, 0]
    _, place = rows.sources.unique(return_inverse=True)
    pairs = {(int(s), tuple(state)) for s, state in zip(sequence, rows.finals.float().tolist())}
    assert len(pairs) == int(place.max()) + 1 < len(place) and {0, 1} == set(sequence.tolist())
    assert all(torch.equal(rows.finals[place == i], rows.finals[place == i][:1].expand((place == i).sum(), -1)) for i in range(len(pairs)))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_written_out_gradient_is_autograds(loss):
    rng = torch.Generator().manual_seed(4)
    logits, teacher = 4 * torch.randn(12, 40, generator=rng), 4 * torch.randn(12, 40, generator=rng)
    labels = torch.randint(40, (12,), generator=rng)
    leaf = logits.clone().requires_grad_()
    value = LOSSES[loss](leaf, teacher, labels)
    value.sum().backward()
    got = row_losses(logits.clone(), teacher.clone() if loss in NEEDS_TEACHER else None, labels, loss)
    scale = value.max().clamp(min=1)                                  # rkl's slopes are as large as its losses
    assert (got.loss - value).abs().max() <= 1e-6 * scale and (got.slope - leaf.grad).abs().max() <= 1e-6 * scale
    assert torch.equal(got.hits, logits.argmax(-1) == labels)
    assert torch.allclose(got.ce, LOSSES["ce"](logits, None, labels), rtol=1e-6)


@pytest.mark.parametrize("piece", [1, 7, 20, 1000])
@pytest.mark.parametrize("kind", ["exp", "uniform", "dpace"])
@pytest.mark.parametrize("loss", LOSSES)
def test_pieces_equal_dense_in_loss_weights_gradient_and_hits(loss, kind, piece):
    rows, made = rows_of(kind), {}
    for way, call in (("dense", dense), ("pieces", lambda *a: weighted_sums(*a, piece_bytes=piece * VOCAB * 4))):
        hidden = hidden_of(rows)
        sums = call(hidden, head_of(), rows, loss)
        (3 * sums.numerator / sums.denominator).backward()
        made[way] = sums, hidden.grad
    (a, grad_a), (b, grad_b) = made["dense"], made["pieces"]
    assert torch.equal(a.hits, b.hits) and not b.denominator.requires_grad
    assert a.numerator.item() == pytest.approx(b.numerator.item(), rel=1e-6) and a.denominator.item() == pytest.approx(b.denominator.item(), rel=1e-6)
    assert (grad_a - grad_b).abs().max() <= 1e-6 * grad_a.abs().max().clamp(min=1)
    assert torch.allclose(a.ce, b.ce, rtol=1e-6)


def test_sums_of_two_halves_add_up_to_the_whole():
    """What several ranks rely on: numerators and denominators are added, then divided once."""
    rows, hidden = rows_of("dpace", 12), None
    cut = int((rows.blocks < 18).sum())
    hidden = hidden_of(rows).detach()
    whole = weighted_sums(hidden, head_of(), rows, "kl")
    halves = [weighted_sums(hidden[a:b], head_of(), rows.cut(a, b), "kl") for a, b in ((0, cut), (cut, len(hidden)))]
    for name in ("numerator", "denominator"):
        assert sum(getattr(h, name) for h in halves).item() == pytest.approx(getattr(whole, name).item(), rel=1e-6)


def test_a_label_outside_the_list_has_no_cross_entropy_and_ends_dpaces_chain():
    rows = rows_of("uniform")
    outside = rows.labels == OUTSIDE
    assert outside.any() and not outside.all()
    hidden = hidden_of(rows)
    made = weighted_sums(hidden, head_of(), rows, "ce")
    made.numerator.backward()
    assert made.denominator == (~outside).sum() and not hidden.grad[outside].any() and hidden.grad[~outside].any(1).all()
    assert made.ce[outside].isinf().all() and not made.hits[outside].any()
    assert weighted_sums(hidden, head_of(), rows, "kl").denominator == len(outside), "KL over the list needs no label"
    one = Rows(labels=torch.tensor([5, OUTSIDE, 6]), weights=torch.ones(3), blocks=torch.zeros(3, dtype=torch.long), slots=torch.arange(1, 4),
               block_size=4, alpha=0.5)
    got = row_weights(one, torch.tensor([0.0, torch.inf, 0.0]), "ce")        # P = 1, 1/2, 1/2
    assert got.tolist() == pytest.approx([2.0, 0.0, 0.5])


def test_dpace_is_of_each_block_alone_and_of_its_own_slots():
    """The rows hold supervised slots only, blocks back to back: a boundary or a slot off by one gives other weights."""
    rows = rows_of("dpace", outside=False)
    ce = torch.rand(len(rows.labels), generator=torch.Generator().manual_seed(5)) * 3
    got = row_weights(rows, ce, "kl")
    for block in rows.blocks.unique():
        mine = rows.blocks == block
        table, here = torch.zeros(BLOCK), torch.zeros(BLOCK, dtype=torch.bool)
        table[rows.slots[mine]], here[rows.slots[mine]] = ce[mine], True
        assert torch.allclose(got[mine], dpace(table, here, 0.5)[rows.slots[mine]])


def test_pieces_are_whole_blocks():
    blocks = torch.tensor([0, 0, 0, 4, 4, 5, 9, 9, 9, 9, 9, 11])
    assert list(cuts(blocks, 5)) == [(0, 5), (5, 6), (6, 11), (11, 12)]
    assert list(cuts(blocks, 1)) == [(0, 3), (3, 5), (5, 6), (6, 11), (11, 12)]
    assert list(cuts(blocks, 100)) == [(0, 12)] and list(cuts(blocks[:0], 5)) == []


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_no_supervised_row_gives_zero_and_a_gradient_of_zero(loss):
    rows = rows_of("dpace").cut(0, 0)
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    made = weighted_sums(hidden, head_of(), rows, loss)
    made.numerator.backward()
    assert made.numerator == made.denominator == 0 and made.hits.shape == made.ce.shape == (0,) and hidden.grad.shape == (0, WIDTH)


def test_a_loss_without_its_teacher_is_refused():
    with pytest.raises(ValueError, match="'kl' needs"):
        weighted_sums(torch.zeros(0, WIDTH), head_of(), Rows(**{**vars(rows_of("exp").cut(0, 0)), "finals": None}), "kl")


def test_no_more_than_one_piece_of_logits_is_alive():
    """Pitfall M1, exactly: each piece is gone before the next is made and after the last."""
    alive, rows = [], rows_of("uniform")
    def watched(logits, teacher, labels, loss):
        assert not any(ref() is not None for ref in alive), "an earlier piece is still in memory"
        alive.extend(weakref.ref(x) for x in (logits, teacher))
        made = row_losses(logits, teacher, labels, loss)
        alive.append(weakref.ref(made.slope))
        return made
    weighted_sums(hidden_of(rows), head_of(), rows, "kl", piece_bytes=8 * VOCAB * 4, row_losses=watched)
    assert len(alive) > 9 and not any(ref() is not None for ref in alive)


def allocations(call) -> Iterator[int]:
    """Bytes allocated (above 0) and freed (below), in order, as torch's CPU allocator reports them."""
    with profile(profile_memory=True) as seen:
        call()
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    return (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))


@pytest.mark.parametrize("loss", FORMS)
def test_memory_is_bounded_by_copies_of_one_piece(loss):
    """Over 11 pieces the most that is alive at once, counted by the allocator, is MOST_COPIES of one piece's logits and less than
    two of another piece's: the dense way takes more than the whole."""
    rows, vocab, slots = rows_of("dpace", 60, vocab=5000), 5000, 28
    hidden, head, piece = hidden_of(rows), head_of(vocab), 4 * 5000 * slots
    alive = most = 0
    for size in allocations(lambda: weighted_sums(hidden, head, rows, loss, piece_bytes=piece).numerator.backward()):
        alive += size
        most = max(most, alive)
    small = 200_000                                                   # rows' own arrays, and gradients of width H
    assert piece < most <= MOST_COPIES * piece + small
    assert len(list(cuts(rows.blocks, slots))) > 10
    whole = sum(max(0, size) for size in allocations(lambda: dense(hidden, head, rows, loss).numerator.backward()))
    assert whole > 10 * piece


def test_products_are_in_the_heads_dtype_whatever_autocast_says():
    """A head in bf16 as on a GPU: close to fp32's, and gradients come back in the rows' own dtype."""
    rows, made = rows_of("exp", outside=False), {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden = hidden_of(rows)
        with torch.autocast("cpu", torch.bfloat16):
            sums = weighted_sums(hidden, head_of().to(dtype), rows, "kl")
        sums.numerator.backward()
        made[dtype] = sums.numerator.item(), hidden.grad
        assert hidden.grad.dtype == torch.float32
    exact = hidden_of(rows)
    dense(exact, head_of(), rows, "kl").numerator.backward()
    assert (made[torch.float32][1] - exact.grad).abs().max() < 1e-5, "autocast must not reach into the sums"
    assert made[torch.bfloat16][0] == pytest.approx(made[torch.float32][0], rel=0.02)


def test_forms_and_losses_are_the_same_list():
    assert list(gradients.FORMS) == list(LOSSES)

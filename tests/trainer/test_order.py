"""What a run reads next is a pure function: no arrival, seed or arm moves it."""
import pytest

from trainer.order import ASIDE, aside, aside_index, index_of, reached, sample_at, trainable, visit


@pytest.mark.parametrize("replay", [0, 1, 3])
def test_each_fresh_sample_comes_once_in_stream_order_at_its_place(replay):
    seen = [visit(p, replay=replay, closed=None) for p in range(40 * (replay + 1))]
    assert seen[::replay + 1] == list(range(40))
    assert all(0 <= index <= p // (replay + 1) for p, index in enumerate(seen)), "a re-read may not look ahead of the stream"


def test_a_closed_stream_is_read_like_an_open_one_until_its_end():
    for p in range(10 * 4):
        assert visit(p, replay=3, closed=10) == visit(p, replay=3, closed=None)


def test_re_reads_are_even_over_the_stream():
    """With uniform re-reads sample 10 of 1000 would be read 3 ln(100) = 14 times; so it is 1 + 2 x 3 at most, falling to 1."""
    seen = [visit(p, replay=3, closed=None) for p in range(4000)]
    early, late = (sum(low <= i < high for i in seen) / (high - low) for low, high in ((0, 100), (900, 1000)))
    assert 6 < early < 7.5 and 1 < late < 1.6


def test_after_the_end_every_sample_goes_on_being_read():
    seen = [visit(p, replay=1, closed=10) for p in range(20, 600)]
    assert set(seen) == set(range(10))
    counts = [seen.count(i) for i in range(10)]
    assert min(counts) > 30, "uniform over 580 draws: 58 expected"


def test_held_aside_is_the_last_of_each_32_and_every_other_sample_has_a_number():
    indices, asides = [index_of(n) for n in range(31 * 5)], [aside_index(n) for n in range(5)]
    assert asides == [31, 63, 95, 127, 159]
    assert indices == sorted(indices) and sorted(indices + asides) == list(range(32 * 5))
    shifted = [index_of(n + 1) - 1 for n in range(31 * 5)]
    assert set(shifted) & set(asides), "a shift by one would train on what is held aside"


@pytest.mark.parametrize("samples", [0, 1, 30, 31, 32, 33, 63, 64, 1000])
def test_counts_of_a_store(samples):
    assert trainable(samples) == sum(i % ASIDE != ASIDE - 1 for i in range(samples))
    assert trainable(samples) + aside(samples) == samples
    if samples > 1:
        assert index_of(trainable(samples) - 1) == samples - 1 - (samples % ASIDE == 0)


@pytest.mark.parametrize("replay", [0, 3])
@pytest.mark.parametrize("closed", [None, 20, 31, 32, 33, 70])
def test_no_visit_meets_a_sample_held_aside_and_all_others_are_read(replay, closed):
    seen = [sample_at(p, replay=replay, closed=closed) for p in range(2000)]
    assert not any(i % ASIDE == ASIDE - 1 for i in seen)
    assert seen[::replay + 1][:20] == list(range(20))
    if closed is not None:
        assert set(seen) == {i for i in range(closed) if i % ASIDE != ASIDE - 1}


@pytest.mark.parametrize("replay", [0, 1, 3])
def test_reached_is_just_past_the_newest_sample_read(replay):
    for position in range(300):
        newest = max([sample_at(p, replay=replay, closed=None) for p in range(position)], default=-1)
        assert reached(position, replay=replay, closed=None) == newest + 1
    assert reached(0, replay=replay, closed=40) == 40

"""What a run reads next is a pure function: no arrival, seed or arm moves it."""
import pytest

from trainer.order import visit


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

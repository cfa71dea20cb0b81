"""The soak's rule: what counts as memory that grew."""
from __future__ import annotations

import numpy as np
import pytest

from tools.soak import JUDGED_FROM_S, MOST_GROWTH, growth, grew

SECONDS = np.arange(0, 3600, 5.0)
SIZE = 300e6


def test_a_line_is_found_exactly_and_the_first_quarter_is_not_judged():
    sizes = np.where(SECONDS < 900, SIZE / 3, SIZE + 10e6 * SECONDS / 3600)        # begins low, as a process does
    slope, share = growth(SECONDS, sizes)
    assert slope == pytest.approx(10e6) and share == pytest.approx(10e6 / np.median(sizes[SECONDS >= 900]), rel=1e-3)


def test_what_comes_and_goes_is_no_growth():
    sizes = np.where(SECONDS % 60 < 15, 1.3 * SIZE, SIZE)                           # an evaluation's tensors
    assert growth(SECONDS, sizes)[1] == pytest.approx(0.0, abs=1e-9)


def test_more_than_the_share_fails_and_a_short_run_is_not_judged():
    assert grew(3600, MOST_GROWTH * 1.01) and not grew(3600, MOST_GROWTH * 0.99) and not grew(3600, -1.0)
    assert grew(JUDGED_FROM_S, 1.0) and not grew(JUDGED_FROM_S - 1, 1.0)

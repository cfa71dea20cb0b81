"""Taps, bf16 bits and the checks of a capture: the conventions that everything else stands on (pitfalls L2, R3)."""
import numpy as np
import pytest
import torch

from common.capture import Capture, auto_taps, check_states, from_bf16, parse_taps, to_bf16
from common.errors import CaptureError, UserError


def made(tokens=6, taps=(1, 3), hidden=4, seed=0) -> Capture:
    rng = np.random.default_rng(seed)
    states = to_bf16(rng.standard_normal((len(taps) + 1, tokens, hidden)).astype(np.float32))
    return Capture(ids=np.arange(tokens, dtype=np.int32), loss_mask=np.arange(tokens) > 2, taps=states[:-1], final=states[-1],
                   probe_rows=np.array([0], np.int32), probe_tokens=np.array([1], np.int32))


def test_released_taps_come_from_the_uniform_rule():
    assert auto_taps(40, 8) == (1, 6, 11, 16, 22, 27, 32, 37)
    assert parse_taps("1,6,11,16,22,27,32,37", 40) == parse_taps("auto", 40) == parse_taps("auto:8", 40)
    assert parse_taps("auto", 8) == (1, 2, 3, 4, 5)
    assert parse_taps("auto:1", 8) == (4,)


@pytest.mark.parametrize("text, says", [
    ("-1", "out of range"), ("39", "0 to 38"), ("40", "0 to 38"), ("1,1", "once"), ("6,1", "ascending"), ("1,x", "integers"),
    ("1.5", "integers"), ("", "integers"), ("auto:0", "1 to 37"), ("auto:99", "1 to 37"), ("auto:x", "auto:8"), ("1,,2", "integers"),
])
def test_layers_out_of_range_duplicated_or_no_integers_are_refused(text, says):
    with pytest.raises(UserError, match=says):
        parse_taps(text, 40)


def test_last_legal_tap_is_the_layer_before_the_last():
    assert parse_taps("0,38", 40) == (0, 38)


def test_bf16_bits_are_torchs():
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(5000) * 10.0 ** rng.integers(-39, 38, 5000)).astype(np.float32)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, 1.00390625, 3.3961e38]       # the last two: a tie, and one that rounds to Inf
    ours = to_bf16(values)
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (ours == theirs).all()
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    finite = every[(every & 0x7FFF) <= 0x7F80]
    assert (to_bf16(from_bf16(finite)) == finite).all()
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan], np.float32)))).all()


def test_a_capture_with_rows_that_do_not_match_is_refused():
    good = made()
    for field, bad in (("loss_mask", good.loss_mask[1:]), ("final", good.final[1:]), ("ids", good.ids.astype(np.int64)),
                       ("taps", good.taps[:, 1:]), ("probe_tokens", np.zeros(2, np.int32))):
        with pytest.raises(CaptureError, match=field):
            Capture(**(vars(good) | {field: bad}))


def test_impossible_states_are_refused_by_layer_and_row():
    check_states(made(), (1, 3))
    def broken(where, row, value):
        capture = made()
        plane = capture.final if where == "final" else capture.taps[where]
        plane[row] = value(plane) if callable(value) else value
        return capture
    for capture, says in (
        (broken(1, 4, 0), "tap 3, row 4: all zero"), (broken(1, 4, 0x8000), "tap 3, row 4: all zero"),
        (broken(0, 2, 0x7F80), "tap 1, row 2: not finite"), (broken(0, 2, 0xFFC0), "tap 1, row 2: not finite"),
        (broken("final", 5, lambda p: p[4]), "final state, row 5: equals the row before"),
        (broken(0, slice(None), 7), "tap 1: every value"), (broken("final", slice(None), 0), "final state: every value"),
    ):
        with pytest.raises(CaptureError, match=says):
            check_states(capture, (1, 3))


def test_only_the_same_token_at_the_very_start_may_repeat_a_row():
    def repeated(row, same_token):
        capture = made()
        for plane in (*capture.taps, capture.final):
            plane[row] = plane[row - 1]
        if same_token:
            capture.ids[row] = capture.ids[row - 1]
        return capture
    check_states(repeated(1, True), (1, 3))
    for capture in (repeated(1, False), repeated(2, True)):
        with pytest.raises(CaptureError, match="equals the row before"):
            check_states(capture, (1, 3))

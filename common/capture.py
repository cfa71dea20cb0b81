"""One sequence as both boxes see it, and the rule that says which layer a tap is.

numpy only: the trainer's receiving thread and the codec handle captures without torch.
bf16 numbers travel as their 16 bits in uint16 (numpy has no bf16).  Row t of every array is token t; nothing is shifted.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import CaptureError, UserError

TAP_RULE = "residual stream after decoder layer i, counted from 0, before any later norm"
FINAL_RULE = "last hidden state after the final norm, as lm_head reads it"


@dataclass(frozen=True, eq=False)
class Capture:
    """ids (T,) int32; loss_mask (T,) bool; taps (K, T, H) and final (T, H) bf16 bits in uint16.

    probe_rows (P,) int32 and probe_tokens (P,) int32: for a few rows t, the token that the producer's own lm_head
    put first on final[t].  The trainer repeats them with the head it holds (pitfall L3: normed twice, or never).
    prompt: the prompt's id (hex), so that a sample can be traced and a held-out one recognised.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    taps: np.ndarray
    final: np.ndarray
    probe_rows: np.ndarray
    probe_tokens: np.ndarray
    prompt: str = ""

    def __post_init__(self) -> None:
        tokens = len(self.ids)
        want = {"ids": (np.int32, (tokens,)), "loss_mask": (np.bool_, (tokens,)),
                "taps": (np.uint16, (*self.taps.shape[:1], tokens, *self.taps.shape[2:])),
                "final": (np.uint16, (tokens, *self.taps.shape[2:])),
                "probe_rows": (np.int32, self.probe_rows.shape), "probe_tokens": (np.int32, self.probe_rows.shape)}
        for name, (dtype, shape) in want.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != shape:
                raise CaptureError(f"{name} is {array.dtype}{array.shape}, expected {np.dtype(dtype)}{shape}")
        if self.taps.ndim != 3 or self.probe_rows.ndim != 1:
            raise CaptureError(f"taps is {self.taps.ndim}-d, expected (taps, tokens, hidden)")

    @property
    def tokens(self) -> int:
        return len(self.ids)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def check_states(capture: Capture, taps: tuple[int, ...]) -> None:
    """Refuse what no working target produces, by layer and row (pitfall R3).

    Finite everywhere; no layer all zero or constant; no row equal to the row before it over a whole layer's width.
    Row 1 may equal row 0 where both are the same token: attention over two equal values gives that on a dense target.
    Raises CaptureError.
    """
    planes = [(f"tap {t}", capture.taps[k]) for k, t in enumerate(taps)] + [("final state", capture.final)]
    for name, plane in planes:
        exponent_full = (plane & 0x7F80) == 0x7F80                       # Inf and NaN alone have this exponent
        if exponent_full.any():
            raise CaptureError(f"{name}, row {int(np.argmax(exponent_full.any(1)))}: not finite")
        if (plane == plane.flat[0]).all():
            raise CaptureError(f"{name}: every value is the same")
        zero = ((plane & 0x7FFF) == 0).all(1)
        if zero.any():
            raise CaptureError(f"{name}, row {int(np.argmax(zero))}: all zero")
        repeated = (plane[1:] == plane[:-1]).all(1)
        repeated[:1] &= capture.ids[:1] != capture.ids[1:2]
        if repeated.any():
            raise CaptureError(f"{name}, row {int(np.argmax(repeated)) + 1}: equals the row before it")


def auto_taps(n_layers: int, count: int) -> tuple[int, ...]:
    """The uniform rule of the released drafters: round(1 + i (n - 4) / (m - 1)), or the middle layer for m = 1."""
    if count == 1:
        return (n_layers // 2,)
    return tuple(round(1 + i * (n_layers - 4) / (count - 1)) for i in range(count))


def parse_taps(text: str, n_layers: int) -> tuple[int, ...]:
    """`--layers` text -> tap ids, ascending.  Raises UserError with the legal range.

    The last layer is not a legal tap: its output before the final norm is what others read after the norm
    (Hugging Face's last hidden state), so a drafter trained on it would fail everywhere else.
    """
    most = n_layers - 3 if n_layers > 4 else 1                        # as many as the uniform rule can place apart
    if text == "auto" or text.startswith("auto:"):
        try:
            count = min(8, most) if text == "auto" else int(text[5:])
        except ValueError:
            raise UserError(f"--layers {text}: write auto, auto:8 or a list like 1,6,11") from None
        if not 1 <= count <= most:
            raise UserError(f"--layers {text}: this target has {n_layers} layers, the uniform rule can place 1 to {most} taps")
        return auto_taps(n_layers, count)
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--layers {text}: layer ids are integers separated by commas, e.g. 1,6,11 (or auto, auto:8)") from None
    if bad := [t for t in taps if not 0 <= t <= n_layers - 2]:
        raise UserError(f"--layers: {bad[0]} is out of range; this target has {n_layers} layers, legal taps are 0 to "
                        f"{n_layers - 2} (the last layer's output is only read after the final norm); try --layers auto")
    if list(taps) != sorted(set(taps)):
        raise UserError(f"--layers {text}: list each layer once, in ascending order")
    return taps

"""Who is at fault, and what happens next.

    HsdraftError
    |-- UserError        the person at this keyboard: one line that says what to do, exit code 2
    |-- PeerError        the other end of the cable: the link is dropped and logged, the daemon goes on
    |   `-- CorruptError bytes that do not say what they claim (a frame, a stored sample, a checkpoint)
    `-- CaptureError     the target gave hidden states that cannot be right: never streamed, counted, named

Anything else is a bug of ours and stops the process loudly with a traceback.
"""
from __future__ import annotations

EXIT_USER = 2
MOST_TEXT = 2000             # characters of a peer's words in one line


class HsdraftError(Exception):
    """Root of everything this project raises on purpose."""


class UserError(HsdraftError):
    """Something the person can mend; str(error) is one line that says what and how."""


class PeerError(HsdraftError):
    """The other end broke the protocol, or refuses us.  It often quotes the peer, so its text is one_line()."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class CorruptError(PeerError):
    """Bytes whose length, checksum or structure is wrong."""


class CaptureError(HsdraftError):
    """A capture with an impossible layer or row, named in the message."""


def one_line(text: object) -> str:
    """What a peer wrote, fit for a log and a terminal: no control characters, at most MOST_TEXT characters."""
    shown = str(text)
    shown = shown if len(shown) <= MOST_TEXT else shown[:MOST_TEXT - 3] + "..."
    return "".join(c if c.isprintable() else " " for c in shown)

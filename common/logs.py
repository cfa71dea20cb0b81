"""Log lines for people: rich on a terminal, plain lines in the journal (systemd adds time and unit itself)."""
from __future__ import annotations

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler


def setup(level: str = "INFO") -> None:
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        form = "%(message)s"
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = "%(levelname)s %(name)s: %(message)s" if "JOURNAL_STREAM" in os.environ else "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)   # it warns of torch kernels; the contract records which run
    logging.getLogger("matplotlib").setLevel(logging.WARNING)

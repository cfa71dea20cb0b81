"""A command run inside the test process sets up logging for a whole process: put it back, or the next test's lines go astray."""
import logging

import pytest


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

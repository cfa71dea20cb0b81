"""What holds for every test.

Triton's interpreter stands in for a GPU where there is none.  The variable is read when triton is first imported, and
transformers does that, so it is set before any test module is.  A command run inside the test process sets up logging for
a whole process: put it back, or the next test's lines go astray.  An example of a property takes what it takes: others use the box, too."""
import logging
import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("hsdraft", deadline=None)
hypothesis.settings.load_profile("hsdraft")


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

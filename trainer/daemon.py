"""`hstrain run`: joins settings, inbox, link, run and evaluations; the training loop itself is `Loop.run`.

This thread trains; the link's thread receives and stores.  A trainer that gets ahead of the stream waits and says so."""
from __future__ import annotations

import logging
import math
import queue
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from common import service
from common.contract import ExtractionContract
from common.drafter.config import DrafterConfig, shape_for
from common.drafter.model import init_scales
from common.errors import UserError
from common.status import Board
from common.version import versions
from trainer import arms, config, objectives
from trainer.batch import Samples, bf16, load_weights, make_batch
from trainer.evals import Evals
from trainer.inbox import Inbox
from trainer.optim import lr_at
from trainer.order import visit
from trainer.run import Run
from trainer.step import train_step

log = logging.getLogger("hstrain")
FIT_SAMPLES = 4              # first samples that a fresh drafter's scales are fitted to

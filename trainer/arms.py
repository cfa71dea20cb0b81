"""Arms: training configurations under test.  Data, not code: an arm is a base and a difference in a few fields, each
naming a function elsewhere (objectives, geometry)."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    question: str                                              # what training this arm answers
    beside: str                                                # the arm it is compared with
    loss: Literal["ce"] = "ce"                                 # objectives.LOSSES
    attention: Literal["causal", "bidi", "mixed"] = "causal"   # inside the block; geometry.layer_rule
    corruption: Literal["full"] = "full"                       # which slots are masked: full = all but slot 0
    weights: Literal["exp", "uniform"] = "exp"                 # per slot; objectives.slot_weights
    gamma: float | None = None                                 # decay of exp weights, in slots; None: by block size

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


ARMS = {arm.name: arm for arm in (
    Arm(name="ce_causal", beside="ce_bidi", attention="causal",
        question="Does a block that is drafted left to right (every layer causal) accept more?"),
    Arm(name="ce_bidi", beside="ce_causal", attention="bidi",
        question="Does seeing the whole block's positions at once (the paper's attention) accept more?"),
)}


def named(name: str) -> Arm:
    if name not in ARMS:
        raise UserError(f"unknown arm {name!r}; known arms: {', '.join(ARMS)} (see hstrain arms)")
    return ARMS[name]

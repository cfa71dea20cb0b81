"""Arms: training configurations under test.  Data, not code: an arm is a base and a difference in a few fields, each
naming a function elsewhere (objectives, corruption, geometry).

Fields changed on the command line make an arm of their own, named after its base and what differs.  Left out: how the
numbers of a run (learning rate, anchors, steps) are chosen; that is config.recipe_for."""
from __future__ import annotations

import dataclasses
import hashlib
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import UserError

MOST_NAME = 24            # characters: with "-s" and a seed of six digits it is a run's name on the wire, at most 32


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    question: str                                              # what training this arm answers
    beside: str                                                # the arm it is compared with
    loss: Literal["ce", "ce_argmax", "kl", "rkl", "tv", "lk_hybrid"] = "ce"     # objectives.LOSSES
    attention: Literal["causal", "bidi", "mixed"] = "causal"   # inside the block; geometry.layer_rule
    corruption: Literal["full", "uniform", "prefix"] = "full"  # which slots are masked; corruption.draw
    weights: Literal["exp", "uniform", "dpace"] = "exp"        # of slots; objectives.slot_weights, dpace
    gamma: float | None = None                                 # decay of exp weights, in slots; None: by block size
    alpha: float = 0.5                                         # floor of dpace's confidences
    all_sliding: bool = False                                  # every layer slides; else all but the last (config.shape_for)
    draft_vocab: int | None = None                             # tokens that may be drafted, the commonest; None: all
    block_size: int | None = None                              # positions per block; None: by the target's size

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


ARMS = {arm.name: arm for arm in (
    Arm(name="ce_causal", beside="ce_bidi", attention="causal",
        question="Does a block that is drafted left to right (every layer causal) accept more?"),
    Arm(name="ce_bidi", beside="ce_causal", attention="bidi",
        question="Does seeing the whole block's positions at once (the paper's attention) accept more?"),
    Arm(name="ce_mixed_full", beside="ce_causal", attention="mixed",
        question="Does the released checkpoint's attention (sliding layers causal, the full one not) accept more?"),
    Arm(name="kl_causal", beside="ce_causal", loss="kl", attention="causal",
        question="Does the target's whole distribution teach more than its token, all else as in ce_causal?"),
    Arm(name="kl_mixed_full", beside="ce_mixed_full", loss="kl", attention="mixed",
        question="Does the target's whole distribution teach more than its token, under the released attention?"),
    Arm(name="kl_mixed_uniform", beside="kl_mixed_full", loss="kl", attention="mixed", corruption="uniform",
        question="Does it help to mask a random share of the block instead of all of it?"),
    Arm(name="vp_mixed", beside="ce_mixed_full", attention="mixed", corruption="prefix",
        question="Does it help to train on blocks that begin with some of their tokens known (D2SD's variable prefix)?"),
    Arm(name="lk_mixed", beside="kl_mixed_full", loss="lk_hybrid", attention="mixed",
        question="Does a loss that turns from KL to acceptance itself (1 - TV) as the drafter learns accept more?"),
    Arm(name="dpace_causal_swa", beside="ce_causal", attention="causal", weights="dpace", all_sliding=True,
        question="How does speculators' default of August 2026 (D-PACE weights, every layer sliding) do on the same samples?"),
)}
TOLD = ("name", "question", "beside")                           # what an arm is called; the other fields are what it is
SHORT = {"attention": "att", "corruption": "mask", "weights": "w", "all_sliding": "swa", "draft_vocab": "vocab",
         "block_size": "block"}                                 # in the names of changed arms
FIELDS = tuple(f.name for f in dataclasses.fields(Arm) if f.name not in TOLD)


def named(name: str) -> Arm:
    if name not in ARMS:
        raise UserError(f"unknown arm {name!r}; known arms: {', '.join(ARMS)} (see hstrain arms)")
    return ARMS[name]


def changed(base: Arm, **fields: Any) -> Arm:
    """base with some of FIELDS given another value; None leaves a field as it is.  UserError names a value that cannot be.

    A combination that is one of ARMS is that arm, so that one experiment has one name.  Any other is called
    BASE.FIELD-VALUE..., or where that is too long BASE.HASH; it is compared with its base."""
    given = {name: value for name, value in fields.items() if value is not None and value != getattr(base, name)}
    made = dataclasses.replace(base, **given)
    _check(made, fields)
    if not given:
        return base
    what = _values(made)
    if same := next((arm for arm in ARMS.values() if _values(arm) == what), None):
        return same
    said = ", ".join(option_of(name, given[name]) for name in FIELDS if name in given)
    return dataclasses.replace(made, name=_name(base, given), beside=base.name, question=f"What does {said} change in {base.name}?")


def overridden(name: str, settings: Any) -> Arm:
    """The arm of this name with the command line's changes: settings has an attribute, None by default, for each of FIELDS."""
    return changed(named(name), **{field: getattr(settings, field) for field in FIELDS})


def choices(field: str) -> tuple[str, ...]:
    """The words that a field may be; () for one that is a number."""
    hint = typing.get_type_hints(Arm)[field]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def differences(arm: Arm, other: Arm) -> dict[str, tuple[Any, Any]]:
    """{field: (arm's, other's)} of the fields that part them."""
    return {name: (getattr(arm, name), getattr(other, name)) for name in FIELDS if getattr(arm, name) != getattr(other, name)}


def option_of(field: str, value: Any) -> str:
    """A field and its value as on the command line."""
    if isinstance(value, bool):
        return _option(field) if value else _option(field).replace("--", "--no-", 1)
    return f"{_option(field)} {_text(value)}"


def _values(arm: Arm) -> dict:
    return {name: getattr(arm, name) for name in FIELDS}


def _check(arm: Arm, asked: dict) -> None:
    """UserError for a value that is none, or one that would say something and change nothing."""
    for name in FIELDS:
        if (known := choices(name)) and getattr(arm, name) not in known:
            raise UserError(f"{_option(name)} {getattr(arm, name)}: choose {', '.join(known)}")
    if arm.gamma is not None and not (math.isfinite(arm.gamma) and arm.gamma > 0):
        raise UserError(f"--gamma {arm.gamma}: the decay of weights in slots, above 0")
    if not 0 <= arm.alpha <= 1:
        raise UserError(f"--alpha {arm.alpha}: from 0 to 1")
    for name, weights in (("gamma", "exp"), ("alpha", "dpace")):
        if asked.get(name) is not None and arm.weights != weights:
            raise UserError(f"{_option(name)} is of --weights {weights}; {arm.name} has --weights {arm.weights} here")
    for name, least in (("draft_vocab", 2), ("block_size", 2)):
        if (value := getattr(arm, name)) is not None and value < least:
            raise UserError(f"{_option(name)} {value}: at least {least}")


def _name(base: Arm, given: dict) -> str:
    """A legal name on the wire: letters, digits and . _ : - only."""
    told = ".".join([base.name, *(f"{SHORT.get(name, name)}-{_text(given[name])}" for name in FIELDS if name in given)])
    if len(told) <= MOST_NAME:
        return told
    exact = sorted((name, value if isinstance(value, (str, bool)) else float(value)) for name, value in given.items())
    digest = hashlib.sha256(repr(exact).encode()).hexdigest()
    return f"{base.name}.{digest[:6]}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value).removesuffix(".0").replace("+", "") if isinstance(value, float) else str(value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

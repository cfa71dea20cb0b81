"""What was captured, from which target, how.  Its hash travels with samples, checkpoints and reports, so that data of
one target can never train or judge a drafter of another unseen (pitfalls L1, L3, A3)."""
from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from common.capture import FINAL_RULE, TAP_RULE
from common.errors import CorruptError


@dataclass(frozen=True, kw_only=True)
class ExtractionContract:
    target: str                     # name as its owner knows it
    weights: str                    # fingerprint of the target's weights (sha256 hex)
    tokenizer: str                  # sha256 hex of the tokenizer
    chat_template: str              # sha256 hex of the template; "" where the target has none
    thinking: bool | None           # template's thinking switch; None where it knows none
    taps: tuple[int, ...]
    n_layers: int
    hidden_size: int
    vocab_size: int                 # rows of the embedding, not the tokenizer's length
    mask_token_id: int              # a row the target never emits (pitfall C4)
    dtype: str                      # the target's compute dtype; captures travel as bf16 whatever it is
    delta_rule: str                 # which kernel ran Gated DeltaNet layers; "" on dense targets
    versions: dict[str, str]        # libraries whose change may change a bit
    tap_rule: str = TAP_RULE
    final_rule: str = FINAL_RULE

    def to_dict(self) -> dict:
        return dataclasses.asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, data: dict) -> ExtractionContract:
        """Strict: a missing, extra or ill-typed field is named in a CorruptError."""
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            got = set(data) if isinstance(data, dict) else set()
            raise CorruptError(f"contract: fields missing {sorted(names - got)}, unknown {sorted(map(str, got - names))}")
        typed = {"taps": list, "versions": dict, "n_layers": int, "hidden_size": int, "vocab_size": int, "mask_token_id": int,
                 "thinking": (bool, type(None))}
        for name in names:
            if not isinstance(data[name], typed.get(name, str)):
                raise CorruptError(f"contract: {name} is a {type(data[name]).__name__}")
        if not data["taps"] or not all(type(t) is int for t in data["taps"]):
            raise CorruptError("contract: taps must be a list of integers")
        return cls(**(data | {"taps": tuple(data["taps"])}))

    @property
    def hash(self) -> str:
        """sha256 hex of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def unlike(ours: ExtractionContract, theirs: ExtractionContract) -> dict[str, str]:
    """{field: 'ours -> theirs'} of the fields that differ, a library's version under versions.NAME; {} when equal."""
    a, b = _flat(ours), _flat(theirs)
    return {name: f"{_short(a.get(name))} -> {_short(b.get(name))}" for name in a | b if a.get(name) != b.get(name)}


def differences(ours: ExtractionContract, theirs: ExtractionContract) -> list[str]:
    """'field: ours -> theirs' for each field that differs; [] when equal."""
    return [f"{name}: {values}" for name, values in unlike(ours, theirs).items()]


def strange(contract: ExtractionContract, theirs: ExtractionContract | None, record: dict) -> tuple[str, str]:
    """A drafter's record against the contract here: 'field: the drafter's -> ours' for each that differs: those that make it another
    target's drafter, and those that move bits only (name, dtype, kernels, library versions, the experts' implementation among them).

    theirs: the contract in the record; None in an old one, which holds a hash alone, so that any difference counts and none but the
    target's name can be named."""
    if record.get("contract") == contract.hash:
        return "", ""
    if theirs is None:
        name = "" if record.get("target") == contract.target else f"target {record.get('target')}, here {contract.target}; "
        return (f"{name}contract {str(record.get('contract'))[:12]}, here {contract.hash[:12]} (taps, weights, dtype, thinking and library "
                "versions count)"), ""
    fields = unlike(theirs, contract)
    light = {name for name in fields if name in ("target", "dtype", "delta_rule") or name.startswith("versions.")}
    return tuple("; ".join(f"{name}: {values}" for name, values in fields.items() if (name in light) == bits) for bits in (False, True))


def _flat(contract: ExtractionContract) -> dict:
    fields = contract.to_dict()
    return {name: value for name, value in fields.items() if name != "versions"} | {
        f"versions.{name}": value for name, value in fields["versions"].items()}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:24] + "..." + text[-8:]

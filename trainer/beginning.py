"""`--init PATH`: a run that begins with a drafter that is there already, ours or somebody's.

Its shape becomes the run's, its weights the fp32 masters; attention inside the block, and whatever else the arm and the command line
name, are the run's own.  Where the run began stands in run.json, and so in each checkpoint's record: a folder of another beginning
is refused by field.  A run that has saved a state goes on from that, and no longer needs PATH.
Left out: the start's optimiser state, and its list of draftable tokens (--draft-vocab chooses one)."""
from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from common.contract import ExtractionContract, strange
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from trainer import imported
from trainer.export import checkpoint_of

# What weights are bound to: another value makes other tensors, or the same ones mean something else.
BOUND = ("hidden_size", "vocab_size", "num_target_layers", "taps", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "rms_norm_eps", "rope_theta")
FREE = ("layer_types", "sliding_window", "block_size", "mask_token_id", "max_position_embeddings", "attention")
OF_THE_STREAM = {"hidden_size", "vocab_size", "num_target_layers", "taps", "mask_token_id"}      # fields of a shape; attention is the arm's


@dataclass(frozen=True)
class Start:
    """config: its shape; about: as run.json tells of it; drafter: None where PATH is gone and the run's folder speaks for it;
    begun: the folder is of a run that began here, so its data was looked at then."""

    path: Path
    config: DrafterConfig
    about: dict
    record: dict
    drafter: Drafter | None
    begun: bool = False

    def shape_fields(self) -> dict:
        """Of a run that begins here: fields of DrafterConfig in place of the defaults for the target's size."""
        return {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)
                if field.name not in OF_THE_STREAM | {"attention"}}


def there(path: Path, folder: Path) -> dict:
    """What the run's folder says of its beginning, {} where it says nothing.  UserError where neither it nor PATH can be begun from."""
    known = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    before = known.get("init") or {}
    if not path.exists() and before.get("path") != str(path.absolute()):
        raise UserError(f"--init {path}: no such file or folder")
    return before


def read(path: Path, folder: Path, target_layers: int) -> Start:
    """path: a run's folder (its newest checkpoint), a checkpoint's, or what hstrain import reads.  folder: the run's that begins here.

    UserError where there is no drafter, in one line."""
    before = there(path, folder)
    if not path.exists():
        return Start(path, DrafterConfig.from_json(json.loads((folder / "run.json").read_text())["drafter"]), before, {}, None)
    place = checkpoint_of(path)
    found, digest = imported.read(place, target_layers), imported.fingerprint(place)
    if before.get("sha256") == digest:
        return Start(path, found.drafter.config, before, found.record, found.drafter, begun=True)
    about = {"path": str(path.absolute()), "sha256": digest, "dtype": str(found.drafter.fc.weight.dtype).removeprefix("torch.")}
    about |= {name: found.record[name] for name in ("target", "contract", "step", "tokens") if name in found.record}
    if isinstance(arm := found.record.get("arm"), dict):
        about["arm"] = arm.get("name")
    return Start(path, found.drafter.config, about, found.record, found.drafter)


def check(start: Start, shape: DrafterConfig, contract: ExtractionContract, *, force: bool) -> list[str]:
    """What a person should know of a run of this shape that begins there.  UserError where it cannot, naming every field.

    force: another target's drafter may begin it, if its shape fits."""
    differ = {name: f"{name} {getattr(start.config, name)}, here {getattr(shape, name)}" for name in (*BOUND, *FREE)
              if getattr(start.config, name) != getattr(shape, name)}
    if wrong := [words for name, words in differ.items() if name in BOUND]:
        raise UserError(f"--init {start.path} does not fit this run: {'; '.join(wrong)}")
    said = [f"differs from the start: {words}" for name, words in differ.items() if name in FREE]
    if start.drafter is not None and start.drafter.shortlist is not None:
        said.append(f"the start drafted {len(start.drafter.shortlist):,} tokens only; its list is left behind, --draft-vocab chooses one")
    return said + _same_target(start, contract, force)


def _same_target(start: Start, contract: ExtractionContract, force: bool) -> list[str]:
    """Pitfall A3.  A fingerprint of weights holds their dtype, so two of different dtypes say nothing of each other."""
    record = start.record
    if start.drafter is None or start.begun:
        return []
    if "contract" not in record:
        return [f"nothing vouches that {start.path} was trained for {contract.target}"]
    said, theirs = [], None
    if "extraction" in record:
        try:
            theirs = ExtractionContract.from_dict(record["extraction"])
        except CorruptError as error:
            raise UserError(f"--init {start.path}: its record is damaged: {error}") from None
        contract = dataclasses.replace(contract, mask_token_id=theirs.mask_token_id)     # a row of the embedding, chosen; said above
        if theirs.dtype != contract.dtype:
            said.append(f"its target computed in {theirs.dtype}, this one in {contract.dtype}, so their weights cannot be compared")
            theirs = dataclasses.replace(theirs, weights=contract.weights)
    wrong, light = strange(contract, theirs, record)
    if wrong and not force:
        raise UserError(f"--init {start.path} was trained on other data than this stream's: {wrong}; --init-force begins with it all the same")
    return said + [f"the start was trained {words}" for words in (wrong and f"on other data: {wrong}", light and f"on states computed otherwise: {light}")
                   if words]


def begin(drafter: Drafter, start: Start) -> None:
    """The start's weights into a run's fp32 drafter, in place.  UserError where they are gone."""
    if start.drafter is None:
        raise UserError(f"--init {start.path} is gone, and this run has not saved a state to go on from; begin another --run-dir")
    with torch.no_grad():
        for ours, theirs in zip(drafter.parameters(), start.drafter.parameters(), strict=True):
            ours.copy_(theirs)

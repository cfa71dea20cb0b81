"""Whether a drafter may run on a target: what its folder holds, what its record says, what this target is.

The folder is read, and its shape held against the target's config.json, before the target's gigabytes are.  Other formats are the
trainer's to turn into ours; here they are recognised, and the command is named.  Left out: what the drafter is then used for."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from common.contract import ExtractionContract, strange
from common.drafter import checkpoint
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from producer import identity, lengths, packed, selftest
from producer.config import Bench, Eval, Generate
from producer.progress import say
from producer.prompts import thinking_mode
from producer.target import Sizes, Target, load, sizes

Settings = Generate | Bench | Eval
SPECULATORS = "speculators_model_type"      # a key that only their folders have


def ready(settings: Bench | Eval) -> tuple[Target, Drafter, bool | None]:
    """Target, drafter fitted to it, thinking mode: what is wrong with the drafter's folder is said before the target is read."""
    found = read_drafter(settings)
    check_sizes(settings, found[0].config)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    target = load(settings.target, dtype=settings.dtype, device=settings.device, experts=settings.experts, say=say)
    thinking = thinking_mode(target.tokenizer, settings.thinking)
    return target, fit_drafter(settings, found, target, thinking), thinking


def read_drafter(settings: Settings) -> tuple[Drafter, dict]:
    """The folder's drafter, on the CPU in fp32, and its record; before the target, whose gigabytes a mistake should not cost.

    Raises UserError for a folder that is no whole drafter of ours or z-lab's, and for more slots than its blocks have.  Where --block-size asks
    for fewer it is a drafter of such blocks from here on; one slot is no block that a drafter can have, and stays the loop's."""
    try:
        refuse_foreign(settings.drafter)
        drafter, config, record = checkpoint.load(settings.drafter, "cpu", torch.float32)
    except CorruptError as error:
        raise UserError(f"--drafter {settings.drafter}: {error}") from None
    if settings.block_size > config.block_size:
        raise UserError(f"--block-size {settings.block_size}: this drafter's blocks have {config.block_size} slots at most")
    if isinstance(settings, Generate):
        lengths.parse(settings.verify_len, settings.block_size or config.block_size)
    if settings.block_size > 1:
        drafter.config = dataclasses.replace(config, block_size=settings.block_size)
    return drafter, record


def refuse_foreign(path: Path) -> None:
    """UserError for a file or folder that hstrain import can read and this box cannot."""
    kind = "a file" if path.is_file() else None
    if kind is None and (path / checkpoint.CONFIG).is_file() and SPECULATORS in checkpoint.read_json(path / checkpoint.CONFIG):
        kind = "in speculators' format"
    if kind:
        raise UserError(f"--drafter {path} is {kind}; make a folder of it first: hstrain import {path} --out DIR")


def check_sizes(settings: Settings, config: DrafterConfig) -> None:
    """UserError for a drafter of another target, from the target's config alone."""
    refuse_misfit(settings, settings.target, sizes(settings.target), config)


def fit_drafter(settings: Settings, found: tuple[Drafter, dict], target: Target, thinking: bool | None) -> Drafter:
    """What read_drafter found, on the target's device and in its dtype.  Raises UserError for a drafter of another target or,
    without --force, contract; and for a target whose blocks cannot be verified and rolled back here."""
    (drafter, record), config = found, found[0].config
    refuse_misfit(settings, target.name, target, config)
    if not record:
        say(f"note: {settings.drafter} has no {checkpoint.RECORD}, so nothing vouches that it was trained for {target.name}")
    else:
        contract = dataclasses.replace(target.contract(config.taps, thinking), mask_token_id=config.mask_token_id)   # the stream's --mask-token
        wrong, other = strange(*compared(target, contract, record), record)
        if wrong and not settings.force:
            raise UserError(f"--drafter {settings.drafter} was trained on other data than this target's: {wrong}; --force uses it "
                            "all the same (the text stays the target's, but fewer drafts will stand)")
        if wrong:
            say(f"note: {settings.drafter} was trained on other data than this target's: {wrong}")
        if other:
            say(f"note: {settings.drafter} was trained on states computed otherwise than here: {other}")
    if config.mask_token_id != target.mask_token_id and (word := target.tokenizer.convert_ids_to_tokens(config.mask_token_id)) is not None:
        say(f"note: the mask token of {settings.drafter}, {config.mask_token_id}, is {word!r} here: where a text holds it, drafts mean little "
            "(the text stays the target's)")
    selftest.check(target, config.taps).require(target.name)
    packed.pack(drafter.to(target.device, target.dtype))
    return drafter


def refuse_misfit(settings: Settings, name: str, target: Sizes | Target, config: DrafterConfig) -> None:
    pairs = (("layers", config.num_target_layers, target.n_layers), ("hidden size", config.hidden_size, target.hidden_size),
             ("vocabulary", config.vocab_size, target.vocab_size))
    if wrong := "; ".join(f"{what} {theirs}, {name} has {ours}" for what, theirs, ours in pairs if theirs != ours):
        raise UserError(f"--drafter {settings.drafter} was made for another target: {wrong}")


def compared(target: Target, contract: ExtractionContract, record: dict) -> tuple[ExtractionContract, ExtractionContract | None]:
    """This target's contract, and the one that the drafter's record holds (None: a hash only).  UserError for a damaged record.

    A fingerprint of weights holds their dtype, so ours is taken in the drafter's: another dtype alone is not other weights."""
    if "extraction" not in record:
        return contract, None
    try:
        theirs = ExtractionContract.from_dict(record["extraction"])
    except CorruptError as error:
        raise UserError(f"the drafter's {checkpoint.RECORD} is damaged: {error}") from None
    dtype = getattr(torch, theirs.dtype, None)
    if isinstance(dtype, torch.dtype) and theirs.dtype != contract.dtype:
        contract = dataclasses.replace(contract, weights=identity.weights(target.model, dtype))
    return contract, theirs

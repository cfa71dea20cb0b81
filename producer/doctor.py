"""`hsprod doctor`: whether this box can serve a target with these options.  Facts first, then verdicts; nothing is loaded."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from common import doctor, jsons, status
from common.doctor import GIB, Box, Finding
from common.errors import UserError
from producer.config import Doctor, Keys, Serve

UNIFIED = ("gfx1103", "gfx1150", "gfx1151", "gfx1152")       # AMD GPUs that have no memory of their own
RESERVE = 4 * GIB            # beside the weights: keys, values and states of a batch, one capture, a drafter (docs/strix-halo.md has the figures)
SYSTEM = 12 * GIB            # of the RAM, that a GPU without its own had better leave
LEAST_CARVED = GIB           # what the BIOS sets aside at its least: 512 MiB on most boards
KEYS = Keys.keys             # where keygen puts them unless told otherwise
WITHOUT = (r"^mtp\.", r"(^|\.)visual\.", r"(^|\.)vision_")   # weights of the files that the text model does not read


@dataclass(frozen=True)
class Weights:
    """Of the target's text model, as its files' headers say."""

    numbers: int
    largest: int                 # numbers in the largest one
    shards: int


def show(settings: Doctor) -> int:
    return doctor.show("hsprod doctor", examine(settings), as_json=settings.json)


def examine(settings: Serve) -> list[Finding]:
    box = doctor.gather("producer")
    findings = [*doctor.judge_python(box, "producer"), *doctor.judge_gpu(box, settings.device)]
    found, weights = target(settings)
    findings += found
    if weights is not None:
        findings.append(judge_memory(box, weights, settings.device, settings.dtype))
    findings += disk(settings)
    return [*findings, prompts(settings), keys(settings), port(settings)]


def target(settings: Serve) -> tuple[list[Finding], Weights | None]:
    """Present, whole, and with the layers that are asked for.  Headers alone are read."""
    try:
        from common.capture import parse_taps
        from producer.target import layer_count, locate
        from producer.weights import chosen, placed, shards
        folder = locate(settings.target)
        taps = parse_taps(settings.layers, layer_count(settings.target))
        held = {name: weight for file, names in shards(placed(folder), WITHOUT).items() for name, weight in chosen(folder / file, names).items()}
    except ImportError as error:
        return [Finding("target", "wrong", f"cannot be looked at: {error}", "pip install 'hsdraft[producer]'")], None
    except UserError as error:
        return [Finding("target", "wrong", str(error), mend(settings.target, str(error)))], None
    sizes = [math.prod(weight.shape) for weight in held.values()]
    weights = Weights(sum(sizes), max(sizes), len({weight.path for weight in held.values()}))
    return [Finding("target", "ok", f"{settings.target}: {weights.numbers / 1e6:,.0f} million weights in {weights.shards} whole file(s), "
                                    f"taps {','.join(map(str, taps))}")], weights


def mend(name: str, error: str) -> str:
    if "--layers" in error:
        return "--layers auto"
    return "see the message" if Path(name).is_dir() or name in ("embedded", "smollm2") else f"hf download {name}"


def judge_memory(box: Box, weights: Weights, device: str, dtype: str) -> Finding:
    """Whether the weights fit where they are to run: once, the largest one twice while they are read, and RESERVE."""
    index = doctor.index_of(device)
    gpu = box.gpus[index] if device != "cpu" and index < len(box.gpus) else None
    wide = {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpu else 4)
    need = (weights.numbers + weights.largest) * wide + RESERVE
    total, where = (gpu.total, gpu.name) if gpu else (box.ram, "the RAM")
    says = f"{weights.numbers * wide / GIB:.1f} GiB of weights, {need / GIB:.1f} GiB with what goes beside them; {where}: {total / GIB:.1f} GiB"
    if need <= total:
        return Finding("memory", "ok", says)
    if gpu is None:
        return Finding("memory", "wrong", says, "a smaller --target" if wide == 2 else "--dtype bfloat16 (half of it), or a smaller --target")
    if not (gpu.arch in UNIFIED or bool(box.hip and box.ttm and abs(gpu.total - box.ttm) < 0.1 * box.ttm)):
        return Finding("memory", "wrong", says, "a smaller --target, or --device cpu")
    return judge_unified(box, need, says)


def judge_unified(box: Box, need: int, says: str) -> Finding:
    """A GPU without memory of its own, which sees less than `need` bytes: how much more it could, and what lets it."""
    spare = max(0, (box.carved or 0) - LEAST_CARVED)                        # what the BIOS could give back to Linux
    if need + SYSTEM > box.ram + spare:
        return Finding("memory", "wrong", says, "a smaller --target")
    back = spare if need + SYSTEM > box.ram else 0
    gib = min(math.ceil(need / GIB) + 16, (box.ram + back - SYSTEM) // GIB)
    limit = "" if box.ttm is None else f" The kernel's TTM limit is {box.ttm / GIB:.0f} GiB of {box.ram / GIB:.0f} GiB RAM."
    bios = (f"in the BIOS, set the graphics memory (UMA frame buffer) to its least: {box.carved / GIB:.0f} GiB are set aside there now; then "
            if back else "")
    return Finding("memory", "wrong", f"{says}.{limit}", f"{bios}sudo amd-ttm --set {gib}   (package amd-debug-tools; or on the kernel's command "
                   f"line ttm.pages_limit={gib * (GIB // 4096)}), then reboot" + ("" if back else "; keep the BIOS carve-out small"))


def disk(settings: Serve) -> list[Finding]:
    """The budget is a stream's; those of other targets and taps lie there without one."""
    from protocol.store import META
    newest, used, others = 0.0, 0, 0
    for meta in (settings.state_dir / "streams").glob(f"*/samples/{META}"):
        size, at = sum(path.stat().st_size for path in meta.parent.glob("*.hs")), meta.stat().st_mtime
        if of_target(meta, settings.target) and at > newest:
            newest, used, others = at, size, others + used
        else:
            others += size
    found = [doctor.judge_disk("disk", doctor.disk_free(settings.state_dir), used, int(settings.disk_budget * 1e9))]
    if others:
        found.append(Finding("other streams", "note", f"{others / 1e9:.1f} GB of samples of other targets, taps or settings in "
                             f"{settings.state_dir / 'streams'}", "remove the folders that no trainer needs any more"))
    return found


def of_target(meta: Path, target: str) -> bool:
    try:
        return jsons.loads(meta.read_text("utf-8"))["contract"]["target"] == target
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prompts(settings: Serve) -> Finding:
    from producer import prompt_sets, prompts as files
    path = settings.prompts or files.SHIPPED
    try:
        split = files.split(prompt_sets.read(path).prompts, settings.held_out, files.SALT)
    except UserError as error:
        return Finding("prompts", "wrong", str(error), "--prompts FILE, in one of the shapes that hsprod serve --help names")
    return judge_prompts(path, len(split.train), len(split.held_out), sum(p.answer is None for p in split.train), settings.mode)


def judge_prompts(path: Path, train: int, held_out: int, bare: int, mode: str) -> Finding:
    """bare: prompts to be streamed that have no answer."""
    if mode == "prefill" and bare:
        return Finding("prompts", "wrong", f"{path}: {bare} of {train} prompts have no answer", "--mode generate, or add an \"answer\" to each")
    return Finding("prompts", "ok", f"{path}: {train:,} to stream, {held_out:,} held out")


def keys(settings: Serve) -> Finding:
    from protocol.keys import ProducerKeys
    from protocol.wire import is_local
    if settings.keys is None:
        return judge_keys(None, None, "", is_local(settings.bind), settings.insecure)
    try:
        return judge_keys(settings.keys, len(ProducerKeys(settings.keys).allowed()), "", is_local(settings.bind), settings.insecure)
    except (UserError, OSError) as error:
        return judge_keys(settings.keys, None, str(error), is_local(settings.bind), settings.insecure)


def judge_keys(folder: Path | None, allowed: int | None, error: str, local: bool, insecure: bool) -> Finding:
    """folder: of --keys.  allowed: trainers that may connect; error: why that is not known.  local: nobody else can reach the port."""
    if error:
        fix = (f"chmod 600 {folder}/secret.key" if "read by others" in error else f"hsprod keygen --keys {folder}" if "missing" in error
               else "see the message")
        return Finding("keys", "wrong", error, fix)
    if folder is not None:
        if allowed:
            return Finding("keys", "ok", f"{folder}: {allowed} trainers may connect")
        return Finding("keys", "wrong", f"{folder}: no trainer may connect", f"hsprod allow --keys {folder} -- 'KEY', which hstrain keygen prints")
    if local:
        return Finding("keys", "ok", "none needed: the address is this box's alone")
    if insecure:
        return Finding("keys", "note", "--insecure: anybody on that network can read the stream",
                       f"hsprod keygen --keys {KEYS}, then --keys {KEYS}")
    return Finding("keys", "wrong", "the address can be reached from the network, and no keys are given",
                   f"hsprod keygen --keys {KEYS}, then --keys {KEYS} (or --insecure)")


def port(settings: Serve) -> Finding:
    from protocol.wire import check_address
    try:
        check_address(settings.bind, None, insecure=True)        # keys have a finding of their own
        return judge_port(settings.bind, "", False)
    except UserError as error:
        return judge_port(settings.bind, str(error), serves(settings))


def serves(settings: Serve) -> bool:
    """Whether a producer of this state folder runs and listens there."""
    try:
        said = status.read(settings.state_dir / "status.json", time.time())
    except UserError:
        return False
    return said["running"] and said.get("address") == settings.bind


def judge_port(address: str, error: str, ours: bool) -> Finding:
    if not error:
        return Finding("address", "ok", f"{address} is free")
    if "in use" in error and ours:
        return Finding("address", "ok", f"{address}: hsprod serve listens there")
    return Finding("address", "wrong", error, "stop what listens there (ss -ltnp), or another port with --bind" if "in use" in error
                   else "--bind tcp://ADDRESS:PORT, with an address that `ip -br address` shows")

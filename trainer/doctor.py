"""`hstrain doctor`: whether this box can train with these options.  Facts first, then verdicts; nothing is loaded.

The producer is asked with a real Hello, under a name of the doctor's own: the trainer's name would end its link."""
from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from common import doctor
from common.contract import ExtractionContract
from common.doctor import GIB, Box, Finding
from common.errors import PeerError, UserError
from protocol.events import Cursor, Differs, LinkLost, Refused, Welcome, Welcomed
from protocol.frames import decode, encode
from protocol.keys import TrainerKeys, public_key
from protocol.rules import Timing
from protocol.store import SampleStore
from protocol.trainer_session import TrainerSession
from protocol.wire import Dialer, Doorbell, is_local
from trainer import arms, config, memory
from trainer.inbox import STORE
from trainer.memory_screen import suggestion
from trainer.replay import store_folder

ADDRESS = re.compile(r"(tcp://.+:\d+|ipc://.+)")
KEYS = config.Keys.keys      # where keygen puts them unless told otherwise
PATIENCE = 5.0               # seconds for the producer's answer
NOTHING = Cursor(None, 0, None)
# Qwen3.6-35B-A3B, where no contract is known
TARGET = {"hidden_size": 2048, "n_layers": 40, "vocab_size": 248320, "taps": tuple(range(8))}


@dataclass(frozen=True)
class Answer:
    """What became of a Hello.  listens: something takes connections there.  welcome, contract: None where it was none."""

    listens: bool
    welcome: Welcome | None = None
    contract: ExtractionContract | None = None
    reason: str = ""


def show(settings: config.Doctor) -> int:
    return doctor.show("hstrain doctor", examine(settings), as_json=settings.json)


def examine(settings: config.Run, *, patience: float = PATIENCE) -> list[Finding]:
    box = doctor.gather("trainer")
    findings = [*doctor.judge_python(box, "trainer"), *doctor.judge_gpu(box, settings.device)]
    cursor, found = stored(settings) if settings.stored else received(settings)
    contract, address = cursor.contract, settings.producer or config.ADDRESS
    findings += [*found, keys(settings, address)]
    if settings.stored and not settings.producer:
        findings.append(Finding("producer", "note", "none is named: acceptance is not measured", "--producer ADDRESS, where it is to be"))
    elif findings[-1].grade != "wrong":
        answer = hello(address, f"{settings.name[:50]}.doctor", cursor, settings.keys, patience)
        findings.append(judge_answer(address, answer, cursor.next_seq if cursor.stream else None, own_key(settings.keys)))
        contract = answer.contract or contract
    findings.append(step(box, settings, contract))
    return findings


def received(settings: config.Run) -> tuple[Cursor, list[Finding]]:
    """This box's own store, which a live stream goes on in: what a Hello says of it, and its disk."""
    used, cursor, error = store(settings.state_dir / STORE)
    wrong = [Finding("store", "wrong", error, "restore it, or another --state-dir")] if error else []
    return cursor, [*wrong, doctor.judge_disk("disk", doctor.disk_free(settings.state_dir), used, int(settings.disk_budget * 1e9))]


def stored(settings: config.Run) -> tuple[Cursor, list[Finding]]:
    """The stored stream that --from names: nothing is received, so any producer of its contract will do for evaluations."""
    try:
        folder = store_folder(settings.stored)
        _, cursor, error = store(folder)
    except UserError as missing:
        folder, cursor, error = settings.stored, NOTHING, str(missing)
    if error:
        return NOTHING, [Finding("stream", "wrong", error, "--from, with a folder in which hstrain run has received a stream")]
    return Cursor(None, 0, cursor.contract), [Finding("stream", "ok", f"{folder}: samples up to {cursor.next_seq - 1:,} of {cursor.contract.target}")]


def store(folder: Path) -> tuple[int, Cursor, str]:
    """Bytes in a box's store, what a Hello says of it, and what is wrong with it."""
    if not folder.exists():
        return 0, NOTHING, ""
    try:
        with SampleStore(folder, readonly=True) as held:
            contract = ExtractionContract.from_dict(held.contract) if held.stream else None
            return held.bytes_used, Cursor(held.stream or None, held.next if held.stream else 0, contract), ""
    except (UserError, OSError) as error:
        return 0, NOTHING, str(error)


def own_key(folder: Path | None) -> str:
    try:
        return public_key(folder) if folder else ""
    except (UserError, OSError):
        return ""


def keys(settings: config.Run, address: str) -> Finding:
    try:
        if settings.keys:
            TrainerKeys(settings.keys)
        return judge_keys(settings.keys, "", is_local(address))
    except (UserError, OSError) as error:
        return judge_keys(settings.keys, str(error), is_local(address))


def judge_keys(folder: Path | None, error: str, local: bool) -> Finding:
    if error:
        fix = (f"chmod 600 {folder}/secret.key" if "read by others" in error
               else f"hstrain trust --keys {folder} -- 'KEY', which hsprod keygen prints" if "producer.key" in error
               else f"hstrain keygen --keys {folder}" if "missing" in error else "see the message")
        return Finding("keys", "wrong", error, fix)
    if folder:
        return Finding("keys", "ok", f"{folder}: this box's key, and the producer's")
    if local:
        return Finding("keys", "ok", "none needed: the producer is on this box")
    return Finding("keys", "note", "none: the stream is not encrypted, and the producer must run with --insecure",
                   f"hstrain keygen --keys {KEYS}, then --keys {KEYS}; the same on the producer with hsprod")


def hello(address: str, name: str, cursor: Cursor, folder: Path | None, patience: float) -> Answer:
    """Say Hello as a follower, which takes no samples and holds nothing back; then Bye."""
    if not listens(address, patience):
        return Answer(False)
    context, bell = zmq.Context(), Doorbell()
    now = time.monotonic()
    session = TrainerSession(name, cursor, samples=False, window=1, timing=Timing(patience, patience), read_chunk=lambda *_: b"", now=now)
    dialer = Dialer(context, address, TrainerKeys(folder) if folder else None, bell)
    try:
        return converse(session, dialer, now + patience)
    finally:
        session.close("only a look")
        for message in session.to_send(time.monotonic()):
            dialer.send(encode(message))
        dialer.close()
        context.term()
        bell.close()


def converse(session: TrainerSession, dialer: Dialer, end: float) -> Answer:
    try:
        while (now := time.monotonic()) < end:
            for message in session.to_send(now):
                dialer.send(encode(message))
            for parts in dialer.receive(0.1, until_writable=False):
                for event in session.receive(decode(parts), time.monotonic()):
                    match event:
                        case Welcomed(welcome, contract, _):
                            return Answer(True, welcome, contract)
                        case Refused(reason, fields):
                            return Answer(True, reason="; ".join([reason, *fields]))
                        case LinkLost(reason):
                            return Answer(True, reason=reason)
    except Differs as error:
        return Answer(True, reason="; ".join([error.reason, *error.fields]))
    except PeerError as error:
        return Answer(True, reason=f"it speaks another language: {error}")
    return Answer(True)


def listens(address: str, patience: float) -> bool:
    if address.startswith("ipc://"):
        return Path(address.removeprefix("ipc://")).exists()
    host, _, number = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(number)), timeout=patience):
            return True
    except (OSError, ValueError):
        return False


def judge_answer(address: str, answer: Answer, next_seq: int | None, key: str) -> Finding:
    """next_seq: the sample that this box needs next; None where it has no stream.  key: this box's public key, "" without one."""
    if not ADDRESS.fullmatch(address):
        return Finding("producer", "wrong", f"--producer {address} is no address", "write tcp://HOST:PORT, as in tcp://10.0.0.1:5757")
    if not answer.listens:
        return Finding("producer", "wrong", f"{address}: nothing takes connections there", "start hsprod serve, check the cable and --producer; "
                       "the port must be open in its firewall")
    if answer.reason:
        return Finding("producer", "wrong", f"{address}: {answer.reason}", refusal_fix(answer.reason))
    if answer.welcome is None:
        fix = (f"on the producer: hsprod allow -- '{key}'; here: hstrain trust -- 'KEY', which hsprod keygen printed" if key
               else "--keys, where the producer has keys; or it hangs: see its log")
        return Finding("producer", "wrong", f"{address}: no answer to Hello", fix)
    first, end = answer.welcome.first_seq, answer.welcome.next_seq
    if next_seq is not None and not first <= next_seq <= end:
        return Finding("producer", "wrong", f"{address} holds samples {first} to {end - 1}, this box needs {next_seq} next",
                       "another --state-dir, which starts where the producer's stream does now")
    behind = end - (first if next_seq is None else next_seq)
    taps = ",".join(map(str, answer.contract.taps))
    return Finding("producer", "ok", f"{address}: {answer.contract.target}, taps {taps}; {behind:,} samples to fetch")


def refusal_fix(reason: str) -> str:
    if reason.startswith("protocol"):
        return "the same hsdraft on both boxes"
    if "is another key's" in reason:
        return "another --name, or take the box's old key out of the producer's list"
    if reason.startswith("too many trainers"):
        return "on the producer: hsprod status, then hsprod forget NAME"
    return "another --state-dir for another stream, or start the producer as it was"


def step(box: Box, settings: config.Run, contract: ExtractionContract | None) -> Finding:
    """Whether one training step fits (trainer/memory.py)."""
    try:
        job, known = job_of(box, settings, contract), contract is not None
    except UserError as error:
        return Finding("arm", "wrong", str(error), "hstrain arms lists them, with their options")
    return judge_step(box, job, settings.device, known)


def job_of(box: Box, settings: config.Run, contract: ExtractionContract | None) -> memory.Job:
    shape = {name: getattr(contract, name) for name in TARGET} if contract else TARGET
    arm = arms.overridden(settings.arm, settings)
    recipe = config.recipe_for(shape["hidden_size"])
    sequences, anchors, optimizer, tokens = (getattr(recipe, name) if getattr(settings, name) is None else getattr(settings, name)
                                             for name in ("sequences", "anchors", "optimizer", "max_tokens"))
    drafter = memory.drafter_for(shape["hidden_size"], shape["n_layers"], shape["vocab_size"], len(shape["taps"]), arm,
                                 num_hidden_layers=settings.layers, block_size=arm.block_size, sliding_window=settings.window)
    return memory.Job(drafter, arm.loss, sequences, anchors, tokens, optimizer, head=arm.draft_vocab or shape["vocab_size"],
                      gpu=settings.device != "cpu" and doctor.index_of(settings.device) < len(box.gpus))


def judge_step(box: Box, job: memory.Job, device: str, known: bool) -> Finding:
    """known: the target's shape is the stream's, and not a guess."""
    need = memory.peak(job)
    total = box.gpus[doctor.index_of(device)].total if job.gpu else box.ram
    usable = total - int(memory.RESERVE * GIB)
    says = (f"a step needs {need / GIB:.1f} GiB of {total / GIB:.1f} less {memory.RESERVE:g} in reserve, by arithmetic"
            + ("" if known else "; the stream's target is not known yet: for Qwen3.6-35B-A3B"))
    if need <= usable:
        return Finding("memory", "ok", says)
    fix = suggestion(job, usable).removeprefix("It does not fit. ")
    return Finding("memory", "wrong" if known else "note", says, f"{fix} (hstrain memory)")

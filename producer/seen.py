"""What a person sees of the producer: its numbers, each named once for status and Prometheus, and `hsprod status` as one screen."""
from __future__ import annotations

from common.exporter import Number, Seen
from common.status import ago, behind_by, budget, counted, size

NUMBERS = (
    Number("first_sample", "Number of the oldest sample that is still kept"),
    Number("next_sample", "Number that the next sample of the stream will have"),
    Number("tokens", "Tokens captured since this start", "counter"),
    Number("tokens_per_second", "Tokens captured a second, over the last minute"),
    Number("stored_bytes_per_second", "Bytes of samples stored a second, encoded, over the last minute"),
    Number("sent_bytes_per_second", "Bytes of samples sent a second, to all trainers together, over the last minute"),
    Number("ratio", "Bytes of raw bf16 states by bytes stored, since this start"),
    Number("disk_used_bytes", "Bytes of samples kept"),
    Number("disk_budget_bytes", "Bytes that samples may use: production pauses there"),
    Number("disk_free_bytes", "Bytes free on the disk"),
    Number("paused", "1 while the disk budget or the disk is full"),
    Number("ended", "1 once every prompt is answered"),
    Number("evaluations", "Checkpoints evaluated since this start", "counter"),
    Number("evaluations_waiting", "Checkpoints that wait for their evaluation"),
    Number("tau", "Tokens per verify of the checkpoint evaluated last, real decoding of held-out prompts"),
    Number("eta", "Speedup over plain decoding of the checkpoint evaluated last"))
TRAINER = (
    Number("connected", "1 while the trainer's link stands"),
    Number("lag", "Samples that the trainer lacks"),
    Number("lag_bytes", "Bytes of samples that the trainer lacks"),
    Number("sole_bytes", "Bytes kept for this trainer alone"),
    Number("credit", "Bytes that the trainer has granted and not used"),
    Number("away_s", "Seconds since the trainer left"))
COUNTED = {
    "checkpoints": "checkpoints received", "reports": "acceptance reports made",
    "replaced_checkpoints": "checkpoints replaced by a newer one before their turn",
    "captures_refused": "answers left out: their states cannot be right (see the log)",
    "captures_too_long": "answers left out: longer than --max-tokens",
    "corrupt": "samples found damaged on this disk and put aside", "captures_made_again": "of those, samples that a trainer needed, made again",
    "unreadable": "times a trainer needed what this box cannot read",
    "disk_errors": "checkpoints that this disk did not take", "unsaved_cursors": "saves of subscribers.json that failed",
    "refused": "connections refused: another stream, target or version", "refused_names": "connections refused: the name is another's",
    "refused_keys": "connections refused: the key is not allowed", "revoked": "links ended: their key is no longer allowed",
    "key_list_errors": "times the list of allowed keys could not be read", "malformed": "links dropped: what came was no message of ours",
    "unended": "connections closed: a message without an end",
    "strangers": "messages of somebody who had not said Hello", "replaced_links": "links replaced by a newer one of the same name",
    "forgotten": "trainers forgotten, as asked"}
SEEN = Seen("hsprod", (), NUMBERS, {"trainers": ("trainer", TRAINER)}, COUNTED)


def rows(values: dict, now: float) -> list[tuple[str, str]]:
    """status.json -> the screen.  Pure; a daemon of another version may lack a number, which is then left out."""
    n, running = values.get("numbers", {}), values.get("running", True)
    found = []
    if "next_sample" in n:
        found.append(("stream", (f"samples {n['first_sample']:,} to {n['next_sample'] - 1:,} kept" if n["next_sample"] > n["first_sample"]
                                 else f"no sample kept, {n['next_sample']:,} made") + f"; {n['tokens']:,} tokens since this start"))
        if running:
            found.append(("rate", f"{n['tokens_per_second']:.0f} tokens/s, {n['stored_bytes_per_second'] / 1e6:.2f} MB/s stored, "
                                  f"{n['sent_bytes_per_second'] / 1e6:.2f} MB/s sent"))
        found += [("compression", f"{n['ratio']:.2f}")] if n["ratio"] else []
        found.append(("disk", budget(n)))
    found += [("address", values["address"])] if values.get("address") else []
    trainers = values.get("trainers")
    found += [(f"trainer {name}", trainer(name, entry, running)) for name, entry in (trainers or {}).items()]
    if trainers == {}:
        found.append(("trainers", "none has joined this stream"))
    if "last_evaluation" in values:
        found.append(("last evaluation", values["last_evaluation"] or "none since this start"))
    return found + counted(values, COUNTED)


LONG = 3600.0                # seconds away after which the way to let go of a trainer is shown


def trainer(name: str, entry: dict, running: bool) -> str:
    """One trainer: where it stands, and what it holds up while it is away.  running: the producer does; else all this is of before."""
    connected = "connected" if running else "was connected"
    if entry["follower"]:
        return f"{connected}, takes no samples"
    behind = behind_by(entry["lag"]) if entry["lag"] else "has every sample"
    if entry["connected"]:
        return f"{connected}, {behind}, credit {size(entry['credit'])}"
    since = f"away for {ago(entry['away_s'])}" if entry["away_s"] is not None else "away"
    if not entry["lag"]:
        return f"{since}, {behind}"
    held = f", {size(entry['sole_bytes'])} of them for it alone" if entry["sole_bytes"] else ""
    advice = f". Never to come back? hsprod forget {name}" if (entry["away_s"] or LONG) >= LONG else ""
    return f"{since}, {behind}: {size(entry['lag_bytes'])} are kept{held}{advice}"

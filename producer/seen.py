"""What a person sees of the producer: its numbers, each named once for status and Prometheus, and `hsprod status` as one screen."""
from __future__ import annotations

from common.exporter import Number, Seen
from common.status import ago, size

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
SEEN = Seen("hsprod", (), NUMBERS, {"trainers": ("trainer", TRAINER)})


def rows(values: dict, now: float) -> list[tuple[str, str]]:
    """status.json -> the screen.  Pure; a daemon of another version may lack a number, which is then left out."""
    n = values.get("numbers", {})
    found = [("doing", values["doing"])]
    if "next_sample" in n:
        found += [("stream", f"samples {n['first_sample']:,} to {n['next_sample'] - 1:,} kept; {n['tokens']:,} tokens since this start"
                             if n["next_sample"] > n["first_sample"] else "no sample kept"),
                  ("rate", f"{n['tokens_per_second']:.0f} tokens/s, {n['stored_bytes_per_second'] / 1e6:.2f} MB/s stored, "
                           f"{n['sent_bytes_per_second'] / 1e6:.2f} MB/s sent; compression {n['ratio']:.2f}"),
                  ("disk", f"{size(n['disk_used_bytes'])} of {size(n['disk_budget_bytes'])}"
                           f" ({n['disk_used_bytes'] / n['disk_budget_bytes']:.0%}), {size(n['disk_free_bytes'])} free on the disk")]
    found.append(("address", values.get("address", "")))
    trainers = values.get("trainers", {})
    found += [(f"trainer {name}", trainer(name, entry, values.get("running", True))) for name, entry in trainers.items()]
    if not trainers:
        found.append(("trainers", "none has joined this stream"))
    found.append(("last evaluation", values.get("last_evaluation") or "none since this start"))
    if counts := {name: count for name, count in values.get("counters", {}).items() if count and name not in QUIET}:
        found.append(("counted", ", ".join(f"{name} {count:,}" for name, count in counts.items())))
    return found


LONG = 3600.0                # seconds away after which the way to let go of a trainer is shown
QUIET = frozenset({"samples", "tokens", "raw_bytes", "bytes"})           # shown above, in better words


def trainer(name: str, entry: dict, running: bool) -> str:
    """One trainer: where it stands, and what it holds up while it is away.  running: the producer does; else all this is of before."""
    connected = "connected" if running else "was connected"
    if entry["follower"]:
        return f"{connected}, takes no samples"
    behind = f"{entry['lag']:,} samples behind" if entry["lag"] else "has every sample"
    if entry["connected"]:
        return f"{connected}, {behind}, credit {size(entry['credit'])}"
    since = f"away for {ago(entry['away_s'])}" if entry["away_s"] is not None else "away"
    if not entry["lag"]:
        return f"{since}, {behind}"
    held = f", {size(entry['sole_bytes'])} of them for it alone" if entry["sole_bytes"] else ""
    advice = f". Never to come back? hsprod forget {name}" if (entry["away_s"] or LONG) >= LONG else ""
    return f"{since}, {behind}: {size(entry['lag_bytes'])} are kept{held}{advice}"

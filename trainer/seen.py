"""What a person sees of a trainer: its numbers, each named once for status and Prometheus, and `hstrain status` as one screen."""
from __future__ import annotations

import shutil

from common.exporter import Number, Seen
from common.status import size
from protocol.store import SampleStore

NUMBERS = (
    Number("step", "Optimisation steps done"),
    Number("steps", "Steps of the whole run"),
    Number("tokens", "Tokens trained on, re-reads included"),
    Number("steps_per_second", "Steps a second, over the last minute"),
    Number("tokens_per_second", "Tokens trained on a second, over the last minute"),
    Number("loss", "Loss of the last step"),
    Number("accuracy", "Share of supervised slots whose likeliest token is right, last step"),
    Number("waited_seconds", "Seconds without a sample to train on, since this start", "counter"),
    Number("tau", "Tokens per verify, real decoding, of the checkpoint measured last"),
    Number("tau_step", "Step of the checkpoint measured last"),
    Number("eta", "Speedup over plain decoding of the checkpoint measured last"),
    Number("first_sample", "Number of the oldest sample in this box's store"),
    Number("next_sample", "Number that the next sample will have"),
    Number("disk_used_bytes", "Bytes of samples in this box's store"),
    Number("disk_budget_bytes", "Bytes that the store may use: receiving pauses there"),
    Number("disk_free_bytes", "Bytes free on the disk"),
    Number("connected", "1 while the link to the producer stands"),
    Number("receiving", "1 where this process fills the box's store"),
    Number("lag", "Samples that the producer has and this box lacks"),
    Number("credit_bytes", "Bytes granted to the producer and not used"),
    Number("received_bytes_per_second", "Bytes of samples received a second, over the last minute"))
SEEN = Seen("hstrain", ("arm", "run_name"), NUMBERS, {})


def of_store(store: SampleStore, budget: int) -> dict:
    return {"first_sample": store.first, "next_sample": store.next, "disk_used_bytes": store.bytes_used, "disk_budget_bytes": budget,
            "disk_free_bytes": shutil.disk_usage(store.folder).free}


def rows(values: dict, now: float) -> list[tuple[str, str]]:
    """A run's status file -> the screen.  Pure; what a run does not know yet is left out."""
    n = values.get("numbers", {})
    found = [("doing", values["doing"]), ("run", values.get("run", ""))]
    if "arm" in values:
        found.append(("arm", values["arm"]))
    if "step" in n:
        found.append(("step", f"{n['step']:,} of {n['steps']:,} ({n['step'] / n['steps']:.0%}), {n['tokens']:,} tokens"))
        found.append(("rate", f"{n['steps_per_second']:.2f} steps/s, {n['tokens_per_second']:.0f} tokens/s"
                              + (f"; waited {n['waited_seconds']:.0f} s for samples" if n["waited_seconds"] >= 1 else "")))
    if "loss" in n:
        found.append(("loss", f"{n['loss']:.3f}, accuracy {n['accuracy']:.0%}"))
    found += [("acceptance", values["acceptance"])] if values.get("acceptance") else []
    found += [("offline", values["offline"])] if values.get("offline") else []
    found.append(("stream", values.get("stream", "")))
    if "receiving" in n and values.get("running", True):
        found.append(("link", link(n)))
    if "disk_used_bytes" in n:
        found.append(("disk", f"{size(n['disk_used_bytes'])} of {size(n['disk_budget_bytes'])} ({n['disk_used_bytes'] / n['disk_budget_bytes']:.0%}), "
                              f"{size(n['disk_free_bytes'])} free on the disk"))
    if counts := {name: count for name, count in values.get("counters", {}).items() if count and name not in QUIET}:
        found.append(("counted", ", ".join(f"{name} {count:,}" for name, count in counts.items())))
    return found


QUIET = frozenset({"samples", "bytes"})                     # shown above, in better words


def link(n: dict) -> str:
    if not n["connected"]:
        return "no producer"
    if not n["receiving"]:
        return "connected, for evaluations; another process receives for this box, or the stream is a stored one"
    return f"connected, {n['lag']:,} samples behind, {n['received_bytes_per_second'] / 1e6:.2f} MB/s, credit {size(n['credit_bytes'])}"

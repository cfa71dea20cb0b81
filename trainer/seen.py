"""What a person sees of a trainer: its numbers, each named once for status and Prometheus, and `hstrain status` as one screen."""
from __future__ import annotations

import shutil

from common.exporter import Number, Seen
from common.status import behind_by, budget, counted, size
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
COUNTED = {
    "rows_cut": "tokens left out: beyond --max-tokens of their sequence", "checkpoints_skipped": "checkpoints that a newer one overtook: not measured",
    "alarms": "checkpoints where real and simulated acceptance part",
    "repeated_prompts": "texts held aside whose prompt is trained on, too: they flatter",
    "samples_after_end": "samples that came after this run's stream had ended: not used",
    "corrupt": "samples found damaged on this disk and put aside", "mended": "of those, samples that came again from the producer",
    "duplicates": "samples that came twice and were kept once",
    "disk_errors": "links ended: this disk did not take what came", "refused": "connections that the producer, or this box, refused",
    "malformed": "links ended: what came was no message of ours", "unsent_offers": "checkpoints offered while no link stood: offered again later",
    "stale_reports": "acceptance reports for what was not asked any more", "stale_requests": "requests for a checkpoint that a newer one has replaced"}
SEEN = Seen("hstrain", ("arm", "run_name"), NUMBERS, {}, COUNTED)


def of_store(store: SampleStore, budget: int) -> dict:
    return {"first_sample": store.first, "next_sample": store.next, "disk_used_bytes": store.bytes_used, "disk_budget_bytes": budget,
            "disk_free_bytes": shutil.disk_usage(store.folder).free}


def counted_in(store: SampleStore) -> dict:
    return {"corrupt": store.corrupt, "duplicates": store.duplicates}


def rows(values: dict, now: float) -> list[tuple[str, str]]:
    """A run's status file -> the screen.  Pure; what a run does not know yet is left out."""
    n, running = values.get("numbers", {}), values.get("running", True)
    found = [("run", values.get("run", ""))] + ([("arm", values["arm"])] if "arm" in values else [])
    if "step" in n:
        found.append(("step", f"{n['step']:,} of {n['steps']:,} ({n['step'] / n['steps']:.0%}), {n['tokens']:,} tokens"
                              + (f"; waited {n['waited_seconds']:.0f} s for samples" if n["waited_seconds"] >= 1 else "")))
        found += [("rate", f"{n['steps_per_second']:.2f} steps/s, {n['tokens_per_second']:.0f} tokens/s")] if running else []
    if "loss" in n:
        found.append(("loss", f"{n['loss']:.3f}, accuracy {n['accuracy']:.0%}"))
    found += [(label, values[name]) for label, name in (("acceptance", "acceptance"), ("simulated", "offline")) if values.get(name)]
    if running:
        found.append(("stream", values.get("stream", "")))
        found += [("link", link(n))] if "receiving" in n else []
    elif "next_sample" in n:
        found.append(("stream", f"{n['next_sample'] - n['first_sample']:,} samples in this box's store"))
    found += [("disk", budget(n))] if "disk_used_bytes" in n else []
    return found + counted(values, COUNTED)


def link(n: dict) -> str:
    if not n["connected"]:
        return "no producer"
    if not n["receiving"]:
        return "connected, for evaluations: another run receives for this box, or the stream is a stored one"
    return f"connected, {behind_by(n['lag'])}, {n['received_bytes_per_second'] / 1e6:.2f} MB/s, credit {size(n['credit_bytes'])}"

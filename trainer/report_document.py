"""The report as plain data: what the terminal, the picture, the page and JSON all show.  Nothing is computed anywhere else.

    runs        identity and rows of each run           source      "real" (decoded by the producer) or "simulated" (on this box)
    compared    arms and pairs at equal tokens, or None with `why_not`        curves      tau by tokens and arm, over seeds
    slots, speed, simulation, divergences, alarms       shows, lacks          sentences
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from trainer import evidence, report_words
from trainer.evidence import Arm
from trainer.report_runs import RunRecord, accepted_lists, common_tokens, row_at, setting_differences

BAND_RESAMPLES = 1000        # for each point of a curve
Parted = Callable[[dict, dict | None, str], list[str]]         # trainer.offline.parted


def build(runs: Sequence[RunRecord], rng: np.random.Generator, parted: Parted, under_way: Sequence[tuple[str, int, int]] = ()) -> dict:
    """under_way: report_runs.sweeps_under_way."""
    source = "real" if any(run.rows["real"] for run in runs) else "simulated"
    judged = [run for run in runs if run.rows[source]]
    compared, why_not = comparison(judged, source, rng)
    rows = {run.name: row_at(run.rows[source], compared["tokens"]) if compared else run.rows[source][-1] for run in judged}
    made = {
        "source": source, "compared": compared, "why_not": why_not,
        "sweeps_under_way": [list(sweep) for sweep in under_way], "not_measured": [run.name for run in runs if run not in judged],
        "arms": list(dict.fromkeys(run.arm for run in runs)), "questions": questions(runs),
        "curves": curves(judged, source, rng), "slots": slots(judged, rows),
        "speed": [speed(run, rows[run.name]) for run in judged if source == "real"],
        "divergences": [{"run": run.name} | found for run in judged for found in rows[run.name].get("divergences", [])],
        "divergences_left_out": sum(rows[run.name].get("divergences_left_out", 0) for run in judged),
        "simulation": simulation(runs), "alarms": alarms(runs, parted), "settings_that_differ": setting_differences(runs),
        "runs": [{"run": run.name, "arm": run.arm, "seed": run.seed, "block_size": run.block_size, "identity": run.identity} | run.rows
                 for run in runs],
    }
    return made | report_words.sentences(made)


def questions(runs: Sequence[RunRecord]) -> dict[str, dict]:
    """{arm: {"question", "beside"}} as the arms say of themselves."""
    return {run.arm: {name: run.identity["arm"].get(name, "") for name in ("question", "beside")} for run in runs}


def comparison(runs: Sequence[RunRecord], source: str, rng: np.random.Generator) -> tuple[dict | None, str | None]:
    """(what evidence.compare found at the last common number of tokens, None), or (None, why there is no comparison)."""
    if not runs:
        return None, "nothing is measured yet"
    tokens = common_tokens([[row["tokens"] for row in run.rows[source]] for run in runs])
    if tokens is None:
        return None, "there is no number of training tokens at which all these runs were measured"
    rows = {run.name: row_at(run.rows[source], tokens) for run in runs}
    if len(hashes := {row.get("prompts_hash") for row in rows.values()}) > 1:
        said = ", ".join(sorted(str(one)[:12] for one in hashes))
        return None, f"prompts_hash differs ({said}): these runs were measured on other prompts"
    arms, unpaired, without = arms_of(runs, rows)
    found = evidence.compare(arms, rng)
    sizes = {run.arm: run.block_size for run in runs}
    prompts = found.prompts or next(iter(rows.values())).get("prompts")
    return {"tokens": tokens, "paired": found.paired, "not_paired": unpaired, "prompts": prompts, "prompts_without_blocks": without,
            "prompts_hash": next(iter(hashes)), "level": evidence.LEVEL, "resamples": evidence.RESAMPLES,
            "arms": [arm_figures(arm, found.arms[arm.name], [rows[run.name] for run in runs if run.arm == arm.name]) for arm in arms],
            "pairs": [pair_figures(pair, [sizes[pair.a], sizes[pair.b]]) for pair in found.pairs]}, None


def pair_figures(pair: evidence.Pair, block_sizes: list) -> dict:
    return asdict(pair) | {"separated": pair.separated, "outcome": pair.outcome, "verdict": pair.verdict, "block_sizes": block_sizes,
                           "block_sizes_differ": block_sizes[0] != block_sizes[1]}


def arms_of(runs: Sequence[RunRecord], rows: dict[str, dict]) -> tuple[list[Arm], str | None, int]:
    """The rows by arm; why they are not paired per prompt (None: they are); prompts left out because some run had no block there."""
    lists = {name: accepted_lists(row) for name, row in rows.items()}
    missing = sum(found is None for found in lists.values())
    if missing:
        why = f"{missing} of {len(lists)} measurements hold no accepted lists per prompt (an older version's, or too large for the link)"
    elif len({frozenset(found) for found in lists.values()}) > 1:
        why = "the runs were measured on other texts"
    else:
        names = sorted(next(iter(lists.values())))
        kept = [name for name in names if all(found[name] for found in lists.values())]
        made = [Arm.of_cells(arm, [run.seed for run in group], *(np.array([[count(lists[run.name][p]) for p in kept] for run in group])
                                                                for count in (committed, len))) for arm, group in by_arm(runs)]
        return made, None, len(names) - len(kept)
    return [Arm(arm, tuple(run.seed for run in group), np.array([rows[run.name]["tau"] for run in group], float),
                np.array([np.diff(rows[run.name]["tau_interval"])[0] / (2 * evidence.Z) for run in group])) for arm, group in by_arm(runs)], why, 0


def committed(accepted: Sequence[int]) -> int:
    """Tokens that a text's blocks committed: the target's own token of each included."""
    return sum(accepted) + len(accepted)


def by_arm(runs: Sequence[RunRecord]) -> list[tuple[str, list[RunRecord]]]:
    return [(arm, [run for run in runs if run.arm == arm]) for arm in dict.fromkeys(run.arm for run in runs)]


def arm_figures(arm: Arm, figure: evidence.Figure, rows: list[dict]) -> dict:
    def mean(name: str) -> float | None:
        found = [row[name] for row in rows if row.get(name) is not None]
        return float(np.mean(found)) if found else None
    return {"arm": arm.name, "seeds": list(arm.seeds), "taus": arm.taus.tolist(), "tau": figure.estimate, "interval": figure.interval,
            "over_prompts": figure.over_prompts} | {name: mean(name) for name in ("tau_prompt", "tau_simulated", "eta", "eta_theory",
                                                                                  "plain_tokens_per_s", "spec_tokens_per_s")}


def curves(runs: Sequence[RunRecord], source: str, rng: np.random.Generator) -> dict[str, dict]:
    """{arm: {"seeds": {seed: [[tokens, tau], ...]}, "mean": [[tokens, tau, low, high], ...]}}; the mean where every seed was measured.

    low, high: over prompts and seeds; with one seed over prompts alone.  None where there is one prompt."""
    out = {}
    for arm, group in by_arm(runs):
        mean = []
        for tokens in sorted(row["tokens"] for row in min((run.rows[source] for run in group), key=len)):
            rows = {run.name: row_at(run.rows[source], tokens) for run in group}
            if all(rows.values()):
                [one], _, _ = arms_of(group, rows)
                [figure] = evidence.compare([one], rng, BAND_RESAMPLES).arms.values()
                mean.append([tokens, figure.estimate, *(figure.interval or figure.over_prompts or (None, None))])
        out[arm] = {"seeds": {str(run.seed): [[row["tokens"], row["tau"]] for row in run.rows[source]] for run in group}, "mean": mean}
    return out


def slots(runs: Sequence[RunRecord], rows: dict[str, dict]) -> dict[str, list[float]]:
    """{arm: share of blocks whose slots 1..j were all accepted, mean over seeds}, as far as every seed was judged."""
    out = {}
    for arm, group in by_arm(runs):
        rates = [rows[run.name]["acceptance_by_slot"] for run in group]
        out[arm] = np.mean([rate[:min(map(len, rates))] for rate in rates], axis=0).tolist()
    return out


def speed(run: RunRecord, row: dict) -> dict:
    return {"run": run.name, "arm": run.arm, "seed": run.seed, "step": row["step"], "tokens": row["tokens"], "tau": row["tau"]} | {
        name: row[name] for name in ("plain_tokens_per_s", "spec_tokens_per_s", "eta", "eta_theory", "identical", "prompts")}


def simulation(runs: Sequence[RunRecord]) -> list[dict]:
    """Each real measurement beside the simulated ones: on the same texts, and of the same checkpoint on texts held aside (None: none)."""
    out = []
    for run in runs:
        aside = {row["step"]: row["tau"] for row in run.rows["simulated"]}
        out += [{"run": run.name, "arm": run.arm, "seed": run.seed, "step": row["step"], "tokens": row["tokens"], "real": row["tau"],
                 "same_texts": row["tau_simulated"], "aside": aside.get(row["step"])} for row in run.rows["real"]]
    return out


def alarms(runs: Sequence[RunRecord], parted: Parted) -> list[dict]:
    """{"run", "step", "says"}: where simulated and real acceptance part further than they may."""
    out = []
    for run in runs:
        aside = {row["step"]: row for row in run.rows["simulated"]}
        out += [{"run": run.name, "step": row["step"], "says": says} for row in run.rows["real"]
                for says in parted(row, aside.get(row["step"]), run.dtype)]
    return out

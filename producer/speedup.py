"""Table 3: the speedup that was measured, the one that the formula gives, and all that lies between the two.

    eta = L_target / (cycle / tau)          eta_theory = tau L_target / (T_t + T_d)          eta / eta_theory = (T_t + T_d) / cycle

So the gap is exactly what a cycle holds besides T_t and T_d, each item's share of the cycle being the share of eta_theory that
it costs.  The formula is filled in twice: with T_t and T_d as the loop met them, and as they are when timed alone (pieces).
The second makes two more items of the gap: short blocks at a text's end, which cost less than whole ones, and what a verify
or a draft takes in the loop beyond what it takes alone, at other contexts, among other work.  Items may be below zero."""
from __future__ import annotations

from rich.table import Table

from producer.tables import ms, percent, table

BETWEEN = ("judge", "rollback", "loop", "remainder")                 # a cycle besides draft, context and verify
SAYS = {"short": "short last blocks", "verify": "verify, loop beyond alone",
        "draft": "draft, loop beyond alone",
        "judge": "judge", "rollback": "rollback", "loop": "loop on the host", "remainder": "remainder"}


def measure(pieces: dict) -> dict:
    """pieces: of producer.pieces.  Pure."""
    cycle, alone = pieces["cycle"], pieces["alone"]
    parts, whole, step, tau = cycle["parts"], cycle["seconds"], pieces["L_target"], cycle["tau"]
    met = parts["verify"], parts["draft"] + parts["context"]
    lone = alone["verify"][-1], alone["draft"] + alone["context"]
    sized = sum(alone["verify"][v - 1] * blocks for v, blocks in cycle["sizes"].items()) / cycle["verifies"]
    gap = {part: parts[part] for part in BETWEEN}
    beyond = {"short": sized - lone[0], "verify": met[0] - sized, "draft": met[1] - lone[1]}
    return {"tau": tau, "L_target": step, "cycle": whole, "eta": tau * step / whole,
            "in_loop": formula(tau, step, whole, *met, gap), "alone": formula(tau, step, whole, *lone, beyond | gap)}


def formula(tau: float, step: float, cycle: float, t_t: float, t_d: float, gap: dict[str, float]) -> dict:
    """eta_theory, what eta is of it, and each item of the gap: seconds a cycle, and the share of eta_theory that it costs.

    t_t + t_d + the items are the cycle, so that ratio + the shares are 1.  All times in seconds."""
    return {"T_t": t_t, "T_d": t_d, "eta_theory": tau * step / (t_t + t_d), "ratio": (t_t + t_d) / cycle,
            "gap": {name: {"seconds": seconds, "share": seconds / cycle} for name, seconds in gap.items()}}


def show(measured: dict) -> list[Table]:
    first = table("3a. Speedup", "", "T_t, ms", "T_d, ms", "eta, formula", "eta, measured", "ratio",
                  note=f"eta = tau L_target / (T_t + T_d), tau {measured['tau']:.2f}, L_target {ms(measured['L_target'])} ms. T_d "
                       "holds the drafter's context.")
    for key, name in (("in_loop", "parts in the loop"), ("alone", "parts timed alone")):
        row = measured[key]
        first.add_row(name, ms(row["T_t"]), ms(row["T_d"]), f"{row['eta_theory']:.3f}", f"{measured['eta']:.3f}", f"{row['ratio']:.3f}")
    second = table("3b. What the gap is made of", "item", "ms a cycle", "of eta, loop", "of eta, alone",
                   note="What each item costs, as a share of the cycle, with the formula's parts taken in the loop or "
                        "alone; with the ratio they add up to 100 %. Below zero: it gains. "
                        "Alone are medians, the loop has means: what else the box does shows between them.")
    inner, outer = measured["in_loop"]["gap"], measured["alone"]["gap"]
    for name, item in outer.items():
        second.add_row(SAYS[name], ms(item["seconds"]), percent(inner[name]["share"]) if name in inner else "", percent(item["share"]))
    second.add_section()
    second.add_row("the whole gap", "", *(percent(1 - measured[key]["ratio"]) for key in ("in_loop", "alone")))
    return [first, second]

"""What a report shows and what it does not, in sentences made from its numbers.  No number is computed here."""
from __future__ import annotations

SHOWN_PAIRS = 6              # verdicts in the summary; the table has all
METHOD = ("Intervals are 95 %. Prompts are drawn with replacement, the same draw for every arm and seed ({resamples:,} draws); the spread "
          "over seeds is added as a t draw with one degree of freedom less than there are seeds, as two or three values cannot be drawn "
          "from; what prompts already count of it is taken out. Differences are taken prompt by prompt and, where both arms have the "
          "same seeds, seed by seed. P is two-sided; p (Holm) is corrected for all pairs, and a verdict needs it below 0.05; the "
          "intervals are not corrected. Sure: the share of draws in which the first arm is above the second. In simulated experiments "
          "without a difference this found one in 1 to 6 % of them; 5 % is what it aims at, fewer where seeds matter little.")


def sentences(document: dict) -> dict:
    """{"title", "shows": [...], "lacks": [...], "method"} of a report document without them."""
    return {"title": title(document), "shows": shows(document), "lacks": lacks(document),
            "method": METHOD.format(resamples=document["compared"]["resamples"]) if document["compared"] else ""}


def title(document: dict) -> str:
    arms, target = document["arms"], target_of(document)
    what = arms[0] if len(arms) == 1 else f"{len(arms)} arms"
    return f"Acceptance of {what}" + (f" on {target}" if target else "")


def shows(document: dict) -> list[str]:
    compared = document["compared"]
    if compared is None:
        return [f"No comparison: {document['why_not']}."]
    arms = sorted(compared["arms"], key=lambda arm: -arm["tau"])
    best = arms[0]
    out = [f"{best['arm']} {'reaches' if len(arms) == 1 else 'has the highest'} tau {best['tau']:.2f}{span(best)}: so many tokens does one verify "
           f"commit, {where(document)}, after training on {tokens_text(compared['tokens'])} tokens ({count(len(best['seeds']), 'seed')})."]
    if compared["pairs"]:
        parted = [pair for pair in compared["pairs"] if pair["separated"]]
        out.append(f"Pairs of arms that are separated: {len(parted)} of {len(compared['pairs'])}"
                   + (f"; the first {SHOWN_PAIRS} follow, the table has all." if len(parted) > SHOWN_PAIRS else "."))
        out += [f"{pair['verdict']}." for pair in parted[:SHOWN_PAIRS]]
    if best.get("eta"):
        out.append(f"Decoding with {best['arm']} ran at {best['eta']:.2f} times plain decoding's speed (eta); tau and the parts' times say "
                   f"{best['eta_theory']:.2f} (eta_theory).")
    if document["speed"]:
        same, of = (sum(row[name] for row in document["speed"]) for name in ("identical", "prompts"))
        each = "; each that is not is listed with the target's margin between its first two tokens there"
        out.append(f"{same} of {of} texts are identical to plain decoding{'' if same == of else each}.")
    out.append(f"ALARM: simulated and real acceptance part in {count(len(document['alarms']), 'measurement')}; see below." if document["alarms"]
               else "Simulated and real acceptance agree as far as they must." if document["simulation"] else
               "Acceptance was simulated on texts held aside on the trainer's box; no real decoding has been measured.")
    return out


def lacks(document: dict) -> list[str]:
    compared = document["compared"]
    out = [f"The sweep {sweep} asks for {asked} runs, of which {begun} have begun." for sweep, asked, begun in document["sweeps_under_way"]]
    if document["not_measured"]:
        out.append(f"Not measured yet, so in no figure: {', '.join(document['not_measured'])}.")
    if compared:
        out += limits_of(compared)
    if behind := [f"{run['run']} (step {max(rows)} of {steps})" for run in document["runs"]
                  if (steps := run["identity"].get("plan", {}).get("steps")) and (rows := [row["step"] for row in run[document["source"]]])
                  and max(rows) < steps]:
        out.append(f"Measured before their end: {', '.join(behind)}. A learning rate that has not come down yet holds acceptance back.")
    if differ := document["settings_that_differ"]:
        said = "; ".join(f"{name} ({', '.join(values)})" for name, values in list(differ.items())[:6])
        more = f"; and {len(differ) - 6} more" if len(differ) > 6 else ""
        out.append(f"The runs differ in more than arm and seed, so a difference may come from that: {said}{more}.")
    target = target_of(document)
    out.append(f"One target ({target or 'not named'}), one set of prompts, greedy decoding, batch 1"
               + (". Speed is of the producer's box while it measured." if document["speed"] else "; nothing here is about speed."))
    if target == "embedded":
        out.append("The embedded target is far more predictable than a real one: read no tau of it as a forecast.")
    if len(document["arms"]) > 1 and not any(name.startswith("plan.") for name in differ):
        out.append("All arms had the same recipe. Another learning rate might suit one of them better; that was not tried here.")
    return [sentence if sentence.endswith(".") else sentence + "." for sentence in out]


def limits_of(compared: dict) -> list[str]:
    """What seeds, prompts and pairing allow."""
    out, seeds = [], [len(arm["seeds"]) for arm in compared["arms"]]
    if min(seeds) == 1:
        few = [arm["arm"] for arm in compared["arms"] if len(arm["seeds"]) == 1]
        out.append(f"One seed of {', '.join(few)}: {'its interval says' if len(few) == 1 else 'their intervals say'} how these drafters would "
                   "do on other prompts, and nothing of another seed. No verdict on an arm follows; that takes two seeds, better three or more.")
    elif min(seeds) == 2:
        out.append("Two seeds: their spread is hardly known, so intervals are wide and only large differences can be separated. Three or "
                   "more tell more.")
    else:
        out.append(f"{min(seeds)} seeds an arm: small differences can stay hidden; not separated does not mean equal.")
    if compared["prompts"]:
        out.append(f"{count(compared['prompts'], 'prompt')}; others (another language, longer texts, another use) may rank the arms otherwise.")
    if compared["not_paired"] and compared["pairs"]:
        out.append(f"Not paired: {compared['not_paired']}. Differences are between arms' own intervals and wider than they need be.")
    if any(not pair["seeds_paired"] for pair in compared["pairs"]):
        out.append("Some arms have other seeds than others: those pairs are not paired by seed.")
    if compared["prompts_without_blocks"]:
        out.append(f"{count(compared['prompts_without_blocks'], 'prompt')} gave no block to some run and stayed out.")
    if mixed := [pair for pair in compared["pairs"] if pair["block_sizes_differ"]]:
        sizes = sorted({size for pair in mixed for size in pair["block_sizes"]}, key=lambda size: size or 0)
        out.append(f"Block sizes differ ({', '.join(map(str, sizes))}): a larger block can accept more and costs more a verify, so tau alone "
                   "does not rank those arms; look at eta.")
    return out


def target_of(document: dict) -> str:
    return next((name for run in document["runs"] if (name := run["identity"].get("target"))), "")


def where(document: dict) -> str:
    prompts = document["compared"]["prompts"]
    return (f"in real decoding of {prompts} held-out prompts" if document["source"] == "real"
            else f"simulated on {prompts or 'some'} texts held aside")


def span(figure: dict) -> str:
    """' (95 %: 4.1 to 4.5)', saying where it is over prompts alone; '' without an interval."""
    if figure["interval"]:
        return " (95 %: {:.2f} to {:.2f})".format(*figure["interval"])
    return " (95 % over prompts: {:.2f} to {:.2f})".format(*figure["over_prompts"]) if figure["over_prompts"] else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def tokens_text(tokens: float) -> str:
    """929k, 1.2M: at most three digits."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"

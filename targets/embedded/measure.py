"""What the trained folder can do, as figures for README.md: held-out bits, and the answers to the shipped prompts.

    OMP_WAIT_POLICY=passive python targets/embedded/measure.py --model producer/data/embedded

Answers are judged as text: did it end, does it loop, are the asked names in it, is it exactly the template's answer.
Weights are read as float32, so the bf16 rounding of the file is in the figures and bf16 arithmetic is not.
"""
import argparse, json, pathlib, random, statistics, time
from collections import defaultdict
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import corpus
from train import END, PAD, answer_bits, held_out, question

LIMIT = 192     # tokens of an answer, <|end|> included


@torch.no_grad()
def answer(model, tok, draws: list[corpus.Draw], temperature: float) -> list[list[int]]:
    """Ids of each answer, <|end|> kept if it came. Prompts of one length form a batch, so nothing is padded."""
    by_length = defaultdict(list)
    for i, draw in enumerate(draws):
        ids = tok(question(draw)).input_ids
        by_length[len(ids)].append((i, ids))
    answers: list[list[int]] = [[] for _ in draws]
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for length, items in by_length.items():
        out = model.generate(torch.tensor([ids for _, ids in items]), max_new_tokens=LIMIT, pad_token_id=PAD, eos_token_id=END, **how)
        for (i, _), row in zip(items, out[:, length:].tolist()):
            answers[i] = row[:row.index(END) + 1] if END in row else row
    return answers


@torch.no_grad()
def entropy(model, tok, draw: corpus.Draw, ids: list[int]) -> list[float]:
    """Bits of the target's distribution at each token of its own answer."""
    prompt = tok(question(draw)).input_ids
    logp = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1].float().log_softmax(-1)
    return (-(logp.exp() * logp).sum(-1) / torch.log(torch.tensor(2.0))).tolist()


def repeats(ids: list[int], n: int = 8) -> float:
    """Share of the n-grams that came before in the same answer."""
    grams = [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def bare(text: str, kind: str) -> str:
    """The answer without its opening, which is free to differ."""
    for opening in sorted(corpus.OPENINGS.get(kind, ("",)), key=len, reverse=True):
        if text.startswith(opening):
            return text[len(opening):]
    return text


def judge(model, tok, draws: list[corpus.Draw], temperature: float) -> dict:
    answers = answer(model, tok, draws, temperature)
    texts = [tok.decode(ids, skip_special_tokens=True) for ids in answers]
    lengths = [len(ids) for ids in answers]
    exact = [bare(text, d.kind) == bare(d.answer, d.kind) for d, text in zip(draws, texts)]
    right_by_kind = defaultdict(list)
    for d, right in zip(draws, exact):
        right_by_kind[d.kind].append(right)
    bits = [b for d, ids in zip(draws[:200], answers) for b in entropy(model, tok, d, ids)]
    figures = {
        "answers": len(draws),
        "ended": statistics.mean(ids[-1] == END for ids in answers),
        "over half repeated 8-grams": statistics.mean(repeats(ids) > 0.5 for ids in answers),
        "mean repeated 8-grams": statistics.mean(map(repeats, answers)),
        "first name in answer": statistics.mean(d.names[0] in text for d, text in zip(draws, texts)),
        "all names in answer": statistics.mean(all(n in text for n in d.names) for d, text in zip(draws, texts)),
        "exactly the template": statistics.mean(exact),
        "entropy, bits a token": statistics.mean(bits),
        "tokens, mean": statistics.mean(lengths), "tokens, median": statistics.median(lengths)}
    return ({k: round(v, 3) for k, v in figures.items()}
            | {"exact by kind": {kind: round(statistics.mean(v), 2) for kind, v in right_by_kind.items()}})


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", type=pathlib.Path, required=True)
    ap.add_argument("--prompts", type=int, default=640, help="how many of the shipped prompts")
    ap.add_argument("--show", type=int, default=0, help="also print so many sampled answers")
    a = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tok = AutoTokenizer.from_pretrained(a.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(a.model, local_files_only=True, dtype=torch.float32).eval()
    began = time.monotonic()

    def report(name: str, figures) -> None:
        print(name, json.dumps(figures), f"({time.monotonic() - began:.0f} s)", flush=True)

    prompts = corpus.shipped(random.Random(2024))[:a.prompts]
    report("greedy", judge(model, tok, prompts, 0.0))
    report("greedy, held-out words only", judge(model, tok, [d for d in prompts if d.held_words], 0.0))
    report("greedy, known words only", judge(model, tok, [d for d in prompts if not d.held_words], 0.0))
    report("T=0.7", judge(model, tok, prompts[:160], 0.7))
    held = held_out(400)
    report("held-out shapes, greedy", judge(model, tok, held["held-out shapes"][:40], 0.0))
    report("answer bits a token", {name: round(answer_bits(model, tok, draws), 3) for name, draws in held.items()})
    for draw, ids in zip(prompts, answer(model, tok, prompts[:a.show], 0.7)):
        print(f"\n<< {draw.prompt}\n{tok.decode(ids)}")


if __name__ == "__main__":
    main()

"""Train the embedded target: a tiny qwen3_5_moe chat model of corpus.py, small enough to live in the repository.

    OMP_WAIT_POLICY=passive python targets/embedded/train.py --minutes 40 --threads 1 --out producer/data/embedded

Why: the demo and the tests need a real model of the user's own architecture (3 Gated DeltaNet layers + 1 attention,
twice, each with routed experts) that is predictable, does not loop and needs no download. One pass over fresh draws:
no draw is kept or seen twice on purpose. The learning rate follows the clock, not a step count, so that a slow machine
also ends with a cooled-down model. Left out: several devices, resuming, padding (windows are filled with whole
conversations and the last one is cut).
"""
import argparse, json, math, pathlib, random, time
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5Tokenizer

import corpus

SPECIAL = ("<|endoftext|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")   # ids 0..6
PAD, MASK, END = (SPECIAL.index(s) for s in ("<|pad|>", "<|mask|>", "<|end|>"))
TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
WINDOW = 256            # tokens of one training row
BATCH = 8               # rows of one step: small and frequent leaves the early plateau sooner
PROMPT_WEIGHT = 0.3     # of a prompt token's loss; an answer's token counts 1
TOP_K = 2               # experts per token
MUON_LR, ADAM_LR = 0.02, 3e-3
FLAT = 0.5              # share of the time at the full rate; then linear to zero


def question(draw: corpus.Draw) -> str:
    return f"<|user|>\n{draw.prompt}<|end|>\n<|assistant|>\n"


def train_tokenizer(rng: random.Random, vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocab` ids over the pieces that Qwen3.5's tokenizer cuts.

    AutoTokenizer sees the model type and puts that very splitting in place of whatever tokenizer.json says, so the
    merges have to be learned on it.
    """
    qwen = Qwen3_5Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    draws = (corpus.training_draw(rng) for _ in range(8000))
    bpe.train_from_iterator((f"{d.prompt}\n{d.answer}" for d in draws), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>", mask_token="<|mask|>", chat_template=TEMPLATE,
        additional_special_tokens=list(SPECIAL), model_max_length=4096, clean_up_tokenization_spaces=False)


def make_config(vocab: int) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(
        vocab_size=vocab, hidden_size=128, num_hidden_layers=8, tie_word_embeddings=False, max_position_embeddings=4096,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
        num_experts=8, num_experts_per_tok=TOP_K, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        eos_token_id=END, pad_token_id=PAD, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [4, 2, 2], "mrope_interleaved": True})


def make_model(vocab: int) -> Qwen3_5MoeForCausalLM:
    model = Qwen3_5MoeForCausalLM._from_config(make_config(vocab)).float()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):       # spread the heads' memory: half-lives of about 1 to 500 tokens
            heads = len(layer.linear_attn.A_log)
            layer.linear_attn.A_log.data = torch.linspace(0, math.log(8), heads)
            layer.linear_attn.dt_bias.data = torch.linspace(-5, -2, heads)
    return model


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by Newton-Schulz (Keller Jordan, 2024).

    torch.optim.Muon takes matrices only; here a parameter (..., r, c) is a stack of them, as experts are, and all
    matrices of one shape are orthogonalized as one batch, which halves the time of a step of a model this small.
    """
    def __init__(self, params, lr: float, momentum: float = 0.95, decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["momentum"])
                    by_shape.setdefault(p.shape[-2:], []).append((p, p.grad.lerp(mean, group["momentum"])))
            for (rows, cols), pairs in by_shape.items():
                stacked = orthogonal(torch.cat([u.view(-1, rows, cols) for _, u in pairs]))
                parts = stacked.split([p.numel() // (rows * cols) for p, _ in pairs])
                for (p, _), part in zip(pairs, parts):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(part.view_as(p), alpha=-group["lr"] * max(1, rows / cols) ** 0.5)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """x (N, r, c) -> (N, r, c): all singular values brought near 1."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(4):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return (x.mT if tall else x).contiguous()


def optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices that mix features; AdamW for tables, gates, convolutions and vectors."""
    no_muon = ("embed", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")
    mixing, others = [], []
    for name, p in model.named_parameters():
        (others if p.ndim < 2 or any(part in name for part in no_muon) else mixing).append(p)
    return [Muon(mixing, MUON_LR), torch.optim.AdamW(others, ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def encode(tok: PreTrainedTokenizerFast, draw: corpus.Draw) -> tuple[list[int], list[float]]:
    """Ids of one conversation and the loss weight of each; the newline after <|end|> closes it."""
    prompt, answer = tok(question(draw)).input_ids, tok(draw.answer + "<|end|>\n").input_ids
    return prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)


def make_batch(tok, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (BATCH, WINDOW+1) int64 and weights (BATCH, WINDOW+1) float; every row starts with a conversation."""
    rows = []
    for _ in range(BATCH):
        ids, weights = [], []
        while len(ids) <= WINDOW:
            more, their = encode(tok, corpus.training_draw(rng))
            ids, weights = ids + more, weights + their
        rows.append((ids[:WINDOW + 1], weights[:WINDOW + 1]))
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights for _, weights in rows])


def balance_loss(router_logits: list[torch.Tensor]) -> torch.Tensor:
    """Switch Transformer's: mean over layers of E * sum_e(share of tokens * mean probability); 1 when all is even.

    router_logits  one (tokens, E) a layer
    """
    p = torch.stack(router_logits).float().softmax(-1)
    used = F.one_hot(p.topk(TOP_K, -1).indices, p.shape[-1]).sum(2).float().mean(1) / TOP_K      # (layers, E)
    return p.shape[-1] * (used * p.mean(1)).sum(-1).mean()


@torch.no_grad()
def answer_bits(model, tok, draws: list[corpus.Draw]) -> float:
    """Mean loss of the answers' tokens, <|end|> included, in bits per token; each conversation alone."""
    total = count = 0
    for draw in draws:
        ids, weights = encode(tok, draw)
        loss = F.cross_entropy(model(torch.tensor([ids[:-2]])).logits[0].float(), torch.tensor(ids[1:-1]), reduction="none")
        answer = loss[torch.tensor(weights[1:-1]) == 1]
        total, count = total + answer.sum().item(), count + len(answer)
    return total / count / math.log(2)


def held_out(n: int) -> dict[str, list[corpus.Draw]]:
    rng = random.Random(77)
    return {name: [make(rng) for _ in range(n)] for name, make in (
        ("new draws", corpus.new_draw), ("held-out words", corpus.rare_draw), ("held-out shapes", corpus.shape_draw))}


def save(model, tok, out: pathlib.Path) -> None:
    """The folder that AutoModelForCausalLM and AutoTokenizer load; weights in bf16, about 6 MB."""
    half = Qwen3_5MoeForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.config.dtype = torch.bfloat16
    half.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=False, max_new_tokens=192)
    half.save_pretrained(out)
    tok.save_pretrained(out)


def train(minutes: float, seed: int, out: pathlib.Path) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tok = train_tokenizer(rng, 1024)
    model = make_model(len(tok)).train()
    opts = optimizers(model)
    rates = [opt.defaults["lr"] for opt in opts]
    routed: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda m, x, y, i=i: routed.__setitem__(i, y[0]))
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "vocab": len(tok)}), flush=True)

    total, used, step, shown, recent = minutes * 60, 0.0, 0, 0.0, []      # seconds of training, evaluation not counted
    while used < total:
        began = time.monotonic()
        scale = min(1, (step + 1) / 30, max(0.01, (1 - used / total) / (1 - FLAT)))
        for opt, rate in zip(opts, rates):
            for group in opt.param_groups:
                group["lr"] = rate * scale
        ids, weights = make_batch(tok, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (each * weight).sum() / weight.sum()
        (loss + 0.01 * balance_loss([routed[i] for i in sorted(routed)])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        recent.append(each.detach()[weight == 1].mean().item() / math.log(2))
        step, used = step + 1, used + time.monotonic() - began
        if used >= shown + 120 or used >= total:
            shown = used
            model.eval()
            bits = {name: round(answer_bits(model, tok, draws), 3) for name, draws in held_out(400 if used >= total else 24).items()}
            model.train()
            print(json.dumps({"s": round(used), "step": step, "tokens": step * BATCH * WINDOW, "train bits": round(sum(recent) / len(recent), 3),
                              "held-out bits": bits}), flush=True)
            recent.clear()
            save(model, tok, out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--minutes", type=float, default=40.0, help="training time")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", type=pathlib.Path, required=True, help="folder of the model")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.set_flush_denormal(True)
    train(a.minutes, a.seed, a.out)

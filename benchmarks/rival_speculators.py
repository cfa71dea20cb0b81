"""speculators 0.9.0's DFlash, as its own trainer drives it, in a process of its own (rivals.py).

    build, step, peak     one training step at a time, on a random capture: step.py
    train                 a whole run of its default recipe on stored captures, weights out: recipes.py
    hidden                what a stored drafter gives for one capture: the networks are compared before the runs are

Its own: the model with its anchors, masks, losses and metrics; packing (CollateFn); optimisers; the schedule; every default.
Bypassed: the file layer (vLLM or Arrow files on the way in), because captures come from our store, and the Trainer class,
which puts the model on a GPU.  Its losses are the eager ones, the fused ones being Triton kernels for a GPU.  Two things are
set to what the captures are: verifier_norm is the identity, since final states are stored behind it; embedding and heads share
one tensor where it would hold three copies."""
from __future__ import annotations

import json
import time

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.train.config.schema import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
from torch import Tensor, nn
from transformers import (
    Qwen3Config,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from benchmarks import rivals
from benchmarks.random_capture import embedding_of, random_capture
from common.capture import from_bf16

CLIP = 1.0                                               # as its Trainer has it
NOT_SAVED = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
held: dict = {}                                          # what build left for step and peak


def settings(**changed) -> dict:
    """Its command line's values, defaults resolved for DFlash, with some changed."""
    return TrainConfig.from_flat(TrainConfig(speculator_type="dflash").flatten() | {"loss_implementation": "eager"} | changed).flatten()


def model_of(shape: dict, embedding: Tensor, head: Tensor, seed: int) -> DFlashDraftModel:
    """shape: config.json of one of our drafters.  Its taps are counted from 1 here."""
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
            "rms_norm_eps", "max_position_embeddings", "layer_types", "rope_parameters", "attention_bias", "tie_word_embeddings",
            "use_sliding_window", "sliding_window")
    layers = Qwen3Config(**{name: shape[name] for name in same if name in shape}, max_window_layers=0)
    if list(layers.layer_types) != list(shape["layer_types"]) or layers.sliding_window != shape.get("sliding_window"):
        raise ValueError(f"Qwen3Config made {layers.layer_types}, window {layers.sliding_window} of {shape}")
    layers._attn_implementation = "sdpa"
    dflash = shape["dflash_config"]
    config = DFlashSpeculatorConfig(transformer_layer_config=layers, draft_vocab_size=shape["vocab_size"], block_size=dflash["block_size"],
                                    aux_hidden_state_layer_ids=[tap + 1 for tap in dflash["target_layer_ids"]],
                                    mask_token_id=dflash["mask_token_id"])
    torch.manual_seed(seed)
    model = DFlashDraftModel(config)
    for part, weight in ((model.embed_tokens, embedding), (model.lm_head, head), (model.verifier_lm_head, head)):
        part.weight = nn.Parameter(weight, requires_grad=False)
    model.verifier_norm = nn.Identity()
    return model


def trainer_parts(model: nn.Module, chosen: dict, steps: int) -> tuple[list, list]:
    """Its optimisers and its schedules."""
    names = TrainerConfig._fields
    config = TrainerConfig(**{k: v for k, v in chosen.items() if k in names} | {
        "num_epochs": 1, "save_path": "", "max_steps": steps, "hidden_states_dtype": torch.float32})
    optimizers = build_optimizers(model, config)
    warmup, total = _resolve_scheduler_steps(config, steps)
    make = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[config.scheduler_type]
    return optimizers, [make(o, num_warmup_steps=warmup, num_training_steps=total) for o in optimizers]


def one_step(model: nn.Module, optimizers: list, batch: dict, call: dict) -> dict:
    """As in Trainer.train_epoch, in fp32: its metrics come with the loss.  {loss, slots}."""
    _, loss, metrics = model(**batch, **call)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for optimizer in optimizers:
        optimizer.step()
    return {"loss": loss.item(), "slots": int(metrics["full_acc_total"]), "tau": float(metrics["eal_sum"] / metrics["eal_total"])}


def item(ids: np.ndarray, mask: np.ndarray, taps: np.ndarray, final: np.ndarray) -> dict:
    """One capture as its dataset gives it: taps (K, T, H) and final (T, H) bf16 bits."""
    tokens = len(ids)
    return {"hidden_states": torch.from_numpy(from_bf16(np.ascontiguousarray(taps.transpose(1, 0, 2)))).flatten(1),
            "input_ids": torch.from_numpy(ids).long(), "verifier_last_hidden_states": torch.from_numpy(from_bf16(final)),
            "loss_mask": torch.from_numpy(mask), "lengths": torch.tensor([tokens]), "position_ids": torch.arange(tokens)}


def pack(items: list[dict], length: int) -> dict:
    hidden = items[0]["verifier_last_hidden_states"].shape[1]
    batch = CollateFn(length, hidden, items[0]["hidden_states"].shape[1] // hidden, torch.float32)(items)
    batch.pop("error_records")
    return batch


def build(shape: dict, tokens: int, anchors: int, loss: str, weights: str, optimizer: str, threads: int) -> dict:
    torch.set_num_threads(threads)
    embedding = embedding_of(shape)
    model = model_of(shape, embedding, embedding, seed=0).train()
    chosen = settings(loss_fn=loss, per_position_loss_weight=weights, optimizer=optimizer, max_anchors=anchors)
    optimizers, _ = trainer_parts(model, chosen, steps=1000)
    capture = random_capture(shape, tokens)
    held.update(model=model, optimizers=optimizers, call=DFlashDraftModel.get_trainer_kwargs(**chosen)[0],
                batch=pack([item(capture.ids, capture.loss_mask, capture.taps, capture.final)], tokens),
                seconds=[rivals.timed(o) for o in optimizers], peak=rivals.Peak())
    return {"resident": held["peak"].before, "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)}


def step() -> dict:
    begin = time.perf_counter()
    made = one_step(held["model"], held["optimizers"], held["batch"], held["call"])
    return made | {"seconds": time.perf_counter() - begin, "optimizer": sum(s.pop() for s in held["seconds"])}


def peak() -> dict:
    return {"peak": held["peak"].bytes()}


def train(captures: str, order: list[list[int]], shape: dict, seed: int, anchors: int, changed: dict, out: str, threads: int) -> dict:
    """captures: a file of recipes.py.  order: samples of each step, packed into one row.  changed: values of its command line.

    Writes its weights to `out` under our drafter's names, which are the same."""
    torch.set_num_threads(threads)
    data = load_file(captures)
    model = model_of(shape, data["embedding"], data["head"], seed).train()
    chosen = settings(**{"max_anchors": anchors} | changed)
    optimizers, schedules = trainer_parts(model, chosen, len(order))
    call = DFlashDraftModel.get_trainer_kwargs(**chosen)[0]
    items = {i: item(*(data[f"{i}.{name}"].numpy() for name in ("ids", "mask", "taps", "final"))) for i in {i for row in order for i in row}}
    longest = max(sum(len(items[i]["input_ids"]) for i in row) for row in order)
    torch.manual_seed(seed + 1)                          # anchors come from the global generator
    begin, last = time.monotonic(), []
    for row in order:
        last.append(one_step(model, optimizers, pack([items[i] for i in row], longest), call))
        for schedule in schedules:
            schedule.step()
    save_file({name: value.contiguous() for name, value in model.state_dict().items() if not name.startswith(NOT_SAVED)}, out)
    used = ("loss_fn", "per_position_loss_weight", "dpace_alpha", "max_anchors", "optimizer", "lr", "muon_lr", "weight_decay",
            "muon_weight_decay", "muon_momentum", "muon_adjust_lr_fn", "scheduler_type", "sliding_window")
    tail = last[-50:]
    return {"settings": {name: chosen[name] for name in used}, "seconds": time.monotonic() - begin,
            "loss": sum(m["loss"] for m in tail) / len(tail), "tau_training": sum(m["tau"] for m in tail) / len(tail)}


@torch.no_grad()
def hidden(captures: str, index: int, shape: dict, weights: str, out: str, seed: int) -> dict:
    """What the weights give for capture `index` at the anchors its code draws: {hidden (N*B, H), anchors (N,)} into `out`."""
    data = load_file(captures)
    model = model_of(shape, data["embedding"], data["head"], 0).eval()
    missing, extra = model.load_state_dict(load_file(weights), strict=False)
    if extra or any(not name.startswith(NOT_SAVED) for name in missing):
        raise ValueError(f"missing {missing}, extra {extra}")
    one = item(*(data[f"{index}.{name}"].numpy() for name in ("ids", "mask", "taps", "final")))
    torch.manual_seed(seed)
    anchors = int(one["loss_mask"][:-shape["dflash_config"]["block_size"]].sum())
    y, _, _, _, where = model._backbone_forward(**pack([one], len(one["input_ids"])), max_anchors=anchors)
    save_file({"hidden": y[0].contiguous(), "anchors": where[::model.block_size].contiguous()}, out)
    return {"anchors": anchors}


if __name__ == "__main__":
    rivals.serve({"build": build, "step": step, "peak": peak, "train": train, "hidden": hidden,
                  "settings": lambda: json.loads(json.dumps(settings(), default=str))})

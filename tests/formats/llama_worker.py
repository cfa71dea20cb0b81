"""llama.cpp (xllamacpp's) in a process of its own: what it decodes, and each block that its drafter gave it.

A fault of its own ends this process, not the tests.  Standard input: one line of JSON; its log goes to standard error; the answer,
one line of JSON, to standard output.  A draft's tokens stand in the log alone, at verbosity 5."""
from __future__ import annotations

import json
import os
import sys

import xllamacpp as x


def server(target: str, draft: str | None, most: int) -> x.Server:
    params = x.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = target, 512, 1, False
    drafts = params.speculative.draft
    for cpu in (params.cpuparams, params.cpuparams_batch, drafts.cpuparams, drafts.cpuparams_batch):
        cpu.n_threads = 1
    params.verbosity = 5 if draft else 1
    if draft:
        drafts.mparams.path, drafts.n_max, drafts.n_min, drafts.p_min = draft, most, 0, 0.0
        params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
    return x.Server(params)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.readline())
    running, out = server(asked["target"], asked["draft"], asked["most"]), []
    for ids in asked["prompts"]:
        print(f"PROMPT {len(out)}", file=sys.stderr, flush=True)
        got = running.handle_completions({"prompt": ids, "n_predict": asked["new"], "temperature": 0, "cache_prompt": False, "logprobs": 1,
                                          "ignore_eos": True})
        out.append([entry["id"] for entry in got["choices"][0]["logprobs"]["content"]])
    print(json.dumps(out), file=answers, flush=True)


if __name__ == "__main__":
    main()

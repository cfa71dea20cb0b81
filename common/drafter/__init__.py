"""The drafter: the small DFlash network that both boxes run.

config: its shape, and the released file layout       geometry: anchors, positions, labels, visibility, each once
layers, model, cache: plain torch, two entrances      acceptance: what a draft is worth, in the loop and simulated
checkpoint: a folder that is whole or refused

The target's embedding and head are no part of it (they are frozen, and the target's): callers pass embedded blocks and
apply the head.  Nothing here imports transformers."""

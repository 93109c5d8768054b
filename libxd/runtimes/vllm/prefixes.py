"""What was seen of prefix caching: tokens that were not fed, beside vLLM's own count of them. Pure."""

from __future__ import annotations

import numpy as np

from libxd.runtimes.protocol import Observation
from libxd.sequences import Sequences


def observed(sequences: Sequences, block_size: int, caches: bool, not_fed: int, hits: int) -> Observation:
    """Knob rollout.enable_prefix_caching.

    caches: whether the cache manager keeps prefixes; not_fed: tokens that a sequence began with and that only another
    one fed; hits: tokens that vLLM says it took from its cache. True and False need all three to agree, with each other
    and with what could be hit: where prompts share a block something must be, where a prompt begins as another
    sequence goes on something may be, and elsewhere the manager alone tells.
    """
    must, may = shared_prompts(sequences, block_size) > 0, shared_sequences(sequences, block_size) > 0
    evidence = {"manager": caches, "not_fed": not_fed, "hits": hits, "block_size": block_size, "could_hit": may}
    fits = (caches and may) if hits else not (caches and must)
    return Observation(caches if fits and not_fed == hits else None, evidence)


def shared_prompts(sequences: Sequences, block_size: int) -> int:
    """How many whole blocks of prompts the prompt of an earlier sequence begins with, too.

    The block that holds a prompt's last token does not count: that token is always computed.
    """
    return _shared(sequences, block_size, sequences.cu_seqlens[:-1] + sequences.prompt_lens)


def shared_sequences(sequences: Sequences, block_size: int) -> int:
    """The same of blocks that any other sequence begins with, what it answers included."""
    return _shared(sequences, block_size, sequences.cu_seqlens[1:], whatever_order=True)


def _shared(sequences: Sequences, size: int, ends: np.ndarray, whatever_order: bool = False) -> int:
    """ends [B]: up to where each sequence's blocks may serve others."""
    usable, serving = [], []
    for first, prompt, end in zip(sequences.cu_seqlens, sequences.prompt_lens, ends, strict=False):
        ids = sequences.token_ids[first:end]
        usable.append([ids[:stop].tobytes() for stop in range(size, int(prompt), size)])
        serving.append({ids[:stop].tobytes() for stop in range(size, len(ids) + 1, size)})
    found = 0
    for s, prefixes in enumerate(usable):
        others = serving[:s] + (serving[s + 1 :] if whatever_order else [])
        found += sum(any(prefix in held for held in others) for prefix in prefixes)
    return found

"""What was seen of prefix caching: tokens that were not fed, beside vLLM's own count of them. Pure."""

from __future__ import annotations

from collections import Counter

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
    found, seen = 0, set()
    for s, prompt in enumerate(sequences.prompt_lens.tolist()):
        keys = _keys(sequences, s, prompt, block_size)
        found += sum(key in seen for key in keys[: (prompt - 1) // block_size])
        seen.update(keys)
    return found


def shared_sequences(sequences: Sequences, block_size: int) -> int:
    """The same of blocks that any other sequence begins with, what it answers included."""
    lengths = np.diff(sequences.cu_seqlens).tolist()
    keys = [_keys(sequences, s, length, block_size) for s, length in enumerate(lengths)]
    held = Counter(key for each in keys for key in each)
    prompts = zip(keys, sequences.prompt_lens.tolist(), strict=True)
    return sum(held[key] > 1 for each, prompt in prompts for key in each[: (prompt - 1) // block_size])


def _keys(sequences: Sequences, sequence: int, length: int, size: int) -> list[int]:
    """A hash for each whole block of a sequence's first `length` tokens, of it and of all that stand before it."""
    first, key, keys = sequences.span(sequence).start, 0, []
    for begin in range(first, first + length - size + 1, size):
        key = hash((key, sequences.token_ids[begin : begin + size].tobytes()))
        keys.append(key)
    return keys

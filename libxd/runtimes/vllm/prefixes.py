"""What was seen of prefix caching: tokens that were not fed, beside vLLM's own count of them. Pure."""

from __future__ import annotations

from libxd.runtimes.protocol import Observation
from libxd.sequences import Sequences


def observed(sequences: Sequences, block_size: int, caches: bool, not_fed: int, hits: int) -> Observation:
    """Knob rollout.enable_prefix_caching.

    caches: whether the cache manager keeps prefixes; not_fed: tokens that a sequence began with and that only another
    one fed; hits: tokens that vLLM says it took from its cache. True and False need all three to agree; where
    no two prompts begin with the same block, the manager alone tells.
    """
    could_hit = shared_blocks(sequences, block_size) > 0
    evidence = {"manager": caches, "not_fed": not_fed, "hits": hits, "block_size": block_size, "could_hit": could_hit}
    agree = not_fed == hits and (hits > 0) == (caches and could_hit)
    return Observation(caches if agree else None, evidence)


def shared_blocks(sequences: Sequences, block_size: int) -> int:
    """How many whole blocks of prompts some earlier sequence's prompt begins with, too.

    The block that holds a prompt's last token does not count: that token is always computed.
    """
    seen: set[bytes] = set()
    found = 0
    for s in range(sequences.num_sequences):
        first, prompt = sequences.span(s).start, int(sequences.prompt_lens[s])
        ids = sequences.token_ids[first : first + prompt]
        usable = [ids[:end].tobytes() for end in range(block_size, prompt, block_size)]
        found += sum(prefix in seen for prefix in usable)
        seen.update(ids[:end].tobytes() for end in range(block_size, prompt + 1, block_size))
    return found

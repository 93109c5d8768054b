"""The paged KV cache of the rollout engine: blocks of keys and values, their owners, and prefixes that are shared.

A block holds BLOCK_TOKENS consecutive tokens of a sequence, for every layer and tensor-parallel rank. Block b of a
sequence belongs to context-parallel rank b mod world size. A shared prefix is the same block object in two tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK_TOKENS = 4
#: what a block is found by: the prefix that it ends, as (id, position, attended) a token
Prefix = tuple[tuple[int, int, bool], ...]


@dataclass
class Block:
    """keys, values [layer][rank]: [BLOCK_TOKENS, G, D] in the compute dtype.

    attended: whether a token may be seen, in order; origin: which token of the flat batch was fed to fill it.
    """

    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    attended: list[bool] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)


class BlockTable:
    """The cache of one sequence: its blocks in order. `length` counts the tokens whose keys are or will be there.

    `first_cell` is where in the flat batch the sequence begins.
    """

    def __init__(self, pool: BlockPool, first_cell: int) -> None:
        self._pool = pool
        self._first_cell = first_cell
        self.blocks: list[Block] = []
        self.length = 0

    def share(self, block: Block) -> None:
        """Take over a full block that another sequence fills."""
        assert self.length % BLOCK_TOKENS == 0
        self.blocks.append(block)
        self.length += BLOCK_TOKENS

    def reserve(self, attended: list[bool]) -> None:
        """Make room for the tokens that the next forward computes, one an entry."""
        for seen in attended:
            if self.length % BLOCK_TOKENS == 0:
                self.blocks.append(self._pool.allocate())
            self.blocks[-1].attended.append(seen)
            self.blocks[-1].origin.append(self._first_cell + self.length)
            self.length += 1

    def write(self, layer: int, rank: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, G, D] of tokens start … start + n of this sequence."""
        done = 0
        while done < keys.shape[0]:
            index, slot = divmod(start + done, BLOCK_TOKENS)
            count = min(BLOCK_TOKENS - slot, keys.shape[0] - done)
            self.blocks[index].keys[layer][rank][slot : slot + count] = keys[done : done + count]
            self.blocks[index].values[layer][rank][slot : slot + count] = values[done : done + count]
            done += count

    def shards(self, layer: int, rank: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """A context-parallel rank at a time: keys, values [S, G, D], token indices int64 [S], attended bool [S]."""
        world_size = self._pool.context_parallel_size
        for owner in range(world_size):
            owned = range(owner, len(self.blocks), world_size)
            if not owned:
                continue
            counts = [len(self.blocks[index].attended) for index in owned]
            yield (
                torch.cat([self.blocks[i].keys[layer][rank][:n] for i, n in zip(owned, counts, strict=True)]),
                torch.cat([self.blocks[i].values[layer][rank][:n] for i, n in zip(owned, counts, strict=True)]),
                torch.cat([torch.arange(n) + i * BLOCK_TOKENS for i, n in zip(owned, counts, strict=True)]),
                torch.tensor([seen for index in owned for seen in self.blocks[index].attended]),
            )

    def attended(self) -> list[bool]:
        """A token at a time, whether later ones may see it."""
        return [seen for block in self.blocks for seen in block.attended]

    def origins(self) -> list[int]:
        """A token at a time, which token of the flat batch its keys and values were computed from."""
        return [cell for block in self.blocks for cell in block.origin]


class BlockPool:
    """Allocates blocks and, where prefixes are cached, finds full ones by the prefix that they end.

    A pool lives for one scoring, so that hits, and with them the row counts of the products, follow from the request.
    """

    def __init__(
        self, layers: int, ranks: int, context_parallel_size: int, block_shape: tuple[int, int], dtype: torch.dtype,
        share_prefixes: bool,
    ) -> None:  # fmt: skip
        self.context_parallel_size = context_parallel_size
        self.share_prefixes = share_prefixes
        self.allocated = self.lookups = self.hits = 0
        self._layers, self._ranks, self._shape, self._dtype = layers, ranks, (BLOCK_TOKENS, *block_shape), dtype
        self._by_prefix: dict[Prefix, Block] = {}

    @property
    def kept(self) -> int:
        """How many prefixes can be found."""
        return len(self._by_prefix)

    def allocate(self) -> Block:
        self.allocated += 1
        return Block(
            [[torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._ranks)] for _ in range(self._layers)],
            [[torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._ranks)] for _ in range(self._layers)],
        )

    def table(self, prompt: Prefix, first_cell: int) -> BlockTable:
        """A table for a prompt, with room for all of it; full blocks of its prefix are shared where that is on.

        The last token is never shared: its hidden state is what the first sampled token comes from.
        """
        table = BlockTable(self, first_cell)
        if self.share_prefixes:
            while table.length + BLOCK_TOKENS < len(prompt):
                self.lookups += 1
                block = self._by_prefix.get(prompt[: table.length + BLOCK_TOKENS])
                if block is None:
                    break
                self.hits += 1
                table.share(block)
        shared = table.length
        table.reserve([attended for _, _, attended in prompt[shared:]])
        if self.share_prefixes:  # found from now on: this forward writes a layer's keys before it reads any
            for end in range(shared + BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
                self._by_prefix[prompt[:end]] = table.blocks[end // BLOCK_TOKENS - 1]
        return table

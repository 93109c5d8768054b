"""The shapes of the synthetic decoders, and the names of their parameters as a Hugging Face Llama names them."""

from __future__ import annotations

from dataclasses import dataclass

from libxd.errors import XdError

#: what the process of a scorer computes on
THREADS = 1


@dataclass(frozen=True)
class Geometry:
    """A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape; a matrix is [out, in]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = layer_prefix(layer)
            named |= {
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.q_proj.weight": (queries, self.hidden),
                f"{prefix}self_attn.k_proj.weight": (keys, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (keys, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, queries),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return named | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def parameter_count(self) -> int:
        total = 0
        for shape in self.shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


GEOMETRIES = {
    "xd-smoke-1": Geometry(hidden=64, layers=2, heads=8, kv_heads=4, head_dim=8, intermediate=192, vocab=320),
}


def of(synthetic: dict[str, object] | None) -> Geometry:
    """The geometry of an identity's synthetic checkpoint; XdError for a real checkpoint or an unknown name."""
    name = (synthetic or {}).get("name")
    if name not in GEOMETRIES:
        raise XdError(
            "cpu-smoke scores its synthetic models only",
            code="no-such-model",
            path="/identity/checkpoint/synthetic",
            found=synthetic,
            expected=" or ".join(GEOMETRIES),
        )
    return GEOMETRIES[str(name)]

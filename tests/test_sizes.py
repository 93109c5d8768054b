"""What adapters reckon with: a model's sizes by its config, under whatever names."""

from __future__ import annotations

import json

import pytest

from libxd.errors import XdError
from libxd.runtimes import sizes

LLAMA = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}  # fmt: skip


def of(place, config):
    (place / "config.json").write_text(json.dumps(config))
    return sizes.of_model(str(place))


def test_what_a_config_says_is_taken(tmp_path):
    assert of(tmp_path, LLAMA) == LLAMA
    assert of(tmp_path, {"text_config": LLAMA, "hidden_size": 7}) == LLAMA


def test_what_it_leaves_out_follows_from_the_rest(tmp_path):
    required = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    assert of(tmp_path, {**required, "head_dim": None}) == {
        **required, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 128,
    }  # fmt: skip


def test_other_names_of_the_same(tmp_path):
    """As GPT-2 has them."""
    found = of(tmp_path, {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": None})
    assert (found["hidden_size"], found["num_hidden_layers"], found["num_attention_heads"]) == (32, 2, 4)


@pytest.mark.parametrize("name", ["vocab_size", "num_attention_heads", "head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -1, "4", 4.0, True])
def test_a_size_that_is_none_is_named(tmp_path, name, value):
    with pytest.raises(XdError, match="does not say how large the model is") as caught:
        of(tmp_path, {**LLAMA, name: value})
    assert (caught.value.status, caught.value.path) == (65, f"/{name}")


def test_a_size_that_is_missing_is_named(tmp_path):
    with pytest.raises(XdError) as caught:
        of(tmp_path, {name: size for name, size in LLAMA.items() if name != "hidden_size"})
    assert caught.value.path == "/hidden_size"


def test_the_cache_of_a_token():
    assert sizes.token_cache(LLAMA, 2) == 2 * 2 * 2 * 16 * 2

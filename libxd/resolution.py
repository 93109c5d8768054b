"""The names in a config's identity -> digests of what they name, and where it lies.

What is not at hand stays null and is listed as missing; a digest that the config gives must be what is found. Nothing
here needs numpy or torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libxd import canon, checkpoint
from libxd.errors import Status, XdError, of_exception

#: what of a directory makes up a tokenizer: names, and how a rank file's name ends
TOKENIZER_FILES = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
})  # fmt: skip
_TOKENIZER_RANKS = ".tiktoken"
_MODEL_FILES = ("config.json", "adapter_config.json")
_MODEL_SUFFIXES = (".safetensors", ".safetensors.index.json", ".py")
MODEL_FACTS = ("num_attention_heads", "num_key_value_heads", "vocab_size")
#: what a scorer shows of the frozen tokens, and what their digest covers: where a prompt ends decides batches, too
OBSERVED_DIGESTS = ("token_ids", "selected_ids", "cu_seqlens", "active_mask", "attention_mask", "positions")
SEQUENCE_DIGESTS = (*OBSERVED_DIGESTS, "prompt_lens")
SEQUENCE_COUNTS = ("num_sequences", "num_tokens", "num_active")


@dataclass
class Resolution:
    """A resolved identity: `identity` as the rows hold it, `locations` of its files, what is `missing`, `issues`."""

    where: str
    base: Path
    identity: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, str | None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    issues: list[XdError] = field(default_factory=list)

    def lack(self, part: str, reason: str) -> None:
        self.missing.append(f"/identity/{part}: {reason}")

    def at(self, part: str, path: str | None) -> Path | None:
        """Where the config's relative path leads; None, and noted as missing, when nothing is there."""
        if path is None:
            self.lack(part, "no path is given")
            return None
        found = Path(os.path.normpath(self.base / path))
        try:
            os.stat(found)
        except (FileNotFoundError, NotADirectoryError):
            self.lack(part, f"not at hand: {path} (relative to the config)")
            return None
        except OSError as error:  # a name too long, a folder that may not be entered
            refused = of_exception(error, self.where)
            refused.path = f"/identity/{part}/path"
            self.issues.append(refused)
            return None
        return found

    def pin(self, part: str, given: str | None, found: str | None) -> str | None:
        """The digest of a part: what was found, else what the config gives; both must agree."""
        if found and given and found != given:
            self.issues.append(XdError(
                f"the {part} found is not the one that is declared", code="digest-differs", where=self.where,
                path=f"/identity/{part}/digest", found=found, expected=given,
                hint="correct the digest, or put the right files there"))  # fmt: skip
        return found or given


def resolve(declared: dict[str, Any], base: Path, where: str) -> Resolution:
    """Resolve a config's `identity` (accepted by its schema); paths are relative to `base`."""
    result = Resolution(where, base)
    checkpoint = _checkpoint(declared["checkpoint"], result)
    tokenizer = _tokenizer(declared["tokenizer"], result)
    sequences = _sequences(declared["sequences"], tokenizer, result)
    result.identity = {
        "checkpoint": checkpoint,
        "tokenizer": tokenizer,
        "sequences": sequences,
        "semantics": declared["semantics"],
        "rollout_mode": declared["rollout_mode"],
        "cache_policy": declared["cache_policy"],
        "model_state": declared["model_state"],
        "model": _model(declared.get("model"), result),
    }
    _check_cache_policy(declared, result)
    return result


def checkpoint_files(directory: str | os.PathLike[str], *, weights: bool = True) -> dict[str, str]:
    """File name -> digest, of all in a checkpoint directory that decides what a model computes.

    That is every weight file and its index, the config, what makes an adapter of it, and code that it brings along.
    weights False: without the tensor files, which are large.
    """
    return _digests(directory, lambda name: _decides(name) and (weights or not holds_weights(name)))


def holds_weights(name: str) -> bool:
    """Whether a checkpoint's file holds tensors, rather than saying what to do with them."""
    return name.endswith(".safetensors")


def _decides(name: str) -> bool:
    return name in _MODEL_FILES or name.endswith(_MODEL_SUFFIXES)


def tokenizer_files(directory: str | os.PathLike[str]) -> dict[str, str]:
    """File name -> digest, of every file of a directory that makes up a tokenizer."""
    return _digests(directory, lambda name: name in TOKENIZER_FILES or name.endswith(_TOKENIZER_RANKS))


def _digests(directory: str | os.PathLike[str], wanted: Callable[[str], bool]) -> dict[str, str]:
    try:
        names = [name for name in sorted(os.listdir(directory)) if wanted(name)]
        return {name: canon.digest_file(Path(directory) / name) for name in names}
    except OSError as error:
        raise XdError(f"cannot be read: {error.strerror}", status=Status.MISSING, code="unreadable",
                      where=str(error.filename or directory)) from error


def _files(part: str, directory: Path, read: Callable[[Path], dict[str, str]], result: Resolution) -> dict[str, str]:
    """The files map of a part; {} with an issue when it cannot be read."""
    try:
        return read(directory)
    except XdError as error:
        result.issues.append(XdError(f"{error.where}: {error.message}", status=error.status, code=error.code,
                                     where=result.where, path=f"/identity/{part}/path"))
        return {}


def _checkpoint(declared: dict[str, Any], result: Resolution) -> dict[str, Any]:
    result.locations["checkpoint"] = None
    given = declared.get("digest")
    synthetic = declared.get("synthetic")
    if synthetic is not None:
        synthetic = synthetic | {"seed": int(synthetic["seed"])}
        digest = result.pin("checkpoint", given, canon.digest(synthetic))
        return {"digest": digest, "files": {}, "synthetic": synthetic}
    directory = result.at("checkpoint", declared.get("path"))
    files = _files("checkpoint", directory, checkpoint_files, result) if directory else {}
    if directory and not ("config.json" in files and any(name.endswith(".safetensors") for name in files)):
        result.lack("checkpoint", f"no config.json or no safetensors file in {declared['path']}")
        files = {}
    if files:
        result.locations["checkpoint"] = str(directory)
    digest = result.pin("checkpoint", given, canon.digest(files) if files else None)
    return {"digest": digest, "files": files, "synthetic": None}


def _tokenizer(declared: dict[str, Any], result: Resolution) -> dict[str, Any]:
    result.locations["tokenizer"] = None
    path, given = declared.get("path"), declared.get("digest")
    identity = {"id": declared["id"], "policy": declared["policy"], "digest": None, "files": {}}
    if declared["policy"] == "token_ids":
        if path or given:
            result.issues.append(XdError("policy token_ids has no tokenizer to name", code="contradiction",
                                         where=result.where, path="/identity/tokenizer"))
        return identity
    directory = result.at("tokenizer", path)
    files = _files("tokenizer", directory, tokenizer_files, result) if directory else {}
    if directory and not files:
        result.lack("tokenizer", f"no tokenizer file in {path}")
    if files:
        result.locations["tokenizer"] = str(directory)
    digest = result.pin("tokenizer", given, canon.digest(files) if files else None)
    return identity | {"digest": digest, "files": files}


def _sequences(declared: dict[str, Any], tokenizer: dict[str, Any], result: Resolution) -> dict[str, Any]:
    result.locations["sequences"] = None
    path, given = declared.get("path"), declared.get("digest")
    unknown = dict.fromkeys((*SEQUENCE_DIGESTS, *SEQUENCE_COUNTS)) | {"digest": given, "packing": "none"}
    file = result.at("sequences", path)
    if file is None:
        return unknown
    from libxd import sequences

    try:
        identity = sequences.identity(file)
    except XdError as error:
        result.issues += [XdError(issue.line(), status=issue.status, code=issue.code, where=result.where,
                                  path="/identity/sequences/path") for issue in error.issues]  # fmt: skip
        return unknown
    result.locations["sequences"] = str(file)
    _check_sampler(sequences.header(file), tokenizer, result)
    return identity | {"digest": result.pin("sequences", given, identity["digest"])}


def _check_sampler(header: dict[str, Any], tokenizer: dict[str, Any], result: Resolution) -> None:
    """Ids mean something under the tokenizer alone that made them. Another model may well score them: off-policy."""
    made_by = (header.get("tokenizer") or {}).get("digest")
    if made_by and tokenizer["digest"] and made_by != tokenizer["digest"]:
        result.issues.append(XdError(
            "the sequences were made with another tokenizer than the one declared", code="tokenizer-differs",
            where=result.where, path="/identity/sequences/path", found=made_by, expected=tokenizer["digest"],
            hint="sample with this tokenizer, or name the one they were made with"))  # fmt: skip


def _model(declared: dict[str, Any] | None, result: Resolution) -> dict[str, int] | None:
    """The model's sizes, from its config.json when that is at hand; declared ones must agree with it."""
    facts = {name: int(declared[name]) for name in MODEL_FACTS} if declared else None
    found = _config_facts(result) if result.locations["checkpoint"] else {}
    for name, value in found.items():
        if facts and facts[name] != value:
            result.issues.append(XdError(
                f"{name} is not what the checkpoint's config.json says", code="model-differs", where=result.where,
                path=f"/identity/model/{name}", found=facts[name], expected=value))  # fmt: skip
    if facts is None and set(found) == set(MODEL_FACTS):
        facts = found
    if facts is None:
        result.lack("model", "sizes are neither declared nor in the checkpoint's config.json")
    elif facts["num_attention_heads"] % facts["num_key_value_heads"]:
        result.issues.append(XdError(
            "the key-value heads do not divide the attention heads", code="indivisible", where=result.where,
            path="/identity/model/num_key_value_heads", found=facts["num_key_value_heads"]))  # fmt: skip
    return facts


def _config_facts(result: Resolution) -> dict[str, int]:
    try:
        return model_facts(result.locations["checkpoint"])
    except XdError as error:
        result.issues += [XdError(issue.line(), status=issue.status, code=issue.code, where=result.where,
                                  path="/identity/checkpoint/path") for issue in error.issues]  # fmt: skip
        return {}


def model_facts(directory: str | os.PathLike[str]) -> dict[str, int]:
    """MODEL_FACTS as far as a checkpoint's config.json says them. XdError 66 or 65."""
    config = checkpoint.config_of(directory)
    facts = {name: config.get(name) for name in MODEL_FACTS}
    if facts["num_key_value_heads"] is None:  # without grouped-query attention it is left out
        facts["num_key_value_heads"] = facts["num_attention_heads"]
    return {name: value for name, value in facts.items() if type(value) is int and value > 0}


def _check_cache_policy(declared: dict[str, Any], result: Resolution) -> None:
    policy = declared["cache_policy"]
    if declared["rollout_mode"] == "decode" and policy["rollout"] == "forbidden":
        result.issues.append(XdError("mode decode goes through the KV cache that the policy forbids",
                                     code="contradiction", where=result.where, path="/identity/cache_policy/rollout"))
    if policy["training"] == "kv_cache":
        result.issues.append(XdError("teacher forcing is one pass and keeps no KV cache", code="contradiction",
                                     where=result.where, path="/identity/cache_policy/training",
                                     found="kv_cache", expected="forbidden or allowed"))

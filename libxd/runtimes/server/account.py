"""What a server says of itself, and of it what changes numbers: read strictly, without paths. No torch, no numpy.

`/v1/models` is OpenAI's. vLLM has `/version`, `/metrics` (with the settings of its cache), and, started with
VLLM_SERVER_DEV_MODE=1, `/server_info` with its whole configuration. What is not there, or not of the type that it
should have, is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from libxd import strictjson
from libxd.environment import VARIABLES
from libxd.errors import Status, XdError
from libxd.knobs import DTYPES
from libxd.runtimes.server.client import WHERE, Client

_CACHE_LINE = re.compile(rb"^vllm:cache_config_info\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def of(client: Client) -> tuple[str, dict[str, Any]]:
    """(The model's name as the server wants it asked for, the account).

    The account is JSON: `model` (of a path its last part), `max_model_len`, `version`, and `config`: knobs by the last
    part of their names, and what else decides numbers. XdError 65 for what is no OpenAI-compatible server, 69 for one
    of several models; otherwise as the client's.
    """
    models = _json(client.get("/v1/models"))
    cards = models.get("data") if isinstance(models, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) and _text(card.get("id")) for card in cards):
        raise XdError("what listens there is no OpenAI-compatible server: it has no list of models at /v1/models",
                      code="not-a-server", where=WHERE)  # fmt: skip
    if len(cards) != 1:
        raise XdError("the server has several models, or none, and which is meant cannot be told", code="many-models",
                      status=Status.REFUSED, where=WHERE, found=len(cards), expected="one model")  # fmt: skip
    name = cards[0]["id"]
    version = _json(client.get("/version"))
    return name, {
        "model": _last_part(name),
        "max_model_len": _number(cards[0].get("max_model_len")),
        "version": _text(version.get("version")) if isinstance(version, dict) else None,
        "config": _configuration(_json(client.get("/server_info?config_format=json")), client.get("/metrics")),
    }


def _configuration(info: Any, metrics: bytes | None) -> dict[str, Any]:
    """What is shown of how the engine was built."""
    shown = info.get("vllm_config") if isinstance(info, dict) else None
    values = {name: read(_at(shown, *place)) for name, (place, read) in _PLACES.items()}
    if values["enable_prefix_caching"] is None:
        values["enable_prefix_caching"] = _cache_labels(metrics or b"").get("enable_prefix_caching")
    variables = _at(info, "vllm_env")
    if isinstance(variables, dict):
        values["variables"] = {name: variables[name] for name in VARIABLES if name in variables}
    ranks = [_number(_at(shown, "parallel_config", f"{kind}_context_parallel_size")) for kind in ("decode", "prefill")]
    values["context_parallel_size"] = None if None in ranks else max(ranks)
    return {name: value for name, value in values.items() if value is not None}


def _cache_labels(metrics: bytes) -> dict[str, Any]:
    """Of the one line of metrics that has the cache's settings; of several engines' lines, nothing."""
    lines = _CACHE_LINE.findall(metrics)
    if len(lines) != 1:
        return {}
    said = dict(_LABEL.findall(lines[0].decode("utf-8", "replace")))
    known = {"True": True, "False": False}
    return {"enable_prefix_caching": known.get(said.get("enable_prefix_caching", ""))}


def _at(value: Any, *place: str) -> Any:
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _json(body: bytes | None) -> Any:
    """None for what is no strict JSON."""
    try:
        return None if body is None else strictjson.loads(body, WHERE)
    except XdError:
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _dtype(value: Any) -> str | None:
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    return name if name in DTYPES else None


def _last_part(name: str) -> str:
    """A model that is named by a path, by its last part: no file holds a path."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "./", "../", "~")) else name


#: name in `config` -> where vLLM's configuration has it, and of what type
_PLACES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "dtype": (("model_config", "dtype"), _dtype),
    "tensor_parallel_size": (("parallel_config", "tensor_parallel_size"), _number),
    "enable_prefix_caching": (("cache_config", "enable_prefix_caching"), _truth),
    "enforce_eager": (("model_config", "enforce_eager"), _truth),
    "logprobs_mode": (("model_config", "logprobs_mode"), _text),
    "quantization": (("model_config", "quantization"), _text),
    "cache_dtype": (("cache_config", "cache_dtype"), _text),
    "block_size": (("cache_config", "block_size"), _number),
    "chunked_prefill": (("scheduler_config", "enable_chunked_prefill"), _truth),
    "max_num_batched_tokens": (("scheduler_config", "max_num_batched_tokens"), _number),
    "max_num_seqs": (("scheduler_config", "max_num_seqs"), _number),
    "pipeline_parallel_size": (("parallel_config", "pipeline_parallel_size"), _number),
    "data_parallel_size": (("parallel_config", "data_parallel_size"), _number),
    "attention_backend": (("attention_config", "backend"), _text),
    "device": (("device_config", "device"), _text),
}

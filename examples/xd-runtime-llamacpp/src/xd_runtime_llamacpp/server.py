"""llama.cpp's server in this process: one slot, one token a request, and what it says and saves of itself."""

from __future__ import annotations

import http.client
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import xllamacpp

from libxd.errors import Status, XdError
from xd_runtime_llamacpp import slot

_FILE = "slot"
#: added to the frozen token's logit when the server samples, so that it samples that one; its logprobs are those before
_FORCED = 1e9


@dataclass(frozen=True)
class Answer:
    """What the server says of one request.

    ids: the sampled tokens that it gives a logprob for; logprobs float32 [V], by id, in nats, those of the first of
    them (None: not asked for, or none given); cached, fed: prompt tokens that were in the slot, that were computed.
    """

    ids: list[int]
    logprobs: np.ndarray | None
    cached: int
    fed: int


class Server:
    """A server on a GGUF file, whose context holds `length` tokens; the cache is in float32."""

    def __init__(self, path: Path, length: int, vocabulary: int, threads: int) -> None:
        self._saved = tempfile.TemporaryDirectory(prefix="xd-llamacpp-")
        self._vocabulary = vocabulary
        self.params = _params(path, length, threads, self._saved.name)
        self._server = xllamacpp.Server(self.params)
        # one that never answered waits for its own loop for ever when it is to end
        self.ask([0], 0, logprobs=False, reuse=False)

    def ask(self, ids: list[int], token: int, *, logprobs: bool, reuse: bool) -> Answer:
        """Have it feed `ids` and sample `token`. reuse: what the slot holds of them need not be fed again.

        XdError 70 when the server refuses the request or answers in another form.
        """
        request = {
            "prompt": ids, "n_predict": 1, "n_probs": self._vocabulary if logprobs else 0, "cache_prompt": reuse,
            "samplers": [], "logit_bias": [[token, _FORCED]], "ignore_eos": False,
        }  # fmt: skip
        said: list[str] = []
        self._server.handle_completions(json.dumps(request), said.append)
        value = json.loads(said[0]) if said else {}
        if "error" in value or "choices" not in value:
            raise XdError(f"llama.cpp's server does not answer: {value.get('error', value)}", status=Status.BUG,
                          code="engine-error")  # fmt: skip
        entries = (value["choices"][0].get("logprobs") or {}).get("content") or []
        timings = value["timings"]
        found = _by_id(entries[0]["top_logprobs"], self._vocabulary) if logprobs and entries else None
        return Answer([entry["id"] for entry in entries], found, timings["cache_n"], timings["prompt_n"])

    def slot(self) -> slot.Slot:
        """What the slot holds now. XdError 70 when the server does not save it, 69 for a layout that is not known."""
        answered = self._post("/slots/0?action=save", {"filename": _FILE})
        path = Path(self._saved.name, _FILE)
        if not path.exists():
            raise XdError(f"llama.cpp's server does not save its slot: {answered}", status=Status.BUG,
                          code="engine-error")  # fmt: skip
        raw = path.read_bytes()
        path.unlink()
        return slot.read(raw)

    def properties(self) -> dict[str, Any]:
        """What the server says of its model and its slots."""
        return self._call("GET", "/props", None)

    def close(self) -> None:
        """End the server; its threads end with it."""
        del self._server
        self._saved.cleanup()

    def _post(self, target: str, value: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", target, json.dumps(value))

    def _call(self, method: str, target: str, body: str | None) -> dict[str, Any]:
        """By the loopback address that it listens on; no proxy is asked."""
        address = urlsplit(self._server.listening_address)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        try:
            connection.request(method, target, body, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


def _params(path: Path, length: int, threads: int, saved: str) -> xllamacpp.CommonParams:
    """Nothing between the weights and the logprobs but what float32 does: no repacking, no other types, no shifting."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.no_extra_bufts = True
    params.n_gpu_layers = 0
    params.fit_params = False
    params.n_ctx = length
    params.n_batch = params.n_ubatch = length  # a prompt goes through in one forward
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.ctx_shift = False
    params.cache_ram_mib = 0  # a slot that was given up is not brought back
    params.n_ctx_checkpoints = 0
    params.warmup = False
    params.slot_save_path = saved + "/"
    params.endpoint_slots = True
    params.verbosity = 0
    return params


def _by_id(entries: list[dict[str, Any]], vocabulary: int) -> np.ndarray:
    """float32 [V]. XdError 70 unless there is one entry an id."""
    ids = np.array([entry["id"] for entry in entries], np.int64)
    if len(ids) != vocabulary or not np.array_equal(np.sort(ids), np.arange(vocabulary)):
        raise XdError("llama.cpp's server gives logprobs of another vocabulary", status=Status.BUG,
                      code="engine-output", found=len(set(ids.tolist())), expected=vocabulary)  # fmt: skip
    logprobs = np.empty(vocabulary, np.float32)
    # JSON has no infinity: a probability of zero comes as null or as the lowest float
    logprobs[ids] = [-np.inf if entry["logprob"] is None else entry["logprob"] for entry in entries]
    return logprobs

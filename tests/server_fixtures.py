"""A small OpenAI-compatible server in a thread, with a model of pairs of ids behind it and faults to switch on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 128
NAME = "a-lab/tiny"
#: what vLLM's /server_info says, as far as it is read
INFO = {
    "vllm_config": {
        "model_config": {"dtype": "torch.float32", "enforce_eager": True, "logprobs_mode": "raw_logprobs",
                         "quantization": None, "model": "/somewhere/else"},
        "parallel_config": {"tensor_parallel_size": 1, "decode_context_parallel_size": 1,
                            "prefill_context_parallel_size": 1},
        "cache_config": {"enable_prefix_caching": False, "block_size": 16},
    },
    "vllm_env": {"VLLM_BATCH_INVARIANT": False, "VLLM_CACHE_ROOT": "/somewhere/else/cache"},
}  # fmt: skip
METRICS = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="0"} 1.0\n'


def pairs(seed: int = 3) -> Callable[[list[int]], list[float]]:
    """A model: the logprob of each token but the first, given the one before it; float32 values."""
    logits = np.random.default_rng(seed).normal(0, 2, (VOCABULARY, VOCABULARY))
    table = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    return lambda ids: table[ids[:-1], ids[1:]].tolist()


class FakeServer:
    """Answers while it stands; `fault` names what is wrong with its completions, `requests` holds what was asked."""

    def __init__(self, model: Callable[[list[int]], list[float]], info: Any, metrics: str | None) -> None:
        self.model = model
        self.info = info
        self.metrics = metrics
        self.names = [NAME]
        self.max_model_len: Any = 64
        self.fault = ""
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.close_after_answer = False
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    # -- what it says of itself

    def page(self, path: str) -> Any:
        """JSON, text, or None for a place that is not there."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": name, "max_model_len": self.max_model_len, "created": 17}
                                               for name in self.names]}  # fmt: skip
        return {"/version": {"version": "9.9"}, "/metrics": self.metrics, "/server_info": self.info}.get(path)

    # -- completions

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(i, ids) for i, ids in enumerate(request["prompt"])]
        spoil = _SPOILED.get(self.fault)
        if spoil:
            spoil(choices[-1])
        if self.fault == "fewer-choices":
            del choices[-1]
        choices.reverse()  # they have an index, and need no order
        return {"object": "text_completion", "choices": choices, "usage": {},
                "model": "another" if self.fault == "other-model" else request["model"]}  # fmt: skip

    def _choice(self, index: int, ids: list[int]) -> dict[str, Any]:
        entries = [{str(token): {"logprob": value, "rank": 1, "decoded_token": None}}
                   for token, value in zip(ids[1:], self.model(ids), strict=True)]  # fmt: skip
        return {"index": index, "text": "x", "token_ids": [0], "prompt_token_ids": list(ids),
                "prompt_logprobs": [None, *entries]}  # fmt: skip

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def setup(self) -> None:
                super().setup()
                server.connections += 1

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                found = server.page(self.path.partition("?")[0])
                if found is None:
                    self.say(404, b"nothing here")
                else:
                    self.say(200, found.encode() if isinstance(found, str) else json.dumps(found).encode())

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(request)
                fault = server.fault
                if fault == "hangs-up":
                    self.close_connection = True
                elif fault.startswith("status-"):
                    error = {"error": {"message": "it will\nnot do", "type": "Error", "code": 0}}
                    self.say(int(fault.removeprefix("status-")), json.dumps(error).encode())
                else:
                    body = json.dumps(server.completion(request)).encode()
                    if fault == "broken-json":
                        body = body[:-2]
                    if fault == "a-page":
                        body = b"<html>welcome</html>"
                    if fault.startswith("in-parts"):
                        self.say_in_parts(body, whole=fault == "in-parts")
                    else:
                        self.say(200, body, len(body) // 2 if fault == "dies" else len(body))

            def say(self, status: int, body: bytes, sent: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:sent])
                if server.close_after_answer or sent not in (None, len(body)):
                    self.close_connection = True

            def say_in_parts(self, body: bytes, whole: bool) -> None:
                """Chunked, and with an end only when whole."""
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for first in range(0, len(body), 100):
                    part = body[first : first + 100]
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                if whole:
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.close_connection = True

        return Handler


def _last(choice: dict[str, Any], value: Any) -> None:
    (entry,) = choice["prompt_logprobs"][-1].values()
    entry["logprob"] = value


def _rename(choice: dict[str, Any]) -> None:
    (entry,) = choice["prompt_logprobs"][-1].values()
    choice["prompt_logprobs"][-1] = {str(VOCABULARY - 1): entry}


#: fault -> what it does to the last choice
_SPOILED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "null": lambda choice: _last(choice, None),
    "stands-in-for-minus-infinity": lambda choice: _last(choice, -9999.0),
    "minus-infinity": lambda choice: _last(choice, float("-inf")),
    "nan": lambda choice: _last(choice, float("nan")),
    "a-text": lambda choice: _last(choice, "-1.5"),
    "a-logit": lambda choice: _last(choice, 3.5),
    "fewer-logprobs": lambda choice: choice["prompt_logprobs"].pop(),
    "no-logprobs": lambda choice: choice.update(prompt_logprobs=None),
    "no-ids": lambda choice: choice.pop("prompt_token_ids"),
    "other-id": lambda choice: choice["prompt_token_ids"].__setitem__(0, VOCABULARY - 1),
    "other-ids-logprob": _rename,
}


@contextmanager
def serving(
    model: Callable[[list[int]], list[float]] | None = None, info: Any = INFO, metrics: str | None = METRICS
) -> Iterator[FakeServer]:
    """A server that stands meanwhile."""
    server = FakeServer(model or pairs(), info, metrics)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()

"""What of a row a running server can answer, by what it says of itself. No torch, and no connection while planning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from libxd import environment as environments
from libxd import knobs, planner
from libxd.errors import Status, XdError
from libxd.runtimes.protocol import EngineContext, KnobRecord, SidePlan

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Engine

NAME = "server"
#: knobs that are settings of the server: the name's last part is what the server's account calls them
SETTINGS = tuple(f"rollout.{name}" for name in (
    "tensor_parallel_size", "context_parallel_size", "dtype", "enable_prefix_caching", "enforce_eager",
))  # fmt: skip
#: what a server of other logprobs than raw ones gives in their place, as vLLM names it
_LOGITS = ("raw_logits", "processed_logits")


class Server:
    """The runtime; rollout alone. It builds nothing: the server is as it was started, and elsewhere."""

    name = NAME
    version = "1"
    sides = frozenset({"rollout"})
    registers_smoke_operators = False
    operator_inputs: frozenset[str] = frozenset()

    def account(self) -> dict[str, Any]:
        """What the server at $XD_SERVER_URL says of itself. XdError when it does not answer."""
        from libxd.runtimes.server import account
        from libxd.runtimes.server.client import Client

        client = Client(_url())
        try:
            return account.of(client)[1]
        finally:
            client.close()

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """Pure: the server's account stands in the environment. A setting that it does not show is unobservable, one
        that it shows to be another is unsupported.
        """
        said = environment.get("servers", {}).get(NAME)
        config = said["config"] if said else {}
        records = [_record(knob, planner.requested(row, side, knob.path), config) for knob in knobs.of_side(side)]
        return SidePlan(
            records,
            engine={"server": said, "mode": row["identity"]["rollout_mode"]},
            construction={"mode": row["identity"]["rollout_mode"]},
            context={},
            process={"server": said},
            refusals=_refusals(row, said),
        )

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """0: what the server holds, it holds already."""
        return 0

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        from libxd.runtimes.server.engine import RolloutEngine

        return RolloutEngine(_url(), plan["engine"]["server"])


def _url() -> str:
    url = environments.url(NAME)
    if url is None:
        raise XdError("no server is named", status=Status.REFUSED, code="no-server",
                      where="$" + environments.url_variable(NAME), expected="http://HOST:PORT")  # fmt: skip
    return url


def _record(knob: knobs.Knob, requested: Any, config: dict[str, Any]) -> KnobRecord:
    if knob.path in SETTINGS:
        return _setting(knob, requested, config.get(knob.path.rpartition(".")[2]))
    if knob.path == "batch.size":
        how = "so many prompts in one request: the server has them in flight together"
        return KnobRecord(knob.path, requested, requested, "applied", knob.lifecycle, how)
    if requested == "native":
        how = "the server takes logprobs itself: with what, from which weights, cannot be seen from outside"
        return KnobRecord(knob.path, requested, requested, "unobservable", knob.lifecycle, how)
    reason = f"a server's logprobs are its own (native): {requested} cannot be bound into it from outside"
    return KnobRecord(knob.path, requested, None, "unsupported", knob.lifecycle, reason)


def _setting(knob: knobs.Knob, requested: Any, shown: Any) -> KnobRecord:
    if knob.path == "rollout.enable_prefix_caching" and requested is True:
        reason = "vLLM shares no prefix of a request that asks for prompt logprobs, and no other request is made"
        return KnobRecord(knob.path, requested, None, "unsupported", "process", reason)
    if shown is None:
        reason = "a setting of the running server, which does not show it (vLLM does, with VLLM_SERVER_DEV_MODE=1)"
        return KnobRecord(knob.path, requested, requested, "unobservable", "process", reason)
    if shown == requested:
        return KnobRecord(knob.path, requested, requested, "applied", "process", "the server says that it runs so")
    reason = f"the server runs with {json.dumps(shown)}; start one with {json.dumps(requested)}"
    return KnobRecord(knob.path, requested, None, "unsupported", "process", reason)


def _refusals(row: dict[str, Any], said: dict[str, Any] | None) -> list[str]:
    """Reasons that belong to no knob."""
    identity, reasons = row["identity"], []
    if said is None:
        variable = environments.url_variable(NAME)
        reasons.append(f"no server is named: set {variable} to the http://HOST:PORT of a running one")
    if identity["rollout_mode"] != "prefill":
        reasons.append(
            "an OpenAI-compatible API takes no tokens to decode: a server samples its own, and a request a token feeds "
            "pieces of the prompt again, which is no decoding; mode prefill, by prompt logprobs, is what can be asked"
        )
    if identity["checkpoint"]["synthetic"]:
        reasons.append("a server has a checkpoint, no synthetic model")
    if identity["semantics"]["logprobs"] != "raw":
        reasons.append("prompt logprobs are raw ones: nothing is done to the logits before them")
    config = said["config"] if said else {}
    if config.get("logprobs_mode") in _LOGITS:
        reasons.append(f"the server gives {config['logprobs_mode']} in the place of logprobs")
    if "quantization" in config:
        reasons.append(f"the server's weights are quantised ({config['quantization']}), and no checkpoint's then")
    return reasons

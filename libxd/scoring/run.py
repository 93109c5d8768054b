"""One attempt's way through an engine, and what it leaves: a readback, and scores when nothing is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd import schema
from libxd.errors import Status, XdError
from libxd.operators.session import Operator
from libxd.runtimes.protocol import Engine, Scores
from libxd.scoring import evidence, readback, score_file
from libxd.scoring.evidence import Snapshot
from libxd.scoring.readback import Refusal
from libxd.scoring.task import Task

if TYPE_CHECKING:
    from libxd.sequences import Sequences

SCHEMA_VERSION = "xd.readback.v1"


class Run:
    """Filled step by step; whatever was not reached stays as it was before anything was observed.

    counters: which engine of the process scores, as which case. intact: the engine is as it was before it scored.
    """

    def __init__(self, task: Task, sequences: Sequences, operator: Operator) -> None:
        self.task = task
        self.sequences = sequences
        self.operator = operator
        self.strict: bool = task.materialized["strict"]
        self.records = task.plan["knobs"]
        self.stage: readback.Stage = "settings"
        self.knobs: list[readback.KnobReadback] = []
        self.refusals: list[Refusal] = []
        self.observed = dict(evidence.UNSEEN)
        self.parameters: dict[str, str] = {}
        self.changed_parameters: dict[str, str | None] = {}
        self.intact = True
        self.described: dict[str, Any] = {}
        self.counters = {"engine_serial": 0, "case_serial": 0}
        self.scores: Scores | None = None

    def go(self, engine: Engine) -> None:
        """Settings, weights, scoring, behaviour, weights: in this order; a refused setting is not scored with."""
        engine.bind(self.operator)
        settings, refusals = readback.compare(self.records, engine.settings(), "settings", self.strict)
        self.knobs, self.refusals = settings, refusals
        self.described = engine.describe()
        if refusals:
            return
        before = Snapshot.take(engine)
        self.stage = "behaviour"
        scores = engine.score(self.sequences, self.task.request)
        shown = engine.behaviour()
        after = Snapshot.take(engine)
        score_file.check(scores, len(self.sequences.token_ids))
        rest = readback.remaining(self.records, settings, shown)
        behaviour, refusals = readback.compare(rest, shown, "behaviour", self.strict)
        self.knobs = readback.merge(self.records, settings, behaviour)
        self.refusals = [*refusals, *readback.operator_refusals(self.task.plan["operator"], self._operator())]
        self.parameters, self.changed_parameters = before.parameters, before.changed(after)
        self.intact = before == after
        expected = self.task.identity["weights"][self.task.side]
        self.observed = evidence.observed_identity(
            self.sequences, self.task.request, scores, before, after, self.operator.temperatures,
            expected["digest"] if expected else None,
        )
        self.scores = scores

    def refuse(self, error: Exception) -> bool:
        """Whether the error is an engine's that found out while running that it cannot do what was materialised."""
        if not isinstance(error, XdError) or error.status != Status.REFUSED:
            return False
        self.refusals.append(Refusal(self.stage, None, None, None, error.line()))
        return True

    def publish(self) -> None:
        """The scores, unless they are refused, then the readback. XdError 69 for a refusal.

        A crash in between leaves an attempt that is scored again and gives the same bytes.
        """
        attempt, side = self.task.attempt, self.task.side
        if not self.refusals:
            assert self.scores is not None
            attempt.refuse_growth(score_file.name(side))
            score_file.write(attempt.file(score_file.name(side)), self.sequences, self.scores, self._metadata())
        self._publish_readback()
        if self.refusals:
            raise self._refused()

    def _refused(self) -> XdError:
        """All refusals in one line, with the values of the first that is about values."""
        said = dict.fromkeys(f"{refusal.knob or refusal.stage}: {refusal.reason}" for refusal in self.refusals)
        valued = next((refusal for refusal in self.refusals if refusal.expected is not None), None)
        facts = {"found": valued.observed, "expected": valued.expected} if valued else {}
        return XdError("; ".join(said), status=Status.REFUSED, code="refused", **facts)

    def _publish_readback(self) -> None:
        attempt, name = self.task.attempt, f"readback_{self.task.side}.json"
        value = self._readback()
        try:
            schema.validate("readback", value, name)
        except XdError as error:
            raise XdError(f"the engine's evidence cannot be recorded: {error.line()}", status=Status.BUG,
                          code="engine-output") from error
        try:
            attempt.write_json(name, value)
        except XdError as error:
            # Counters of the process are no part of what was measured: the earlier readback says the same.
            if error.code != "output-differs" or {**attempt.readback(self.task.side), "reuse": value["reuse"]} != value:
                raise

    def _readback(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **self.task.stamp,
            "status": "refused" if self.refusals else "ok",
            "refusals": [refusal.as_json() for refusal in self.refusals],
            "knobs": [knob.as_json() for knob in self.knobs],
            "operator": self._operator(),
            "observed": self.observed,
            "parameters": self.parameters,
            "changed_parameters": self.changed_parameters,
            "engine": self.described,
            "reuse": self.counters,
        }

    def _operator(self) -> dict[str, Any]:
        """The instance as it is, not as it was bound."""
        operator = self.operator
        return {
            "backend": operator.backend,
            "version": operator.version,
            "build": operator.build,
            "calls": operator.calls,
            "instance": operator.implementation,
            "evidence": {"options": operator.options, "temperatures": sorted(operator.temperatures)},
        }

    def _metadata(self) -> dict[str, Any]:
        assert self.scores is not None
        return {
            "schema_version": score_file.SCHEMA_VERSION,
            **self.task.stamp,
            "semantics": self.observed["semantics"],
            "mode": self.observed["scoring_mode"],
            "dtypes": {"parameters": self.observed["weights_dtype"], "logits": self.scores.logits_dtype},
            "observed": self.observed,
        }

"""One attempt's way through an engine, and what it leaves: a readback, and scores when nothing is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd import canon, identity, schema
from libxd.errors import Status, XdError
from libxd.operators.session import EnginesOwn, Operator
from libxd.runtimes.protocol import Engine, Observation, Scores, submission_batches
from libxd.scoring import evidence, observer, readback, score_file
from libxd.scoring.evidence import Snapshot
from libxd.scoring.numerics import Numerics
from libxd.scoring.readback import Refusal
from libxd.scoring.task import Task

if TYPE_CHECKING:
    from libxd.sequences import Sequences

SCHEMA_VERSION = "xd.readback.v1"
#: over so many ranks a side's head may be split: an operator may see a part of the vocabulary at a time
_VOCABULARY_SHARDS = "rollout.tensor_parallel_size"


class Run:
    """Filled step by step; whatever was not reached stays as it was before anything was observed.

    numerics: the state of the process, which nothing of the case may change. counters: which engine of the process
    scores, as which case. intact: the engine is as it was before it scored.
    """

    def __init__(self, task: Task, sequences: Sequences, operator: Operator | EnginesOwn, numerics: Numerics) -> None:
        self.task = task
        self.sequences = sequences
        self.operator = operator
        self.numerics = numerics
        self.strict: bool = task.materialized["strict"]
        self.records = task.plan["knobs"]
        self.stage: readback.Stage = "settings"
        self.knobs: list[readback.KnobReadback] = []
        self.refusals: list[Refusal] = []
        self.observed = dict(evidence.UNSEEN)
        self.parameters: dict[str, str] = {}
        self.changed_parameters: dict[str, str | None] = {}
        self.buffers: dict[str, dict[str, str]] = {}
        self.not_parameters: list[str] = []
        self.intact = True
        self.described: dict[str, Any] = {}
        self.counters = {"engine_serial": 0, "case_serial": 0}
        self.scores: Scores | None = None

    def go(self, engine: Engine) -> None:
        """Settings, weights, scoring, behaviour, weights: in this order; a refused setting is not scored with."""
        engine.bind(self.operator)
        settings, refusals = readback.compare(self.records, engine.settings(), "settings", self.strict)
        self.knobs = settings
        self.refusals = [*refusals, *self._changed_numerics("settings")]
        self.described = {**engine.describe(), "numerics": self.numerics.now()}
        if self.refusals:
            return
        before = Snapshot.take(engine)
        self.stage = "behaviour"
        scores = engine.score(self.sequences, self.task.request)
        shown = engine.behaviour()
        after = Snapshot.take(engine)
        score_file.check(scores, len(self.sequences.token_ids))
        shown = {**shown, **self._other_batches(scores)}
        rest = readback.remaining(self.records, settings, shown)
        behaviour, refusals = readback.compare(rest, shown, "behaviour", self.strict)
        self.knobs = readback.merge(self.records, settings, behaviour)
        self.refusals = [
            *refusals, *self._changed_numerics("behaviour"), *self._submission(scores), *self._operators_work(scores)
        ]  # fmt: skip
        self.parameters, self.changed_parameters = before.parameters or {}, before.changed(after)
        self.buffers, self.not_parameters = before.buffers, sorted(engine.not_parameters())
        self.intact = before == after
        expected = identity.held_weights(self.task.identity["weights"][self.task.side], self.not_parameters)
        self.observed = evidence.observed_identity(
            self.sequences, self.task.request, scores, before, after, self.operator,
            None if expected is None else canon.digest(expected),
        )  # fmt: skip
        self.scores = scores

    def _changed_numerics(self, stage: readback.Stage) -> list[Refusal]:
        return self.numerics.refusals(stage, self.task.plan["engine"])

    def _other_batches(self, scores: Scores) -> dict[str, Observation]:
        """batch.size where forwards show another one than was asked, whatever the engine says of it."""
        if scores.observed.forwards is None:
            return {}
        ran = observer.batch_size(self.task.request, self.sequences, scores.observed.forwards)
        return {} if ran.value == self.task.request.batch_size else {"batch.size": ran}

    def _submission(self, scores: Scores) -> list[Refusal]:
        if scores.observed.forwards is None:
            return []
        request, sequences = self.task.request, self.sequences
        asked = submission_batches(sequences.num_sequences, request.submission, request.batch_size)
        ran = observer.batches(scores.observed.forwards)
        _, in_order = observer.ran_as_asked(asked, ran, sequences.answered())
        return readback.submission_refusals(request.submission, in_order, ran)

    def _operators_work(self, scores: Scores) -> list[Refusal]:
        """Whether it, and nothing else, gave what is to be published."""
        fed, active = scores.observed, self.sequences.active_mask
        shards = [record["materialized"] for record in self.records if record["knob"] == _VOCABULARY_SHARDS]
        return [
            *readback.operator_refusals(self.task.plan["operator"], self._operator(), bool(active.any())),
            *readback.scored_refusals(
                self.operator.returned(), fed.selected_ids, scores.logprobs, fed.scored, active,
                shards[0] if shards else 1,
            ),
        ]  # fmt: skip

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
        if not self.refusals:
            assert self.scores is not None
            score_file.write(self.task.attempt, self.sequences, self.scores, self._metadata(), self.task.shard_tokens)
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
            "buffers": self.buffers,
            "not_parameters": self.not_parameters,
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
            "logprobs": len(operator.returned()[0]),
            "instance": operator.implementation,
            "evidence": {"options": dict(operator.options), "temperatures": sorted(operator.temperatures)},
        }

    def _metadata(self) -> dict[str, Any]:
        assert self.scores is not None
        return {
            "schema_version": score_file.SCHEMA_VERSION,
            **self.task.stamp,
            "semantics": self.observed["semantics"],
            # of an engine whose forwards cannot be seen, as which mode its numbers are meant
            "mode": self.observed["scoring_mode"] or self.task.request.mode,
            "dtypes": {"parameters": self.observed["weights_dtype"], "logits": self.scores.logits_dtype},
            "observed": self.observed,
        }

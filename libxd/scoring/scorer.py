"""One process's scorer: holds an engine, scores attempt after attempt with it, publishes what the engine showed."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from libxd import at_hand
from libxd.errors import Status, XdError, ran_out_of_memory
from libxd.operators import catalog
from libxd.operators.session import EnginesOwn, Operator, OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import Engine, EngineContext
from libxd.scoring import lifecycle
from libxd.scoring.lifecycle import Needs
from libxd.scoring.numerics import Numerics
from libxd.scoring.run import Run
from libxd.scoring.task import Task


@dataclass
class Held:
    """The engine in hand, and what it was built for."""

    engine: Engine
    needs: Needs
    serial: int


class Scorer:
    """Scores one side. An engine is kept only while it is as it was when it was built."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.held: Held | None = None
        #: the process is not what it was: its numeric state was changed, and no other case may compute under it
        self.spent = False
        self._numerics: Numerics | None = None
        self._process: str | None = None
        self._engines = 0
        self._cases = 0

    def score(self, task: Task, *, reuse: bool) -> dict[str, int]:
        """Score one attempt and publish; the counters of `reuse` as they stand in its readback.

        XdError 69 when it is refused (with a readback that says why, unless this process is not the one the attempt was
        materialised for), 65 for sequences that changed, 70 when the engine fails, 75 when memory runs out.
        """
        self._require_process(task.needs, reuse)
        sequences = at_hand.sequences(task.requested)
        with OperatorSession(_catalog(task)) as session:
            operator = _operator(session, self.side, task.plan["operator"])
            numerics = self._begin(task)
            run = Run(task, sequences, operator, numerics)
            try:
                held = self._engine(task, reuse)
                self._cases += 1
                run.counters = {"engine_serial": held.serial, "case_serial": self._cases}
                run.go(held.engine)
            except Exception as error:
                self.close()
                if not run.refuse(error):
                    raise as_xd_error(error) from error
            finally:
                self.spent = bool(numerics.refusals("behaviour", task.plan["engine"]))
            if run.refusals or not run.intact:
                self.close()
            run.publish()
        return run.counters

    def estimate_bytes(self, task: Task) -> int:
        """The memory in bytes that this attempt's engine will need."""
        runtime = registry.load(task.plan["runtime"])
        return runtime.estimate_bytes(self.side, task.plan["engine"], task.requested["locations"])

    def close(self) -> None:
        """Give the engine up, and its memory."""
        if self.held is not None:
            engine, self.held = self.held.engine, None
            engine.close()
            del engine
            gc.collect()

    def _begin(self, task: Task) -> Numerics:
        """The numeric state of this process, first read before any operator or engine of it is made."""
        if self._numerics is None:
            self._numerics = Numerics(getattr(registry.load(task.plan["runtime"]), "numerics", None))
            # What importing the runtime's library left behind, some 160 000 objects of torch, holds no optimizer of a
            # model that is yet to be built. Frozen, it costs neither the search for one, twice a case, nor the garbage
            # collector a walk over all of it.
            gc.freeze()
        return self._numerics

    def _require_process(self, needs: Needs, reuse: bool) -> None:
        if reuse:
            lifecycle.require_same(self.held.needs if self.held else None, needs)
        if self._process not in (None, needs.process):
            raise XdError("this process cannot serve the case: it was started for another process fingerprint",
                          status=Status.REFUSED, code="incompatible-reuse", found=self._process, expected=needs.process)
        self._process = needs.process

    def _engine(self, task: Task, reuse: bool) -> Held:
        if reuse and self.held is not None:
            return self.held
        self.close()
        runtime = registry.load(task.plan["runtime"])
        context = EngineContext(task.identity, task.requested["locations"])
        at_hand.require_checkpoint(task.requested, weights=False)
        engine = runtime.open(self.side, task.plan, context)
        self._engines += 1
        self.held = Held(engine, task.needs, self._engines)
        return self.held


def as_xd_error(error: Exception) -> XdError:
    """What an engine raised, as one line: 75 when memory ran out, else 70; an XdError stays what it is."""
    if isinstance(error, XdError):
        return error
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if ran_out_of_memory(error):
        return XdError(f"the engine ran out of memory: {said}", status=Status.RETRY, code="out-of-memory",
                       hint="free memory on the device and run the same command again, or plan a smaller batch.size")
    return XdError(f"the engine failed: {said}", status=Status.BUG, code="engine-error",
                   hint="XD_DEBUG=1 shows the traceback")


def _operator(session: OperatorSession, side: str, planned: dict[str, Any]) -> Operator | EnginesOwn:
    """The instance for a side's `operator` record; without a build it is the engine's own step."""
    if planned["build"] is None:
        return EnginesOwn(planned["backend"])
    session.resolve(side, planned)
    return session.instance(side)


def _catalog(task: Task) -> catalog.SemanticOperatorCatalog:
    """The operators of this process. XdError 75 `stale-registry` when they are not those of materialising."""
    found = catalog.load(task.materialized["smoke_operators"])
    if found.digest != task.materialized["catalog"]:
        raise XdError("stale registry: the operators here are not those it was materialised with",
                      status=Status.RETRY, code="stale-registry", found=found.digest,
                      expected=task.materialized["catalog"], hint="materialise the row again")
    return found

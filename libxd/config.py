"""Experiment file -> Experiment: strict, normalised, and every mistake in it said at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

from libxd import contract, knobs, resolution, schema, strictjson, topology
from libxd.contract import Contract
from libxd.errors import XdError, XdErrors
from libxd.experiment import Experiment, Intervention
from libxd.operators import installed
from libxd.resolution import Resolution

MAX_BYTES = 1 << 20
MAX_CASES = 256  # of one plan, the baseline among them; repeats are no cases
#: a field whose name holds one of these would decide the verdict, which only the numerical contract may
THRESHOLD_WORDS = ("threshold", "tolerance", "atol", "rtol")


def load(path: str | os.PathLike[str]) -> Experiment:
    """The experiment in a file. XdErrors with all that is wrong with it; XdError 66 when it is not there."""
    try:
        value = strictjson.load(path, max_bytes=MAX_BYTES)
    except XdError as error:
        if error.code == "not-a-file":
            error.hint = "write it to a file: a config's paths are relative to where it lies"
        raise
    return parse(value, Path(path).parent, str(path))


def parse(value: Any, base: Path, where: str) -> Experiment:
    """The experiment in a JSON value; its paths are relative to `base`. Raises like `load`."""
    reader = _Reader(value, where)
    if not isinstance(reader.config, dict):
        raise XdErrors(reader.issues)
    config = reader.config
    resolved = resolution.resolve(config["identity"], base, where) if reader.sound("/identity") else None
    if resolved:
        reader.issues += resolved.issues
    bound = reader.contract()
    operators = reader.operators()
    baseline = reader.baseline()
    interventions = reader.interventions(baseline)
    pairs = reader.pairs(interventions)
    reader.check_ends()
    reader.check_heads(baseline, interventions, resolved)
    if reader.issues or resolved is None or bound is None:
        raise XdErrors(reader.issues)
    return Experiment(
        experiment_id=config["experiment_id"],
        scenario_id=config["scenario_id"],
        scenario=config["scenario"],
        contract=bound,
        strategy=config["strategy"],
        strict_fallback=config.get("strict_fallback", True),
        resolution=resolved,
        baseline=baseline,
        interventions=tuple(item for _, item in interventions),
        pairs=pairs,
        operators=operators,
    )


class _Reader:
    """One pass over a config. Each step takes what is sound, reports what is not, and goes on."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        self.issues: list[XdError] = []
        self.config = self._without_refused_fields(value, ())
        try:
            schema.validate("experiment_config", self.config, where)
        except XdErrors as errors:
            self.issues += errors.issues

    def report(self, message: str, code: str, path: str, **facts: Any) -> None:
        self.issues.append(XdError(message, code=code, where=self.where, path=path, **facts))

    def sound(self, pointer: str) -> bool:
        """Whether a section is there and nothing in it was reported."""
        touched = any(issue.path == pointer or issue.path.startswith(pointer + "/") for issue in self.issues)
        return pointer[1:] in self.config and not touched

    def _without_refused_fields(self, value: Any, keys: tuple[str | int, ...]) -> Any:
        """A copy without the fields that are refused by name, each reported in its place, which `keys` lead to."""
        if isinstance(value, list):
            return [self._without_refused_fields(item, (*keys, i)) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, item in value.items():
            if _names_threshold(name):
                self._refuse_threshold(name, _pointer(*keys, name))
            elif keys[:1] == ("baseline",) and any(word in name.lower() for word in knobs.DEFERRED):
                self.report(f"{name} is deferred: this contract does not vary it", "deferred-knob",
                            _pointer(*keys, name))
            else:
                kept[name] = self._without_refused_fields(item, (*keys, name))
        return kept

    def _refuse_threshold(self, name: str, place: str) -> None:
        self.report(f"{name} would set a threshold, which only the numerical contract does", "threshold-smuggled",
                    place, hint="choose contract_source")

    def contract(self) -> Contract | None:
        if not (self.sound("/contract_source") and self.sound("/contract_version")):
            return None
        try:
            return contract.lookup(self.config["contract_source"], self.config["contract_version"], self.where)
        except XdError as error:
            self.issues.append(error)
            return None

    def baseline(self) -> dict[str, Any]:
        """The ten knobs, flat, canonical; those that are at fault are reported and left out."""
        values = {}
        for path in knobs.CATALOG:
            group, name = path.split(".")
            pointer = f"/baseline/{group}/{name}"
            section = self.config.get("baseline")
            section = section.get(group) if isinstance(section, dict) else None
            if isinstance(section, dict) and name in section and not any(i.path == pointer for i in self.issues):
                value = self._normalised(path, section[name], pointer)
                if value is not None:
                    values[path] = value
        return values

    def _normalised(self, path: str, value: Any, pointer: str) -> Any:
        try:
            canonical = knobs.normalise(path, value, self.where, pointer)
        except XdError as error:
            self.issues.append(error)
            return None
        if path == "logp.backend":
            self._check_backend(canonical, pointer)
        return canonical

    def _check_backend(self, backend: str, pointer: str) -> None:
        if backend not in installed.backends():
            self.report("no such operator is installed", "unknown-operator", pointer, found=backend,
                        expected="one of " + ", ".join(installed.backends()))

    def operators(self) -> dict[str, Any] | None:
        """The explicit mapping, canonical, with options; None when there is none."""
        if not self.sound("/operators"):
            return None
        bound = {}
        for side, binding in self.config["operators"]["selected_logprob"].items():
            pointer = f"/operators/selected_logprob/{side}"
            if isinstance(binding, str):
                binding = {"backend": binding}
            else:
                pointer += "/backend"
            backend = knobs.BACKEND_ALIASES.get(binding["backend"], binding["backend"])
            self._check_backend(backend, pointer)
            bound[side] = {"backend": backend, "options": binding.get("options", {})}
        return {"selected_logprob": bound}

    def interventions(self, baseline: dict[str, Any]) -> list[tuple[int, Intervention]]:
        """The sound interventions with their index in the file."""
        declared = list(self._declared())
        if self._exceeds_cap(declared):
            return []
        found: list[tuple[int, Intervention]] = []
        for index, item in declared:
            path, pointer = item["path"], f"/interventions/{index}/path"
            try:
                knobs.get(path, self.where, pointer)
            except XdError as error:
                if _names_threshold(path):
                    self._refuse_threshold(path, pointer)
                else:
                    self.issues.append(error)
                continue
            if any(path == other.path for _, other in found):
                self.report("this knob has an intervention already", "duplicate-intervention", pointer, found=path,
                            hint="put all its values into one")
                continue
            if path == "logp.backend" and "operators" in self.config:
                self.report("an explicit operator mapping leaves logp.backend without effect", "operator-conflict",
                            pointer, hint="drop the mapping or the intervention")
            values = tuple(self._values(index, path, item["values"], baseline.get(path)))
            found.append((index, Intervention(path, values, item.get("allow_fallback", False))))
        return found

    def _declared(self) -> Iterator[tuple[int, dict[str, Any]]]:
        items = self.config.get("interventions")
        for index, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict) and isinstance(item.get("path"), str) and isinstance(item.get("values"), list):
                yield index, item

    def _values(self, index: int, path: str, declared: list[Any], baseline: Any) -> Iterator[Any]:
        seen: list[Any] = []
        for place, value in enumerate(declared):
            pointer = f"/interventions/{index}/values/{place}"
            canonical = self._normalised(path, value, pointer)
            if canonical is None:
                continue
            if canonical == baseline:
                self.report("equals the baseline", "equals-baseline", pointer, found=value)
            elif canonical in seen:
                self.report("stands twice", "duplicate-value", pointer, found=value)
            else:
                seen.append(canonical)
                yield canonical

    def _exceeds_cap(self, declared: list[tuple[int, dict[str, Any]]]) -> bool:
        """Count the cases before any is built."""
        sizes = [len(item["values"]) for _, item in declared]
        cases = 1 + sum(sizes)
        if self.config.get("strategy") == "pairwise" and self.sound("/pairs"):
            by_path = {item["path"]: size for (_, item), size in zip(declared, sizes, strict=True)}
            cases = 1 + sum(prod(by_path.get(path, 0) for path in pair) for pair in self.config["pairs"])
            cases = max(cases, max(sizes, default=0))  # values that no pair uses are read, too
        if cases > MAX_CASES:
            self.report("too many cases", "too-many-cases", "/interventions", found=cases,
                        expected=f"at most {MAX_CASES} with the baseline")
        return cases > MAX_CASES

    def pairs(self, interventions: list[tuple[int, Intervention]]) -> tuple[tuple[str, str], ...]:
        strategy = self.config.get("strategy")
        if "pairs" not in self.config:
            if strategy == "pairwise":
                self.report("pairwise needs pairs", "missing-field", "/pairs")
            return ()
        if strategy in ("one_at_a_time", "bisect"):
            self.report(f"{strategy} crosses nothing; pairs are for pairwise", "contradiction", "/pairs")
        if not self.sound("/pairs"):
            return ()
        declared = {item["path"] for _, item in self._declared()}
        for index, pair in enumerate(self.config["pairs"]):
            for place, path in enumerate(pair):
                if path not in declared:
                    self.report("no intervention declares this path", "undeclared-pair", f"/pairs/{index}/{place}",
                                found=path, expected=" or ".join(sorted(declared)))
            if pair[0] == pair[1]:
                self.report("a knob cannot be paired with itself", "self-pair", f"/pairs/{index}", found=pair[0])
        for (_, first), (index, second) in combinations(enumerate(self.config["pairs"]), 2):
            if set(first) == set(second):
                self.report("stands twice", "duplicate-pair", f"/pairs/{index}", found=second)
        return tuple((first, second) for first, second in self.config["pairs"])

    def check_ends(self) -> None:
        """A bisection has two ends: the baseline, and the one value of each intervention."""
        if self.config.get("strategy") != "bisect":
            return
        if self.config.get("interventions") == []:
            self.report("bisect needs another end: an intervention for each knob that differs", "missing-field",
                        "/interventions")
        for index, item in self._declared():
            if len(item["values"]) > 1:
                self.report("bisect takes one value of each knob: that of the other end", "contradiction",
                            f"/interventions/{index}/values", found=len(item["values"]), expected=1)

    def check_heads(
        self, baseline: dict[str, Any], interventions: list[tuple[int, Intervention]], resolved: Resolution | None
    ) -> None:
        """Tensor-parallel sizes must split the model's heads (libxd.topology), where its sizes are known."""
        model = resolved.identity["model"] if resolved else None
        if model is None:
            return
        path = "rollout.tensor_parallel_size"
        places = [(baseline[path], "/baseline/rollout/tensor_parallel_size")] if path in baseline else []
        for index, item in interventions:
            if item.path == path:
                # the pointer counts the file's values, of which faulty ones are not here
                declared = self.config["interventions"][index]["values"]
                places += [(value, f"/interventions/{index}/values/{declared.index(value)}") for value in item.values]
        for size, pointer in places:
            if reason := topology.conflict(size, model):
                self.report(f"tensor parallelism of {size} {reason}", "indivisible", pointer)


def _pointer(*keys: str | int) -> str:
    return reduce(strictjson.pointer_to, keys, "")


def _names_threshold(name: str) -> bool:
    return any(word in name.lower() for word in THRESHOLD_WORDS)

"""actual.json: every knob from what was requested over what was materialised to what the live engine showed."""

from __future__ import annotations

from typing import Any

from libxd.rundir import SIDES


def actual(requested: dict[str, Any], materialized: dict[str, Any], readbacks: dict[str, Any]) -> dict[str, Any]:
    """The actual.json value, from the attempt's validated requested, materialized and readback (a side each) values.

    A knob that a readback does not speak of was not observed: actual null, status "unobservable".
    """
    return {
        "schema_version": "xd.actual.v1",
        "case_id": requested["case_id"],
        "repeat": requested["repeat"],
        "knobs": [record for side in SIDES for record in _knobs(side, materialized["sides"][side], readbacks[side])],
        "operators": {
            side: _operator(requested, side, materialized["sides"][side]["operator"], readbacks[side]["operator"])
            for side in SIDES
        },
    }


def _knobs(side: str, planned: dict[str, Any], readback: dict[str, Any]) -> list[dict[str, Any]]:
    shown = {record["knob"]: record for record in readback["knobs"]}
    unseen = {"actual": None, "status": "unobservable", "stage": None}
    records = []
    for record in planned["knobs"]:
        seen = shown.get(record["knob"], unseen)
        records.append({
            "knob": record["knob"],
            "side": side,
            "requested": record["requested"],
            "materialized": record["materialized"],
            "actual": seen["actual"],
            "lifecycle": record["lifecycle"],
            "status": seen["status"],
            "stage": seen["stage"],
        })  # fmt: skip
    return records


def _operator(requested: dict[str, Any], side: str, planned: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": planned["operation"],
        "requested": requested["operators"][planned["operation"]][side],
        "materialized": {key: planned[key] for key in ("backend", "options", "version", "build")},
        "actual": {key: seen[key] for key in ("backend", "version", "build", "instance", "calls")},
    }

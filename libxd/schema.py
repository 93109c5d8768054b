"""The schemas of every JSON file and row (JSON Schema 2020-12), and validation with readable places."""

from __future__ import annotations

import json
from functools import cache, reduce
from pathlib import Path
from typing import Any

import jsonschema_rs
import xdschemas

from libxd.errors import XdError, XdErrors
from libxd.strictjson import pointer_to

MAX_ISSUES = 32  # of one value; more says nothing new


def directory() -> Path:
    """Where the schema files lie: `schemas/` of a checkout, package data when installed."""
    return Path(next(iter(xdschemas.__path__)))


def names() -> list[str]:
    """The names `validate` knows, one a schema file."""
    return sorted(path.name.removesuffix(".schema.json") for path in directory().glob("*.schema.json"))


@cache
def load(name: str) -> dict[str, Any]:
    """One schema as a JSON value."""
    return json.loads((directory() / f"{name}.schema.json").read_bytes())


@cache
def _registry() -> jsonschema_rs.Registry:
    schemas = (load(name) for name in names())
    return jsonschema_rs.Registry([(schema["$id"], schema) for schema in schemas])


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(load(name), registry=_registry())


def validate(name: str, value: Any, where: str) -> Any:
    """`value`, when schema `name` accepts it; else XdErrors with a JSON pointer for every place that it does not."""
    issues = [
        XdError(_message(error), code=_code(error), where=where, path=_place(error))
        for _, error in zip(range(MAX_ISSUES), _validator(name).iter_errors(value), strict=False)
    ]
    if issues:
        raise XdErrors(issues)
    return value


def _place(error: jsonschema_rs.ValidationError) -> str:
    return reduce(pointer_to, map(str, error.instance_path), "")


def _code(error: jsonschema_rs.ValidationError) -> str:
    keyword = str(error.schema_path[-1]) if error.schema_path else ""
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        return "unknown-field"
    return {"required": "missing-field", "type": "wrong-type"}.get(keyword, "schema")


def _message(error: jsonschema_rs.ValidationError) -> str:
    return error.message if len(error.message) < 300 else error.message[:299] + "…"

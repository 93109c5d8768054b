"""The schemas of every JSON file and row (JSON Schema 2020-12), and validation with readable places."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache, reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jsonschema_rs
import xdschemas

from libxd.errors import XdError, XdErrors
from libxd.strictjson import pointer_to

_MOST_COPIED = 20_000  # parts of a value of which every error is said
_MOST_COPIED_ONCE = 1_000_000  # and of one whose first error is
_DIVISIBLE = (dict, list, float)  # what may be or hold a float


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
    if not _validator(name).is_valid(value):
        raise XdErrors(
            XdError(_message(error), code=_code(error), where=where, path=_place(error))
            for error in _errors(name, value, where)
        )
    if (halved := _halved(value)) is not value:
        errors = iter(_errors(name, halved, where))
        fractions = (error for error in errors if _keyword(error) in ("type", "anyOf", "oneOf"))
        if (first := next(fractions, None)) is not None:
            raise XdErrors(
                XdError("a whole number is wanted, written without a fraction", code="wrong-type", where=where,
                        path=_place(error), found=_at(value, error))
                for error in chain([first], fractions)
            )
    return value


def _errors(name: str, value: Any, where: str) -> Iterable[jsonschema_rs.ValidationError]:
    """What the schema has against a value, if anything. Each error comes with a copy of what it is about, which is
    often the whole: of a large value the first one alone is given, and of a very large one none; XdError says so."""
    validator = _validator(name)
    parts = sum(1 for _ in islice(_parts(value), _MOST_COPIED_ONCE + 1))
    if parts <= _MOST_COPIED:
        return validator.iter_errors(value)
    if validator.is_valid(value):
        return ()
    if parts > _MOST_COPIED_ONCE:
        raise XdError("is not what its schema says, and too large for it to be said where", code="schema", where=where,
                      found=f"over {_MOST_COPIED_ONCE} parts")  # fmt: skip
    try:
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        return (error,)
    return ()


def _parts(value: Any) -> Iterator[bool]:
    """As many as the value has parts."""
    yield True
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)


def _halved(value: Any) -> Any:
    """`value` with 0.5 for each float that is a whole number: to JSON Schema 1.0 is an integer, to what reads it not.

    The same object where there is none. Every row passes through here: scalars are not called for.
    """
    if isinstance(value, float):
        return 0.5 if value.is_integer() else value
    if not isinstance(value, dict | list):
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    changed = [
        (key, other) for key, item in items
        if isinstance(item, _DIVISIBLE) and (other := _halved(item)) is not item
    ]  # fmt: skip
    if changed:
        value = value.copy()
        for key, other in changed:
            value[key] = other
    return value


def _place(error: jsonschema_rs.ValidationError) -> str:
    return reduce(pointer_to, map(str, error.instance_path), "")


def _at(value: Any, error: jsonschema_rs.ValidationError) -> Any:
    return reduce(lambda part, key: part[key], error.instance_path, value)


def _keyword(error: jsonschema_rs.ValidationError) -> str:
    return str(error.schema_path[-1]) if error.schema_path else ""


def _code(error: jsonschema_rs.ValidationError) -> str:
    keyword = _keyword(error)
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        return "unknown-field"
    return {"required": "missing-field", "type": "wrong-type"}.get(keyword, "schema")


def _message(error: jsonschema_rs.ValidationError) -> str:
    return error.message if len(error.message) < 300 else error.message[:299] + "…"

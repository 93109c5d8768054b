"""The schemas: well formed, versioned, described, closed; and their examples, judged by two validators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
import referencing
from referencing.jsonschema import DRAFT202012

from libxd import knobs, schema
from libxd.errors import XdErrors
from libxd.knobs import DTYPES

EXAMPLES = Path(__file__).parent / "schema_examples"
NAMES = schema.names()
DOCUMENTS = [name for name in NAMES if name != "common"]  # common is definitions alone
REGISTRY = referencing.Registry().with_resources(
    (schema.load(name)["$id"], DRAFT202012.create_resource(schema.load(name))) for name in NAMES
)


def examples(kind: str) -> list[Path]:
    return sorted(EXAMPLES.glob(f"*/{kind}-*.json"))


#: keywords whose value maps free names to schemas, and those whose value is data
MAPS = ("properties", "patternProperties", "$defs", "dependentSchemas")
DATA = ("const", "enum", "examples", "default", "required")


def nodes(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with its place."""
    if isinstance(value, dict):
        yield place, value
        for key, item in value.items():
            if key in MAPS:
                for name, part in item.items():
                    yield from nodes(part, f"{place}/{key}/{name}")
            elif key not in DATA:
                yield from nodes(item, f"{place}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nodes(item, f"{place}/{index}")


def resolved(name: str, reference: str) -> dict[str, Any]:
    return REGISTRY.resolver(schema.load(name)["$id"]).lookup(reference).contents


def described(name: str, node: dict[str, Any]) -> bool:
    if node.get("description", "").strip():
        return True
    return "$ref" in node and described(name, resolved(name, node["$ref"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_2020_12_and_its_id_is_versioned(name):
    document = schema.load(name)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert document["$id"] == f"urn:xd:schema:{name}:v1"
    jsonschema_rs.meta.validate(document)


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_leads_somewhere(name):
    for place, node in nodes(schema.load(name)):
        if "$ref" in node:
            assert isinstance(resolved(name, node["$ref"]), dict), place


@pytest.mark.parametrize("name", NAMES)
def test_every_property_is_described(name):
    missing = [
        f"{place}/properties/{field}"
        for place, node in nodes(schema.load(name))
        if "properties" in node and not _refines(place)
        for field, item in node["properties"].items()
        if not described(name, item)
    ]
    assert missing == []


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_closed_or_a_map(name):
    """An object that names properties takes no others, unless it says what others may be."""
    open_ones = [
        place
        for place, node in nodes(schema.load(name))
        if "properties" in node and not _refines(place) and node.get("additionalProperties", True) is True
    ]
    assert open_ones == []


def _refines(place: str) -> bool:
    """Inside a conditional a schema only narrows what the object around it has named."""
    words = place.split("/")
    return any(word in words for word in ("if", "then", "dependentSchemas", "not", "allOf"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_schema_has_examples_of_both_kinds(name):
    kinds = {path.name.partition("-")[0] for path in (EXAMPLES / name).glob("*.json")}
    assert kinds == {"valid", "invalid"}


def test_no_example_lies_where_nothing_looks():
    strays = [p for p in EXAMPLES.rglob("*") if p.is_file() and p not in {*examples("valid"), *examples("invalid")}]
    assert strays == []
    assert {path.name for path in EXAMPLES.iterdir()} <= set(DOCUMENTS)


@pytest.mark.parametrize("path", examples("valid"), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_valid_examples_are_accepted(path):
    value = json.loads(path.read_bytes())
    assert schema.validate(path.parent.name, value, str(path)) is value
    assert oracle(path.parent.name).is_valid(value)


@pytest.mark.parametrize("path", examples("invalid"), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_invalid_examples_violate_one_thing(path):
    value = json.loads(path.read_bytes())
    with pytest.raises(XdErrors) as caught:
        schema.validate(path.parent.name, value, str(path))
    assert len({issue.path for issue in caught.value.issues}) == 1, [issue.line() for issue in caught.value.issues]
    assert not oracle(path.parent.name).is_valid(value)


def oracle(name: str) -> jsonschema.Draft202012Validator:
    """A validator written by other people in another language."""
    return jsonschema.Draft202012Validator(schema.load(name), registry=REGISTRY)


# -- what schemas and code both know


def test_schemas_and_catalog_know_the_same_knobs():
    definitions = schema.load("common")["$defs"]
    assert definitions["knob_path"]["enum"] == list(knobs.CATALOG)
    assert list(definitions["values"]["properties"]) == list(knobs.CATALOG)
    assert definitions["values"]["required"] == list(knobs.CATALOG)
    assert set(definitions["dtype"]["enum"]) == set(DTYPES)
    assert definitions["size"]["maximum"] == knobs.MAX_INTEGER
    for path, knob in knobs.CATALOG.items():
        declared = definitions["values"]["properties"][path]
        if knob.type == "choice":
            allowed = declared.get("enum") or definitions["dtype"]["enum"]
            assert set(allowed) == set(knob.values), path


def test_a_config_can_set_the_ten_knobs_and_nothing_else():
    groups = schema.load("experiment_config")["properties"]["baseline"]["properties"]
    paths = [f"{group}.{name}" for group, item in groups.items() for name in item["properties"]]
    assert sorted(paths) == sorted(knobs.CATALOG)


def test_every_knob_says_what_it_means():
    for knob in knobs.CATALOG.values():
        assert len(knob.meaning.split()) >= 5, knob.path

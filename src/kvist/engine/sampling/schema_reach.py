"""Whether a JSON schema asks for a value without end: a required part that can only be itself again.

Owns `endless`. Must not know grammars or tokens. What it does not understand counts as fine, so that it never refuses a schema
that some text satisfies; contradictions that are not about depth are the grammar compiler's to find.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Any  # parsed JSON


def endless(schema: Schema) -> bool:
    """True if every value of `schema` would have to be infinitely deep. Local references (`#`, `#/...`) are followed.

    The references that can end are found as a least fixed point: at first none, then those whose target ends given the
    ones found so far, until nothing is added.
    """
    references: set[str] = set()
    _collect(schema, references)
    ending: set[str] = set()
    while True:
        more = {r for r in references - ending if _ends(_target(schema, r), ending)}
        if not more:
            return not _ends(schema, ending)
        ending |= more


def _collect(node: Schema, references: set[str]) -> None:
    stack = [node]
    while stack:
        at = stack.pop()
        if isinstance(at, Mapping):
            reference = at.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                references.add(reference)
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)


def _target(schema: Schema, reference: str) -> Schema:
    """What a local reference points at (RFC 6901); `True`, any value, if that does not exist: the compiler reports it."""
    at = schema
    for part in [p for p in reference.lstrip("#").split("/") if p]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and key in at:
            at = at[key]
        elif isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        else:
            return True
    return at


def _ends(schema: Schema, ending: set[str]) -> bool:
    """Whether a finite value fits, if exactly the references in `ending` have one."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference not in ending:
        return False
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and not any(_ends(option, ending) for option in options):
            return False
    every = schema.get("allOf")
    if isinstance(every, list) and not all(_ends(part, ending) for part in every):
        return False
    return _another_type(schema) or (_object_ends(schema, ending) and _array_ends(schema, ending))


def _another_type(schema: Mapping[str, Any]) -> bool:
    """Whether a value that is neither object nor array may do, so that required parts bind nobody."""
    return "type" not in schema or any(kind not in ("object", "array") for kind in _listed(schema["type"]))


def _object_ends(schema: Mapping[str, Any], ending: set[str]) -> bool:
    if "array" in _listed(schema["type"]):
        return True
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True
    return all(_ends(properties.get(name, True), ending) for name in required if isinstance(name, str))


def _array_ends(schema: Mapping[str, Any], ending: set[str]) -> bool:
    if "object" in _listed(schema["type"]):
        return True
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return True
    first = schema.get("prefixItems")
    first = first if isinstance(first, list) else []
    rest_ends = least <= len(first) or _ends(schema.get("items", True), ending)
    return rest_ends and all(_ends(item, ending) for item in first[:least])


def _listed(kinds: object) -> list[object]:
    return kinds if isinstance(kinds, list) else [kinds]

"""Whether a result is one: `schema.json` says what it holds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    schema = json.loads((Path(__file__).parent / "schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def problems(document: Any) -> list[str]:
    """What is wrong with a result, a line each with its place; empty where nothing is."""
    found = sorted(_validator().iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{'/'.join(map(str, error.absolute_path)) or '(all)'}: {error.message}" for error in found]


def read(file: Path) -> dict[str, Any]:
    """A result.

    Raises:
        ValueError: it is no JSON, or not as the schema wants it; names the file and the first fault.
    """
    try:
        document: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if wrong := problems(document):
        raise ValueError(f"{file}: {wrong[0]}")
    return document

"""Where a benchmark's result goes: the table for people, the samples into a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def show(result: dict[str, Any], text: str, file: Path | None) -> None:
    """Print `text`, and write `result` to `file` where one was asked for."""
    print(text)
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")

"""Which table entries hold for the arithmetic that a site would use."""

from __future__ import annotations

import pytest

from fusionml.plans import counts
from fusionml.settings import Settings
from fusionml.table import Entry


@pytest.mark.parametrize(
    ("setting", "comes_to", "measured", "holds"),
    [
        ("auto", "native", "native", True),
        ("auto", "native", "float32", True),
        ("auto", "float32", "float32", True),
        # Half types on macOS: native products have crashed there, so nobody gets them without asking.
        ("auto", "float32", "native", False),
        ("native", "native", "native", True),
        ("native", "native", "float32", False),
        ("float32", "float32", "native", False),
    ],
)
def test_an_entry_of_another_arithmetic_does_not_hold(
    setting: str, comes_to: str, measured: str, holds: bool
) -> None:
    entry = Entry(0.3, 0.2, "2026-08-01T12:00:00+00:00", 0.02, None, 20, measured)
    assert counts(Settings(cpu_dtype=setting), entry, comes_to) == holds

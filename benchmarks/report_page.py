"""What a page is made of, whichever form it takes: sections of paragraphs, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from benchmarks.report_text import NONE, NOT_YET, clean

_NUMBER = re.compile(r"^[-+~]?\d|^-$")


@dataclass(frozen=True)
class Paragraph:
    text: str
    strong: str = ""
    """Words that stand before it, emphasised."""
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Table:
    """Every row has as many cells as there are columns; `folded` hides it behind its caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    kind: ClassVar[str] = "table"

    @property
    def numeric(self) -> list[bool]:
        """Of each column but the first, whether it holds figures: easier to compare flush right."""
        return [
            place > 0
            and bool(self.rows)
            and all(_NUMBER.match(row[place]) or row[place] == NOT_YET for row in self.rows)
            and any(row[place] not in (NONE, NOT_YET) for row in self.rows)
            for place in range(len(self.columns))
        ]


@dataclass(frozen=True)
class Picture:
    """Only a page of HTML has it: every figure in it is in a table too."""

    svg: Markup
    caption: str
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class Pictures:
    """Side by side where there is room; hidden behind its caption if `folded` is one."""

    pictures: Sequence[Picture]
    folded: str = ""
    kind: ClassVar[str] = "pictures"


@dataclass(frozen=True)
class Heading:
    text: str
    kind: ClassVar[str] = "heading"


Block = Paragraph | Items | Table | Pictures | Heading


@dataclass(frozen=True)
class Section:
    title: str
    source: str
    """Where in the paper."""
    blocks: Sequence[Block] = field(default_factory=tuple)

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", clean(self.title).lower()).strip("-")

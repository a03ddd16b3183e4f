"""The ratio table: what was measured on this machine, by site, in memory and in one JSON file.

The file holds a section for each state of the machine in which something was measured (another MLX, another
math library, other steering variables): only the one that matches is used, and none is lost on saving.
Reading never raises; a file that cannot be read is set aside and a run goes on without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

from .ratios import LARGEST_RATIO, Site

log = logging.getLogger("fusionml")

SCHEMA = 1
LARGEST_FILE = 16 * 2**20
"""Bytes; a table of ten thousand sites has four million."""
MOST_SECTIONS = 32
"""States of one machine that a file remembers; the ones measured longest ago go first."""
FINGERPRINT_FACTOR = 3.0
"""Rates of one math library differ less than this between two readings, also on a busy machine; those of two
libraries more."""


# --- entries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What was measured for one site.

    ratio: CPU share, 0 to 0.9; 0 where no split was the fastest. gain: stock's time over the fastest arm's,
    less 1. when: ISO time. spread: relative deviation of one sample, None where too few were taken to say.
    power: power source, None if unknown. samples: how many. cpu_dtype: what the CPU part computes in.
    per_row: stock's seconds for one row, None if not measured. form: how a split is computed. dense: whether
    the dense arm is the fastest, where the ratio is 0. dense_per_row: its seconds for one row, None if not
    measured. A wrong value is a ValueError that names it.
    """

    ratio: float
    gain: float
    when: str
    spread: float | None
    power: str | None
    samples: int
    cpu_dtype: str
    per_row: float | None = None
    form: str = "dense"
    dense: bool = False
    dense_per_row: float | None = None

    @property
    def arm(self) -> str:
        """`split`, `dense` or `stock`."""
        return "split" if self.ratio > 0 else "dense" if self.dense else "stock"

    def __post_init__(self) -> None:
        _require_number("ratio", self.ratio, 0, LARGEST_RATIO)
        _require_number("gain", self.gain, -1, 1000)
        if self.spread is not None:
            _require_number("spread", self.spread, 0, 1000)
        for name in ("per_row", "dense_per_row"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name), 1e-15, 1e9)
        if not isinstance(self.dense, bool):
            raise ValueError(f"dense is {self.dense!r}: use True or False")
        _require_number("samples", self.samples, 0, 10**9)
        if not isinstance(self.samples, int):
            raise ValueError(f"samples is {self.samples!r}: use a whole number")
        for name in ("power", "cpu_dtype", "form"):
            value = getattr(self, name)
            if not (isinstance(value, str) and len(value) <= 64) and not (name == "power" and value is None):
                raise ValueError(f"{name} is {value!r}: use a string of at most 64 characters")
        _require_time(self.when)


def _require_number(name: str, value: object, least: float, most: float) -> None:
    if not _is_number(value) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: use a number from {least} to {most}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_time(when: object) -> None:
    try:
        if not isinstance(when, str):
            raise ValueError
        datetime.fromisoformat(when.removesuffix("Z"))
    except ValueError:
        raise ValueError(f"when is {when!r}: use an ISO time such as 2026-08-01T12:00:00+00:00") from None


_ENTRY_FIELDS = {each.name: each.default for each in fields(Entry)}


# --- sections: one state of the machine each --------------------------------------------------------------


@dataclass
class _Section:
    """Entries by `Site.key()`, and the state of the machine that they hold for."""

    machine: dict[str, Any]
    fingerprint: dict[str, float]
    entries: dict[str, Entry] = field(default_factory=dict)

    def differences(self, other: _Section) -> list[str]:
        """What differs between two states, in words; empty where entries of one hold for the other.

        An empty fingerprint was not taken and matches any.
        """
        names = sorted({*self.machine, *other.machine})
        words = [
            f"{_one_line(name)} {_short(self.machine.get(name))}, not {_short(other.machine.get(name))}"
            for name in names
            if self.machine.get(name) != other.machine.get(name)
        ]
        if self.fingerprint and other.fingerprint and not _similar(self.fingerprint, other.fingerprint):
            words.append(f"math rates {_short(self.fingerprint)}, not {_short(other.fingerprint)}")
        return words

    def newest(self) -> str:
        return max((entry.when for entry in self.entries.values()), default="")

    @classmethod
    def read(cls, value: object) -> _Section:
        """From parsed JSON; a ValueError says what is wrong with it."""
        machine, fingerprint, entries = _values(value, ["machine", "fingerprint", "entries"])
        if not all(isinstance(part, dict) for part in (machine, fingerprint, entries)):
            raise ValueError("a section's machine, fingerprint or entries is no object")
        section = cls(_plain(machine), checked_fingerprint(fingerprint))
        for key, entry in entries.items():
            Site.parse(key)
            section.entries[key] = _entry(entry)
        return section

    def plain(self) -> dict[str, Any]:
        entries = {key: asdict(entry) for key, entry in self.entries.items()}
        return {"machine": self.machine, "fingerprint": self.fingerprint, "entries": entries}


def _entry(value: object) -> Entry:
    """From parsed JSON; what an earlier version did not know has its default."""
    _values(value, [name for name, default in _ENTRY_FIELDS.items() if default is MISSING])
    assert isinstance(value, dict)
    return Entry(**{name: value[name] for name in _ENTRY_FIELDS if name in value})


def _values(value: object, names: list[str]) -> list[Any]:
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ValueError(f"{_short(value)} is no object with {', '.join(names)}")
    return [value[name] for name in names]


def _require_shallow(value: object, levels: int = 8) -> None:
    """Values nested more deeply can be read and then neither compared nor written."""
    if levels == 0:
        raise ValueError("a machine nests more than 8 levels deep")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _require_shallow(part, levels - 1)


def _similar(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        one[name] <= FINGERPRINT_FACTOR * other[name] and other[name] <= FINGERPRINT_FACTOR * one[name]
        for name in one
    )


def checked_fingerprint(fingerprint: Mapping[str, float]) -> dict[str, float]:
    """The same, once all of its rates are positive finite numbers; else a ValueError."""
    for name, rate in fingerprint.items():
        if not _is_number(rate) or not 0 < rate < 1e300:
            raise ValueError(
                f"the fingerprint's {_one_line(name)} is {_short(rate)}: use a positive finite rate"
            )
    return {name: float(rate) for name, rate in fingerprint.items()}


def _one_line(name: str) -> str:
    """A name from a file: as it is, unless it would break a line or a terminal."""
    return name.encode("unicode_escape").decode()[:80]


def _short(value: object) -> str:
    """For a message. A hostile value may be huge, or nested too deeply to be printed."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


# --- the file ---------------------------------------------------------------------------------------------


class _BadFileError(Exception):
    """The file is there and its contents are no table."""


def _parse(raw: bytes) -> list[_Section]:
    try:
        parsed = json.loads(raw, parse_constant=_refuse_constant)
        schema = parsed.get("schema") if isinstance(parsed, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(f"its schema is {_short(schema)}, this version reads {SCHEMA}")
        if not isinstance(parsed.get("sections"), list):
            raise ValueError("it has no list of sections")
        return [_Section.read(section) for section in parsed["sections"]]
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise _BadFileError(str(error)[:200] or type(error).__name__) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")


def _read(path: str) -> bytes | None:
    """The file's contents, None without a file; OSError or _BadFileError where it cannot be read."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{path} is not a regular file")
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return None
    if len(raw) > LARGEST_FILE:
        raise _BadFileError(f"it has more than {LARGEST_FILE} bytes")
    return raw


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer forever


@contextlib.contextmanager
def _locked(path: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock file beside `path`, so that nobody reads, merges and writes at the same time.

    Without `wait`, a lock that somebody else holds is an OSError.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)  # which also unlocks; the file stays, since removing it would split the lock


def _set_aside(path: str, reason: str) -> None:
    aside, number = f"{path}.bad", 1
    while os.path.lexists(aside):
        aside, number = f"{path}.bad{number}", number + 1
    os.rename(path, aside)
    log.warning("ratio table %s cannot be used (%s): set aside as %s", path, reason, aside)


def _write(path: str, sections: list[_Section]) -> None:
    """Replaces the file in one step. The caller holds the lock, so one name for the new file is enough."""
    content = {"schema": SCHEMA, "sections": [section.plain() for section in sections]}
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
    new = f"{path}.new"
    try:
        with open(new, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    _sync_directory(os.path.dirname(path))


def _sync_directory(directory: str) -> None:
    """Makes a rename last through a power cut, where the file system can; it is in effect anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- the table --------------------------------------------------------------------------------------------


class RatioTable:
    """Measured ratios of one machine in one state; `load` makes one, from a file that need not exist.

    `ignored` is None, or the line that says which entries of the file are not used and why.
    Lookups may come from any thread while another puts or saves.
    """

    def __init__(
        self, path: str | os.PathLike[str], machine: Mapping[str, Any], *, ours: bool = True
    ) -> None:
        """An empty table; see `load`."""
        # Not the name but what it leads to: replacing a symbolic link would leave its target behind.
        self.path = os.path.realpath(path)
        self.ignored: str | None = None
        self._state = _Section(_plain(machine), {})
        self._changed: dict[str, Entry] = {}
        self._layers: dict[_Layer, list[tuple[int, Entry]]] = {}
        self._mutex = threading.Lock()
        self._ours = ours

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        machine: Mapping[str, Any],
        *,
        fingerprint: Mapping[str, float] | None = None,
        ours: bool = True,
    ) -> RatioTable:
        """The table in the file, for this state of the machine; empty where the file holds nothing for it.

        machine: anything that JSON can hold; equal means the same state. fingerprint: rates of the CPU math
        library, compared within a factor of 3; None is not compared. ours: whether the place is our own,
        where contents that are no table are set aside as `PATH.bad`; elsewhere it is somebody's file, and
        stays. Never raises for what the file is: whatever is wrong is one warning. A machine or fingerprint
        that is none is a ValueError.
        """
        table = cls(path, machine, ours=ours)
        table._state.fingerprint = checked_fingerprint(fingerprint or {})
        table._adopt(table._sections_or_warning())
        if table.ignored is not None and not len(table):
            log.warning("ratio table %s: %s", table.path, table.ignored)
        return table

    def __len__(self) -> int:
        return len(self._state.entries)

    def entries(self) -> dict[Site, Entry]:
        """All entries, by site, in the order of their keys."""
        return {Site.parse(key): entry for key, entry in sorted(self._state.entries.items())}

    def lookup(self, site: Site) -> Entry | None:
        """The entry of this layer at the nearest row bucket at or below `site.rows`, else None."""
        measured = self._layers.get(_layer(site), [])
        at = bisect_right(measured, site.rows, key=lambda pair: pair[0])
        return measured[at - 1][1] if at else None

    def put(self, site: Site, entry: Entry) -> None:
        """Adds or replaces an entry, in memory; `save()` keeps it."""
        with self._mutex:
            self._changed[site.key()] = self._state.entries[site.key()] = entry
            self._index()

    def save(self) -> None:
        """Merges what was put since the last save into the file.

        What others saved meanwhile stays and is taken over. An OSError leaves the old file as it was. No
        `put()` waits for the lock or the disk; what it puts meanwhile is for the next save.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with _locked(self.path):
            with self._mutex:
                saved = self._changed.copy()
            sections = self._sections_on_disk()
            own = self._own(sections)
            own.entries.update(saved)
            others = [section for section in sections if section is not own]
            others.sort(key=_Section.newest, reverse=True)
            _write(self.path, [own, *others][:MOST_SECTIONS])
            with self._mutex:
                self._changed = {k: e for k, e in self._changed.items() if saved.get(k) is not e}
                self._state.entries.update(own.entries | self._changed)
                self._index()

    def clear(self) -> None:
        """Forgets everything, in memory and in the file, for whatever state of the machine it was made.

        An OSError where the file is somebody else's.
        """
        if os.path.isdir(os.path.dirname(self.path)):
            with _locked(self.path), contextlib.suppress(FileNotFoundError):
                if not self._ours:
                    self._sections_on_disk()
                os.unlink(self.path)
        with self._mutex:
            self._state.entries, self._changed, self.ignored = {}, {}, None
            self._index()

    def _adopt(self, sections: list[_Section]) -> None:
        """Takes over what holds for this state, the newest last, and says what does not."""
        ignored, reasons = 0, ""
        for section in sorted(sections, key=_Section.newest):
            if differences := section.differences(self._state):
                ignored, reasons = ignored + len(section.entries), "; ".join(differences)[:300]
            else:
                self._state.entries.update(section.entries)
        if ignored:
            self.ignored = f"{ignored} entries ignored, made with {reasons}"
        self._index()

    def _index(self) -> None:
        """Entries by layer, replaced as a whole: a lookup in another thread sees the old or the new."""
        layers: dict[_Layer, list[tuple[int, Entry]]] = {}
        for site, entry in self.entries().items():
            layers.setdefault(_layer(site), []).append((site.rows, entry))
        for measured in layers.values():
            measured.sort(key=lambda pair: pair[0])
        self._layers = layers

    def _own(self, sections: list[_Section]) -> _Section:
        """The section of this state among them, added where there is none."""
        own = next((s for s in sections if not s.differences(self._state)), None)
        if own is None:
            own = _Section(self._state.machine, self._state.fingerprint)
            sections.append(own)
        own.fingerprint = own.fingerprint or self._state.fingerprint
        return own

    def _sections_on_disk(self) -> list[_Section]:
        """For whoever holds the lock: what the file holds, a bad one out of the way."""
        try:
            raw = _read(self.path)
            return [] if raw is None else _parse(raw)
        except _BadFileError as error:
            if not self._ours:
                raise OSError(f"it holds no ratio table ({error}) and is left as it is") from None
            _set_aside(self.path, str(error))
            return []

    def _sections_or_warning(self) -> list[_Section]:
        try:
            raw = _read(self.path)
            return [] if raw is None else _parse(raw)
        except _BadFileError as error:
            reason = str(error)
        except OSError as error:
            log.warning("ratio table %s cannot be read: %s", self.path, error)
            return []
        if not self._ours:
            log.warning("%s holds no ratio table (%s): ignored, and left as it is", self.path, reason)
            return []
        try:
            # Again under the lock: a writer may have replaced the bad file meanwhile. A prompt may be waiting
            # for this table, so a lock that is held is not waited for: the next save sets the file aside.
            with _locked(self.path, wait=False):
                return self._sections_on_disk()
        except OSError as error:
            log.warning("ratio table %s cannot be used (%s), nor set aside: %s", self.path, reason, error)
            return []


_Layer = tuple[str, str, int, int, bool]


def _layer(site: Site) -> _Layer:
    return site.kind, site.dtype, site.inputs, site.outputs, site.bias


def _plain(machine: Mapping[str, Any]) -> dict[str, Any]:
    """As it will come back from JSON, so that a tuple equals the list that was read."""
    try:
        plain = json.loads(json.dumps(dict(machine), allow_nan=False))
        _require_shallow(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"machine is {_short(machine)}: use what JSON can hold ({error})") from None
    return dict(plain)

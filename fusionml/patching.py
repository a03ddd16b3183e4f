"""Integration: `patch()`, `unpatch()`, `patched()` and `status()`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import forwards, machine, sharded, split
from .imports import when_imported
from .known import BLOCKS, SWITCH_LAYERS, SWITCHES
from .session import Session
from .settings import Settings, resolve

log = logging.getLogger("fusionml")


@dataclass
class Replacement:
    """One function of somebody else's that ours stands in for."""

    owner: Any
    name: str
    make: Callable[[Session, Any], Any]
    original: Any = None
    ours: Any = None
    stock: Any = None

    def __post_init__(self) -> None:
        self.stock = getattr(self.owner, self.name)

    def install(self, session: Session) -> None:
        # Somebody may have put the original back by hand: then ours is gone already.
        if self.ours is None or getattr(self.owner, self.name) in (self.original, self.stock):
            self.original = getattr(self.owner, self.name)
            self.ours = self.make(session, self.original)
            setattr(self.owner, self.name, self.ours)

    def remove(self) -> bool:
        """Put the original back; False if somebody replaced ours in the meantime."""
        if self.ours is None:
            return True
        current = getattr(self.owner, self.name)
        if current not in (self.ours, self.original, self.stock):
            return False
        if current is self.ours:  # else somebody has taken it out already
            setattr(self.owner, self.name, self.original)
        self.ours = self.original = None
        return True

    @property
    def label(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


_lock = threading.RLock()
_session = Session()
_replacements = [
    *(
        Replacement(layer, "__call__", forwards.replace_linear)
        for layer in (nn.Linear, nn.QuantizedLinear, *sharded.LAYERS)
    ),
    Replacement(mx, "set_wired_limit", forwards.replace_set_wired_limit),
]
_base: Settings | None = None
_contexts: dict[object, Settings] = {}


def patch(model: nn.Module | None = None, **settings: Any) -> None:
    """Split the large linear layers of every model that MLX-LM loads from now on.

    Calling it again changes the settings; handing over a model without settings only adds the model. A model
    that is neither loaded by MLX-LM nor handed over is never touched.

    Args:
        model: a model that is loaded already, to split as well.
        **settings: the fields of `fusionml.settings.Settings`; what is not given is taken from the
            environment (`FUSIONML_<NAME>`), then from the defaults.

    Raises:
        ValueError: a setting outside what is allowed; nothing is patched then.
        TypeError: a setting that does not exist, or a model that is not an `nn.Module`.
    """
    global _base
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; patch() takes an mlx.nn.Module")
    resolved = resolve(settings, max_ratio=split.max_ratio())
    with _lock:
        if settings or model is None or _base is None:
            _base = resolved
            _apply()
        if model is not None:
            _session.known.add(model, from_loader=False)


def unpatch() -> bool:
    """Put every original function back; False if somebody wrapped one of ours in the meantime.

    What somebody else put on top of ours is left where it is: a warning names it, and our function inside
    only calls the original from then on.
    """
    global _base
    with _lock:
        _base = None
        return _apply()


class patched(contextlib.ContextDecorator):
    """`patch()` for the length of a block or of a decorated function; afterwards all is as before.

    Args:
        **settings: as for `patch()`.

    Raises:
        ValueError: a setting outside what is allowed, at once and not only on entering.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = resolve(settings, max_ratio=split.max_ratio())
        self._tokens: list[object] = []

    def __call__(self, function: Any) -> Any:
        asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if asynchronous or inspect.isgeneratorfunction(function):
            raise TypeError(f"{function!r} runs after it returns; use `with patched():` inside it")
        return super().__call__(function)

    def __enter__(self) -> patched:
        token = object()
        with _lock:
            _contexts[token] = self._settings
            try:
                _apply()
            except BaseException:
                del _contexts[token]
                _apply()
                raise
            self._tokens.append(token)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            del _contexts[self._tokens.pop()]
            _apply()


def status() -> dict[str, Any]:
    """What FusionML is doing, as plain data that JSON can hold.

    Keys: `patched`, `backend`, `idle` (why no call can split at all, None where one may), `settings`,
    `table`, `calls` (prefill-sized calls by arm), `reasons` (the stock ones among them by reason), `sites`
    (the decision for each shape), `skipped` (layers by reason), `eligible` (share of the known models' linear
    arithmetic in prefill that may split), `probe_seconds`.
    """
    _session.collect()
    return {
        "patched": _session.settings.enabled,
        "backend": machine.backend(),
        "idle": _session.idle,
        "settings": asdict(_session.settings),
        "table": _session.table_state(),
        "calls": dict(_session.calls),
        "reasons": dict(_session.reasons),
        "sites": _session.sites(),
        **_session.coverage(),
        "probe_seconds": _session.probe_seconds(),
    }


def session() -> Session:
    """The state of this process."""
    return _session


def _apply() -> bool:
    """Make the process match the wanted settings: the innermost `patched()`, else `patch()`'s."""
    wanted = next(reversed(_contexts.values()), _base)
    if wanted is not None and wanted.enabled:
        fresh = not _session.settings.enabled
        _session.configure(wanted)
        _install()
        if fresh:
            log.info("patched: large linear layers of models loaded from now on are split (%s)", _brief())
        return True
    if wanted is not None and not _session.settings.enabled:
        log.info("off (enabled=False): everything is stock")
    _session.configure(Settings(enabled=False) if wanted is None else wanted)
    return True if wanted is not None else _remove()


def _brief() -> str:
    s = _session.settings
    share = "measured or default" if s.ratio is None else s.ratio
    return f"CPU share {share}, boundary {s.boundary}, from {s.min_rows} rows"


def _install() -> None:
    _watch_mlx_lm()
    for replacement in _replacements:
        _put(replacement)


def _put(replacement: Replacement) -> None:
    """Ours in its place; where no call can split, a layer's own `__call__` stays: it costs nothing at all."""
    if _session.idle is not None and replacement.name == "__call__":
        replacement.remove()
    else:
        replacement.install(_session)


@functools.cache
def _watch_mlx_lm() -> None:
    """Stand in for MLX-LM's loader and its layers of experts as soon as they are imported."""
    when_imported("mlx_lm.utils", _loader_imported)
    when_imported(SWITCH_LAYERS, _experts_imported)


def _loader_imported(utils: ModuleType) -> None:
    _replace(utils, "load_model", forwards.replace_load_model)


def _experts_imported(layers: ModuleType) -> None:
    makers = dict.fromkeys(BLOCKS, forwards.replace_expert_block)
    makers |= dict.fromkeys(SWITCHES, forwards.replace_expert_layer)
    for name, make in makers.items():
        if hasattr(layers, name):  # another version of MLX-LM may have other ones
            _replace(getattr(layers, name), "__call__", make)


def _replace(owner: Any, name: str, make: Callable[[Session, Any], Any]) -> None:
    with _lock:
        _replacements.append(Replacement(owner, name, make))
        if _session.settings.enabled:
            _put(_replacements[-1])


def _remove() -> bool:
    kept = [replacement.label for replacement in _replacements if not replacement.remove()]
    if kept:
        warnings.warn(
            f"{', '.join(kept)} was wrapped by somebody after fusionml.patch(): left as it is, and ours only "
            "calls the original now; undo the other patch, then call fusionml.unpatch() again",
            RuntimeWarning,
            stacklevel=4,
        )
    return not kept

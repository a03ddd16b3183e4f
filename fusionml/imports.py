"""Acts on a module when it is imported, so that we need not import it first.

Importing MLX-LM before a program's first line would freeze what the program sets for it in its environment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act(module)` once the module `name` has been imported: now, if it has been already."""
    if name in sys.modules:
        act(importlib.import_module(name))  # which waits while another thread is still importing it
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher(MetaPathFinder):
    """Stands in front of the finders until its module was imported, not only looked for."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act(module)


class _Acting(Loader):
    """A loader that acts on what it loaded, and is the other loader in everything else."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

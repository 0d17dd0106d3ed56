"""Takes the place of SGLang's compiled operators, which exist for GPUs only.

Any name, and any submodule, can be imported; calling an operator raises. The CPU server calls none.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class _Absent:
    """An operator that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU; this is a stand-in for tests")


def _attribute_of(module: str) -> Any:
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{module}.{name}")

    return attribute


class _Submodules(MetaPathFinder, Loader):
    """Makes every submodule that has no file."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        inside = fullname.startswith(__name__ + ".")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _attribute_of(module.__name__)  # type: ignore[method-assign]


__getattr__ = _attribute_of(__name__)
sys.meta_path.append(_Submodules())

"""Which architectures there are: every module of this package that declares an ARCHITECTURE."""

import functools
import pkgutil
from importlib import import_module

from pagecast_worker import models
from pagecast_worker.executor import LoadError
from pagecast_worker.models.architecture import Architecture

_MACHINERY = {"decoder", "folded", "one_row", "sources", "weights"}
"""Modules that compute with a family, and are not looked into: they load torch, which reading a configuration does not need."""


@functools.cache
def architectures() -> dict[str, Architecture]:
    """By name, in alphabetical order."""
    found = (module for module in pkgutil.iter_modules(models.__path__) if module.name not in _MACHINERY)
    modules = [import_module(f"{models.__name__}.{module.name}") for module in found]
    families: list[Architecture] = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return {one.name: one for one in sorted(families, key=lambda one: one.name)}


def architecture(name: str) -> Architecture:
    """Raises LoadError for one that nothing here computes."""
    known = architectures()
    if name not in known:
        raise LoadError(f"field architectures names {name}; known are {', '.join(known)}")
    return known[name]

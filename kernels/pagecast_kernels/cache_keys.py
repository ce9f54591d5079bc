"""Keys of compiled kernels that are the same in every process. Importing it is enough.

Triton (3.6) keeps a compiled kernel under a hash of its source, of the functions that it calls, and of the constants that they all use.
But constants of a called function count only where that function was hashed before, by another kernel: so a key depends on what was
launched earlier, and a kernel that one process has compiled may not be found by the next. Here functions are hashed before they count.
"""

from typing import Any

from triton.runtime import jit

_finder: Any = getattr(jit, "DependenciesFinder", None)  # no part of triton's interface: where it is not, keys are as triton makes them
_count = getattr(_finder, "_update_hash", None)


def _count_hashed(finder: Any, function: Any) -> None:
    getattr(function, "cache_key", None)
    assert _count is not None
    _count(finder, function)


if _count is not None and _count.__name__ != _count_hashed.__name__:
    _finder._update_hash = _count_hashed

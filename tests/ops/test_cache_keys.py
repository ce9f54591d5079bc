"""A kernel is found in Triton's cache whatever was launched before it in the process that compiled it."""

import os
import subprocess
import sys

import pytest

KEYS = """
import gc
from triton.runtime.jit import JITCallable
from pagecast_kernels import triton_ops
functions = [each for each in gc.get_objects() if isinstance(each, JITCallable) and each._fn_name.startswith("pagecast_kernels.")]
functions.sort(key=lambda function: function._fn_name)
for function in {order}(functions):
    function.cache_key
print(*(f"{{function._fn_name}} {{function.cache_key}}" for function in functions), sep="\\n")
"""


def keys(order: str) -> list[str]:
    """Of all functions, hashed in this order, in a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", KEYS.format(order=order)]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()


@pytest.mark.parametrize("order", ["reversed", "(lambda all: all[1::2] + all[::2])"])
def test_keys_do_not_depend_on_the_order_of_launches(order):
    expected = keys("list")
    assert len(expected) > 50
    assert keys(order) == expected

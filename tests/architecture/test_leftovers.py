"""The check that nothing is left behind finds what is."""

import os
import subprocess
import sys
import time

import leftovers


def test_a_process_is_found_whose_parent_has_gone() -> None:
    read, write = os.pipe()
    child = f"[sys.executable, '-c', 'import os; os.read({read}, 1)'], pass_fds=[{read}], start_new_session=True"
    code = f"import subprocess, sys; subprocess.Popen({child})"
    subprocess.run([sys.executable, "-c", code], pass_fds=[read], check=True)
    deadline = time.monotonic() + leftovers.PATIENCE_S
    while not any("os.read" in line for line in leftovers.processes()):  # in the middle of its exec it has no environment yet
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.write(write, b"!")
    deadline = time.monotonic() + leftovers.PATIENCE_S
    while any("os.read" in line for line in leftovers.processes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for end in (read, write):
        os.close(end)

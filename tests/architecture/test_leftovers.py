"""The check that nothing is left behind finds what is."""

import os
import subprocess
import sys
import time

import leftovers
import zmq


def test_a_process_is_found_whose_parent_has_gone() -> None:
    before = leftovers.processes()  # what other tests of this process share for longer
    read, write = os.pipe()
    child = f"[sys.executable, '-c', 'import os; os.read({read}, 1)'], pass_fds=[{read}], start_new_session=True"
    code = f"import subprocess, sys; subprocess.Popen({child})"
    subprocess.run([sys.executable, "-c", code], pass_fds=[read], check=True)
    (found,) = leftovers.wait_for_none(before, leftovers.processes, patience_s=0.0)
    assert "os.read" in found
    os.write(write, b"!")
    assert leftovers.wait_for_none(before, leftovers.processes) == []
    for end in (read, write):
        os.close(end)


def test_a_context_that_was_never_ended_is_found() -> None:
    before = leftovers.contexts()
    held = zmq.Context()
    held.socket(zmq.DEALER).close(0)
    end = time.monotonic() + 30
    while not (left := leftovers.wait_for_none(before, leftovers.contexts, patience_s=0.0)):  # its thread names itself
        assert time.monotonic() < end
    (found,) = left
    assert found == "a ZeroMQ context"
    held.term()
    assert leftovers.wait_for_none(before, leftovers.contexts) == []

"""A real worker process with the oracle, against a scheduler socket played by the test."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from worker.scheduler_socket import WAIT_S, SchedulerSocket, prefill, start_epoch, start_worker, worker_argv

from pagecast_wire.codec import WIRE_DIGEST, view_u32
from pagecast_wire.intake import HelloWanted, LoadProgress
from pagecast_wire.lifeline import VARIABLE
from pagecast_wire.plan import StepPlan, StopWorker
from pagecast_wire.result import PlanGap, StepResult, WorkerFault, WorkerHello
from pagecast_worker.oracle import oracle_tokens

PROMPT = list(range(40, 70))


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerSocket]:
    socket = SchedulerSocket(tmp_path)
    yield socket
    socket.close()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def tokens(result: StepResult) -> list[int]:
    return view_u32(result.tokens).tolist()


def test_hello_steps_gap_resend_and_stop(tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]) -> None:
    worker = start_worker(tmp_path)
    started.append(worker)
    progress = scheduler.expect(LoadProgress)
    assert (progress.rank, progress.phase) == (0, "weights")
    hello: WorkerHello = scheduler.expect(WorkerHello)
    assert (hello.pid, hello.rank, hello.num_blocks, hello.last_epoch) == (worker.pid, 0, 64, 0)
    assert hello.wire_digest == WIRE_DIGEST and hello.model.name == "oracle"
    assert json.loads((tmp_path / "worker-0.progress").read_text()) == {"phase": "warm-up", "done": 1, "total": 1}
    expected = oracle_tokens(PROMPT, 6)
    scheduler.send(prefill(2, 1, PROMPT))  # of no epoch that was started
    scheduler.send(start_epoch(3))
    scheduler.send(prefill(3, 1, PROMPT))
    result: StepResult = scheduler.expect(StepResult)
    assert (result.epoch, result.step, result.rank, tokens(result)) == (3, 1, 0, expected[:1])
    scheduler.send(StepPlan(epoch=3, step=1))
    for step in (3, 4):
        scheduler.send(StepPlan(epoch=3, step=step))
    gap: PlanGap = scheduler.expect(PlanGap)
    assert (gap.epoch, gap.last_step) == (3, 1)
    for step in (2, 3, 4):
        scheduler.send(StepPlan(epoch=3, step=step))
    for step in (2, 3, 4):
        result = scheduler.expect(StepResult)
        assert (result.step, tokens(result)) == (step, expected[step - 1 : step])
    assert scheduler.heartbeat(3, 4).incarnation == hello.incarnation
    scheduler.send(StepPlan(epoch=3, step=5))
    scheduler.send(StopWorker())
    assert scheduler.expect(StepResult).step == 5
    assert worker.wait(WAIT_S) == 0


def test_a_new_epoch_empties_the_worker(tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(start_worker(tmp_path, oracle_step_us=20_000))
    scheduler.expect(WorkerHello)
    scheduler.send(start_epoch(1))
    scheduler.send(prefill(1, 1, PROMPT))
    scheduler.send(StepPlan(epoch=1, step=2))
    scheduler.send(start_epoch(2))  # while results of epoch 1 are still on the device
    scheduler.send(StepPlan(epoch=1, step=3))
    scheduler.send(prefill(2, 1, PROMPT[::-1]))
    epochs = []
    while (result := scheduler.expect(StepResult)).epoch == 1:
        epochs.append(result.step)
    assert (result.epoch, result.step, tokens(result)) == (2, 1, oracle_tokens(PROMPT[::-1], 1))
    assert 3 not in epochs


def test_a_restarted_scheduler_is_told_who_this_is(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    first = SchedulerSocket(tmp_path)
    started.append(start_worker(tmp_path))
    hello = first.expect(WorkerHello)
    first.send(start_epoch(5))
    first.heartbeat(5, 0)
    first.close()
    second = SchedulerSocket(tmp_path)
    try:
        second.heartbeat(5, 0)  # an idle worker shows itself by its heartbeat alone
        second.send(HelloWanted(scheduler_incarnation="new"), peers=list(second.heartbeat_peers))
        again = second.expect(WorkerHello)
        assert (again.incarnation, again.pid, again.last_epoch) == (hello.incarnation, hello.pid, 5)
        second.send(start_epoch(6))
        second.send(prefill(6, 1, PROMPT))
        assert tokens(second.expect(StepResult)) == oracle_tokens(PROMPT, 1)
        second.send(HelloWanted(scheduler_incarnation="new"))
        assert second.expect(WorkerHello).last_epoch == 6
    finally:
        second.close()


def test_ranks_above_zero_send_no_tokens(tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(start_worker(tmp_path, rank=1, tensor_parallel_size=2))
    assert scheduler.expect(WorkerHello).world_size == 2
    scheduler.send(start_epoch(1))
    scheduler.send(prefill(1, 1, PROMPT))
    result = scheduler.expect(StepResult)
    assert (result.rank, result.step, result.tokens, result.flags) == (1, 1, b"", b"")


def test_a_contradictory_plan_is_a_fault_and_ends_the_worker(
    tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]
) -> None:
    worker = start_worker(tmp_path)
    started.append(worker)
    scheduler.expect(WorkerHello)
    scheduler.send(start_epoch(1))
    scheduler.send(prefill(1, 1, PROMPT))
    scheduler.expect(StepResult)
    scheduler.send(prefill(1, 2, PROMPT))  # the row is taken
    fault = scheduler.expect(WorkerFault)
    assert (fault.kind, fault.epoch, fault.step) == ("protocol", 1, 2)
    assert worker.wait(WAIT_S) == 1


def test_bytes_that_are_no_message_are_dropped(tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(start_worker(tmp_path))
    scheduler.expect(WorkerHello)
    scheduler.send(start_epoch(1))
    for peer in scheduler.peers:
        for junk in (b"", b"\xff" * 100, b"\x81\xa4type\xa9step_plan"):
            scheduler.socket.send_multipart([peer, junk])
    scheduler.send(prefill(1, 1, PROMPT))
    assert tokens(scheduler.expect(StepResult)) == oracle_tokens(PROMPT, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_an_idle_worker(
    tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    worker = start_worker(tmp_path)
    started.append(worker)
    scheduler.expect(WorkerHello)
    worker.send_signal(number)
    assert worker.wait(WAIT_S) == 0


def test_a_worker_without_a_scheduler_says_what_it_waits_for_and_ends_by_a_signal(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    worker = start_worker(tmp_path, log_format="json")
    started.append(worker)
    assert worker.stderr is not None
    assert b"loaded" in worker.stderr.readline()
    told = json.loads(worker.stderr.readline())
    assert told["event"] == "waiting for the scheduler" and told["endpoint"] == f"ipc://{tmp_path}/workers.ipc"
    worker.terminate()
    assert worker.wait(WAIT_S) == 0


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_2(
    tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]
) -> None:
    program = textwrap.dedent("""
        import sys
        from pagecast_worker import main
        from pagecast_worker.config import WorkerConfig
        from pagecast_worker.executor import LoadError
        class Broken:
            def load(self, report):
                raise LoadError("model.safetensors: tensor x is missing")
        main.make_executor = lambda config, link: Broken()
        sys.exit(main.run(WorkerConfig(run_dir=sys.argv[1], model="m")))
    """)
    worker = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE)
    started.append(worker)
    fault = scheduler.expect(WorkerFault)
    assert (fault.kind, fault.step) == ("load", 0) and "tensor x is missing" in fault.detail
    assert worker.wait(WAIT_S) == 2
    assert worker.stderr is not None
    assert worker.stderr.read() == b"pagecast worker: model.safetensors: tensor x is missing\n"


@pytest.mark.parametrize(("error", "kind"), [("OutOfMemory('no room')", "out_of_memory"), ("ZeroDivisionError('x')", "step")])
def test_an_executor_that_fails_is_a_fault_of_its_kind(
    tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]], error: str, kind: str
) -> None:
    program = textwrap.dedent(f"""
        import sys
        from pagecast_worker import main
        from pagecast_worker.config import WorkerConfig
        from pagecast_worker.executor import OutOfMemory
        from pagecast_worker.oracle import OracleExecutor
        class Failing(OracleExecutor):
            def submit(self, plan):
                if plan.step == 3:
                    raise {error}
                super().submit(plan)
        main.make_executor = lambda config, link: Failing(config)
        sys.exit(main.run(WorkerConfig(run_dir=sys.argv[1], model="m", executor="oracle", oracle_step_us=1000)))
    """)
    worker = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE)
    started.append(worker)
    scheduler.expect(WorkerHello)
    scheduler.send(start_epoch(1))
    for plan in (prefill(1, 1, PROMPT), StepPlan(epoch=1, step=2), StepPlan(epoch=1, step=3)):
        scheduler.send(plan)
    while isinstance(message := scheduler.receive()[1], StepResult):
        assert message.step < 3
    assert isinstance(message, WorkerFault)
    assert (message.kind, message.epoch, message.step) == (kind, 1, 3)
    assert worker.wait(WAIT_S) == 1


def test_a_run_dir_too_long_for_a_socket_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = subprocess.run(worker_argv(tmp_path / ("x" * 120)), stderr=subprocess.PIPE, timeout=WAIT_S)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1 and b"run_dir is too long" in done.stderr and b"107" in done.stderr


PARENT = """
import os, subprocess, sys
reading, writing = os.pipe()
environment = os.environ | {sys.argv[1]: f"{os.getpid()}:{reading}"}
child = subprocess.Popen(sys.argv[2:], pass_fds=(reading,), env=environment)
print(child.pid, flush=True)
os.close(reading)
sys.stdin.read()
"""


def test_a_worker_does_not_outlive_a_killed_parent(
    tmp_path: Path, scheduler: SchedulerSocket, started: list[subprocess.Popen[bytes]]
) -> None:
    argv = [sys.executable, "-c", PARENT, VARIABLE, *worker_argv(tmp_path)]
    parent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started.append(parent)
    hello = scheduler.expect(WorkerHello)
    worker = psutil.Process(hello.pid)
    os.kill(parent.pid, signal.SIGKILL)
    psutil.wait_procs([worker], timeout=WAIT_S)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_the_oracle_worker_loads_no_torch(tmp_path: Path) -> None:
    program = "import sys, pagecast_worker.main, pagecast_worker.oracle; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S).stdout == "False\n"

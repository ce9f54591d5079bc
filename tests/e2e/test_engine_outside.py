"""What the engine shows to the outside: metrics text, a recording that runs again, and a pool that changed size."""

import urllib.request
from pathlib import Path
from typing import Any

import zmq
from e2e.engine_rig import RigFrontend, RigWorker, engine_thread, rig_workers
from free_ports import free_port

from pagecast_scheduler.engine.recorder import Recorder
from pagecast_scheduler.engine.replay import replay
from pagecast_wire.codec import MAX_BYTES


def _series(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_agree_with_what_was_served(tmp_path: Path) -> None:
    port = free_port()
    with engine_thread(tmp_path, metrics_port=port), rig_workers(tmp_path, 1, num_blocks=101, step_us=100):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit([1] * 32, 10, seed=i) for i in range(4)]
        frontend.wait_finished(*keys)
        long = frontend.submit([1] * 32, 1000)
        frontend.pump(lambda: len(frontend.tokens.get((long, 0), [])) > 1, "tokens")
        frontend.abort(long)
        frontend.wait_finished(long)
        served = 4 * 10 + len(frontend.tokens[long, 0])
        series: dict[str, float] = {}

        def is_over() -> bool:
            series.update(_series(port))
            in_use = series["pagecast_num_requests_running"] or series["pagecast_kv_cache_usage"]
            return series["pagecast_output_tokens_total"] >= served and not in_use

        frontend.pump(is_over, "the next look at the counters")
        assert series["pagecast_sequences_finished_total{reason=\"LENGTH\"}"] == 4
        assert series["pagecast_sequences_finished_total{reason=\"CANCELLED\"}"] == 1
        assert series["pagecast_cache_config_info{block_size=\"16\",num_blocks=\"101\"}"] == 1
        assert series["pagecast_time_to_first_token_seconds_count"] == 5
        assert series["pagecast_frontends_connected"] == 1
        assert series["pagecast_prefix_tokens_hit_total"] > 0
        assert series["pagecast_device_seconds_total"] > 100e-6 * 10
        frontend.close()


def test_a_pool_that_shrank_asks_for_a_new_scheduler(tmp_path: Path) -> None:
    """Limits were told to front ends already; only a new start can change them."""
    with engine_thread(tmp_path) as engine:
        frontend = RigFrontend(tmp_path)
        with rig_workers(tmp_path, 1, num_blocks=200):
            frontend.wait_serving()
            smaller = RigWorker(tmp_path, num_blocks=100)
            smaller.start()
            assert engine.exit_code() == 5  # type: ignore[attr-defined]
            assert "100 blocks" in engine.reason and "200" in engine.reason
            smaller.quit.set()
        with engine_thread(tmp_path, max_model_len=512), rig_workers(tmp_path, 1, num_blocks=100):
            frontend.welcome = None
            frontend.pump(lambda: frontend.welcome is not None, "the new scheduler's welcome")
            assert frontend.welcome is not None and frontend.welcome.limits.num_blocks == 100
            key = frontend.submit([1], 10)
            frontend.wait_finished(key)
            frontend.expect(key)
        frontend.close()


def test_an_oversized_message_closes_its_sender_only(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        frontend = RigFrontend(tmp_path).wait_serving()
        context: zmq.Context[Any] = zmq.Context()
        sender = context.socket(zmq.DEALER)
        sender.set(zmq.LINGER, 0)
        monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sender.connect(f"ipc://{tmp_path}/frontends.ipc")
        sender.send(bytes(MAX_BYTES["from_frontend"] + 1))
        frontend.pump(lambda: bool(monitor.poll(0)), "the sender is cut off")
        key = frontend.submit([1], 10)
        frontend.wait_finished(key)
        frontend.expect(key)
        sender.disable_monitor()
        sender.close()
        context.destroy(0)
        frontend.close()


def test_a_recording_holds_every_input(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with engine_thread(tmp_path, record=Recorder(str(path), with_tokens=True)):
        frontend = RigFrontend(tmp_path)
        with rig_workers(tmp_path, 1):
            frontend.wait_serving()
            keys = [frontend.submit([i, 1] * 9, 40, seed=i) for i in range(6)]
            frontend.pump(lambda: all(frontend.tokens.get((key, 0)) for key in keys), "all run")
            frontend.abort(keys[0])
            successor = RigWorker(tmp_path)
            successor.start()
            frontend.wait_finished(*keys)
            successor.quit.set()
        frontend.close()
    again = replay(path)
    assert again.compared and again.difference is None
    assert again.num_requests >= 6 and again.num_results > 40

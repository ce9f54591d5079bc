"""The synchronous client: values, errors, deadline, cancel, retries."""

import gc
import threading
import time
from typing import Any

import pytest
from client.fake_server import FakeServer

from pagecast import Client, SamplingParams, errors, types


def test_stream_gives_typed_events_in_order_and_passes_over_unknown_ones(server: FakeServer) -> None:
    with Client(server.target) as client:
        events = list(client.stream("hello"))
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Accepted", "Progress", "Tokens", "SequenceFinished", "Completed"]
    accepted, progress, tokens, finished, completed = events
    assert isinstance(accepted, types.Accepted) and accepted.effective.seed == 5 and accepted.prompt_tokens == 3
    assert progress == types.Progress(2, "prefilling", 0, 1, 3, 0, 2.0)
    assert tokens == types.Tokens(4, 0, 0, (7, 8), "ab")
    assert finished == types.SequenceFinished(5, 0, "stop", 8, types.Usage(3, 1, 2, 0))
    assert completed == types.Completed(6, types.Usage(3, 1, 2, 0), types.Timings(0.005, 0.25, 1.5), 1)


def test_generate_returns_the_whole_result(server: FakeServer) -> None:
    with Client(server.target) as client:
        result = client.generate("hello")
    assert (result.text, result.token_ids, result.num_recoveries) == ("ab", (7, 8), 2)
    assert result.effective.seed == 2**64 - 1
    assert result.sequences[0].matched_stop == "!" and result.sequences[0].reason == "stop"


def test_the_other_calls(server: FakeServer) -> None:
    with Client(server.target) as client:
        assert client.tokenize("hi") == (104, 105)
        assert client.detokenize([104, 105]) == "hi"
        assert client.render_chat([{"role": "user", "content": "x"}]).text == "<user>x"
        assert client.render_chat([types.ChatMessage("user", "x")]).token_ids == tuple(map(ord, "<user>x"))
        (model,) = client.models()
        assert (model.name, model.chat, model.prefix_cache, model.limits.max_model_len) == ("m", False, None, 128)
        assert client.load().state == "serving" and client.load().num_running == 4
        assert client.server_info() == types.ServerInfo("1", "i", 3)
        assert client.health() == "SERVING"
        assert client.health("readiness") == "NOT_SERVING"
        with pytest.raises(errors.NotFound):
            client.health("no such service")


@pytest.mark.parametrize("whole", [True, False])
def test_a_refused_request_names_every_field(server: FakeServer, whole: bool) -> None:
    with Client(server.target) as client, pytest.raises(errors.InvalidRequest) as caught:
        client.generate("bad") if whole else list(client.stream("bad"))
    error = caught.value
    assert (error.code, error.reason, error.metadata) == ("INVALID_ARGUMENT", "FIELD_VIOLATION", {"request_id": "r1"})
    assert [violation.field for violation in error.violations] == ["spec.sampling.temperature", "spec.sampling.top_p"]
    assert "must be at most 100, not 101" in str(error) and "\n" not in str(error)


def test_a_busy_server_is_tried_again_and_then_given_up_with_its_advice(server: FakeServer) -> None:
    with Client(server.target) as client:
        assert client.generate("flaky").text == "ab"
        assert server.script.attempts == 3
        with pytest.raises(errors.Unavailable) as caught:
            list(client.stream("busy"))
    assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 0.3)


def test_nobody_listening_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.health()


def test_a_timeout_ends_the_call(server: FakeServer) -> None:
    with Client(server.target) as client, pytest.raises(errors.DeadlineExceeded):
        client.generate("slow", timeout=3.0)
    assert server.script.attempts == 1


@pytest.mark.parametrize("way", ["cancel", "with", "break"])
def test_leaving_a_stream_cancels_it_on_the_server(server: FakeServer, way: str) -> None:
    with Client(server.target) as client:
        stream = client.stream("endless")
        assert isinstance(next(stream), types.Tokens)
        if way == "cancel":
            stream.cancel()
        elif way == "with":
            with stream:
                next(stream)
        else:
            for _ in stream:
                break
            del stream, _
            gc.collect()
        assert server.script.cancelled.wait(30)


def test_what_is_said_arrives(server: FakeServer) -> None:
    sampling = SamplingParams(
        temperature=0.0, top_k=-1, top_p=0.5, min_p=0.25, seed=2**64 - 1, max_tokens=0, min_tokens=0, stop="end",
        stop_token_ids=[2, 2**32 - 1], ignore_eos=False, detokenize=False,
    )
    with Client(server.target) as client:
        client.generate(
            [1, 2], sampling, model="m", request_id="mine", cache_scope="s", bypass_prefix_cache=True, priority="interactive",
            time_budget=1.5, max_queue_time=0.25,
        )
        client.generate("x")
        client.generate([{"role": "user", "content": "y"}])
        client.generate([])
    full, plain, chat, nothing = server.script.asked
    assert list(full.prompt_token_ids.ids) == [1, 2] and full.WhichOneof("input") == "prompt_token_ids"
    assert full.sampling.HasField("temperature") and full.sampling.temperature == 0.0
    assert full.sampling.HasField("top_k") and full.sampling.top_k == 0
    assert (full.sampling.top_p, full.sampling.min_p, full.sampling.seed) == (0.5, 0.25, 2**64 - 1)
    for field in ("max_output_tokens", "min_output_tokens", "ignore_eos"):
        assert full.stopping.HasField(field)
    assert list(full.stopping.stop_texts) == ["end"] and list(full.stopping.stop_token_ids) == [2, 2**32 - 1]
    assert (full.output.text, full.model, full.request_id, full.cache.cache_scope) == (False, "m", "mine", "s")
    assert full.cache.bypass_prefix_cache and full.scheduling.priority == 3
    assert full.stopping.time_budget.ToMilliseconds() == 1500 and full.scheduling.max_queue_time.ToMilliseconds() == 250
    assert not plain.sampling.HasField("temperature") and not plain.stopping.HasField("max_output_tokens") and plain.output.text
    assert chat.chat.messages[0].content == "y"
    assert nothing.WhichOneof("input") == "prompt_token_ids"


@pytest.mark.parametrize(("params", "named"), [
    (SamplingParams(top_k=-2), "top_k"), (SamplingParams(seed=2**64), "seed"), (SamplingParams(max_tokens=-1), "max_tokens"),
    (SamplingParams(min_tokens=2**32), "min_tokens"), (SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
    (SamplingParams(max_tokens=1.5), "max_tokens"),  # type: ignore[arg-type]
])
def test_numbers_that_no_message_holds_are_refused_by_name(server: FakeServer, params: SamplingParams, named: str) -> None:
    with Client(server.target) as client, pytest.raises(ValueError, match=f"^{named} must"):
        client.generate("x", params)


def test_unknown_request_options_are_refused_by_name(server: FakeServer) -> None:
    with Client(server.target) as client, pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=3)  # type: ignore[call-arg]


def test_several_endpoints_share_the_calls(server: FakeServer) -> None:
    other = FakeServer()
    try:
        with Client([server.target, other.target]) as client:
            # Until both connections stand, round robin may use one alone; each round is a chance to see both.
            end = time.monotonic() + 60
            while not (server.script.asked and other.script.asked):
                assert time.monotonic() < end, "one endpoint has all the calls"
                client.generate("hello")
    finally:
        other.close()


@pytest.mark.parametrize("endpoints", [["localhost:1", "127.0.0.1:2"], ["127.0.0.1:1", "[::1]:2"], []])
def test_endpoints_that_cannot_be_balanced_are_refused(endpoints: list[str]) -> None:
    with pytest.raises(ValueError, match="several endpoints"):
        Client(endpoints)


def test_a_stream_that_waits_for_its_server_can_be_left() -> None:
    """By another thread, as Ctrl-C does in the commands: it must not begin anew after that."""
    server = FakeServer()
    with Client(server.target) as client:
        stream = client.stream("endless")
        next(stream)
        server.close()
        found: list[Exception] = []

        def read() -> None:
            try:
                for _ in stream:
                    pass
            except errors.RpcError as error:
                found.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        end = time.monotonic() + 60
        while stream._position._num_failures < 4:  # it waits for 0.4 s and more from here on
            assert time.monotonic() < end
            time.sleep(0.01)
        stream.cancel()
        reader.join(60)
        assert [type(error) for error in found] == [errors.Cancelled]


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 1e300])
def test_a_timeout_that_is_too_far_away_for_grpc_is_none_that_has_passed(server: FakeServer, timeout: float) -> None:
    with Client(server.target) as client:
        assert client.generate("hello", timeout=timeout).text == "ab"
        assert len(list(client.stream("hello", timeout=timeout))) == 5
        assert client.load(timeout=timeout).num_running == 4


@pytest.mark.parametrize("name", ["timeout", "time_budget", "progress_interval"])
@pytest.mark.parametrize("value", [float("nan"), "soon"])
def test_times_that_are_no_numbers_are_named(server: FakeServer, name: str, value: Any) -> None:
    with Client(server.target) as client, pytest.raises(ValueError, match=f"^{name} must be a number of seconds"):
        client.stream("hello", **{name: value})

"""LLM and AsyncLLM over the oracle: the same tokens as any other way, in order, and no process left behind however the program ends."""

import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest
from e2e.launch_roles import wait_ended

from pagecast import LLM, AsyncLLM, SamplingParams, errors, types
from pagecast.llm import front_ends, listed
from pagecast.requests import generation_spec
from pagecast_worker.oracle import oracle_tokens

LONG = SamplingParams(max_tokens=32, ignore_eos=True, seed=1)


def test_results_come_in_the_order_of_the_prompts() -> None:
    with LLM(executor="oracle", max_num_seqs=8, num_frontends=2) as llm:
        assert len(llm._channels) == 2  # calls go to both in turn
        prompts = [[number + 1, 2, 3] for number in range(200)]
        params = [SamplingParams(max_tokens=1 + number % 7, ignore_eos=True, detokenize=False, seed=number) for number in range(200)]
        together = llm.generate(prompts, params)
        assert [output.prompt for output in together] == prompts
        assert [len(output.outputs[0].token_ids) for output in together] == [1 + number % 7 for number in range(200)]
        assert together[0].outputs[0].text == "" and together[0].outputs[0].finish_reason == "length"
        for number in (0, 77, 199):
            (alone,) = llm.generate(prompts[number], params[number], cache_scope="another")
            assert alone.outputs[0].token_ids == together[number].outputs[0].token_ids
        repeated = llm.generate([[9] * 64, [9] * 64 + [1]], LONG)
        again = llm.generate([9] * 64, LONG)
        assert again[0].num_cached_tokens >= 48 and again[0].outputs == repeated[0].outputs
        (many,) = llm.generate([7, 8], SamplingParams(n=4, max_tokens=20, ignore_eos=True, seed=5))
        expected = [oracle_tokens([7, 8], 20, 5, sequence) for sequence in range(4)]
        assert [list(output.token_ids) for output in many.outputs] == expected and [o.index for o in many.outputs] == [0, 1, 2, 3]
        assert llm.generate([], LONG) == []


def test_a_refused_prompt_raises_and_the_llm_goes_on() -> None:
    with LLM(executor="oracle", max_num_seqs=4, max_model_len=64) as llm:
        with pytest.raises(errors.InvalidRequest) as caught:
            llm.generate([[1, 2], list(range(1, 100)), [3]], LONG)
        assert caught.value.violations
        with pytest.raises(ValueError, match="2 prompts but 1 sampling"):
            llm.generate([[1], [2]], [LONG])
        assert len(llm.generate([1, 2], LONG)[0].outputs[0].token_ids) == 32


@pytest.mark.parametrize(("options", "kind", "said"), [
    ({"no_such": 1}, TypeError, "no_such"),
    ({"max_num_seqs": 0}, errors.StartError, "max_num_seqs"),
    ({"executor": "torch", "model": "/no/such"}, errors.ModelNotFound, "/no/such"),
])
def test_wrong_options_are_named(options: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        LLM(**{"executor": "oracle"} | options)  # type: ignore[arg-type]


def test_one_prompt_and_many_are_told_apart() -> None:
    message = {"role": "user", "content": "x"}
    assert listed("text") == ["text"]
    assert listed([1, 2]) == [[1, 2]]
    assert listed([message]) == [[message]]
    assert listed([types.ChatMessage("user", "x")]) == [[types.ChatMessage("user", "x")]]
    assert listed(["a", "b"]) == ["a", "b"]
    assert listed([[1], [2]]) == [[1], [2]]
    assert listed([[message], [message]]) == [[message], [message]]
    assert listed([]) == []
    ids = np.array([1, 2], np.uint16)
    assert [list(prompt) for prompt in listed(ids)] == [[1, 2]] and len(listed(np.array([[1, 2], [3, 4]]))) == 2
    assert list(generation_spec(ids, None, {}).prompt_token_ids.ids) == [1, 2]


async def test_async_streams_run_side_by_side_and_can_be_left() -> None:
    async def read(prompt: list[int]) -> tuple[int, ...]:
        got: list[int] = []
        async for event in llm.stream(prompt, LONG):
            if isinstance(event, types.Tokens):
                got += event.token_ids
        return tuple(got)

    async with AsyncLLM(executor="oracle", max_num_seqs=8, num_frontends=2) as llm:
        streamed = await asyncio.gather(*(read([number + 1, 5]) for number in range(20)))
        whole = await asyncio.gather(*(llm.generate([number + 1, 5], LONG) for number in range(20)))
        assert streamed == [output.outputs[0].token_ids for output in whole]
        endless = llm.stream([1], SamplingParams(ignore_eos=True))
        async for event in endless:
            if isinstance(event, types.Tokens):
                break
        endless.cancel()
        assert len(await read([7, 7])) == 32
    with pytest.raises(errors.PagecastError, match="closed"):
        llm.stream([1])


PROGRAM = """
import os, sys, time, signal
import psutil
from pagecast import LLM, SamplingParams
llm = LLM(executor="oracle")
print(*[child.pid for child in psutil.Process().children()], flush=True)
assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
print("generated", flush=True)
{end}
"""


KILLED = """
def kill_front_ends():
    for child in psutil.Process().children():
        if "frontend" in child.cmdline():
            child.kill()
import asyncio, threading
from pagecast import AsyncLLM
prompts, params = [[1, 2, number] for number in range(40)], SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
threading.Timer(0.1, kill_front_ends).start()  # whether before or while it is asked
found = llm.generate(prompts, params)
assert [output.prompt for output in found] == prompts and all(len(output.outputs[0].token_ids) == 400 for output in found)
async def ask():
    async with AsyncLLM(executor="oracle", oracle_step_us=1000) as other:
        threading.Timer(0.1, kill_front_ends).start()
        found = await asyncio.gather(*(other.generate(prompt, params) for prompt in prompts))
        assert all(len(output.outputs[0].token_ids) == 400 for output in found)
asyncio.run(ask())
"""

FORK = """
child = os.fork()
if child == 0:
    sys.exit(5)  # at a fork's exit the cluster is not ended, and not waited for
end = time.monotonic() + 60
while os.waitpid(child, os.WNOHANG) == (0, 0):
    assert time.monotonic() < end, os.kill(child, signal.SIGKILL)
    time.sleep(0.05)
assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
"""


@pytest.mark.parametrize(("end", "code"), [
    (FORK, 0), (KILLED, 0), ("pass", 0), ("sys.exit(3)", 3), ("raise RuntimeError('x')", 1),
    ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ("os._exit(4)", 4), ("del llm", 0),
])
def test_no_process_outlives_the_program(end: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(end=end)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 2 + front_ends()
    _, errors_said = process.communicate(timeout=120)
    assert process.returncode == code, errors_said
    wait_ended(children)

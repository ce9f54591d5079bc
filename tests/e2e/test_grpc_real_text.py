"""Text of the real model over gRPC: whole characters in every chunk, equal to transformers' decoding, cut where a stop text says."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from e2e.cli_server import Served, serve
from e2e.real_model import PROMPTS, Reference

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

CHOSEN = ["chinese", "emoji family", "chat"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--cpu-kv-gib", "0.2") as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.address) as opened:
        yield opened


async def stream(channel: grpc.aio.Channel, **fields: Any) -> tuple[list[int], list[str], Any]:
    """(ids, text chunks, the end of the sequence)."""
    ids: list[int] = []
    chunks: list[str] = []
    end = None
    call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=pb.GenerationSpec(**fields)))
    async for response in call:
        event = response.event
        if event.HasField("tokens"):
            ids += event.tokens.token_ids
            chunks.append(event.tokens.text)
        elif event.HasField("sequence_finished"):
            end = event.sequence_finished
    return ids, chunks, end


def hot(seed: int) -> pb.SamplingOptions:
    """So hot that rare bytes come up."""
    return pb.SamplingOptions(temperature=2.0, seed=seed)


@pytest.mark.parametrize("name", CHOSEN)
async def test_chunks_join_to_transformers_decoding(channel: grpc.aio.Channel, reference: Reference, name: str) -> None:
    for sampling in (pb.SamplingOptions(temperature=0), hot(1)):
        ids, chunks, _ = await stream(
            channel, prompt_text=PROMPTS[name], sampling=sampling, stopping=pb.StoppingOptions(max_output_tokens=32, ignore_eos=True)
        )
        assert len(ids) == 32
        assert "".join(chunks) == reference.tokenizer.decode(ids, skip_special_tokens=True)


async def test_text_that_the_prompt_makes_the_model_copy_comes_in_whole_characters(channel: grpc.aio.Channel) -> None:
    """Greedy copying of three-byte and four-byte characters, of which most take several tokens."""
    ids, chunks, _ = await stream(
        channel,
        prompt_text="你好世界🙂你好世界🙂你好世界🙂你好世界🙂你好世界🙂",
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_output_tokens=36, ignore_eos=True),
    )
    whole = "".join(chunks).rstrip("\ufffd")
    assert "你好" in whole and "\ufffd" not in whole
    assert len(whole) < len(ids)


async def test_a_stop_text_cuts_the_same_stream(channel: grpc.aio.Channel) -> None:
    rules: dict[str, Any] = {"max_output_tokens": 60, "ignore_eos": True}
    _, chunks, _ = await stream(channel, prompt_text=PROMPTS["story"], sampling=hot(3), stopping=pb.StoppingOptions(**rules))
    text = "".join(chunks)
    stop = text[20:27]
    rules["stop_texts"] = [stop]
    ids, cut, end = await stream(channel, prompt_text=PROMPTS["story"], sampling=hot(3), stopping=pb.StoppingOptions(**rules))
    assert "".join(cut) == text[: text.index(stop)]
    assert (end.reason, end.stop_text, end.usage.output_tokens) == (pb.FINISH_REASON_STOP, stop, len(ids))


async def test_a_chat_is_the_templates_text(channel: grpc.aio.Channel, reference: Reference) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="What is 2 + 2? 你好 🙂")])
    rendered = await tokenizer_pb2_grpc.TokenizerServiceStub(channel).RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    assert rendered.text == reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rules = pb.StoppingOptions(max_output_tokens=24)
    greedy = pb.SamplingOptions(temperature=0)
    as_chat = await stream(channel, chat=chat, sampling=greedy, stopping=rules)
    as_ids = await stream(channel, prompt_token_ids=pb.TokenIds(ids=rendered.token_ids), sampling=greedy, stopping=rules)
    assert as_chat[0] == as_ids[0] and "<|im_end|>" not in "".join(as_chat[1])

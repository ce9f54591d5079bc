"""A caller that leaves in the middle and comes back: raw calls, so that nothing goes on by itself."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
from e2e.cli_server import LIMIT_S
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc
from pagecast_worker.oracle import EOS_TOKEN_ID, oracle_tokens

VOCAB = 2048
DETACH = pb.DeliveryOptions(on_disconnect=pb.ON_DISCONNECT_DETACH, detach_grace=Duration(seconds=300))


@dataclass
class Caller:
    """One request of the oracle's, as its caller sees it. got: token ids by sequence; logprobs: how many records came with them."""

    request_id: str
    prompt: list[int]
    length: int
    seed: int = 1
    num_sequences: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    got: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    is_complete: bool = False
    call: Any = None

    def begin(self, channel: grpc.aio.Channel, *, detach: bool = True) -> "Caller":
        sampling = pb.SamplingOptions(seed=self.seed, num_sequences=self.num_sequences)
        stopping = pb.StoppingOptions(max_output_tokens=self.length, ignore_eos=True)
        ids = pb.TokenIds(ids=self.prompt)
        spec = pb.GenerationSpec(request_id=self.request_id, prompt_token_ids=ids, sampling=sampling, stopping=stopping, **self.options)
        request = pb.GenerateStreamRequest(spec=spec, delivery=DETACH if detach else None)
        self.call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request)  # type: ignore[no-untyped-call]
        self.got = {}
        return self

    async def accepted(self) -> None:
        """From here on the request must not be lost."""
        response = await self.call.read()
        assert response is not grpc.aio.EOF and response.event.WhichOneof("event") == "accepted"

    async def read(self, at_least: int = 0) -> "Caller":
        """Until every sequence has so many tokens; 0: until the call ends."""
        async with asyncio.timeout(LIMIT_S):
            while not at_least or len(self.got) < self.num_sequences or min(map(len, self.got.values())) < at_least:
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    break
                self._take(response.event)
        return self

    def _take(self, event: Any) -> None:
        if event.WhichOneof("event") == "tokens":
            ids = self.got.setdefault(event.tokens.sequence_index, [])
            assert event.tokens.first_token_offset == len(ids), "a gap or a repeat"
            ids += event.tokens.token_ids
            self.logprobs += [record.logprob for record in event.tokens.logprobs]
        self.is_complete |= event.WhichOneof("event") == "completed"

    async def leave(self) -> "Caller":
        """The connection is gone, without a word."""
        self.call.cancel()
        return self

    async def come_back(self, channel: grpc.aio.Channel) -> "Caller":
        """Resume where it was, as often as the server says that it is not there yet."""
        cursors = [pb.SequenceCursor(sequence_index=i, next_token_offset=len(ids)) for i, ids in self.got.items()]
        request = pb.ResumeStreamRequest(request_id=self.request_id, cursors=cursors, delivery=DETACH)
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.call = generation_pb2_grpc.GenerationServiceStub(channel).ResumeStream(request)  # type: ignore[no-untyped-call]
                try:
                    response = await self.call.read()
                    assert response is not grpc.aio.EOF
                    assert response.event.accepted.request_id == self.request_id
                    return self
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                    await asyncio.sleep(0.05)  # what a client does between two tries

    async def finish(self, elsewhere: grpc.aio.Channel) -> "Caller":
        """Read to the end, going on at another front end whenever this one is lost."""
        while not self.is_complete:
            try:
                await self.read()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                await self.come_back(elsewhere)
        return self

    def check(self) -> None:
        """All tokens came, and they are the ones of a run without faults."""
        assert self.is_complete
        for index in range(self.num_sequences):
            constrained = "constraint" in self.options
            expected = oracle_tokens(self.prompt, self.length, self.seed, index, vocab_size=VOCAB, constrained=constrained)
            if constrained and EOS_TOKEN_ID in expected:
                expected = expected[: expected.index(EOS_TOKEN_ID) + 1]
            assert self.got[index] == expected

"""TokenizerService: the code path of generation, offered by itself."""

from typing import Any

from pagecast.v1 import tokenizer_pb2 as pb
from pagecast.v1 import tokenizer_pb2_grpc
from pagecast_scheduler.frontend.chat_rules import check_chat
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.service_state import ServiceState


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenize, Detokenize and RenderChat."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        """Ids of a text, as a prompt would get them."""
        self._state.check_model(request.model)
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._state.prompts.tokenize(request.text, add_special, "text", None))

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        """Text of a whole sequence of ids."""
        self._state.check_model(request.model)
        size = self._state.limits().vocab_size
        ids = list(request.token_ids)
        if ids and max(ids) >= size:
            at = next(i for i, token_id in enumerate(ids) if token_id >= size)
            text = f"must be below the vocabulary size {size}, not {ids[at]}"
            raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation(f"token_ids[{at}]", text),))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._state.prompts.detokenize(ids, skip))

    async def RenderChat(self, request: Any, context: Any) -> pb.RenderChatResponse:
        """The text and the ids that a conversation becomes."""
        self._state.check_model(request.model)
        violations: list[Violation] = []
        check_chat(request.chat, "chat", self._state.limits(), violations)
        if violations:
            raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(violations))
        text = await self._state.prompts.render(request.chat, "chat")
        ids = await self._state.prompts.tokenize(text, False, "chat", None)
        return pb.RenderChatResponse(text=text, token_ids=ids)

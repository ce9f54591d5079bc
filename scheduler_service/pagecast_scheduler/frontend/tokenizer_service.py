"""TokenizerService: the code path of generation, offered by itself."""

from typing import Any

from pagecast.v1 import tokenizer_pb2 as pb
from pagecast.v1 import tokenizer_pb2_grpc
from pagecast_scheduler.frontend.chat_rules import check_chat
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation, field_violation
from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.service_state import ServiceState


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenize, Detokenize, CountTokens and RenderChat."""

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
        found, ids = Findings(), list(request.token_ids)
        found.token_ids("token_ids", ids, self._state.limits().vocab_size)
        found.refuse()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._state.prompts.detokenize(ids, skip))

    async def CountTokens(self, request: Any, context: Any) -> pb.CountTokensResponse:
        """How many tokens a text or a conversation has."""
        self._state.check_model(request.model)
        limits, prompts = self._state.limits(), self._state.prompts
        kind = request.WhichOneof("input")
        if kind is None:
            raise field_violation("input", "must hold one of text and chat")
        if kind == "text":
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await prompts.tokenize(request.text, add_special, "text", None)
        else:
            ids = await prompts.tokenize(await self._rendered(request.chat), False, "chat", None)
        return pb.CountTokensResponse(num_tokens=len(ids), max_model_len=limits.max_request_tokens)

    async def RenderChat(self, request: Any, context: Any) -> pb.RenderChatResponse:
        """The text and the ids that a conversation becomes."""
        self._state.check_model(request.model)
        text = await self._rendered(request.chat)
        ids = await self._state.prompts.tokenize(text, False, "chat", None)
        return pb.RenderChatResponse(text=text, token_ids=ids)

    async def _rendered(self, chat: Any) -> str:
        """The text that a conversation becomes. Raises Refusal."""
        violations: list[Violation] = []
        check_chat(chat, "chat", self._state.limits(), violations)
        if violations:
            raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(violations))
        return await self._state.prompts.render(chat, "chat")

"""ModelService: what is served, and its limits."""

from typing import Any

from pagecast.v1 import model_pb2 as pb
from pagecast.v1 import model_pb2_grpc
from pagecast_scheduler.frontend.call_forms import call_format_of
from pagecast_scheduler.frontend.constraints import KINDS
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.output_parts import reasoning_format_of
from pagecast_scheduler.frontend.service_state import ServiceState


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ListModels and GetModel."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        """The one model of this cluster; none while it is unknown."""
        return pb.ListModelsResponse(models=[self._model()] if self._state.engine.welcome is not None else [])

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        """The model, with limits and capabilities."""
        self._state.check_model(request.model)
        return pb.GetModelResponse(model=self._model())

    def _model(self) -> pb.Model:
        welcome = self._state.engine.welcome
        if welcome is None:
            raise Refusal(Reason.STARTING)
        facts = welcome.model
        template = self._state.prompts.tokenizer.chat_template
        calls = None if template is None or not template.knows_tools else call_format_of(template.source)
        reasoning = None if template is None else reasoning_format_of(template.source)
        return pb.Model(
            name=self._state.model_name,
            architecture=facts.architecture,
            digest=facts.digest,
            tokenizer_digest=self._state.prompts.tokenizer.digest,
            dtype=facts.dtype,
            num_parameters=facts.num_parameters,
            vocab_size=facts.vocab_size,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            quantization=facts.quantization,
            end_token_ids=facts.eos_token_ids,
            limits=self._state.limits().to_proto(),
            capabilities=pb.ModelCapabilities(
                chat=template is not None,
                prefix_cache=welcome.limits.enable_prefix_caching,
                constraints=KINDS,
                tool_call_format=None if calls is None else calls.name,
                reasoning_format=None if reasoning is None else reasoning.name,
            ),
        )

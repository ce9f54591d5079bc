"""KServe's Open Inference Protocol, the part without tensors: live, ready, and what is served."""

from importlib import metadata
from typing import Any

from pagecast_scheduler.frontend.compat import open_inference_pb2 as pb
from pagecast_scheduler.frontend.compat import open_inference_pb2_grpc
from pagecast_scheduler.frontend.errors import Reason, Refusal, model_unknown
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_wire.intake import ServingState


class OpenInferenceServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The protocol's versions are digests of weights."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        """Who answers is live."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_serving())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        self._check(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._is_serving())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="pagecast", version=metadata.version("pagecast"))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        """No tensors go in or out over this protocol, so there are none to describe."""
        digest = self._check(request.name, request.version)
        return pb.ModelMetadataResponse(name=self._state.model_name, versions=[digest], platform="pagecast")

    def _is_serving(self) -> bool:
        return self._state.serving_state is ServingState.SERVING

    def _check(self, name: str, version: str) -> str:
        """The digest of the served weights. Raises Refusal for another model or version."""
        self._state.check_model(name)
        welcome = self._state.engine.welcome
        if welcome is None:
            raise Refusal(Reason.STARTING)
        if version and version != welcome.model.digest:
            raise model_unknown(f"{name}:{version}", f"{self._state.model_name}:{welcome.model.digest}")
        return welcome.model.digest

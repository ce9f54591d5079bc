"""Models, tokenizer, load, health and reflection over a real port."""

import asyncio
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, end_frontend
from frontend.fake_scheduler import finished
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import model_pb2, model_pb2_grpc, runtime_pb2, runtime_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from pagecast_scheduler.frontend import cache_watch
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.load_reports import ORCA
from pagecast_scheduler.frontend.server import COMPAT, HEALTH, REFLECTION, SERVICES
from pagecast_wire.control import CacheEvents
from pagecast_wire.intake import ServingState

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_the_model_is_listed_with_its_limits(rig: Rig) -> None:
    stub = model_pb2_grpc.ModelServiceStub(rig.channel)
    (model,) = (await stub.ListModels(model_pb2.ListModelsRequest())).models
    assert (model.name, model.vocab_size, list(model.end_token_ids)) == ("tiny", 512, [2])
    assert (model.limits.max_model_len, model.limits.max_pool_tokens, model.limits.max_message_bytes) == (256, 256, 8 << 20)
    assert model.capabilities.HasField("chat") and model.capabilities.chat and model.capabilities.prefix_cache
    assert (await stub.GetModel(model_pb2.GetModelRequest(model="tiny"))).model == model


async def test_the_tokenizer_service_is_the_code_path_of_generation(rig: Rig) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(rig.channel)
    ids = (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="hi 你"))).token_ids
    assert bytes(ids) == "hi 你".encode()
    assert (await stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=ids))).text == "hi 你"
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    rendered = await stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
    assert rendered.text == "user: hi\nassistant: " and bytes(rendered.token_ids).decode() == rendered.text
    call = rig.generation.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat)))
    submit = await rig.scheduler.accept()
    assert submit.prompt[::4].decode() == rendered.text
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[1, 512]))
    assert details(caught.value)[1]["BadRequest"].field_violations[0].field == "token_ids[1]"


async def test_load_is_the_schedulers_status(rig: Rig) -> None:
    stub = runtime_pb2_grpc.RuntimeServiceStub(rig.channel)
    load = await stub.GetLoad(runtime_pb2.GetLoadRequest())
    assert (load.state, load.num_running, load.kv_utilization) == (runtime_pb2.SERVING_STATE_SERVING, 1, 0.25)
    info = await stub.GetServerInfo(runtime_pb2.GetServerInfoRequest())
    assert (info.instance_id, info.epoch) == ("one", 1) and info.version


async def test_health_follows_the_engine_and_watches_stay_open(rig: Rig) -> None:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="pagecast.v1.GenerationService"))
    stranger = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await watch.read()).status == SERVING
    assert (await stranger.read()).status == UNKNOWN
    for state, status in ((ServingState.STALLED, NOT_SERVING), (ServingState.SERVING, SERVING), (ServingState.RECOVERING, NOT_SERVING)):
        await rig.scheduler.set_state(state)
        async with asyncio.timeout(20):
            assert (await watch.read()).status == status
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert set(listed) == {"", "liveness", "readiness", *SERVICES}
    assert {name for name, answer in listed.items() if answer.status == SERVING} == {"liveness"}
    assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not watch.done() and not stranger.done()
    await end_frontend(rig)
    assert await watch.code() is grpc.StatusCode.OK and await stranger.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("name", REFLECTION)
async def test_reflection_answers_under_both_names(rig: Rig, name: str) -> None:
    call: Any = rig.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {*SERVICES, *COMPAT, HEALTH, ORCA, *REFLECTION}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="pagecast.v1.GenerationService"))
    answer = (await call.read()).file_descriptor_response
    files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in answer.file_descriptor_proto]
    assert any(service.name == "GenerationService" for file in files for service in file.service)
    await call.done_writing()


async def test_a_watch_that_lost_a_change_ends_before_it_tells_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watch, "MAX_UNREAD", 2)
    watch = cache_watch.CacheWatch(1, "one", 0)
    for number in (1, 2, 3):  # the third has no room
        watch.receive(CacheEvents(1, 1, number), "one")
    assert [(await watch.next())[1].sequence] == [1]
    watch.receive(CacheEvents(1, 1, 4), "one")
    assert [(await watch.next())[1].sequence] == [2]
    with pytest.raises(Refusal) as caught:
        await watch.next()
    assert caught.value.reason is Reason.SLOW_CONSUMER and watch.opening().after == 2

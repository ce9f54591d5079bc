"""Well-formed messages that mean nothing, from a front end that was welcomed and from a rank of the group: nobody else notices."""

from pathlib import Path
from typing import Any

import msgspec
import zmq
from e2e.engine_rig import RigFrontend, engine_thread, rig_workers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire.message_strategies import instances, messages

from pagecast_wire.codec import encode
from pagecast_wire.control import Attach, Kept, RestartWorkers, SetDrain
from pagecast_wire.intake import KEY_BITS, Farewell, FrontendHello
from pagecast_wire.result import GroupJoin, WorkerHello

ODD = st.sampled_from([0, 1, 3, 1 << 39, (1 << 40) - 1])


def as_own(message: Any, slot: int, odd: int) -> Any:
    """The same, under keys that this front end may use."""
    key = slot << KEY_BITS | odd
    if isinstance(message, Kept):
        submit = msgspec.structs.replace(message.attached.submit, key=key)
        return msgspec.structs.replace(message, attached=msgspec.structs.replace(message.attached, submit=submit))
    if "keys" in message.__struct_fields__:
        return msgspec.structs.replace(message, keys=(key, *message.keys))
    return msgspec.structs.replace(message, key=key) if "key" in message.__struct_fields__ else message


def test_a_front_end_that_talks_nonsense(tmp_path: Path) -> None:
    kinds = [kind for kind in messages("from_frontend") if kind not in (FrontendHello, Farewell, SetDrain, RestartWorkers)]
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        canary, mad = RigFrontend(tmp_path).wait_serving(), RigFrontend(tmp_path).wait_serving()
        key = canary.submit([1] * 20, 1500)
        names = iter(range(1_000_000))

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(kinds).flatmap(instances), ODD)
        def talk(message: Any, odd: int) -> None:
            mad.send(as_own(message, mad.slot, odd))
            if isinstance(message, Kept) and not next(names) % 3:  # what is kept is looked at
                identity = message.attached.submit.identity
                mad.send(Attach(mad.slot << KEY_BITS | 5, identity.owner, identity.request_id))

        talk()
        canary.wait_finished(key)
        canary.expect(key)
        last = canary.submit([3, 2], 10)
        canary.wait_finished(last)
        canary.expect(last)
        mad.close()
        canary.close()


def test_a_peer_that_talks_like_a_rank(tmp_path: Path) -> None:
    """It is no member of the group, whatever it says."""
    kinds = [kind for kind in messages("from_worker") if kind not in (WorkerHello, GroupJoin)]
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        canary = RigFrontend(tmp_path).wait_serving()
        stranger = canary.context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(f"ipc://{tmp_path}/workers.ipc")
        key = canary.submit([1] * 20, 1500)

        @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(kinds).flatmap(instances))
        def talk(message: Any) -> None:
            stranger.send(encode(message))

        talk()
        canary.wait_finished(key)
        canary.expect(key)
        assert canary.status is not None and canary.status.epoch == 1
        stranger.close()
        canary.close()

"""What makes a hello unacceptable, in words that name both sides' values. Pure functions."""

from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.link import ForeignHello
from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION
from pagecast_wire.result import GroupJoin, WorkerHello


def wire_mismatch(version: int, digest: str) -> str | None:
    """What is wrong with a peer's wire version or digest; None if nothing is."""
    if version != WIRE_VERSION:
        return f"wire version {version}, the scheduler speaks {WIRE_VERSION}"
    if digest != WIRE_DIGEST:
        return f"wire digest {digest}, the scheduler has {WIRE_DIGEST}"
    return None


def foreign_build(hello: ForeignHello) -> str:
    """Why a hello that did not decode is refused."""
    return wire_mismatch(hello.wire_version, hello.wire_digest) or "a hello with other fields than this build's"


def place_mismatch(hello: WorkerHello | GroupJoin, config: EngineConfig) -> str | None:
    """What is wrong with the place in the group that a rank claims; None if nothing is."""
    if hello.world_size != config.tensor_parallel_size:
        return f"tensor_parallel_size {hello.world_size}, the scheduler has {config.tensor_parallel_size}"
    if not 0 <= hello.rank < hello.world_size:
        return f"rank {hello.rank} of {hello.world_size}"
    return None


def digest_mismatch(model: str, config: str, reference: WorkerHello | GroupJoin) -> str | None:
    """What two ranks do not agree on: weights or configuration; None if nothing."""
    theirs = reference.model_digest if isinstance(reference, GroupJoin) else reference.model.digest
    if model != theirs:
        return f"model digest {model}, rank {reference.rank} reported {theirs}"
    if config != reference.config_digest:
        return f"config digest {config}, rank {reference.rank} reported {reference.config_digest}"
    return None


def join_mismatch(join: GroupJoin, config: EngineConfig, reference: WorkerHello | GroupJoin | None) -> str | None:
    """What keeps a rank out of the group that is gathering; None if nothing does. reference: as in `worker_mismatch`."""
    wire = wire_mismatch(join.wire_version, join.wire_digest) or place_mismatch(join, config)
    if wire is not None:
        return wire
    return digest_mismatch(join.model_digest, join.config_digest, reference) if reference is not None else None


def worker_mismatch(hello: WorkerHello, config: EngineConfig, reference: WorkerHello | None) -> str | None:
    """What makes a rank unacceptable; None if nothing does. reference: the rank that all others must agree with, once there is one."""
    wire = wire_mismatch(hello.wire_version, hello.wire_digest)
    if wire is not None:
        return wire
    place = place_mismatch(hello, config)
    if place is not None:
        return place
    if hello.block_size != config.block_size:
        return f"block_size {hello.block_size}, the scheduler has {config.block_size}"
    if hello.num_blocks < 2:
        return f"num_blocks {hello.num_blocks}, at least 2 are needed"
    if reference is None:
        return None
    digests = digest_mismatch(hello.model.digest, hello.config_digest, reference)
    if digests is not None:
        return digests
    if hello.model != reference.model:
        return f"other facts about model {hello.model.name} than rank {reference.rank} reported"
    return None

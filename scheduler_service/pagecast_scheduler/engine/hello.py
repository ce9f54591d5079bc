"""What makes a hello unacceptable, in words that name both sides' values. Pure functions."""

from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.link import ForeignHello
from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION
from pagecast_wire.result import WorkerHello


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


def worker_mismatch(hello: WorkerHello, config: EngineConfig, reference: WorkerHello | None) -> str | None:
    """What makes a rank unacceptable; None if nothing does. reference: the rank that all others must agree with, once there is one."""
    wire = wire_mismatch(hello.wire_version, hello.wire_digest)
    if wire is not None:
        return wire
    if hello.world_size != config.tensor_parallel_size:
        return f"tensor_parallel_size {hello.world_size}, the scheduler has {config.tensor_parallel_size}"
    if not 0 <= hello.rank < hello.world_size:
        return f"rank {hello.rank} of {hello.world_size}"
    if hello.block_size != config.block_size:
        return f"block_size {hello.block_size}, the scheduler has {config.block_size}"
    if hello.num_blocks < 2:
        return f"num_blocks {hello.num_blocks}, at least 2 are needed"
    if reference is None:
        return None
    if hello.model.digest != reference.model.digest:
        return f"model digest {hello.model.digest}, rank {reference.rank} reported {reference.model.digest}"
    if hello.config_digest != reference.config_digest:
        return f"config digest {hello.config_digest}, rank {reference.rank} reported {reference.config_digest}"
    if hello.model != reference.model:
        return f"other facts about model {hello.model.name} than rank {reference.rank} reported"
    return None

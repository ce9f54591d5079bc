"""Messages between Pagecast's own processes: front ends, the scheduler and the workers.

Typed msgspec structs in msgpack with packed little-endian columns; see `codec` for the rules. Beside them what these processes do
alike: keys, lifelines, pulses, log lines, reading a GGUF file's metadata. This package owns no socket and no state, and imports nothing
else of ours.
"""

from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION, WireError, decode, encode, pack_u32, pack_u64, view_u32, view_u64

__all__ = ["WIRE_DIGEST", "WIRE_VERSION", "WireError", "decode", "encode", "pack_u32", "pack_u64", "view_u32", "view_u64"]

"""The naive reference: what every stream must say, computed from its own tokens alone, with no cache, batch or scheduler.

A model is stood in for by arithmetic. The "KV" of a token is a 64-bit chain value over all tokens up to it, as real KV depends on all
tokens before; the next token is a mix of the last chain value with the request's seed and sequence index. Whoever reads one wrong
cell therefore says other tokens from there on.
"""

from dataclasses import dataclass, field

VOCABULARY = 24
"""Token ids are 0 .. VOCABULARY - 1: few, so that prompts collide and stop ids are met often."""

MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
"""Chain value before the first token."""


def extend(chain: int, token: int) -> int:
    """Chain value after one more token. Never 0 or 1 in practice; those mark broken and unwritten cells in the oracle."""
    chain = (chain ^ (token + 1) * 0xD6E8FEB86659FD93) & MASK
    chain = (chain * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
    return chain ^ (chain >> 29)


def sample(chain: int, seed: int, sequence: int, banned: frozenset[int]) -> int:
    """The next token after `chain`. banned: ids that may not be sampled yet (min_output_tokens)."""
    word = ((chain ^ seed * 0xA24BAED4963EE407 ^ sequence * 0x9FB21C651E98DF25) * 0x9E6C63D0676A9A99) & MASK
    token = (word >> 33) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def forced_run(chain: int, stop_ids: frozenset[int]) -> list[int]:
    """What a constraint that is in force leaves no choice about after a token was drawn, none of it a stop id. chain: value after it."""
    word = (chain * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & MASK
    run: list[int] = []
    for index in range((word >> 17) % 11 if (word >> 40) % 3 == 0 else 0):
        token = (word >> (5 * index)) % VOCABULARY
        if token in stop_ids:
            break
        run.append(token)
    return run


@dataclass(slots=True)
class Stream:
    """The whole output one sequence must produce if nothing ends it early. `stopped`: its last token is a stop id."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


def stream(
    prompt: list[int], seed: int, sequence: int, limit: int, minimum: int, stop_ids: frozenset[int], constrained: bool = False
) -> Stream:
    """Recompute everything from the prompt on, one token after another: at most `limit`, up to and including the first stop id after
    `minimum`. constrained: runs of them follow without a choice."""
    chain = EMPTY
    for token in prompt:
        chain = extend(chain, token)
    result = Stream()
    run: list[int] = []
    while len(result.tokens) < limit and not result.stopped:
        is_forced = bool(run)
        token = run.pop(0) if is_forced else sample(chain, seed, sequence, stop_ids if len(result.tokens) < minimum else frozenset())
        result.tokens.append(token)
        result.stopped = token in stop_ids
        chain = extend(chain, token)
        if constrained and not is_forced:
            run = forced_run(chain, stop_ids)
    return result

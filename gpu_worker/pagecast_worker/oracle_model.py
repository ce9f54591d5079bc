"""The oracle's "model": integer arithmetic modulo 2^64 in which every token depends on all before it, cheap to continue.

It imitates what paged attention depends on. The value kept in the cache for position i is a running sum over tokens 0..i, as a
real key or value depends on everything before it:

    cell[i] = sum_{j <= i} mix(token[j]) * weight[j]

and a next token is drawn from all cells of the context, read one by one, as attention reads them:

    context = sum_{i < n} cell[i] * RATIO^i
    token   = mix(context ^ key(seed, sequence)) mod vocab_size

RATIO^i splits into RATIO^(block start) * RATIO^offset, so a block's share can be kept per block, and results do not depend on
the block size. A wrong block, a stale cell, a block of another prefix or a cell overwritten too early changes the token.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_RATIO: Final = 0x9E3779B97F4A7C15  # odd, hence a unit of the ring
_MASK: Final = (1 << 64) - 1
_TOKEN_SALT: Final = np.uint64(0x1F83D9ABFB41BD6B)
_WEIGHT_SALT: Final = np.uint64(0x5BE0CD19137E2179)
_RUN_SALT: Final = 0x510E527FADE682D1
_LONGEST_RUN: Final = 12


def mix(values: Any) -> U64:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014) of an array of u64."""
    x = np.asarray(values, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def position_weights(count: int) -> U64:
    """weight[0..count): odd u64, one per position."""
    return mix(np.arange(count, dtype=np.uint64) + _WEIGHT_SALT) | np.uint64(1)


def ratio_powers(count: int, stride: int = 1) -> U64:
    """RATIO^(i * stride) for i in 0..count."""
    powers = np.full(count, pow(_RATIO, stride, _MASK + 1), dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers, dtype=np.uint64)


def token_terms(tokens: Any, weights: U64) -> U64:
    """mix(token) * weight per token: what each adds to the running sum."""
    return mix(np.asarray(tokens, dtype=np.uint64) + _TOKEN_SALT) * weights


def row_key(seed: int, sequence: int) -> int:
    """What a row's seed and sequence index add to the draw."""
    pair = np.array([seed & _MASK, sequence + 0x3C6EF372], dtype=np.uint64)
    first, second = (int(part) for part in mix(pair))
    return first ^ second


def draw(contexts: U64, keys: U64, vocab_size: int) -> NDArray[np.int64]:
    """The next token of each row."""
    return (mix(contexts ^ keys) % np.uint64(vocab_size)).astype(np.int64)


def avoid(token: int, banned: Collection[int], vocab_size: int) -> int:
    """The first id at or after `token`, cyclically, that is not banned; `token` itself if every id is."""
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        if candidate not in banned:
            return candidate
    return token


def forced_run(token: int, vocab_size: int, stop_ids: Collection[int] = ()) -> list[int]:
    """What any constraint makes the oracle say after it drew `token`: after every third a few tokens that follow from it alone, up to
    the first that would be a stop id."""
    words = mix(np.arange(1 + _LONGEST_RUN, dtype=np.uint64) + np.uint64((token * _RUN_SALT) & _MASK)).tolist()
    run: list[int] = []
    for word in words[1 : 1 + words[0] // 3 % _LONGEST_RUN] if words[0] % 3 == 0 else ():
        if word % vocab_size in stop_ids:
            break
        run.append(word % vocab_size)
    return run


def oracle_tokens(
    prompt: Sequence[int],
    n: int,
    seed: int = 0,
    sequence: int = 0,
    vocab_size: int = 49152,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
    constrained: bool = False,
) -> list[int]:
    """The output that any correct serving of `prompt` by the oracle must produce; computed without blocks, steps or batches.

    At most n output tokens; ends after the first stop id, which is part of the output. Before `min_tokens` output tokens exist, no
    stop id can be drawn. constrained: under any constraint, whose forced tokens are not drawn.
    """
    total = len(prompt) + n
    weights, powers = position_weights(total), ratio_powers(total)
    cells = np.cumsum(token_terms(prompt, weights[: len(prompt)]), dtype=np.uint64)
    context = int(np.sum(cells * powers[: len(prompt)], dtype=np.uint64))
    cell = int(cells[-1])
    key = np.array([row_key(seed, sequence)], dtype=np.uint64)
    output: list[int] = []
    run: list[int] = []
    while len(output) < n:
        if run:
            token = run.pop(0)
        else:
            token = int(draw(np.array([context], dtype=np.uint64), key, vocab_size)[0])
            if len(output) < min_tokens:
                token = avoid(token, stop_ids, vocab_size)
            run = forced_run(token, vocab_size, stop_ids) if constrained else []
        position = len(prompt) + len(output)
        output.append(token)
        if token in stop_ids:
            break
        cell = (cell + int(token_terms([token], weights[position : position + 1])[0])) & _MASK
        context = (context + cell * int(powers[position])) & _MASK
    return output

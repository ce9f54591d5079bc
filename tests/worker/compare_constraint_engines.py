"""llguidance beside xgrammar on the vocabulary of SmolLM2: what compiling and masks cost, and whether the texts are valid.

    PYTHONPATH=tests python tests/worker/compare_constraint_engines.py [SCHEMAS]

xgrammar is not a dependency of Pagecast: install it beside. Each engine writes one text for each of the random schemas of
random_schemas.py, drawing at random under its masks.
"""

import argparse
import json
import time
from collections.abc import Callable

import jsonschema
import numpy as np
from llguidance import LLMatcher
from worker.random_schemas import schema_text
from worker.test_constraints import END, VOCAB, eager_ids, vocabulary

from pagecast_wire.constraints import grammar_of, limits
from pagecast_wire.sampling import Constraint, ConstraintKind

MOST_TOKENS = 300
Step = Callable[[np.ndarray], None]


def llguidance_engine() -> Callable[[str], tuple[Step, Callable[[int], bool]]]:
    tokenizer = vocabulary()

    def compile_schema(schema: str) -> tuple[Step, Callable[[int], bool]]:
        matcher = LLMatcher(tokenizer, grammar_of(Constraint(ConstraintKind.JSON_SCHEMA, schema)), log_level=0, limits=limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda mask: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), matcher.consume_token

    return compile_schema


def xgrammar_engine() -> Callable[[str], tuple[Step, Callable[[int], bool]]]:
    import torch
    import xgrammar

    pieces = [vocabulary().decode_bytes([i]) for i in range(VOCAB)]
    info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: str) -> tuple[Step, Callable[[int], bool]]:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema, any_whitespace=True))
        return lambda mask: matcher.fill_next_token_bitmask(torch.from_numpy(mask).unsqueeze(0)), matcher.accept_token

    return compile_schema


def measure(name: str, compile_schema: Callable[[str], tuple[Step, Callable[[int], bool]]], count: int) -> None:
    noise = np.random.default_rng(0)
    compiling, masking, valid, endless, refused = [], [], 0, 0, 0
    for seed in range(count):
        schema = schema_text(seed)
        began = time.perf_counter()
        try:
            fill, accept = compile_schema(schema)
        except (ValueError, RuntimeError):
            refused += 1
            continue
        compiling.append(time.perf_counter() - began)
        output: list[int] = []
        while output[-1:] != [END] and len(output) < MOST_TOKENS:
            mask = np.zeros(-(-VOCAB // 32), np.int32)
            began = time.perf_counter()
            fill(mask)
            masking.append(time.perf_counter() - began)
            logits = noise.gumbel(size=VOCAB).astype(np.float32)
            logits[eager_ids()] += 7
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
            output.append(int(np.where(allowed, logits, -np.inf).argmax()))
            if not allowed.any() or not accept(output[-1]):
                break
        if output[-1:] != [END]:
            endless += 1
            continue
        try:
            text = vocabulary().decode_bytes(output[:-1]).decode()
            jsonschema.validate(json.loads(text), json.loads(schema), jsonschema.Draft202012Validator)
            valid += 1
        except (ValueError, jsonschema.ValidationError):
            pass
    compiled, masks = np.array(compiling) * 1e3, np.array(masking) * 1e6
    print(
        f"{name:11} compile ms: median {np.median(compiled):.2f}, 99th {np.percentile(compiled, 99):.1f}; mask us: median "
        f"{np.median(masks):.0f}, 99th {np.percentile(masks, 99):.0f}, most {masks.max():.0f}; "
        f"of {count} schemas {valid} valid, {count - valid - endless - refused} invalid, {endless} without an end, {refused} refused"
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemas", nargs="?", type=int, default=200, metavar="SCHEMAS", help="how many (default: %(default)s)")
    wanted = parser.parse_args().schemas
    for engine, make in (("llguidance", llguidance_engine), ("xgrammar", xgrammar_engine)):
        measure(engine, make(), wanted)

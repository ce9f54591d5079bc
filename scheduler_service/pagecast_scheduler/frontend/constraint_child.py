"""The child process that compiles constraints for a check: one JSON line in, one out, until its input ends.

It is killed when it takes too long and replaced by the next check, so nothing here guards against time; memory has a limit.
"""

import ctypes
import json
import os
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

from pagecast_wire.constraints import grammar_of, limits
from pagecast_wire.sampling import Constraint, ConstraintKind

MAX_MEMORY_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_TEXT = 300
"""Characters of a compiler's message that are passed on; it speaks of the caller's own constraint."""


def fault(kind: str, text: str, tokenizer: LLTokenizer, opening: str = "", closing: str = "") -> str:
    """What is wrong with a constraint; "" if it compiles and its first token exists."""
    try:
        grammar = grammar_of(Constraint(ConstraintKind[kind.upper()], text, opening, closing))
        message = LLMatcher.validate_grammar(grammar, tokenizer, limits=limits())
        if message:
            return str(message)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        has_first = any(matcher.compute_bitmask())
        return str(matcher.get_error()) if matcher.is_error() else "" if has_first else "matches no text"
    except ValueError as error:
        return str(error)


def plain(message: str) -> str:
    """A compiler's message as one short line."""
    if message.startswith("NoExtensionBias"):  # llguidance's word for it
        return "matches no text"
    line = " ".join(message.partition("<state>")[0].split())
    return "".join(c for c in line if c.isprintable())[:MAX_TEXT]


def main() -> None:
    """Answers until there is nothing more to read. Its argument is the front end's process id, with which it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        kind, text, opening, closing = json.loads(line)
        print(json.dumps(plain(fault(kind, text, tokenizer, opening, closing))), flush=True)


if __name__ == "__main__":
    main()

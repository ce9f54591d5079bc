"""What front ends bring to a scheduler that starts where another was lost, put in an order that no reader can tell from before."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from pagecast_scheduler.engine.frontends import Frontend
from pagecast_wire.control import Attach, EarlierLogprobs, Kept
from pagecast_wire.intake import Submit

Brought = list[tuple[Frontend, Any]]


def in_order_of_return(messages: Iterable[tuple[Frontend, Any]]) -> Brought:
    """Requests first, with all that is known of their tokens, then who reads along, then what else was said of them.

    Several front ends may bring one request, each with the tokens that it had got when the scheduler died. All are given the longest
    history of each sequence: the request goes on where no reader has anything yet, and no token is drawn twice. Who brings a
    request first, but lacks some of its tokens, asks for it like one that joins.
    """
    messages = list(messages)
    submits = [(frontend, message) for frontend, message in messages if isinstance(message, Submit)]
    whole: dict[Any, Submit] = {}  # by name, under the key of the front end that is the first to bring it
    first: dict[Any, Frontend] = {}
    names: dict[int, Any] = {}  # by key
    for frontend, submit in submits:
        name = names[submit.key] = _name(submit)
        have = whole.setdefault(name, submit)
        first.setdefault(name, frontend)
        whole[name] = replace(have, history=_longer(have.history, submit.history))
    opening: Brought = []
    joining: Brought = []
    lacking: Brought = []
    for frontend, submit in submits:
        request = whole[_name(submit)]
        if submit.key != request.key:
            joining.append((frontend, replace(submit, history=request.history)))
            continue
        opening.append((frontend, request))
        if submit.history != request.history:
            lacking.append((frontend, Attach(submit.key, submit.identity.owner, submit.identity.request_id)))
    records: Brought = []
    rest: Brought = []
    for frontend, message in messages:
        if isinstance(message, EarlierLogprobs) and message.key in names:
            name = names[message.key]
            records.append((first[name], replace(message, key=whole[name].key)))
        elif not isinstance(message, Submit):
            rest.append((frontend, message))
    kept = sorted((brought for brought in rest if isinstance(brought[1], Kept)), key=lambda brought: brought[1].left_ms)
    rest = [brought for brought in rest if not isinstance(brought[1], Kept)]
    # Kept ones in the order in which they are forgotten, and before whoever asks for one of them.
    return opening + records + joining + lacking + kept + rest


def _name(submit: Submit) -> Any:
    """Equal for submits of one request; one without an id is itself alone."""
    identity = submit.identity
    return (identity.owner, identity.request_id, identity.digest) if identity.request_id else submit.key


def _longer(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if len(first) != len(second):
        return max(first, second, key=len)
    return tuple(max(pair, key=len) for pair in zip(first, second, strict=True))

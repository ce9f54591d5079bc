"""Renders conversations with the model's own chat template, in a sandbox with limits of time and size.

The environment follows what templates in the field are written for: blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, and a `tojson` that leaves non-ASCII characters alone. Whatever a template does to a value goes through the sandbox
(attributes, items, calls, products), and each time the clock is looked at; so a rendering ends, and no product of a text and a number
fills the memory.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 8 << 20
"""A rendering longer than this is refused; the table of limits publishes it."""
MAX_SECONDS = 2.0
"""A rendering that takes longer is refused; the longest conversations take milliseconds."""

_deadline: ContextVar[float] = ContextVar("deadline")
"""Monotonic time at which the rendering of this thread must be over."""


class TemplateRefused(Exception):
    """The template does not accept this conversation (an unknown role, roles out of turn), or fails on it."""


class TemplateTooLarge(Exception):
    """The rendering took too long or grew too large."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a look at the clock wherever a template touches a value."""

    intercepted_binops = frozenset(["*", "**", "+", "~"])

    @staticmethod
    def _check_time() -> None:
        if time.monotonic() > _deadline.get(float("inf")):
            raise TemplateTooLarge

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_time()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check_time()
        if operator != "+" and _size(left) * _size(right) > MAX_RENDERED_CHARS:
            raise TemplateTooLarge
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """How large a product or power this value can make, roughly."""
    if isinstance(value, str | list | tuple):
        return len(value)
    return min(abs(value), MAX_RENDERED_CHARS + 1) if isinstance(value, int) else 1


def _raise(message: str) -> None:
    raise TemplateRefused


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant wrote, for training; for a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template ready to render. knows_tools: it reads the list of tools."""

    source: str
    template: jinja2.Template
    knows_tools: bool


def compile_template(source: str) -> ChatTemplate:
    """A template ready to render. Raises jinja2.TemplateSyntaxError."""
    environment = _environment()
    names = meta.find_undeclared_variables(environment.parse(source))
    return ChatTemplate(source, environment.from_string(source), "tools" in names)


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation. Raises TemplateTooLarge, or TemplateRefused whatever else goes wrong inside the template."""
    parts: list[str] = []
    size = 0
    values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
    deadline = time.monotonic() + MAX_SECONDS
    token = _deadline.set(deadline)
    try:
        for part in template.template.generate({**(kwargs or {}), **special_tokens, **values}):
            size += len(part)
            if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise TemplateTooLarge
            parts.append(part)
    except (TemplateRefused, TemplateTooLarge):
        raise
    except Exception:
        raise TemplateRefused from None
    finally:
        _deadline.reset(token)
    return "".join(parts)

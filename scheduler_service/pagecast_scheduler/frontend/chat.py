"""Renders conversations with the model's own chat template, in a sandbox.

The environment follows what templates in the field are written for: blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, and a `tojson` that leaves non-ASCII characters alone.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 64 << 20
"""A rendering longer than this is refused; every real limit is far below."""


class TemplateRefused(Exception):
    """The template does not accept this conversation (an unknown role, roles out of turn), or fails on it."""


def _raise(message: str) -> None:
    raise TemplateRefused


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def compile_template(source: str) -> jinja2.Template:
    """A template ready to render. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment.from_string(source)


def render(
    template: jinja2.Template, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """The prompt text of a conversation. Raises TemplateRefused, whatever goes wrong inside the template."""
    parts: list[str] = []
    size = 0
    try:
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        for part in template.generate(**special_tokens, **values):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise TemplateRefused
            parts.append(part)
    except TemplateRefused:
        raise
    except Exception:
        raise TemplateRefused from None
    return "".join(parts)

"""Pagecast's Python package: clients of a server, and the embedded LLM. Importing it loads nothing until a name is used,
so that a role process that starts through `pagecast.cli` carries only what it needs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "async_client", "Client": "sync", "LLM": "llm", "AsyncLLM": "llm", "SamplingParams": "sampling", "RequestOutput": "llm",
    "CompletionOutput": "llm", "Tool": "types", "ToolCall": "types", "ChatMessage": "types",
    "PagecastError": "errors", "RpcError": "errors", "Tls": "access",
}
"""Public name to the module that defines it."""

if TYPE_CHECKING:
    from pagecast.access import Tls as Tls
    from pagecast.async_client import AsyncClient as AsyncClient
    from pagecast.errors import PagecastError as PagecastError
    from pagecast.errors import RpcError as RpcError
    from pagecast.llm import LLM as LLM
    from pagecast.llm import AsyncLLM as AsyncLLM
    from pagecast.llm import CompletionOutput as CompletionOutput
    from pagecast.llm import RequestOutput as RequestOutput
    from pagecast.sampling import SamplingParams as SamplingParams
    from pagecast.sync import Client as Client
    from pagecast.types import ChatMessage as ChatMessage
    from pagecast.types import Tool as Tool
    from pagecast.types import ToolCall as ToolCall


def __getattr__(name: str) -> Any:
    """Import the home of a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'pagecast' has no attribute {name!r}")
    value = getattr(import_module(f"pagecast.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

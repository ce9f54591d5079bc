"""A call of one of our own methods from inside another method's call: same caller, same deadline, the answers to a function of ours."""

from collections.abc import Awaitable, Callable
from typing import Any


class InnerCall:
    """Stands for the context of the inner method. deliver: gets each message that the inner method would have sent.

    What is sent is not the outer call's business (headers are), and what ends the inner method ends the outer one.
    """

    def __init__(self, outer: Any, deliver: Callable[[Any], Awaitable[None]]) -> None:
        self._outer = outer
        self._deliver = deliver

    async def write(self, message: Any) -> None:
        await self._deliver(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

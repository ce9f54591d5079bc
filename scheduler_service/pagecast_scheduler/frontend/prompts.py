"""Prompts to token ids without holding up the event loop: short ones at once, long ones in a small pool of threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pagecast_scheduler.frontend import chat
from pagecast_scheduler.frontend.chat_rules import conversation
from pagecast_scheduler.frontend.errors import Reason, Refusal, field_violation
from pagecast_scheduler.frontend.limits import Limits
from pagecast_scheduler.frontend.tokenizer import Tokenizer
from pagecast_scheduler.frontend.validation import check_prompt_length

INLINE_CHARS = 2048
"""Longest text that is worked on directly: well under a millisecond."""
NUM_THREADS = 2
MAX_WAITING = 256
"""Long texts being worked on or waiting for a thread; more are refused, so that they cannot pile up in memory."""

T = TypeVar("T")


class PromptMaker:
    """Tokenizes and renders for every service, so that they agree. Other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")

    async def _run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        if size <= INLINE_CHARS:
            return work(*arguments)
        if self._num_waiting >= MAX_WAITING:
            raise Refusal(Reason.OVERLOADED, message="too many long texts are being tokenized")
        with self._lock:
            self._num_waiting += 1
        job = self._pool.submit(work, *arguments)
        job.add_done_callback(self._note_done)
        return await asyncio.wrap_future(job)

    def _note_done(self, job: Future[Any]) -> None:
        """On the thread that did the work, or on the event loop's if it was cancelled before."""
        with self._lock:
            self._num_waiting -= 1

    def close(self) -> None:
        """Lets the threads go; work not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, text: str, add_special_tokens: bool, path: str, limits: Limits | None) -> list[int]:
        """Ids of a text. With limits, a text that cannot fit is refused before the work: no id stands for more than so many bytes."""
        if limits is not None and self.tokenizer.max_token_bytes is not None and len(text) > limits.max_request_tokens:
            least = -(-len(text.encode()) // self.tokenizer.max_token_bytes)
            check_prompt_length(least, path, limits, is_least=True)
        return await self._run(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of a whole sequence of ids."""
        return await self._run(len(ids), self.tokenizer.decode, ids, skip_special_tokens)

    async def render(self, prompt: Any, path: str) -> str:
        """The text that a ChatPrompt becomes. Raises Refusal without a template, or when the template refuses."""
        template = self.tokenizer.chat_template
        if template is None:
            raise Refusal(Reason.FEATURE_DISABLED, message="the model has no chat template")
        chat_values = conversation(prompt)
        if chat_values.tools is not None and not template.knows_tools:
            raise field_violation(f"{path}.tools", "the model's chat template knows no tools")
        special = self.tokenizer.special_tokens
        values = (template, chat_values.messages, special, chat_values.add_generation_prompt, chat_values.tools, chat_values.kwargs)
        try:
            return await self._run(chat_values.size, chat.render, *values)
        except chat.TemplateRefused:
            raise field_violation(f"{path}.messages", "the model's chat template does not accept this conversation") from None
        except chat.TemplateTooLarge:
            text = f"rendering took more than {chat.MAX_SECONDS:g} s or {chat.MAX_RENDERED_CHARS} characters"
            raise field_violation(f"{path}.messages", text) from None

    async def prompt_ids(self, spec: Any, limits: Limits | None) -> tuple[list[int], str]:
        """Ids of a GenerationSpec's input, and the text of a rendered chat ("" otherwise). Chat templates write their own special
        tokens, so none are added to them. limits: as for `tokenize`."""
        kind = spec.WhichOneof("input")
        if kind == "prompt_token_ids":
            return list(spec.prompt_token_ids.ids), ""
        if kind == "chat":
            text = await self.render(spec.chat, "spec.chat")
            return await self.tokenize(text, False, "spec.chat", limits), text
        return await self.tokenize(spec.prompt_text, True, "spec.prompt_text", limits), ""

    def ways_to_write(self, word: str) -> list[list[int]]:
        """Token ids of a word as it is, and with a space before it: how it stands within a text."""
        ways = [self.tokenizer.encode(word, False)]
        if not word.startswith(" "):
            ways.append(self.tokenizer.encode(" " + word, False))
        return [ids for ids in ways if ids]

"""The page to chat, in a real browser: a question typed, tokens streaming with their log-probabilities, the load, an answer stopped."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cli_server import Served, serve
from playwright.sync_api import Page, expect, sync_playwright

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]
LIMIT_MS = 60_000

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here; .ci/run installs it where it can")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--cpu-kv-gib", "0.3", "--http-port", "0") as running:
        yield running


@pytest.fixture
def page(served: Served) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        try:
            opened = browser.new_page()
            opened.set_default_timeout(LIMIT_MS)
            opened.on("pageerror", lambda error: pytest.fail(f"the page threw {error}"))
            opened.goto(served.http)
            yield opened
        finally:
            browser.close()


def ask(page: Page, text: str, max_tokens: int) -> None:
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_question_is_answered_token_by_token(page: Page, tmp_path: Path) -> None:
    expect(page.locator("#model")).to_have_text("smollm2-135m", timeout=LIMIT_MS)
    expect(page.locator("#load-text")).to_contain_text("running", timeout=LIMIT_MS)
    ask(page, "What is the capital of France?", 24)
    expect(page.locator(".assistant .facts")).to_contain_text("tokens/s", timeout=LIMIT_MS)
    answer = page.locator(".message.assistant")
    tokens = answer.locator(".token")
    assert tokens.count() > 3
    for i in range(tokens.count()):
        title = tokens.nth(i).get_attribute("title") or ""
        assert re.match(r"log-probability -?\d+\.\d{3} \(\d+\.\d %\)", title), title
    assert page.screenshot(path=tmp_path / "chat.png")


def test_an_answer_can_be_stopped_and_a_refusal_is_shown(page: Page) -> None:
    ask(page, "Write a very long story about a lighthouse, with many chapters.", 2000)  # hundreds of tokens, in float32 and in bfloat16
    page.wait_for_selector(".message.assistant .token")
    page.click("#stop")
    expect(page.locator(".assistant .facts")).to_have_text("stopped", timeout=LIMIT_MS)
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "Hello", 1_000_000)
    failed = page.locator(".message.failed .facts")
    expect(failed).to_contain_text("max_tokens", timeout=LIMIT_MS)

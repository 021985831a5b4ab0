"""A real Chromium for tests of pages, and what no page of ours may do: complain, break its own policy, or call elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.required_tools import required_tool

OTHER_NAMES = ("chromium-browser", "google-chrome-stable", "google-chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

expect.set_options(timeout=20_000)  # for machines that run other things too


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips where none is installed, unless the environment says that tools are required."""
    executable = next(filter(None, map(shutil.which, OTHER_NAMES)), None) or required_tool("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, faults: int = 0, **context: Any) -> Iterator[Page]:
    """A page in a profile of its own. At the end: no errors but `faults` failed calls that the test provoked, no other host."""
    profile = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    page = profile.new_page()
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    try:
        page.goto(url)
        yield page
        failed = [text for text in complaints if text.startswith("Failed to load resource")]
        assert len(failed) == faults, complaints
        assert [text for text in complaints if text not in failed] == []
        assert hosts == {urlsplit(url).netloc}, "a page called another host"
    finally:
        profile.close()

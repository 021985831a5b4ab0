"""A real server process that is told to stop while it answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from models import toy

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, as a user would have one on disk."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = toy.byte_tokenizer()
    toy.tiny_causal_lm("llama", len(tokenizer), 3, max_positions=9000).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--target", str(folder), "--medium", "none"]
    command += getattr(request, "param", [])
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
        yield process, url
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


class Stream(threading.Thread):
    """Reads one streamed answer; `begun` is set at the first piece of text."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.body = {"prompt": "abc", "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self.url, self.lines, self.begun = url, list[str](), threading.Event()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=120) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.begun.set()
        except httpx.TransportError as error:
            self.lines.append(f"broken: {error}")


def test_a_stop_lets_the_stream_finish_and_turns_new_requests_away(server: tuple[subprocess.Popen[str], str]) -> None:
    """Restarting a server must not cut answers, and a balancer must be told to go elsewhere, not find a closed door."""
    process, url = server
    stream = Stream(url, 800)
    stream.start()
    assert stream.begun.wait(60)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert "stopping" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert httpx.get(f"{url}/metrics").status_code == 200
    stream.join(60)
    assert stream.lines[-1] == "data: [DONE]"
    assert json.loads(stream.lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.wait(20) == 0
    assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_a_second_signal_ends_at_once(server: tuple[subprocess.Popen[str], str]) -> None:
    """Who insists does not want to wait for the longest answer."""
    process, url = server
    stream = Stream(url, 8900)
    stream.start()
    assert stream.begun.wait(60)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("server", [["--drain-s", "1", "--log-format", "json"]], indirect=True)
def test_who_is_not_done_in_time_is_told_so(server: tuple[subprocess.Popen[str], str]) -> None:
    """A supervisor kills after its own patience: better to end streams with an error before. The log stays JSON to the end."""
    process, url = server
    stream = Stream(url, 8900)
    stream.start()
    assert stream.begun.wait(60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    stream.join(10)
    assert stream.lines[-1] == "data: [DONE]"
    error = json.loads(stream.lines[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    assert process.stderr is not None
    records = [json.loads(line) for line in process.stderr.read().splitlines()]
    messages = [record["message"] for record in records]
    assert any(message.startswith("ready in") for message in messages) and messages[-1] == "stopped"
    (call,) = [record for record in records if record.get("path") == "/v1/completions"]
    assert (call["status"], call["error"]) == (200, "overloaded") and call["completion_tokens"] > 0

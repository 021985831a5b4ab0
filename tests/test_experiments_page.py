"""The page of experiments in a real browser; the calls it makes are answered here, in the shape of the admin API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.chromium import chromium, opened
from tests.http_engine import Server, serve

KEY = "admin-key-of-the-test"


def interval(estimate: float, low: float, high: float) -> dict[str, float]:
    return {"estimate": estimate, "low": low, "high": high}


class Api:
    """Answers the page's calls like a server with one running and one ended experiment, and keeps what was posted."""

    def __init__(self, *, locked: bool = False) -> None:
        self.locked = locked
        self.posted: list[tuple[str, Any]] = []
        self.asked: list[str] = []
        self.names = ["graft or plain", "older"]

    def answer(self, route: Route) -> None:
        request = route.request
        path = re.sub(r"^https?://[^/]+", "", request.url)
        if request.resource_type == "document":
            route.continue_()
            return
        self.asked.append(path)
        is_admin = path.startswith("/admin")
        if is_admin and self.locked and request.headers.get("authorization") != f"Bearer {KEY}":
            error = {"message": "The admin API needs the admin key.", "type": "x", "param": None, "code": None}
            route.fulfill(status=401, json={"error": error})
            return
        if request.method == "POST":
            self.posted.append((path, request.post_data_json))
            route.fulfill(json={})
            return
        data = [self.experiment(name, full=is_admin) for name in self.names]
        answer: dict[str, Any] = {"object": "list", "data": data}
        if is_admin:
            answer |= {"running": self.names[0], "persistent": False, "default": {"schedule": "graft", "budget": None}}
        route.fulfill(json=answer)

    def experiment(self, name: str, *, full: bool) -> dict[str, Any]:
        speeds = {"plain": interval(27.4, 26.9, 28.0), "graft": interval(33.1, 31.8, 34.6), "new": None}
        arms = [
            {"name": "plain", "schedule": "ar", "share": 0.25},
            {"name": "graft", "schedule": "graft", "share": 0.5},
            {"name": "new", "schedule": "chain", "share": 0.25},
        ]
        differences = [
            {"arm": "graft", "against": "plain", "tokens_per_s": interval(0.21, 0.15, 0.27), "decided": True},
            {"arm": "new", "against": "plain", "tokens_per_s": None, "decided": False},
        ]
        state = "running" if name == self.names[0] else "stopped"
        view: dict[str, Any] = {"name": name, "state": state, "control": "plain", "winner": "graft"}
        if not full:
            return {**view, "arms": [{**arm, "tokens_per_s": speeds[arm["name"]]} for arm in arms], "differences": differences}
        figures = [
            {"name": arm["name"], "num_requests": 80, "tau": 2.1, "delta": 2.9, "num_output_tokens": 9000,
             "tokens_per_s": speeds[arm["name"]]}
            for arm in arms
        ]  # fmt: skip
        more = {"mode": "fixed", "alpha": 0.05, "guard": 0.05, "promoted": None}
        full_arms = [{**arm, "budget": None, "weight": 1.0, "stopped": False} for arm in arms]
        return {**view, **more, "arms": full_arms, "report": {"arms": figures, "differences": differences}}


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def visit(page: Page, api: Api, server: Server) -> None:
    page.route(re.compile(r"/(admin|v1)/experiments"), api.answer)
    page.goto(f"{server.url}/experiments")


def test_arms_and_intervals_are_drawn(server: Server, browser: Browser) -> None:
    """A figure without its uncertainty invites wrong decisions; what is not known yet says so."""
    with opened(browser, server.url) as page:
        visit(page, Api(), server)
        cards = page.locator(".card[data-experiment]")
        expect(cards).to_have_count(2)
        expect(page.locator("#summary")).to_contain_text("graft or plain is running.")
        card = cards.first
        expect(card.locator("tbody tr")).to_have_count(3)
        expect(card.locator(".chart").first).to_have_attribute("aria-label", re.compile("graft 33.1, between 31.8 and 34.6"))
        speeds, against = card.locator(".chart").nth(0), card.locator(".chart").nth(1)
        expect(speeds.locator(".bar")).to_have_count(2)
        expect(speeds).to_contain_text("not enough requests yet")
        expect(against.locator(".decided .bar")).to_have_count(1)
        expect(against.locator(".zero")).to_have_count(1)
        # Drawn where the numbers are: the bar of a wider interval is longer, and the faster arm stands to the right.
        boxes = [speeds.locator(".bar").nth(place).bounding_box() for place in range(2)]
        assert boxes[0] and boxes[1] and boxes[0]["width"] < boxes[1]["width"] and boxes[0]["x"] < boxes[1]["x"]


def test_buttons_do_what_they_say_and_ask_before_what_cannot_be_undone(server: Server, browser: Browser) -> None:
    """A slip of the mouse must not end an experiment."""
    api = Api()
    with opened(browser, server.url) as page:
        visit(page, api, server)
        card = page.locator(".card[data-experiment]").first
        card.get_by_label("Weight of new").fill("0.5")
        card.get_by_role("button", name="Set weights").click()
        expect(page.locator("#notice")).to_contain_text("new weights")
        weights = {"plain": 1, "graft": 1, "new": 0.5}
        assert api.posted.pop() == ("/admin/experiments/graft%20or%20plain/weights", {"weights": weights})
        card.get_by_role("button", name="Stop").click()
        assert not api.posted
        card.get_by_role("button", name="Stop: sure?").click()
        expect(page.locator("#notice")).to_contain_text("has been stopped")
        assert api.posted.pop() == ("/admin/experiments/graft%20or%20plain/stop", {})
        expect(card.get_by_label("Arm to promote")).to_have_value("graft")
        card.get_by_role("button", name="Promote").click()
        card.get_by_role("button", name="Promote: sure?").click()
        expect(page.locator("#notice")).to_contain_text("default now")
        assert api.posted.pop() == ("/admin/experiments/graft%20or%20plain/promote", {"arm": "graft"})


def test_an_experiment_is_started_from_the_form(server: Server, browser: Browser) -> None:
    """The body must be one that the admin API takes."""
    api = Api()
    with opened(browser, server.url) as page:
        visit(page, api, server)
        page.get_by_role("button", name="New experiment").click()
        page.get_by_label("Name", exact=True).fill("third")
        page.get_by_role("button", name="Add an arm").click()
        page.get_by_label("Arm", exact=True).nth(2).fill("chain")
        page.get_by_label("Schedule").nth(2).select_option("chain")
        page.get_by_label("Budget").nth(2).fill("5")
        page.get_by_role("button", name="Start").click()
        expect(page.locator("#notice")).to_contain_text("third is running")
        path, body = api.posted.pop()
        assert path == "/admin/experiments"
        arms = [
            {"name": "control", "schedule": "ar", "weight": 1},
            {"name": "candidate", "schedule": "graft", "weight": 1},
            {"name": "chain", "schedule": "chain", "weight": 1, "budget": 5},
        ]
        assert body == {"name": "third", "mode": "fixed", "alpha": 0.05, "guard": 0.05, "arms": arms}


@pytest.mark.parametrize("admin_key", [None, KEY])
def test_the_page_runs_an_experiment_on_a_real_server(browser: Browser, admin_key: str | None) -> None:
    """What the tests above pretend must be what the server does: with a key, and without one on the same machine."""
    faults = 0 if admin_key is None else 1  # the first look, without the key
    with serve(admin_key=admin_key) as server, opened(browser, f"{server.url}/experiments", faults=faults) as page:
        if admin_key is not None:
            expect(page.locator("#summary")).to_contain_text("needs the admin key")
            page.get_by_role("button", name="Admin key").click()
            page.get_by_label("Key", exact=True).fill(admin_key)
            page.get_by_role("button", name="Use").click()
        page.get_by_role("button", name="New experiment").click()
        page.get_by_label("Name", exact=True).fill("first")
        page.get_by_role("button", name="Start", exact=True).click()
        card = page.locator(".card[data-experiment=first]")
        expect(card.locator(".badge")).to_have_text("running")
        card.get_by_label("Weight of candidate").fill("3")
        card.get_by_role("button", name="Set weights").click()
        expect(card.locator("tbody tr").nth(1)).to_contain_text("75 %")
        card.get_by_label("Arm to promote").select_option("candidate")
        card.get_by_role("button", name="Promote").click()
        card.get_by_role("button", name="Promote: sure?").click()
        expect(card.locator(".badge")).not_to_have_text("running")
        schedules = server.client.get("/v1/schedules").json()["data"]
        assert [one["name"] for one in schedules if one["default"]] == ["graft"]
        assert server.client.get("/v1/experiments").json()["data"][0]["name"] == "first"


def test_without_the_admin_key_there_is_only_something_to_see(server: Server, browser: Browser) -> None:
    """The public view has no buttons that would fail, and the refused call is not repeated."""
    api = Api(locked=True)
    with opened(browser, server.url, faults=1) as page:
        visit(page, api, server)
        expect(page.locator(".card[data-experiment]")).to_have_count(2)
        expect(page.locator(".card[data-experiment] button")).to_have_count(0)
        expect(page.get_by_role("button", name="New experiment")).to_be_hidden()
        page.get_by_role("button", name="Admin key").click()
        page.get_by_label("Key", exact=True).fill(KEY)
        page.get_by_role("button", name="Use").click()
        expect(page.locator(".card[data-experiment] button").first).to_be_visible()
        assert api.asked.count("/admin/experiments") == 2
        assert json.loads(page.evaluate("() => JSON.stringify(Object.values(sessionStorage))")) == [KEY]


def test_a_server_without_experiments_says_so(browser: Browser, server: Server) -> None:
    """An empty page would look broken."""
    with opened(browser, server.url, faults=1) as page:
        page.route(re.compile("experiments$"), lambda route: route.continue_() if route.request.resource_type == "document"
                   else route.fulfill(status=404, json={"error": {"message": "Not Found", "param": None}}))  # fmt: skip
        page.goto(f"{server.url}/experiments")
        expect(page.locator("#notice")).to_contain_text("offers no experiments")


def test_a_phone_shows_experiments_without_scrolling_sideways(server: Server, browser: Browser) -> None:
    """Wide tables scroll inside their card."""
    with opened(browser, server.url, viewport={"width": 360, "height": 740}) as page:
        visit(page, Api(), server)
        expect(page.locator(".card[data-experiment]")).to_have_count(2)
        page.get_by_role("button", name="New experiment").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

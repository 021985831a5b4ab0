"""The playground in a real browser, on a real server: what it shows is what the engine did."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from transformers import PreTrainedModel

from app.build import build
from app.config import Settings
from app.serving import LoadedEngine
from models.toy import byte_tokenizer
from tests.chromium import chromium, opened
from tests.http_engine import Server, serve

TinyModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Iterator[Server]:
    """A folder with a tiny model, as `graftserve serve --target FOLDER` serves it: prompt lookup and a truncated medium."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama", 259, 3, layers=3, max_positions=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    settings = Settings(target=str(folder), weights="fp32", device="cpu", max_num_seqs=2, max_model_len=4096)
    loaded: LoadedEngine = build(settings, lambda _: None)
    with serve(load=lambda: loaded) as server:
        yield server


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", name="traced")
def _traced(server: Server) -> dict[str, Any]:
    """What the API says of the answer that `choose` asks for."""
    body = {"prompt": "abcabcabcabc", "max_tokens": 40, "speculative": {"schedule": "treegraft", "trace": True}}
    choice: dict[str, Any] = server.complete(**body).json()["choices"][0]
    return choice


def ready(page: Page) -> None:
    expect(page.locator(".schedule").first).to_be_enabled()


def choose(page: Page, *, schedule: str = "treegraft", tokens: int = 40, text: str = "abcabcabcabc") -> None:
    """Fill the form: continue a text with many repeats, which prompt lookup drafts for."""
    ready(page)
    page.get_by_label("a text to continue").check()
    page.get_by_label("Prompt", exact=True).fill(text)
    page.get_by_label("Max tokens").fill(str(tokens))
    page.locator(".schedule").first.select_option(schedule)


def finished(page: Page, word: str = "Finished") -> None:
    expect(page.locator("#status")).to_have_text(re.compile(word), timeout=60_000)


def test_an_answer_is_shown_with_its_creators_and_its_trees(
    server: Server, browser: Browser, traced: dict[str, Any]
) -> None:
    """The page's promise: the very text, each token under who drafted it, and the tree it was accepted from."""
    with opened(browser, server.url) as page:
        choose(page)
        page.get_by_role("button", name="Run").click()
        finished(page)
        tokens = page.locator(".answer .token")
        assert page.locator(".answer").evaluate("box => box.textContent") == traced["text"]
        classes = tokens.evaluate_all("all => all.map((one) => one.className.split(' ')[1])")
        assert classes == [token["creator"] for token in traced["graft"]["tokens"]]
        assert len(set(classes)) > 1, "nothing that was drafted has been accepted; the test's model is badly chosen"
        counts = page.locator(".legend .count").evaluate_all("all => all.map((one) => Number(one.textContent))")
        assert sum(counts) == 40
        assert page.locator("[data-counter=tokens]").text_content() == "40"
        steps = traced["graft"]["steps"]
        assert float(page.locator("[data-counter=tau]").text_content() or "") == pytest.approx(40 / len(steps), abs=0.006)

        best = max(range(len(steps)), key=lambda place: steps[place]["num_tokens"])
        page.get_by_role("slider", name="Step").fill(str(best))
        accepted = sum(node["accepted"] for node in steps[best]["nodes"])
        assert accepted > 1
        expect(page.locator("svg.tree .node.accepted")).to_have_count(accepted)
        # One edge less than nodes, and one more to the target's own token.
        expect(page.locator("svg.tree .edge.accepted")).to_have_count(accepted)
        width_of = "all => all.map((one) => parseFloat(getComputedStyle(one).strokeWidth))"
        widths = page.locator("svg.tree .edge").evaluate_all(width_of)
        assert max(widths) > 2 * min([*widths, 1.5])
        verified = sum(node["verified"] for node in steps[best]["nodes"])
        expect(page.locator("svg.tree .node")).to_have_count(verified + 1)
        page.get_by_label("unverified nodes").check()
        expect(page.locator("svg.tree .node")).to_have_count(len(steps[best]["nodes"]) + 1)

        counts = [sum(node["rescored"] for node in step["nodes"]) for step in steps]
        assert max(counts) > 0
        page.get_by_role("slider", name="Step").fill(str(counts.index(max(counts))))
        expect(page.locator("svg.tree .mark")).to_have_count(max(counts))


def test_text_and_tree_grow_while_the_answer_comes_and_stop_ends_it(server: Server, browser: Browser) -> None:
    """A stream that is shown at its end is none; a stopped one must not go on in the engine."""
    with opened(browser, server.url) as page:
        choose(page, tokens=4000)
        page.get_by_label("Prompt", exact=True).focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("svg.tree .node").first).to_be_visible()
        first = page.locator(".answer .token").count()
        expect(page.locator(f".answer .token:nth-child({first + 20})")).to_be_attached()
        expect(page.locator("#status")).to_have_text("treegraft is answering…")
        page.keyboard.press("Escape")
        finished(page, "Stopped")
        expect(page.get_by_role("button", name="Run")).to_be_enabled()
        expect(page.locator(".error")).to_be_hidden()
        told = page.locator(".answer .token").count()
        page.wait_for_timeout(300)
        assert page.locator(".answer .token").count() == told < 4000
        assert server.engine.num_running == 0


def test_two_schedules_side_by_side_say_whether_the_text_is_the_same(server: Server, browser: Browser) -> None:
    """Also above temperature 0, where both must draw with one seed to be comparable."""
    with opened(browser, server.url) as page:
        choose(page, tokens=24)
        page.get_by_label("Compare two").check()
        page.get_by_label("Temperature").fill("1")
        expect(page.locator(".schedule").nth(1)).to_have_value("ar")
        for order in ("one after the other", "at the same time"):
            page.get_by_label(order).check()
            page.get_by_role("button", name="Run").click()
            finished(page)
            expect(page.locator("#verdict")).to_contain_text("Same text.")
            texts = page.locator(".answer").evaluate_all("all => all.map((box) => box.textContent)")
            assert len(texts) == 2 and texts[0] == texts[1] != ""
            assert page.locator(".pane").nth(1).locator(".token:not(.target):not(.legend *)").count() == 0
            page.locator("#status").evaluate("line => { line.textContent = ''; }")
        expect(page.locator("#verdict")).to_contain_text("shared the machine")


def test_different_texts_are_told(server: Server, browser: Browser) -> None:
    """Negative control of "Same text": the second answer is changed on its way to the page."""
    with opened(browser, server.url) as page:
        choose(page, tokens=8, schedule="ar")
        page.get_by_label("Compare two").check()
        page.evaluate(
            "() => { const real = fetch; let calls = 0; window.fetch = async (...all) => {"
            "  if (calls++ === 0) return real(...all);"
            "  const text = await (await real(...all)).text();"
            '  return new Response(text.replace(/"text":"[^"]*","creator"/, \'"text":"other","creator"\')); }; }'
        )
        page.get_by_role("button", name="Run").click()
        finished(page)
        expect(page.locator("#verdict")).to_contain_text("The texts part at character 1.")


def test_errors_are_shown_where_the_answer_would_be(server: Server, browser: Browser) -> None:
    """Without the server's words nobody knows what to change."""
    with opened(browser, server.url, faults=1) as page:
        choose(page, tokens=999_999)
        page.get_by_role("button", name="Run").click()
        finished(page, "Failed")
        expect(page.get_by_role("alert")).to_contain_text("999999")
        choose(page, tokens=5)
        page.get_by_role("button", name="Run").click()
        finished(page)
        expect(page.locator(".error")).to_be_hidden()


def test_what_the_model_says_is_never_markup(server: Server, browser: Browser) -> None:
    """A model that writes HTML must not write into the page."""
    evil = "<img src=x onerror=alert(1)><b>"
    with opened(browser, server.url) as page:
        choose(page, tokens=4)
        page.route(
            "**/v1/completions",
            lambda route: route.fulfill(
                status=200,
                content_type="text/event-stream",
                body='data: {"choices":[{"index":0,"text":"x","finish_reason":"stop","graft":{"tokens":[{"index":0,"text":"'
                + evil
                + '","creator":"<i>"}],"steps":[],"truncated":true}}]}\n\ndata: [DONE]\n\n',
            ),
        )
        page.get_by_role("button", name="Run").click()
        finished(page)
        assert page.locator(".answer").evaluate("box => box.textContent") == evil
        assert page.locator(".answer img, .answer b, .legend i").count() == 0


def test_the_keyboard_goes_everywhere(server: Server, browser: Browser) -> None:
    """Skip link, run, tokens, tree and slider without a mouse, and focus that can be seen."""
    with opened(browser, server.url) as page:
        ready(page)
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        choose(page)
        page.keyboard.press("Control+Enter")
        finished(page)
        page.locator(".answer").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        focused = page.locator(".answer .token:focus")
        expect(focused).to_have_count(1)
        expect(page.get_by_role("tooltip")).to_contain_text("drafted by")
        assert focused.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        page.keyboard.press("Escape")
        expect(page.get_by_role("tooltip")).to_be_hidden()
        page.get_by_role("slider", name="Step").focus()
        page.keyboard.press("Home")
        expect(page.locator(".step-label")).to_contain_text("step 1 of")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".step-label")).to_contain_text("step 2 of")
        page.locator("svg.tree .node").first.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("svg.tree .node:focus")).to_have_attribute("aria-level", "2")


def test_dark_and_light_follow_the_system_until_somebody_chooses(server: Server, browser: Browser) -> None:
    """Both themes are drawn, and a choice outlives the visit."""
    paint = "() => getComputedStyle(document.body).backgroundColor"
    with opened(browser, server.url, color_scheme="light") as page:
        light = page.evaluate(paint)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(paint)
        assert light != dark
        page.get_by_role("button", name="Switch between dark and light").click()
        assert page.evaluate(paint) == light
        page.reload()
        assert page.evaluate(paint) == light


def test_a_phone_shows_everything_without_scrolling_sideways(server: Server, browser: Browser) -> None:
    """360 pixels are what small phones have."""
    with opened(browser, server.url, viewport={"width": 360, "height": 740}) as page:
        choose(page)
        page.keyboard.press("Control+Enter")
        finished(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_label("Compare two").check()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_nothing_moves_while_the_answer_comes(server: Server, browser: Browser) -> None:
    """A page that jumps cannot be read, and the Stop button would be somewhere else each time."""
    with opened(browser, server.url) as page:
        choose(page, tokens=100)
        place = "() => [...document.querySelectorAll('#stop, .answer, .tree-box, .slider, .counters')].map((one) => {"
        place += " const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })"
        before = page.evaluate(place)
        page.keyboard.press("Control+Enter")
        for _ in range(5):
            page.wait_for_timeout(100)
            assert page.evaluate(place) == before
        finished(page)
        assert page.evaluate(place) == before


def test_thousands_of_tokens_are_appended_and_never_drawn_again(server: Server, browser: Browser) -> None:
    """Drawing the whole answer at each token would be 2,000 times 2,000 nodes."""
    with opened(browser, server.url) as page:
        choose(page, schedule="ar", tokens=2000)
        body = "".join(
            f'data: {{"choices":[{{"index":0,"finish_reason":null,"graft":{{"tokens":[{{"index":{place},"text":"word ",'
            f'"creator":"small"}}],"steps":[],"truncated":true}}}}]}}\n\n'
            for place in range(2000)
        )
        page.route(
            "**/v1/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body + "data: [DONE]\n\n"),
        )
        page.evaluate(
            "() => { window.seen = [0, 0]; new MutationObserver((all) => all.forEach((one) => {"
            " seen[0] += one.addedNodes.length; seen[1] += one.removedNodes.length; }))"
            ".observe(document.querySelector('.answer'), { childList: true, subtree: true, characterData: true }); }"
        )
        page.keyboard.press("Control+Enter")
        finished(page)
        added, removed = page.evaluate("() => seen")
        count = page.locator(".answer > .token").count()
        assert removed == 0 and added == count == 2000
        expect(page.locator("[data-counter=tokens]")).to_have_text("2000")


def test_a_key_is_sent_and_kept_for_the_tab_only(server: Server, browser: Browser) -> None:
    """Servers can ask for keys; a key that outlives the tab would be found by the next person."""
    with opened(browser, server.url) as page:
        ready(page)
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill("sk-test")
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        choose(page, tokens=4)
        with page.expect_request("**/v1/completions") as sent:
            page.keyboard.press("Control+Enter")
        assert sent.value.header_value("authorization") == "Bearer sk-test"
        finished(page)
        assert page.evaluate("() => Object.values(sessionStorage)") == ["sk-test"]
        assert page.evaluate("() => JSON.stringify(localStorage) + document.cookie") == "{}"
        other = page.context.new_page()
        other.goto(server.url)
        assert other.evaluate("() => sessionStorage.length") == 0


def test_a_refused_key_opens_the_dialog_with_the_reason(server: Server, browser: Browser) -> None:
    """A page that only says "401" leaves people without a way on."""
    refusal = '{"error": {"message": "This server asks for an API key.", "type": "x", "param": null, "code": null}}'
    with opened(browser, server.url, faults=1) as page:
        choose(page, tokens=4)
        page.route("**/v1/completions", lambda route: route.fulfill(status=401, content_type="application/json", body=refusal))
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("dialog")).to_contain_text("This server asks for an API key.")


def test_a_server_that_still_loads_is_waited_for(browser: Browser) -> None:
    """People open the page right after the start."""
    from tests.http_engine import ScriptedEngine, until

    engine, gate = ScriptedEngine(), [False]

    def load() -> LoadedEngine:
        until(lambda: gate[0], within_s=30)
        return LoadedEngine(engine, engine.tokenizer)

    with serve(engine, load=load, wait_ready=False) as server, opened(browser, server.url, faults=1) as page:
        expect(page.locator("#model-name")).to_have_text("loading")
        gate[0] = True
        ready(page)


DEEDS = ("console.error('x')", "fetch('http://localhost:9/').catch(() => 0)", "setTimeout(() => boom(), 0)")


@pytest.mark.parametrize("deed", DEEDS)
def test_a_page_that_misbehaves_is_caught(server: Server, browser: Browser, deed: str) -> None:
    """Negative control: a watch that hears nothing would pass every page."""
    with pytest.raises(AssertionError), opened(browser, server.url) as page:
        ready(page)
        page.evaluate(deed)
        page.wait_for_timeout(100)


@pytest.mark.parametrize("name", ["/", "/experiments", "/static/style.css", "/static/pane.js", "/static/favicon.svg"])
def test_pages_are_served_with_a_strict_policy(server: Server, name: str) -> None:
    """Whatever a model says, the browser runs nothing but our files."""
    response = server.client.get(name)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert server.client.head(name).status_code == 200


@pytest.mark.parametrize("name", ["../main.py", "%2e%2e%2fmain.py", "..%5cmain.py", "pages.py", "", "index.html%00.js"])
def test_only_the_pages_files_are_served(server: Server, name: str) -> None:
    """A path that leads out of the folder would give sources and settings away."""
    assert server.client.get(f"/static/{name}").status_code == 404


def test_pages_hold_no_inline_code_and_no_address_of_another_host() -> None:
    """The policy would block them; whoever writes them should learn it here."""
    folder = Path(__file__).parent.parent / "app" / "static"
    for path in folder.iterdir():
        text = path.read_text()
        assert not re.search(r"\son\w+=|style=|<script>|javascript:|eval\(|innerHTML|insertAdjacentHTML", text), path.name
        found = set(re.findall(r"https?://[^\"'\s)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not found, f"{path.name}: {found}"

"""What the documentation shows works: code is executed, requests are sent, command lines are read, references are complete."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.exceptions import TyperException

import verify
from app.cli import application
from app.config import Settings, load_settings
from app.schedules_reference import reference
from app.serving import LoadedEngine
from engine.admission import check_rules
from models import toy
from scheduler import definitions
from scheduler.auto_budget import TARGET, AutoBudget
from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.definitions import define_schedule
from scheduler.drift import LiveCosts
from tests.doc_blocks import PAGES, ROOT, Block, blocks, commands, links, sections
from tests.engine_world import World
from tests.http_engine import Server, serve
from tests.required_tools import required_tool

ADDRESSES = ("http://127.0.0.1:8000", "http://HOST:8000")  # of the server in the examples
SHOWN = {"text", "promql"}  # languages of blocks that are only looked at
ELSEWHERE = set("cd docker export git graftserve-load guidellm kill openssl promtool sleep source sqlite3".split())
MOST_NOT_RUN = 8

ALL = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Any]:
    """Blocks to run, as parameters of a test."""
    chosen = [block for block in ALL if block.language in languages and block.is_run]
    return [pytest.param(block, id=block.place) for block in chosen]


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Server]:
    """The real application over the real engine and tiny random models, all schedules, prices as of a slow machine."""
    target = toy.tiny_causal_lm("llama", 259, 0)
    drafter = LatencyModel((1, 64), (0.1, 0.2))
    models = {TARGET: LatencyModel((1, 64), (10.0, 20.0)), "small": drafter, "medium": drafter}
    auto = AutoBudget(LiveCosts(CostProfile(models, Origin("none", "none", "none", "1", "never"))))
    end = toy.byte_tokenizer().eos_token_id
    world = World(target, small=toy.tiny_causal_lm("llama", 259, 1), medium=target, auto=auto, stop_tokens=[end])
    world.engine.default_schedule = "treegraft"
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer)) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    """Examples may add to the tables of names; other tests must not see it."""
    tables: list[dict[str, Any]] = [verify.EVERY_VERIFIER, definitions.POLICY_TYPES]  # type: ignore[list-item]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """A block in an unknown language, or without one, would never be run by anybody."""
    known = SHOWN | {"sh", "python", "json", "toml"}
    assert not [f"{block.place}: {block.info!r}" for block in ALL if block.language not in known]


def test_few_blocks_are_left_alone() -> None:
    left = [block.place for block in ALL if not block.is_run]
    assert len(left) <= MOST_NOT_RUN, left


PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" and block.is_run for block in blocks(page))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as stack:
        for block in blocks(page):
            if block.language == "python" and block.is_run:
                source = "\n" * (block.line - 1) + moved(block.text, server)
                exec(compile(source, str(page), "exec"), names)
        for value in list(names.values()):
            if hasattr(value, "close") and not isinstance(value, type):
                stack.callback(value.close)


@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_right(block: Block, server: Server) -> None:
    """curl is run against a real server; the program's own commands are read with all their options."""
    for words in commands(block.text):
        match words[0]:
            case "curl":
                check_curl(words, block, server)
            case "graftserve":
                check_command(words[1:])
            case "make":
                makefile = (ROOT / "Makefile").read_text("utf-8")
                targets = [word for word in words[1:] if "=" not in word]
                assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), words
            case "python" if words[1] == "-m":
                assert importlib.util.find_spec(words[2]) is not None, words
            case _:
                assert words[0] in ELSEWHERE or (ROOT / words[0]).is_file(), f"who checks this? {words}"


@pytest.mark.parametrize("block", of("json"))
def test_json_parses_and_is_served(block: Block, server: Server) -> None:
    """A block that says where it goes is a body, and is sent there."""
    body = json.loads(block.text)
    paths = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
    for word in block.info.split()[1:]:
        if word in paths:
            response = server.client.post(paths[word], json=body)
            assert response.status_code == block.status, response.text


@pytest.mark.parametrize("block", of("toml"))
def test_settings_files_are_read(block: Block, tmp_path: Path) -> None:
    tomllib.loads(block.text)
    file = tmp_path / "graftserve.toml"
    file.write_text(block.text, "utf-8")
    load_settings(file)


def check_curl(words: list[str], block: Block, server: Server) -> None:
    """Run it as it stands but for the address, and compare the status."""
    assert any(word.startswith(ADDRESSES) for word in words), f"an address that no test can replace: {words}"
    line = [required_tool("curl", "curl"), *(moved(word, server) for word in words[1:])]
    line += ["--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    assert int(status) == block.status, f"{block.place}: {status} {body}"
    if "--no-buffer" in words or "-N" in words:
        assert body.startswith("data: ") and body.rstrip().endswith("data: [DONE]"), body


def moved(text: str, server: Server) -> str:
    """With the addresses of examples replaced by the server's."""
    for address in ADDRESSES:
        text = text.replace(address, server.url)
    return text


def check_command(words: list[str]) -> None:
    """Read a command line as the program would, settings and schedules of the user's own included, and do nothing."""
    command: Any = typer.main.get_command(application())
    context, name = typer.Context(command, info_name="graftserve"), "graftserve"
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, parent=context, info_name=name)
    if "--help" in words:
        return
    with command.make_context(name, list(words), parent=context.parent) as read:
        given = {key: value for key, value in read.params.items() if key in Settings.model_fields}
    if len(given) == len(Settings.model_fields):
        check_definitions(load_settings(None, given))


def check_definitions(settings: Settings) -> None:
    """Schedules of the user's own exist in all their parts, and their rules are right for their trees."""
    for name, definition in settings.define.items():
        available = ["ngram", "small", "medium"]
        schedule = define_schedule(name, available=available, **definition.model_dump())
        check_rules(schedule, allow_lossy=settings.allow_lossy)


# ---- the checks themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "graftserve nothing",
        "graftserve serve --no-such-option 1",
        "graftserve serve --port many",
        """graftserve serve --define '{"x": {"policy": "eagle", "options": {"wide": 4}, "plan": "M*"}}'""",
        """graftserve serve --define '{"x": {"policy": "eagle", "plan": "M*", "verifier": "specinfer"}}'""",
    ],
)
def test_a_wrong_command_line_is_noticed(text: str) -> None:
    """If this fails, the tests above would pass whatever the pages said."""
    (words,) = commands(text)
    with pytest.raises((TyperException, ValueError)):
        check_command(words[1:])


def test_a_wrong_request_is_noticed(server: Server) -> None:
    (words,) = commands(f"""curl {ADDRESSES[0]}/v1/completions -H 'Content-Type: application/json' -d '{{"promt": "x"}}'""")
    with pytest.raises(AssertionError, match="promt"):
        check_curl(words, Block(ROOT / "README.md", 1, "sh", ""), server)


def test_commands_are_taken_apart() -> None:
    text = "A=1 one 'two\nthree' \\\n  four | five  # six\n\n# seven\neight > nine\n"
    assert list(commands(text)) == [["one", "two\nthree", "four"], ["eight"]]


# ---- references -----------------------------------------------------------------------------------------------------


def test_the_page_of_schedules_is_what_the_code_says() -> None:
    """`graftserve docs schedules > docs/schedules.md` writes it anew."""
    assert (ROOT / "docs" / "schedules.md").read_text("utf-8") == reference()


def test_every_option_has_words() -> None:
    """A comment beside each field of a policy is where they come from."""
    assert not re.findall(r"^\| .* \|\s*\|$", reference(), re.MULTILINE)


API = ROOT / "docs" / "api.md"


def test_every_endpoint_is_on_the_page(server: Server) -> None:
    page = API.read_text("utf-8")
    for path, methods in server.app.openapi()["paths"].items():
        for method in methods:
            line = f"`{method.upper()} {path.replace('{name}', 'NAME')}`"
            assert line in page, f"docs/api.md does not name {line}"


def test_every_field_of_every_body_is_on_the_page(server: Server) -> None:
    """By section: the fields of an object that the OpenAPI description names X are in the table of the section that names X."""
    schemas = server.app.openapi()["components"]["schemas"]
    page = API.read_text("utf-8")
    assert undescribed(page, schemas) == []
    for row in ("min_p", "budget", "role"):
        cut = re.sub(rf"^\| `{row}` .*\n", "", page, flags=re.MULTILINE)
        assert any(name.endswith(f".{row}") for name in undescribed(cut, schemas)), f"a page without {row} would pass"


def undescribed(page: str, schemas: dict[str, Any]) -> list[str]:
    """Fields that no table of the sections about their object has, as OBJECT.FIELD."""
    described = sections(page, 3)
    found = []
    for name, schema in schemas.items():
        text = "\n".join(text for heading, text in described.items() if f"`{name}`" in heading)
        in_tables = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
        found += [f"{name}.{field}" for field in schema["properties"] if field not in in_tables]
    return found


def test_no_field_is_on_the_page_that_there_is_not(server: Server) -> None:
    schemas = server.app.openapi()["components"]["schemas"]
    for heading, text in sections(API.read_text("utf-8"), 3).items():
        named = [schemas[name]["properties"] for name in re.findall(r"`(\w+)`", heading) if name in schemas]
        if named:
            in_table = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
            extra = in_table - {field for properties in named for field in properties}
            assert not extra, f"docs/api.md, {heading}: there is no {sorted(extra)}"


def test_every_number_of_an_answer_is_on_the_page(server: Server) -> None:
    """`metrics` of a real answer; every key has a row in its section."""
    body = {"prompt": "one two one two", "max_tokens": 8, "temperature": 0}
    metrics = server.client.post("/v1/completions", json=body).json()["metrics"]
    described = sections(API.read_text("utf-8"), 3)
    for part, numbers in metrics.items():
        check_described(described, f"metrics.{part}", numbers)
    for count in metrics["graft"]["drafters"].values():
        check_described(described, "metrics.graft.drafters", count)


def check_described(described: dict[str, str], name: str, numbers: Iterable[str]) -> None:
    (text,) = (text for heading, text in described.items() if f"`{name}`" in heading)
    missing = [key for key in numbers if f"| `{key}`" not in text]
    assert not missing, f"docs/api.md, {name}: {missing} not described"


def test_every_error_status_is_on_the_page() -> None:
    from app.errors import STATUSES

    page = sections(API.read_text("utf-8"), 2)["Errors"]
    assert not [status for status in STATUSES if f"| {status} |" not in page]


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not [target for target in links(page) if not (page.parent / target).exists()]


def test_the_index_names_every_page() -> None:
    index = set(links(ROOT / "docs" / "README.md"))
    pages = {page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"}
    assert pages <= index, f"docs/README.md does not name {sorted(pages - index)}"


def test_the_readme_is_short_and_even() -> None:
    """Longer texts belong on pages of their own."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) < 400, f"{len(lines)} lines"
    long = [number for number, line in enumerate(lines, 1) if len(line) > 128 and not line.startswith("|")]
    assert not long, f"lines {long} are longer than 128"


def files_of_readme() -> dict[str, list[str]]:
    """Names of Python files by top-level folder, as the section Files lists them; subfolders are not told apart."""
    (tree,) = (block.text for block in blocks(ROOT / "README.md") if block.text.startswith("app/ "))
    found: dict[str, list[str]] = {}
    folder = ""
    for line in tree.splitlines():
        top = re.match(r"^(\w+)/", line)
        folder = top[1] if top else folder
        found.setdefault(folder, []).extend(re.findall(r"\b\w+\.py\b", line))
    return found


def test_the_file_tree_is_true_and_complete() -> None:
    """Every module once, and none that there is not. Modules of one name in two subfolders are listed twice."""
    skipped = {"__init__.py"}
    for folder, listed in files_of_readme().items():
        if folder in ("tests", "docs"):
            continue
        files = [f.name for f in (ROOT / folder).rglob("*.py") if f.name not in skipped and f.parent.name != "reference"]
        assert sorted(listed) == sorted(files), (
            f"{folder}: README has {sorted(set(listed) - set(files))} too much, lacks {sorted(set(files) - set(listed))}, "
            f"and twice: {sorted(name for name in set(listed) if listed.count(name) > files.count(name))}"
        )


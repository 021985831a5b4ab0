"""`bench schedules`: prompts compared one by one, transformers in its own process, a log to go on with."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

import app.decode_bench.plain_process
from app.commands.bench_schedules import schedules
from app.commands.options import takes_settings
from app.decode_bench.charts import CATEGORIES, STEPS, Prices, costs_panel, draw_all, prices, steps_panel
from app.decode_bench.counts import counts
from app.decode_bench.methods import spread_evenly
from app.decode_bench.plain_process import PlainProcess, PlainProcessFailed, Written, serve
from app.decode_bench.progress import bar
from app.decode_bench.record import as_json
from app.decode_bench.report import (
    Results,
    Table,
    category_tables,
    drafter_tables,
    fallback_lines,
    speed_table,
    step_table,
    tables,
)
from app.decode_bench.run_log import RunLog, file_states
from app.decode_bench.turns import Method, Pace, Work, deciles, differences, measure, num_answers, ratios
from app.local import Question
from app.prompt_sets import read_prompt_set, read_prompts
from app.proof import Difference, Judge, Outcome
from engine.request import DrafterCount, RequestStats
from models.reference import Arrivals, PlainModel
from scheduler.cost import LatencyModel
from tests.engine_world import _own
from tree.tree import TokenTree
from verify import EVERY_VERIFIER
from verify.base import Noise, Verdict
from verify.greedy import Greedy

TinyModel = Callable[..., PreTrainedModel]

QUESTIONS = [Question((1, 2, i), 5) for i in range(4)]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured


# ---- methods without models ---------------------------------------------------------------------------------------------


def stats(steps: int, tokens: int) -> RequestStats:
    return RequestStats(
        "any",
        num_prompt_tokens=3,
        num_output_tokens=tokens,
        num_steps=steps,
        accepted=[1] * (tokens - steps),
        drafters={"medium": DrafterCount(drafted=2 * steps, accepted=tokens - steps, forwards=3 * steps)},
        num_verified_nodes=3 * steps - 2,
        draft_s=0.01 * steps,
        verify_s=0.02 * steps + 0.05,
        prompt_verify_s=0.05,
        declined={"medium": steps, "small": 1},
        fallbacks={"ngram": 1},
    )


def work(seconds: float, tokens: int = 10, steps: int | None = None, end: str = "length", first_s: float = 0.1) -> Work:
    counted = () if steps is None else (stats(steps, tokens),)
    pace = Pace(first_s, 1, tokens if steps is None else steps)
    return Work(seconds, (Outcome(tuple(range(tokens)), end),), (pace,), counted)


def method(name: str, *repeats: Sequence[Work | None]) -> Method:
    """A method that was measured: per repeat one work per prompt, None for a prompt it was not asked."""
    works = [{i: item for i, item in enumerate(works) if item is not None} for works in repeats]
    return Method(name, lambda group: pytest.fail("nothing is to be asked"), works=works)


class Scripted:
    """A method whose answers take as long as a list says, and that keeps a record of what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, tuple[int, ...]]], groups: frozenset[int] | None = None) -> None:
        self._asked = asked
        self.method = Method(name, self.answer, groups)

    def answer(self, group: Sequence[Question]) -> Work:
        self._asked += [(self.method.name, question.prompt) for question in group]
        outcomes = tuple(Outcome(question.prompt, "length") for question in group)
        return Work(0.5 + len(self._asked), outcomes, tuple(Pace(0.5, 1, 2) for _ in group), (stats(2, 3),))


class Killed(BaseException):
    """Stands for whatever ends a process."""


# ---- prompt by prompt ---------------------------------------------------------------------------------------------------


def test_speeds_are_compared_prompt_by_prompt_within_a_repeat() -> None:
    """A ratio of sums would let the longest prompt speak for all; one across repeats would measure the machine's drift."""
    plain = method("ar", [work(1.0), work(8.0), work(1.0)], [work(10.0), work(80.0), work(10.0)], [work(1.0)] * 3)
    fast = method("fast", [work(0.5), work(8.0), work(2.0)], [work(5.0), work(80.0), work(20.0)], [work(0.25)] * 3)
    assert ratios(fast, plain) == pytest.approx({0: 2.0, 1: 1.0, 2: 0.5})
    assert ratios(plain, plain) == {0: 1.0, 1: 1.0, 2: 1.0}
    ratio = Results([plain, fast], {"ar": [], "fast": []}, 1, [None] * 3).ratio(fast, plain)
    assert ratio is not None and (ratio.median, ratio.low, ratio.high) == pytest.approx((1.0, 0.6, 1.8))


def test_speeds_are_rates_and_not_times() -> None:
    """Where two texts have different lengths, seconds say nothing."""
    plain, other = method("ar", [work(1.0, tokens=10)]), method("transformers", [work(1.0, tokens=5)])
    assert ratios(other, plain) == pytest.approx({0: 0.5})


def test_a_method_is_compared_over_the_prompts_it_was_asked() -> None:
    """Prompts that only one of the two answered would compare apples with nothing."""
    plain = method("ar", [work(1.0), work(2.0), work(3.0)])
    few = method("transformers", [work(2.0), None, work(3.0)])
    assert ratios(few, plain) == pytest.approx({0: 0.5, 2: 1.0})
    assert ratios(plain, few) == pytest.approx({0: 2.0, 2: 1.0})


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40))
def test_deciles_are_numpys(samples: list[float]) -> None:
    """A percentile of another convention would be another number in the README."""
    found = deciles(samples)
    assert (found.low, found.median, found.high) == pytest.approx(tuple(np.percentile(samples, [10, 50, 90])))


@given(st.integers(1, 200), st.integers(1, 200))
def test_chosen_prompts_are_spread_evenly(total: int, number: int) -> None:
    """Files are sorted by category, so the first prompts alone would be of one kind."""
    chosen = sorted(spread_evenly(total, number))
    assert len(chosen) == min(number, total) and chosen[0] == 0 and chosen[-1] < total
    gaps = {b - a for a, b in zip(chosen, [*chosen[1:], total], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert spread_evenly(total, None) == frozenset(range(total))


# ---- tables -------------------------------------------------------------------------------------------------------------


def results(*, fast: Difference | None = None, concurrency: int = 1) -> Results:
    plain = method("ar", [work(1.0, 10, 10), work(2.0, 10, 10), work(1.0, 10, 10)])
    quick = method("fast", [work(0.5, 10, 5), work(0.5, 10, 4), work(0.5, 10, 5)])
    other = method("transformers", [work(4.0), None, None])
    methods = [plain, quick, other] if concurrency == 1 else [plain, quick]
    return Results(methods, {"ar": [], "fast": [fast] if fast else []}, concurrency, ["math", "talk", "math"])


def line(shown: Table, name: str) -> dict[str, str]:
    _, titles, lines = shown
    (cells,) = [cells for cells in lines if cells[0] == name]
    return dict(zip(titles, cells, strict=True))


def test_the_tables_show_causes_next_to_effects() -> None:
    """Golden: each column against numbers that can be checked by hand."""
    speed, steps = speed_table(results()), step_table(results())
    assert line(speed, "fast") == {
        "schedule": "fast",
        "tokens/s": "20.00 (20.00-20.00)",
        "times ar, end to end": "2.00 (2.00-3.60)",
        "times ar, decoding": "2.25 (2.25-4.25)",  # 9 tokens in 0.4 s, against 0.9, 1.9 and 0.9 s
        "times transformers": "8.00 (8.00-8.00)",  # on the one prompt that both answered
        "text": "equal",
    }
    assert line(steps, "fast") == {
        "schedule": "fast",
        "first token ms": "100 (100-100)",
        "tokens/verification": "2.45",  # 27 tokens in 11 steps, what came with the prompt left out
        "draft forwards": "3.82",  # 42
        "rows verified": "3.00",  # 33
        "draft ms": "12.73",  # 0.14 s
        "verify ms": "25.45",  # 0.28 s, what read the prompt left out
        "other ms": "70.91",  # 1.5 s less 0.14, 0.28 and 0.3 s
    }
    other = line(speed, "transformers")
    assert (other["times ar, end to end"], other["times transformers"]) == ("0.25 (0.25-0.25)", "1.00 (1.00-1.00)")
    assert other["text"] == "not compared"
    told = line(steps, "transformers")
    assert (told["tokens/verification"], told["draft ms"], told["other ms"]) == ("1.00", "-", "-"), "it counts blocks only"


def test_drafters_are_shown_with_the_calls_that_they_were_spared() -> None:
    """Few forwards of a drafter mean one thing if its plan asks seldom, and another if its price was too high."""
    ((_, titles, lines),) = drafter_tables(results())
    fast = {cells[1]: dict(zip(titles[2:], cells[2:], strict=True)) for cells in lines if cells[0] == "fast"}
    assert fast == {
        "medium": {"drafted": "28", "accepted": "16", "share": "0.57", "forwards/step": "3.82", "declined/step": "1.27"},
        "small": {"drafted": "0", "accepted": "0", "share": "-", "forwards/step": "0.00", "declined/step": "0.27"},
    }


def test_a_schedule_that_was_stepped_down_is_named() -> None:
    """Its figures are those of another schedule."""
    lines = fallback_lines(results())
    assert "fast: 3 of 11 steps decoded by ngram, since it lost against ar" in lines and len(lines) == 2


def test_reading_the_prompt_does_not_hide_the_speed_of_decoding() -> None:
    """With a prompt that takes most of the time, decoding twice as fast shows as next to nothing from end to end."""
    plain = method("ar", [work(10.0 + 0.9, 10, 10, first_s=10.0)])
    fast = method("fast", [work(10.0 + 0.45, 10, 5, first_s=10.0)])
    found = Results([plain, fast], {"ar": [], "fast": []}, 1, [None])
    end_to_end, decoding = found.ratio(fast, plain), found.decoding_ratio(fast, plain)
    assert end_to_end is not None and end_to_end.median == pytest.approx(10.9 / 10.45)
    assert decoding is not None and decoding.median == pytest.approx(2.0)


def test_several_answers_at_once_have_no_decoding_of_their_own() -> None:
    """One answer's prompt is read while the other is written: no clock tells the two apart."""
    pair = Work(2.0, (Outcome((1, 2), "length"),) * 2, (Pace(0.5, 1, 2),) * 2, (stats(2, 2),) * 2)
    plain, fast = method("ar", [pair]), method("fast", [pair])
    found = Results([plain, fast], {"ar": [], "fast": []}, 2, [None] * 2)
    assert found.ratio(fast, plain) is not None and found.decoding_ratio(fast, plain) is None
    assert counts(fast).tau == 1.0 and counts(fast).other_ms is None and counts(fast).verify_ms == pytest.approx(40.0)
    assert line(step_table(found), "fast")["other ms"] == "-" and line(speed_table(found), "fast")["times ar, decoding"] == "-"


def test_answers_of_one_token_are_no_decoding() -> None:
    """Nothing is divided by their zero seconds."""
    plain, fast = (method(name, [work(0.2, 1, 1)]) for name in ("ar", "fast"))
    found = Results([plain, fast], {"ar": [], "fast": []}, 1, ["one"])
    assert found.decoding_ratio(fast, plain) is None and prices(found) is None and steps_panel(found) is None
    assert len(tables(found)) == 6
    assert json.loads(json.dumps(as_json(found, fast), allow_nan=False))["per_step"]["tau"] is None


@pytest.mark.parametrize(("gap", "shown"), [(1e-4, True), (0.5, False), (None, False)])
def test_a_speed_up_is_refused_where_texts_differ(gap: float | None, shown: bool) -> None:
    """A faster way to write something else is no speed-up; near ties are let pass, and named."""
    found = results(fast=Difference(0, 3, 1, 2, 5.0, 5.0, gap, 1e-3))
    cells = line(speed_table(found), "fast")
    assert cells["times ar, end to end"] == ("2.00 (2.00-3.60)" if shown else "refused")
    assert (cells["times ar, decoding"] != "-") == shown
    assert cells["times transformers"] == ("8.00 (8.00-8.00)" if shown else "-")
    assert cells["text"] == ("1 near ties" if shown else "DIFFERS")
    assert found.refused == (set() if shown else {"fast"})
    assert (as_json(found, found.methods[1])["times_ar"] is not None) == shown
    for speeds in category_tables(found)[:2]:
        assert (line(speeds, "math (2)")["fast"] != "-") == shown
    assert as_json(found, found.methods[1])["times_ar_decoding"] is not None or not shown


def test_categories_are_shown_by_themselves() -> None:
    """A schedule may pay for one kind of task and cost on another; their median says neither."""
    speed, decoding, tokens = category_tables(results())
    assert line(speed, "math (2)") == {
        "category (prompts)": "math (2)", "fast": "2.00 (2.00-2.00)", "transformers": "0.25 (0.25-0.25)",
    }
    assert line(speed, "talk (1)")["fast"] == "4.00 (4.00-4.00)"
    assert line(speed, "talk (1)")["transformers"] == "-", "it was asked no such prompt"
    assert line(decoding, "talk (1)")["fast"] == "4.75 (4.75-4.75)"
    assert line(tokens, "talk (1)") == {"category (prompts)": "talk (1)", "fast": "3.00", "transformers": "-"}
    assert category_tables(results(concurrency=3)) == [], "a prompt has no time of its own"


def test_the_json_keeps_what_every_question_took() -> None:
    """Figures that were not thought of today can only be made from raw samples."""
    found = results()
    fast, other = (json.loads(json.dumps(as_json(found, found.methods[i]), allow_nan=False)) for i in (1, 2))
    assert fast["questions"]["seconds"] == [[0.5, 0.5, 0.5]]
    assert fast["questions"]["num_blocks"] == [[5, 4, 5]] and fast["questions"]["first_s"] == [[0.1, 0.1, 0.1]]
    assert other["questions"]["seconds"] == [[4.0, None, None]] and other["questions"]["draft_s"] == [[None] * 3]
    assert fast["categories"]["math"]["per_step"]["tau"] == 2.25 and fast["num_accepted"] == 16
    assert fast["declined"] == {"medium": 14, "small": 3}
    assert (fast["is_text_compared"], other["is_text_compared"]) == (True, False)
    assert as_json(results(concurrency=3), found.methods[1])["questions"] is None


def test_every_repeat_is_compared(tiny_model: TinyModel) -> None:
    """A text that is wrong in the second repeat only is wrong; so is the second prompt of a group."""
    good, bad = Outcome((1, 2), "length"), Outcome((1,), "stop")
    plain, other = (Method(name, lambda group: pytest.fail("nothing is to be asked")) for name in ("ar", "other"))
    plain.works = [{0: Work(1.0, (good, good), ()), 1: Work(1.0, (good,), ())}] * 2
    other.works = [plain.works[0], {0: Work(1.0, (good, bad), ()), 1: Work(1.0, (bad,), ())}]
    judge = Judge(lambda: PlainModel(_own(tiny_model("llama", 40, 1))))
    found = differences(other, plain, QUESTIONS[:3], judge)
    assert [item.prompt for item in found] == [1, 2] and not any(item.is_near_tie for item in found)
    assert differences(plain, plain, QUESTIONS[:3], judge) == []


# ---- turns and their log ------------------------------------------------------------------------------------------------


def test_methods_take_turns_and_who_begins_changes() -> None:
    """If the same method always came first, it would always meet the same caches and the same clock."""
    asked: list[tuple[str, tuple[int, ...]]] = []
    methods = [Scripted("a", asked).method, Scripted("b", asked).method, Scripted("few", asked, frozenset({0, 3})).method]
    told: list[str] = []
    measure(methods, QUESTIONS, concurrency=1, repeats=1, told=told.append)
    names = [name for name, _ in asked]
    assert names == ["a", "b", "few"] + ["a", "b", "few"] + ["b", "a"] + ["a", "b"] + ["a", "b", "few"]
    assert told == names[3:] and len(told) == num_answers(methods, len(QUESTIONS), concurrency=1, repeats=1)
    assert sorted(methods[2].works[0]) == [0, 3] and sorted(methods[0].works[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("stop_after", [0, 1, 5, 8, 13])
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, stop_after: int, concurrency: int) -> None:
    """An hour of measuring must not be lost, and what is there must not be measured again, nor lost from the tables."""
    file, identity = tmp_path / "log.jsonl", {"schedules": ["a", "b"]}

    def run(limit: int | None) -> tuple[list[Method], list[tuple[str, tuple[int, ...]]]]:
        asked: list[tuple[str, tuple[int, ...]]] = []
        methods = [Scripted(name, asked).method for name in ("a", "b")]
        with RunLog.open(file, identity, "commit") as log:
            if limit is not None:
                write = log.append

                def append(*measured: Any) -> None:
                    if len(log) == limit:
                        raise Killed
                    write(*measured)

                log.append = append  # type: ignore[method-assign]
            measure(methods, QUESTIONS, concurrency=concurrency, repeats=4, log=log)
        return methods, asked

    groups = -(-len(QUESTIONS) // concurrency)
    with pytest.raises(Killed):
        run(stop_after)
    written = file.read_text()
    assert written.count("\n") == 1 + stop_after
    file.write_text(written + '{"repeat": 0, "gr')  # half a line, as a kill leaves it
    methods, asked = run(None)
    kept = stop_after // 2  # groups that both methods had answered
    assert len(asked) == 2 * len(QUESTIONS[:concurrency]) + sum(
        2 * len(QUESTIONS[concurrency * (i % groups) : concurrency * (i % groups + 1)]) for i in range(kept, 4 * groups)
    )
    assert file.read_text().startswith(written), "what was measured is still there"
    again, unasked = run(None)
    assert unasked == [], "everything is there, and yet something was asked"
    assert [m.works for m in again] == [m.works for m in methods], "what is read is not what was written"
    for i in range(kept):
        entry = json.loads(written.splitlines()[1 + 2 * i])
        (read,) = [m.works[entry["repeat"]][entry["group"]] for m in methods if m.name == entry["method"]]
        assert read.seconds == entry["seconds"]


def test_a_log_takes_more_repeats_and_another_commit(tmp_path: Path) -> None:
    """Both are harmless, but the result must say which code measured."""
    file = tmp_path / "log.jsonl"
    for repeats, commit in ((1, "one"), (2, "two"), (2, None)):
        with RunLog.open(file, {"a": (1,)}, commit) as log:
            measure([Scripted("a", []).method], QUESTIONS, concurrency=1, repeats=repeats, log=log)
            assert len(log) == 4 * repeats
    assert log.commits == ["one", "two", None]


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        ({"settings": {"plan": "MS", "budget": 8}, "prompts": "x"}, 'settings.plan was "MSM", is "MS"'),
        ({"settings": {"plan": "MSM", "budget": 8, "new": 1}, "prompts": "x"}, "settings.new was null, is 1"),
        ({"settings": {"plan": "MSM", "budget": 8}, "prompts": "y"}, 'prompts was "x", is "y"'),
    ],
)
def test_a_log_of_another_run_is_refused_by_name(tmp_path: Path, identity: dict[str, Any], named: str) -> None:
    """Measurements of different things in one median would be a number about nothing."""
    file = tmp_path / "log.jsonl"
    RunLog.open(file, {"settings": {"plan": "MSM", "budget": 8}, "prompts": "x"}, None).__exit__(None, None, None)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="log of another run") as error:
        RunLog.open(file, identity, None)
    assert named in str(error.value) and file.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["notes without an end", "notes\n", '{"a": 1}\n', "[]\n", '{"measures": {}}\n{"repeat": 0}\n']
)
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, content: str) -> None:
    """A mistyped name must not cost somebody their notes."""
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(ValueError, match="notes.txt"):
        RunLog.open(file, {}, None)
    assert file.read_text() == content


def test_model_files_that_changed_are_noticed(tmp_path: Path) -> None:
    """A drafter that is trained on meanwhile keeps its name."""
    folder, corpus = tmp_path / "model", tmp_path / "corpus.txt"
    (folder / "deep").mkdir(parents=True)
    weights = folder / "deep" / "weights"
    weights.write_bytes(b"12")
    corpus.write_bytes(b"1")
    before = file_states([folder, corpus])
    assert file_states([folder, corpus]) == before and set(before) == {str(folder), str(corpus)}
    os.utime(weights, ns=(1, 1))
    changed = file_states([folder, corpus])
    assert changed[str(folder)] != before[str(folder)] and changed[str(corpus)] == before[str(corpus)]


# ---- drawings and the bar -----------------------------------------------------------------------------------------------


def test_a_schedule_lies_on_the_line_of_its_own_speed() -> None:
    """The lines say how fast a point would be: at the prices of a single schedule they must say how fast it was."""
    found = results()
    price, fast = prices(found), counts(found.methods[1])
    assert price is not None and price == Prices(
        plain=pytest.approx(3700 / 27), verification=pytest.approx(1060 / 11), forward=pytest.approx(140 / 42)
    )
    assert fast.tau is not None and fast.delta is not None
    assert price.tau((27 / 1.2) / (27 / 3.7), fast.delta) == pytest.approx(fast.tau)
    panel = steps_panel(found)
    assert panel is not None
    points = {curve.name: (curve.xs[0], curve.ys[0]) for curve in panel.curves if not curve.style}
    assert points["fast"] == (pytest.approx(42 / 11), pytest.approx(27 / 11)) and "transformers" not in points


def test_the_target_pays_for_the_rows_that_were_chosen() -> None:
    """Each schedule's mean verification stands on the target's curve."""
    costs = {"target": LatencyModel((1, 4, 40), (10.0, 16.0, 88.0)), "medium": LatencyModel((1, 40), (1.0, 2.0))}
    panel = costs_panel(results(), costs, 0)
    points = {curve.name: (curve.xs[0], curve.ys[0]) for curve in panel.curves if not curve.style}
    assert points["fast"] == (pytest.approx(3.0), pytest.approx(14.0))
    assert [curve.name for curve in panel.curves if curve.style] == ["forward of target", "forward of medium"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_what_there_is_is_drawn(tmp_path: Path, concurrency: int) -> None:
    """And what there is not, is left out, rather than a failure after all the measuring."""
    costs = {"target": LatencyModel((1, 4, 40), (10.0, 16.0, 88.0))}
    folder = tmp_path / "plots"
    for known in (costs, {}):
        names = [file.name for file in draw_all(results(concurrency=concurrency), known, 100, folder)]
        assert names == [CATEGORIES, STEPS] and sorted(names) == sorted(file.name for file in folder.iterdir())
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)
    alone = Results([results().methods[0]], {"ar": []}, 1, [None] * 3)
    assert draw_all(alone, {}, 100, folder) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_shows_what_is_left_on_terminals_only(is_terminal: bool) -> None:
    """In a file it would be a thousand lines; and a thread that draws it would compute while somebody is timed."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100)
    threads = threading.active_count()
    with bar(3, console) as told:
        assert threading.active_count() == threads
        told("ar")
        told("treegraft")
    assert ("2/3" in stream.getvalue() and "treegraft" in stream.getvalue()) == is_terminal


# ---- the other process --------------------------------------------------------------------------------------------------

ECHO = (
    "import sys\nfor line in sys.stdin: "
    "print('{\"token_ids\": [7], \"seconds\": 0.5, \"first_s\": 0.25, \"num_first\": 1, \"num_blocks\": 1}', flush=True)"
)


def child(code: str) -> PlainProcess:
    return PlainProcess([sys.executable, "-c", code], {})


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_the_child_ends_with_the_block_however_that_ends() -> None:
    """A forgotten child would go on computing beside every later measurement."""
    with child(ECHO) as plain:
        assert plain.generate([1, 2], 3) == Written([7], 0.5, 0.25, 1, 1)
    assert is_gone(plain.pid)
    with pytest.raises(KeyboardInterrupt), child(ECHO) as plain:
        assert not is_gone(plain.pid)
        raise KeyboardInterrupt
    assert is_gone(plain.pid)
    plain.close()  # twice is as good as once


def test_the_child_is_out_of_reach_of_ctrl_c() -> None:
    """The terminal tells a whole group of processes; a child that dies first makes the parent report a failure."""
    with child(ECHO) as plain:
        assert os.getpgid(plain.pid) == plain.pid != os.getpgid(0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; input(); print('no memory left', file=sys.stderr); sys.exit(3)", "ended with status 3: no memory left"),
        ("import os; input(); os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("input(); print('{\"error\": \"ValueError: no such model\"}')", "failed: ValueError: no such model"),
        ("raise SystemExit(4)", "ended with status 4"),
        ("input(); print('{\"half', end='')", "ended with status 0"),
    ],
)
def test_a_child_that_fails_says_why(code: str, message: str) -> None:
    """A broken pipe, or a traceback of ours, would say nothing of what went wrong over there."""
    started = psutil.Process().children()
    with pytest.raises(PlainProcessFailed, match=message):
        child(code)
    assert psutil.Process().children() == started, "it was left behind"


def test_a_child_that_dies_between_two_questions_says_so() -> None:
    """The same in the middle of a run."""
    with child("print('{}', flush=True)") as plain:
        while psutil.Process(plain.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        with pytest.raises(PlainProcessFailed, match="ended with status 0"):
            plain.generate([1], 1)


class Counting:
    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_tokens: frozenset[int],
        lookup: int | None,
        assistant: Any,
        streamer: Arrivals,
    ) -> list[int]:
        if not prompt:
            raise IndexError("nothing\nto go on from")
        for block in (prompt, [max_tokens, *stop_tokens], [lookup or 0], [int(assistant is not None)]):
            streamer.put(torch.tensor([block]))
        return [max_tokens, *stop_tokens, lookup or 0, int(assistant is not None)]


def test_the_child_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol, without a process: what is loaded, answered, and said of an error."""
    loaded: list[dict[str, Any]] = []

    def load(asked: dict[str, Any]) -> tuple[Counting, Counting]:
        loaded.append(asked)
        return Counting(), Counting()

    monkeypatch.setattr(app.decode_bench.plain_process, "_load", load)
    plain = {"max_tokens": 4, "lookup": None, "assisted": False}
    asked = [{**plain, "prompt": [1, 2]}, {**plain, "prompt": [1], "lookup": 5}, {**plain, "prompt": [1], "assisted": True}]
    questions = [{"stop_tokens": [9]}, *asked, {**plain, "prompt": []}]
    answers = io.StringIO()
    with pytest.raises(SystemExit):
        serve((json.dumps(question) + "\n" for question in questions), answers)
    ready, answer, lookup, assisted, error = map(json.loads, answers.getvalue().splitlines())
    assert loaded == questions[:1] and ready == {"ready": True}
    assert answer["token_ids"] == [4, 9, 0, 0] and answer["seconds"] >= answer["first_s"] >= 0
    assert (answer["num_first"], answer["num_blocks"]) == (2, 3)
    assert lookup["token_ids"] == [4, 9, 5, 0] and assisted["token_ids"] == [4, 9, 0, 1]
    assert error == {"error": "IndexError: nothing to go on from"}


def test_an_assistant_of_another_vocabulary_is_refused(model_folder: Path, tmp_path: Path, tiny_model: TinyModel) -> None:
    """transformers would translate between tokenizers, or fail in the middle of the run."""
    other = tmp_path / "other"
    tiny_model("llama", 300, 1).save_pretrained(other)
    models = {"target": str(model_folder), "assistant": str(other)}
    about = {"device": "cpu", "threads": torch.get_num_threads(), "num_tokens": 259, "stop_tokens": []}
    answers = io.StringIO()
    with pytest.raises(SystemExit):
        serve([json.dumps(models | about)], answers)
    assert "300 output rows, the target 259" in answers.getvalue()


# ---- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    entries = [{"prompt": "one two one", "category": "count"}, {"prompt": "hi", "category": "talk"}, {"prompt": "and"}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def decode(model_folder: Path, *options: str) -> Result:
    program = typer.Typer()
    program.command()(takes_settings(schedules))
    fixed = f"--target {model_folder} --weights fp32 --device cpu --max-model-len 300 --max-tokens 6"
    return CliRunner().invoke(program, [*fixed.split(), *options])


def record_of(result: Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return record


@pytest.mark.parametrize("options", ["--schedules treegraft", "--temperature 1 --concurrency 2"])
def test_the_bench_runs_and_ends_in_json(model_folder: Path, options: str) -> None:
    """A bench is run rarely, and its code rots in between. Nothing is said about the times."""
    result = decode(model_folder, "--limit", "2", "--repeats", "1", *options.split())
    assert result.exit_code == 0, result.stderr
    record = record_of(result)
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert [entry["name"] for entry in record["methods"]][0] == "ar"
    for entry in record["methods"]:
        assert entry["differences"] == [] and entry["seconds"] and entry["times_ar"]["median"] > 0
        assert entry["tokens"] == [12]
        assert (entry["questions"] is None) == ("concurrency" in options)


def test_transformers_takes_part_in_a_process_of_its_own(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """The whole way, with a real child. Both are float32 here, so it writes what our plain decoding writes."""
    log = tmp_path / "log.jsonl"
    options = ["--prompts", str(prompts), "--schedules", "small", "--repeats", "1", "--log", str(log)]
    before = psutil.Process().children()
    result = decode(model_folder, *options, "--transformers", "--transformers-limit", "2")
    assert result.exit_code == 0, result.stderr
    assert psutil.Process().children() == before, "the child outlived the run"
    assert "not its text" in result.stdout and "talk (1)" in result.stdout and "times ar, decoding" in result.stdout
    record = record_of(result)
    assert record["categories"] == ["count", "talk", None] and record["commits"] == [record["machine"]["commit"]]
    plain, small, other = record["methods"]
    assert [entry["name"] for entry in record["methods"]] == ["ar", "small", "transformers"]
    assert other["questions"]["tokens"] == [[6, 6, None]] and other["times_ar"]["median"] > 0
    assert small["times_transformers"] is not None and set(small["categories"]) == {"count", "talk"}
    lines = [json.loads(text) for text in log.read_text().splitlines()][1:]
    texts = {(entry["group"], entry["method"]): entry["outcomes"] for entry in lines}
    assert len(lines) == 3 + 3 + 2
    assert texts[0, "transformers"] == texts[0, "ar"] and texts[1, "transformers"] == texts[1, "ar"]
    refused = decode(model_folder, *options)
    assert refused.exit_code == 2 and "transformers.plain was true, is false" in refused.stderr, "it is another run"


@pytest.mark.slow
def test_transformers_own_speculation_takes_part(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Beside or without its plain generate, and in fewer passes where its drafts are right; the plots show what there is."""
    plots, log = tmp_path / "plots", tmp_path / "log.jsonl"
    options = ["--prompts", str(prompts), "--schedules", "ngram", "--repeats", "1", "--max-tokens", "40"]
    ways = ["--transformers-lookup", "--lookup-tokens", "4", "--transformers-assisted", str(model_folder)]
    result = decode(model_folder, *options, *ways, "--plots", str(plots), "--log", str(log))
    assert result.exit_code == 0, result.stderr
    assert sorted(file.name for file in plots.iterdir()) == sorted([CATEGORIES, STEPS])
    record = record_of(result)
    assert (record["transformers_lookup_tokens"], record["transformers_assistant"]) == (4, str(model_folder))
    plain, _, lookup, assisted = record["methods"]
    assert [lookup["name"], assisted["name"]] == ["transformers-lookup", "transformers-assisted"]
    assert lookup["times_transformers"] is None and lookup["times_ar_decoding"]["median"] > 0
    assert plain["per_step"]["tau"] == 1.0 < lookup["per_step"]["tau"], "a greedy toy model repeats itself"
    assert assisted["per_step"]["tau"] > 1.0, "it is assisted by itself"
    lines = [json.loads(text) for text in log.read_text().splitlines()][1:]
    texts = {(entry["group"], entry["method"]): entry["outcomes"] for entry in lines}
    for group in range(3):
        assert texts[group, "ar"] == texts[group, lookup["name"]] == texts[group, assisted["name"]]


def test_the_command_goes_on_with_its_log(model_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Through the command, with real answers: what is complete is taken from the log, the rest is measured."""
    log = tmp_path / "log.jsonl"
    options = ["--prompts", str(prompts), "--schedules", "small", "--log", str(log)]
    first = decode(model_folder, *options, "--repeats", "1")
    assert first.exit_code == 0, first.stderr
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    second = decode(model_folder, *options, "--repeats", "2")
    assert second.exit_code == 0 and "5 measurements are in" in second.stderr, second.stderr
    assert log.read_text().count("\n") == 1 + 5 + 2 + 6, "the incomplete group anew, and the second repeat"
    for before, after in zip(record_of(first)["methods"], record_of(second)["methods"], strict=True):
        assert after["questions"]["seconds"][0][:2] == before["questions"]["seconds"][0][:2]
        assert after["questions"]["tokens"] == [[6, 6, 6]] * 2 and after["differences"] == []
    with prompts.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    written = log.read_bytes()
    for more, named in (([], "prompts.number was 3, is 4"), (["--budget", "4"], 'settings.budget was "auto", is 4')):
        refused = decode(model_folder, *options, *more)
        assert refused.exit_code == 2 and named in refused.stderr and log.read_bytes() == written, refused.stderr


def test_a_wrong_text_gives_status_1(model_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a lossy rule must not come out as a speed-up."""

    class Worst(Greedy):
        def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
            return Greedy()(tree, nodes, -rows if len(nodes) > 1 else rows, noise)

    monkeypatch.setitem(EVERY_VERIFIER, "greedy", Worst())
    result = decode(model_folder, "--prompts", str(prompts), "--schedules", "medium", "--repeats", "1")
    assert result.exit_code == 1 and "refused" in result.stdout, result.stdout
    assert record_of(result)["methods"][1]["times_ar"] is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--transformers", "--concurrency", "2"], "one prompt at a time"),
        (["--transformers", "--temperature", "1"], "temperature 0"),
        (["--log", "no/such/folder/log.jsonl"], "no/such/folder"),
        (["--prompts", "no-such-file.txt"], "no-such-file.txt"),
        (["--plots", "no/such/folder/plots"], "no/such/folder"),
        (["--plots", "pyproject.toml"], "pyproject.toml"),
        (["--transformers-lookup", "--concurrency", "2"], "one prompt at a time"),
        (["--transformers-assisted", "no/such/assistant"], "no/such/assistant"),
    ],
)
def test_a_mistake_is_known_before_the_models_load(options: list[str], named: str) -> None:
    """Status 2 and one line, as everywhere else."""
    result = decode(Path("no/such/model"), *options)
    assert result.exit_code == 2
    assert named in result.stderr and result.stderr.count("\n") == 1


def test_prompts_hand_out_their_category(tmp_path: Path, prompts: Path) -> None:
    """Whoever does not ask for it gets the conversations as ever."""
    assert [prompt.category for prompt in read_prompt_set(prompts)] == ["count", "talk", None]
    assert read_prompts(prompts, 2) == [prompt.messages for prompt in read_prompt_set(prompts, 2)]
    assert [prompt.category for prompt in read_prompt_set(None, 2)] == [None, None]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p"}\n{"prompt": "p", "category": 3}\n')
    with pytest.raises(ValueError, match="bad.jsonl:2.*category"):
        read_prompt_set(bad)

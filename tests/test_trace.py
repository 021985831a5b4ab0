"""Logging what could have been drafted: every word's tree and price as if it had been alone; files; the three commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from app.commands import COMMANDS
from app.drafter_quality import Text
from app.teacher_forcing import Memory, Trail, read_text
from app.tracing import GaveUp, Plan, plan_for, trace_text
from drafters.base import Halt
from models.toy import byte_tokenizer
from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.features import FEATURES
from scheduler.profiles import PROFILES
from scheduler.roofline import profiles
from scheduler.rule import Rule
from scheduler.simulation import GUIDED, MEDIUM, ORACLE, PLAIN, SMALL, simulate
from scheduler.traces import Branch, Header, Record, Trace, header_line, priced, read_trace, record_line
from scheduler.value import always, prefix_index, word_index, words_of
from tests.engine_world import World, greedy_reference
from tests.toy_heads import tail_head

TinyModel = Callable[..., PreTrainedModel]


def model(per_row: float, base: float) -> LatencyModel:
    return LatencyModel((1, 64), (base + per_row, base + 64 * per_row))


PRICES = CostProfile(
    {"target": model(1.0, 10.0), "small": model(0.1, 1.0), "medium": model(0.2, 3.0)},
    Origin("toy", "toy", "fp32", "1", "2026"),
)


def worlds(tiny_model: TinyModel, kind: str) -> World:
    target = tiny_model("llama", 259, 1)
    small = {"ngram": None, "head": tail_head(target, num_draft=60), "lm": tiny_model("llama", 259, 2)}[kind]
    return World(target, small=small, medium=tail_head(target, num_draft=200, seed=3), num_rows=900)


def plan(world: World, depth: int = 2, stride: int = 3) -> Plan:
    made = plan_for(
        world.schedules["treegraft"],
        world.drafters,
        depth=depth,
        stride=stride,
        stop_tokens=frozenset(),
        vocab_size=259,
        cost_ratio=lambda context: 0.25,
    )
    return replace(made, policy=replace(made.policy, frontier=3, width=3))


def text(tiny_model: TinyModel, prompt: bytes = b"abcabcab, once more: abc") -> Text:
    """A prompt and what the target writes after it."""
    ids = tuple(prompt)
    return Text((*ids, *greedy_reference(tiny_model("llama", 259, 1), ids, 20)), len(ids))


def memory(world: World) -> Callable[[Text, tuple[int, ...]], Memory]:
    return lambda known, layers: read_text(world.lm, known.tokens, layers)


# ---- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "head", "lm"])
def test_every_word_is_as_if_it_had_been_alone(kind: str, tiny_model: TinyModel) -> None:
    """Against drafters that know nothing else of the position: same trees, same scores, same number and size of forwards.

    Else a medium call would look cheaper, or different, because another word had made it before.
    """
    here = worlds(tiny_model, kind)
    known, how = text(tiny_model), plan(here, depth=2, stride=5)
    records = list(trace_text(known, 0, "code", how, memory(here)))
    assert len(records) == 4 and any(len(b.parent) > 3 for b in records[0].branches.values())
    for record in records:
        for word, branch in record.branches.items():
            tree, forwards = alone(here, known, how, record.position - 1, word)
            assert branch.parent == tuple(tree.parent[1:]), word
            assert branch.lp == pytest.approx(tuple(tree.lp[1:]), abs=1e-4)
            assert [how.drafters[letter].name for letter in branch.creator] == tree.creator[1:]
            for letter in "SM":
                own = [rows for by, rows in branch.forwards if by == letter]
                assert (len(own), sum(own)) == forwards[letter], f"{word}: {branch.forwards}"
    here.check_books()


def alone(world: World, known: Text, how: Plan, root: int, word: str) -> tuple[object, dict[str, tuple[int, int]]]:
    """One word's tree and the forwards behind it, by drafters that were led to the root and asked nothing there."""
    trails = {}
    for letter, drafter in how.drafters.items():
        kept = read_text(world.lm, known.tokens, drafter.layers) if drafter.layers else None
        trails[letter] = Trail(drafter, known.tokens, root - 1, kept)
        for _ in range(3):
            drafter.propose([trails[letter].ask_along_truth(0, 1)])
        trails[letter].advance()
    growth = how.policy.begin(
        known.tokens[root], stop_tokens=frozenset(), max_depth=trails["S"].num_left - 1, vocab_size=259
    )
    counts = dict.fromkeys("SM", (0, 0))
    for letter in [*word, ""]:
        while "N" in how.drafters and (ask := growth.ask("ngram")) is not None:
            size = len(growth.tree)
            (answer,) = how.drafters["N"].propose([trails["N"].ask(growth.tree, ask.nodes, ask.width)])
            growth.attach("ngram", answer)
            if len(growth.tree) == size:
                break
        ask = growth.ask(how.drafters[letter].name) if letter else None
        if ask is None:
            continue
        drafter = how.drafters[letter]
        first, *more = ask.tops(growth.tree)
        for one in more:
            if len(drafter.passes(trails[letter].ask(growth.tree, one.nodes, one.width, rescore=one.rescore))) <= 1:
                first = one
        ask = first
        lm = getattr(drafter, "lm", None)
        before = (0, 0) if lm is None else (lm.num_forwards, lm.num_rows_forwarded)
        (answer,) = drafter.propose([trails[letter].ask(growth.tree, ask.nodes, ask.width, rescore=ask.rescore)])
        assert not isinstance(answer, Halt)
        if lm is not None:
            done = counts[letter]
            counts[letter] = (done[0] + lm.num_forwards - before[0], done[1] + lm.num_rows_forwarded - before[1])
        growth.attach(drafter.name, answer)
    for trail in trails.values():
        trail.close()
    return growth.tree, counts


def test_accepted_nodes_are_the_targets_own_text(tiny_model: TinyModel) -> None:
    """And decisions have signals; nobody keeps a row of any cache."""
    here = worlds(tiny_model, "ngram")
    known = text(tiny_model)
    # The target itself drafts: whatever it puts first is accepted, as deep as the tree goes.
    twin = World(tiny_model("llama", 259, 1), medium=tiny_model("llama", 259, 1), num_rows=900)
    for record in trace_text(known, 7, None, plan(twin, depth=3, stride=1), memory(twin)):
        left = len(known.tokens) - record.position - 1
        assert len(record.branches["MMM"].path) >= min(3, left) and record.prompt == 7
        assert set(record.rows) == {"", "S", "M", "SS", "SM", "MS", "MM"}
        assert all(len(row) == len(FEATURES) for row in record.rows.values())
        assert record.rows[""][FEATURES.index("log_cost_ratio")] == pytest.approx(np.log(0.25))
    twin.check_books()
    here.check_books()


def test_a_drafter_that_gives_up_ends_the_text_and_keeps_nothing(tiny_model: TinyModel) -> None:
    """Its cache is full here; the prompts before are not lost."""
    here = worlds(tiny_model, "lm")
    here.drafters["small"].lm.pool.allocate(890)  # type: ignore[attr-defined]
    with pytest.raises(GaveUp, match="small gave up"):
        list(trace_text(text(tiny_model), 0, None, plan(here), memory(here)))
    assert here.lm.pool.num_used == 0


def test_only_schedules_that_graft_can_be_traced(tiny_model: TinyModel) -> None:
    """A word over S and M means nothing to others."""
    here = worlds(tiny_model, "lm")
    for name in ("small", "talon", "ar"):
        with pytest.raises(ValueError, match=name):
            plan_for(
                here.schedules[name],
                here.drafters,
                depth=1,
                stride=1,
                stop_tokens=frozenset(),
                vocab_size=9,
                cost_ratio=lambda context: 1.0,
            )


# ---- files and prices -----------------------------------------------------------------------------------------------


def header(depth: int = 1) -> Header:
    return Header("toy", "small", "medium", depth, 8, 4, FEATURES)


def record(prompt: int, *, helps: bool, chain: int = 3) -> Record:
    """The small drafter's one node is wrong; the medium's chain is right where it `helps`. `entropy` tells."""
    row = [0.0] * len(FEATURES)
    row[FEATURES.index("entropy")] = 1.0 if helps else 0.0
    small = Branch((0,), (-0.7,), "S", (), (("S", 1),))
    parents = (0, *range(2, 2 + chain - 1))
    path = tuple(range(2, 2 + chain)) if helps else ()
    medium = Branch((0, *parents), (-0.7, *(-0.1,) * chain), "S" + "M" * chain, path, (("M", 1),) * chain)
    return Record(prompt, "code" if helps else None, 100 + prompt, {"": tuple(row)}, {"S": small, "M": medium})


def trace_of(count: int = 200) -> Trace:
    return Trace(header(), tuple(record(i % 10, helps=i % 2 == 0) for i in range(count)), PRICES)


def test_a_trace_survives_its_file() -> None:
    """It is made on one machine and read on another."""
    trace = trace_of(6)
    written = header_line(trace.header, PRICES) + "".join(map(record_line, trace.records))
    assert read_trace(written) == trace
    assert read_trace(header_line(header(), None)).profile is None


@pytest.mark.parametrize(
    ("line", "change", "named"),
    [
        (0, {"format": "x"}, "line 1: expected graftserve-trace"),
        (0, {"features": ["mood"]}, "other signals"),
        (0, {"depth": 0}, "depth"),
        (1, {"branches": {}}, "line 2"),
        (1, {"rows": {}}, "signals for every decision"),
        (1, {"position": None}, "line 2"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(line: int, change: dict[str, object], named: str) -> None:
    """A rule fitted to half a record would be a wrong rule."""
    trace = trace_of(2)
    lines = [header_line(trace.header, PRICES), *map(record_line, trace.records)]
    lines[line] = json.dumps(json.loads(lines[line]) | change) + "\n"
    with pytest.raises(ValueError, match=named):
        read_trace("".join(lines))


@pytest.mark.parametrize(
    "values",
    [
        {"parent": (0, 3)},
        {"lp": (-0.1,)},
        {"lp": (-0.1, 0.2)},
        {"path": (2,)},
        {"path": (1, 3)},
        {"creator": "S"},
    ],
)
def test_impossible_trees_are_refused(values: dict[str, object]) -> None:
    """Parents after their children, positive log-probabilities, paths with gaps."""
    good = Branch((0, 1), (-0.1, -0.2), "SM", (1, 2), ())
    with pytest.raises(ValueError):
        replace(good, **values)  # type: ignore[arg-type]


def test_a_step_costs_its_forwards_and_its_verification() -> None:
    """By hand, with three nodes of the medium's chain verified, and with the cut that leaves one of them out."""
    trace = Trace(header(), (record(0, helps=True), record(1, helps=False)), PRICES)
    steps = priced(trace, PRICES, budget=5)
    small, medium = word_index("S"), word_index("M")
    assert steps.tokens.tolist() == [[1.0, 4.0], [1.0, 1.0]]
    assert steps.ms[0, small] == pytest.approx(1.1 + 12.0) and steps.ms[0, medium] == pytest.approx(3 * 3.2 + 15.0)
    assert steps.plain_ms[0] == pytest.approx(11.0)
    cut = priced(trace, PRICES, budget=3)
    assert cut.tokens[0, medium] == 3.0 and cut.ms[0, medium] == pytest.approx(3 * 3.2 + 13.0)
    assert priced(trace, PRICES, budget=1).tokens.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    ratio = steps.rows[0, prefix_index(""), FEATURES.index("log_cost_ratio")]
    assert ratio == pytest.approx(np.log(3.2 / 11.0))


def test_the_size_by_price_never_knows_what_was_accepted() -> None:
    """Else simulated gains would come from looking ahead: equal trees get equal sizes whether they were right or not."""
    steps = priced(Trace(header(), (record(0, helps=True), record(0, helps=False)), PRICES), PRICES, budget=None)
    assert steps.ms[0].tolist() == steps.ms[1].tolist()
    dear = CostProfile({**PRICES.models, "target": model(1000.0, 1.0)}, PRICES.origin)
    assert priced(trace_of(2), dear, budget=None).tokens.max() == 1.0, "rows that cost a step each are not worth one"


def test_a_profile_without_a_model_is_refused() -> None:
    """A drafter without a price would be free, and win."""
    without = CostProfile({"target": PRICES.models["target"], "small": PRICES.models["small"]}, PRICES.origin)
    with pytest.raises(ValueError, match="no medium drafter"):
        priced(trace_of(2), without, budget=None)
    with pytest.raises(ValueError, match="no target"):
        priced(trace_of(2), CostProfile({}, PRICES.origin), budget=None)


# ---- simulation -----------------------------------------------------------------------------------------------------


def test_guidance_gains_where_a_signal_tells_and_the_oracle_bounds_it() -> None:
    """The medium helps in every other step, and one signal knows when."""
    result = simulate(trace_of(), PRICES, budget=8)
    rates = {name: total.rate for name, total in result.totals.items()}
    assert list(rates) == [PLAIN, SMALL, MEDIUM, GUIDED, ORACLE]
    assert rates[GUIDED] > 1.05 * max(rates[SMALL], rates[MEDIUM]) and result.gain > 0.05
    assert rates[ORACLE] == pytest.approx(rates[GUIDED]) and result.possible >= result.gain - 1e-9
    never = simulate(trace_of(), PRICES, budget=8, rule=Rule(False))
    assert never.totals[GUIDED] == always(priced(trace_of(), PRICES, budget=8), "S")


def test_where_the_medium_is_free_it_is_always_called() -> None:
    """Prices decide, not acceptance alone."""
    free = CostProfile({**PRICES.models, "medium": model(0.0, 1e-6), "target": model(1e-6, 10.0)}, PRICES.origin)
    result = simulate(trace_of(), free, budget=8)
    assert result.totals[GUIDED].rate == pytest.approx(result.totals[MEDIUM].rate, rel=1e-3)


def test_shipped_profiles_are_what_the_script_computes() -> None:
    """A profile edited by hand would not be what its assumptions say."""
    made = profiles()
    assert set(made) == {path.stem for path in PROFILES.glob("*.json")} and len(made) == 6
    for name, profile in made.items():
        assert CostProfile.from_json((PROFILES / f"{name}.json").read_text()) == profile
        assert "not measured" in profile.origin.machine and {"target", "small", "medium"} == set(profile.models)
        target, medium, small = (profile.ms(model, 1) for model in ("target", "medium", "small"))
        assert small < medium < target, name
    assert made["gpu141-8b"].ms("target", 1) < made["gpu80-8b"].ms("target", 1) < made["gpu80-32b"].ms("target", 1)
    # By hand: 16 GB of weights at three quarters of 3.35 TB/s, and 32 layers of 10 us.
    assert made["gpu80-8b"].ms("target", 1) == pytest.approx(16e9 / (0.75 * 3.35e12) * 1e3 + 0.32, abs=1e-4)


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama", 259, 1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def command(*arguments: str) -> Result:
    program = typer.Typer()
    for name in ("trace", "fit-scheduler", "simulate"):
        program.command(name)(COMMANDS[name])
    return CliRunner().invoke(program, arguments)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_from_prompts_to_a_rule_and_a_simulation(folder: Path, home: Path) -> None:
    """The three commands, as the documentation has them, on a toy model that drafts for itself."""
    prices, log, rule = home / "costs.json", home / "steps.jsonl", home / "rule.json"
    prices.write_text(PRICES.to_json())
    lines = ('{"prompt": "one two one two", "category": "repeats"}', '{"prompt": "hello"}')
    (home / "prompts.jsonl").write_text("\n".join(lines))
    models = ("--target", str(folder), "--medium", str(folder), "--small", "ngram", "--weights", "fp32", "--device", "cpu")
    extent = ("--max-model-len", "120", "--max-tokens", "16", "--drafting-steps", "2", "--stride", "2")
    files = ("--prompts", str(home / "prompts.jsonl"), "--out", str(log), "--profile", str(prices))
    result = command("trace", *models, *extent, *files)
    assert result.exit_code == 0, result.stderr + str(result.exception)
    trace = read_trace(log.read_text())
    assert (trace.header.small, trace.header.medium, trace.header.depth) == ("ngram", "medium", 2)
    assert {entry.category for entry in trace.records} == {"repeats", None} and trace.profile == PRICES
    assert all(set(entry.branches) == set(words_of(2)) for entry in trace.records)

    result = command("fit-scheduler", str(log), "--out", str(rule))
    assert result.exit_code == 0, result.stderr + str(result.exception)
    report = Rule.from_json(rule.read_text()).report
    assert report["prompts"] == 2 and "always medium" in result.stdout and "call the medium" in result.stderr

    result = command("simulate", str(log), "--profile", "gpu80-8b", "--profile", str(prices), "--rule", str(rule))
    assert result.exit_code == 0, result.stderr + str(result.exception)
    machines = json.loads(result.stdout.splitlines()[-1])["machines"]
    assert set(machines) == {"gpu80-8b", str(prices)}
    for found in machines.values():
        assert found["possible"] >= max(found["gain"], 0.0)
        assert set(found["tokens_per_second"]) == {PLAIN, SMALL, MEDIUM, GUIDED, ORACLE}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("fit-scheduler", "nowhere.jsonl", "--out", "rule.json"), "nowhere.jsonl"),
        (("simulate", "{bad}", "--profile", "gpu80-8b"), "line 1"),
        (("simulate", "{empty}"), "no position"),
        (("simulate", "{good}", "--profile", "gpu9-8b"), "gpu9-8b"),
        (("simulate", "{good}", "--rule", "{bad}"), "call rule"),
        (("fit-scheduler", "{good}", "--out", "no/where/rule.json"), "no folder"),
        (("trace", "--out", "no/where/trace.jsonl"), "no folder"),
    ],
)
def test_what_the_user_can_mend_is_one_line(arguments: tuple[str, ...], named: str, home: Path) -> None:
    """Status 2, the file's name, and no traceback."""
    files = {name: home / f"{name}.jsonl" for name in ("bad", "empty", "good")}
    files["bad"].write_text("{}\n")
    files["empty"].write_text(header_line(header(), PRICES))
    trace = trace_of(40)
    files["good"].write_text(header_line(trace.header, PRICES) + "".join(map(record_line, trace.records)))
    result = command(*(argument.format(**files) for argument in arguments))
    assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1, result.stderr

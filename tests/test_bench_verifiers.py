"""The comparison of trees and rules, where what comes out is known beforehand, and the command around it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from app.commands.bench import bench
from app.config import ScheduleDefinition
from app.local import Answer
from app.verifier_bench import PairCounts, Plan, Seconds, StepLog, measure_pairs
from app.verifier_pairs import default_pairs
from app.verifier_report import COLUMNS, funnel_rows, pair_json, panels, rows
from engine.admission import check_rules
from engine.request import DrafterCount, FinishReason, RequestStats, StepStats
from engine.sequence import TreeRecord
from scheduler.definitions import define_schedule
from tests.engine_world import World
from tree.tree import TokenTree

TinyModel = Callable[..., PreTrainedModel]


def schedules_of(pairs: dict[str, ScheduleDefinition]) -> list[Any]:
    available = ("ngram", "small", "medium")
    return [define_schedule(name, available=available, **parts.model_dump()) for name, parts in pairs.items()]


# ---- which pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2, 3, 4, 8, 9, 16, 33, 64, 100, 511])
def test_every_pair_that_is_offered_can_be_served_within_its_budget(budget: int) -> None:
    """A pair that the engine refuses, or a tree larger than asked for, would end the run or compare apples with pears."""
    pairs = default_pairs(budget, "medium", small="ngram")
    for schedule in schedules_of(pairs):
        check_rules(schedule, allow_lossy=False)
        assert 1 < schedule.budget <= budget, schedule.name
        if not schedule.name.startswith(("chain", "path")):
            assert schedule.budget > budget / 2, f"{schedule.name} has {schedule.budget} of {budget} nodes"
    assert len(pairs) >= 12 and len({parts.verifier for parts in pairs.values()}) == 8, "a lossless rule is missing"
    assert "treegraft+walk" not in default_pairs(budget, "medium")


# ---- counting -------------------------------------------------------------------------------------------------------


def record(chain: list[int], siblings: int, accepted: int) -> TreeRecord:
    """A chain of tokens, each with siblings that the drafter liked better; the first `accepted` of the chain are accepted."""
    tree, path = TokenTree(0), []
    node = 0
    for token in chain:
        for other in range(siblings):
            tree.add(node, 50 + other, -0.5 - other / 10, "medium")
        node = tree.add(node, token, -2.0, "medium")
        path.append(node)
    return TreeRecord(tree, tuple(range(len(tree))), tuple(path[:accepted]), 9)


def answered(records: list[TreeRecord], forwards: int) -> Answer:
    stats = RequestStats("s", 3, num_lossy=1, drafters={"medium": DrafterCount(forwards=forwards)})
    return Answer((1, 2), "", FinishReason.LENGTH, stats, (record([], 0, 0), *records))


def test_a_small_case_by_hand() -> None:
    """Golden: two answers, three verifications; the trees of the prompts, which are roots alone, are no verifications."""
    counts = PairCounts("pair", "walk", 1.0)
    counts.add(answered([record([1, 2, 3], 0, 2), record([1], 1, 1)], 4), Seconds(1.0, 0.5, 0.1, 0.3, 0.1))
    counts.add(answered([record([1, 2], 2, 0)], 2), Seconds(1.0, 0.5, 0.0, 0.3, 0.0))
    counts.add(answered([], 0), Seconds())  # one token, from the prompt's pass: nothing to count
    assert (counts.verifications, counts.tokens, counts.forwards, counts.nodes) == (3, 3 + 2 + 1, 6, 4 + 3 + 7)
    assert counts.tau == 2.0 and counts.delta == 2.0 and counts.lossy_tokens == 3
    assert counts.by_prompt == [(2.0, 2.5), (2.0, 1.0)]
    assert [(depth.offered, depth.accepted) for depth in counts.funnel] == [(3, 2), (2, 1), (1, 0)]
    assert [dict(depth.ranks) for depth in counts.funnel] == [{0: 1, 1: 1}, {0: 1}, {}]
    assert counts.seconds.step == 2.0 and counts.seconds.own_share == pytest.approx(0.1)
    assert rows([counts])[0] == (
        "pair", "1", "walk", "3", "2.00", "2.00", "4.67", "33333", "33333", "10.0%", "666.7",
    )  # fmt: skip
    assert funnel_rows([counts])[0] == ("pair", "1", "67%", "50%", "0%")
    said = json.loads(json.dumps(pair_json(counts)))
    assert said["funnel"][0] == {"depth": 1, "offered": 3, "accepted": 2, "ranks": [1, 1]}
    depths, cost = panels([counts])
    assert list(depths.curves[0].ys) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    line, dots = cost.curves
    assert [y - x for x, y in zip(line.xs, line.ys, strict=True)] == [1, 1], "a perfect chain has tau = delta + 1"
    assert (list(dots.xs), list(dots.ys)) == ([2.0, 2.0], [2.5, 1.0])


def test_a_pair_without_any_verification_is_reported_and_not_divided_by() -> None:
    """A run over answers of one token each should end in a report."""
    counts = PairCounts("pair", "walk", 1.0)
    assert rows([counts])[0] == ("pair", "1", "walk", "0", *["-"] * 7) and len(rows([counts])[0]) == len(COLUMNS)
    assert json.loads(json.dumps(pair_json(counts)))["tau"] is None and len(panels([counts])) == 2


def test_steps_over_prompts_and_pauses_between_requests_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's pass is no verification, and the time between two requests is nobody's."""
    clock = iter([10.0, 13.0, 14.5, 100.0, 101.0])
    monkeypatch.setattr("app.verifier_bench.time.perf_counter", lambda: next(clock))
    log = StepLog()
    stats = RequestStats("s", 3)
    for prompt_tokens, draft_s in ((5, 0.0), (0, 1.0), (0, 0.5), (5, 9.0), (0, 0.25)):
        log.on_step([StepStats("s", num_prompt_tokens=prompt_tokens, draft_s=draft_s, tree_s=0.1, verify_s=0.2, rule_s=0.3)])
        if draft_s == 0.5:
            log.on_finish(stats, FinishReason.LENGTH)
    taken = log.take()
    assert taken.step == 3.0 + 1.5 + 1.0 and taken.draft == 1.75
    assert (taken.tree, taken.target, taken.rule) == pytest.approx((0.3, 0.6, 0.9))
    assert log.take() == Seconds()


# ---- measuring ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_model: TinyModel) -> list[PairCounts]:
    """All pairs, where the drafter is the target itself."""
    target = tiny_model("llama", 40, 1)
    defined = default_pairs(8, "medium", small="ngram")
    world = World(target, medium=target, schedules=schedules_of(defined))
    log = StepLog()
    world.engine.subscribe(log)
    told: list[str] = []
    plan = Plan(list(defined), (0.0, 1.0), max_tokens=20)
    prompts = [(3, 1, 4, 1, 5), (9, 2, 6)]
    with world:
        counts = measure_pairs(world.engine, log, prompts, plan, told.append)
    assert len(told) == plan.num_answers(2) == 2 * 2 * len(defined)
    return counts


def test_a_drafter_that_is_the_target_makes_perfect_chains(measured: list[PairCounts]) -> None:
    """tau = delta + 1 up to the answer's end; a forward or a token counted twice or not at all would show."""
    by_name = {(one.name, one.temperature): one for one in measured}
    for name, temperature in (("chain+walk", 0.0), ("path+block", 1.0)):
        one = by_name[name, temperature]
        assert one.tokens == one.forwards + one.verifications, name
        # 20 tokens: one of the prompt's pass, two whole steps of 8, one step that may draft two more.
        assert (one.verifications, one.tokens, one.nodes) == (6, 2 * 19, 2 * 19)
        assert all(depth.accepted == depth.offered for depth in one.funnel) and len(one.funnel) == 7
        assert all(set(depth.ranks) <= {0} for depth in one.funnel)


def test_ratio_rules_accept_all_of_what_the_target_itself_drew(measured: list[PairCounts]) -> None:
    """If p is q every draw passes. Negative control: the walk, which ignores q, refuses most of the same trees."""
    by_name = {(one.name, one.temperature): one for one in measured}
    exact = ("iid+naive", "iid+specinfer", "iid+spectr", "distinct+specinfer-distinct", "delayed+traversal", "delayed+khisti")
    for name in exact:
        one = by_name[name, 1.0]
        deep = [depth for depth in one.funnel if depth.offered]
        assert all(depth.accepted == depth.offered for depth in deep), name
    walk = by_name["iid+walk", 1.0]
    assert walk.funnel[1].accepted < walk.funnel[1].offered


def test_counts_belong_together(measured: list[PairCounts]) -> None:
    """At T = 0 pairs of one policy are one measurement; funnels narrow; the parts of a step are not more than the step."""
    cold = {one.name: one for one in measured if one.temperature == 0}
    same = [pair_json(cold[f"iid+{rule}"]) for rule in ("walk", "naive", "specinfer", "spectr")]
    assert all({**one, "name": ""} == {**same[0], "name": ""} for one in same) and same[0]["rule"] == "greedy"
    for one in measured:
        offered, accepted = [d.offered for d in one.funnel], [d.accepted for d in one.funnel]
        assert offered == sorted(offered, reverse=True) and accepted == sorted(accepted, reverse=True)
        assert one.tokens == one.verifications + sum(accepted)
        assert all(sum(depth.ranks.values()) == depth.accepted <= depth.offered for depth in one.funnel)
        parts = one.seconds
        assert 0 < parts.draft + parts.tree + parts.target + parts.rule <= parts.step
        assert parts.tree > 0 and parts.rule > 0 and 0 < (parts.own_share or 0) < 1


# ---- the command ----------------------------------------------------------------------------------------------------


def command(target: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    program = typer.Typer()
    program.add_typer(bench, name="bench")
    options = ("--target", str(target), "--weights", "fp32", "--device", "cpu", "--max-model-len", "300")
    return CliRunner().invoke(program, ["bench", "verifiers", *options, *arguments])


def test_the_command_compares_pairs_and_ends_in_json(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of one's own beside those that come with it, a lossy one among them, which is marked by its tokens."""
    prompts, out, plot = (tmp_path / name for name in ("prompts.txt", "out.json", "out.png"))
    prompts.write_text("one\ntwo\nthree\n")
    own = {"mine": {"policy": "chain", "options": {"length": 3}, "plan": "M*", "greedy_verifier": "margin"}}
    names = "chain+walk,delayed+khisti,treegraft+walk,mine"
    result = command(
        model_folder,
        *("--medium", "truncated:1+0", "--define", json.dumps(own), "--allow-lossy", "true", "--pairs", names),
        *("--prompts", str(prompts), "--limit", "2", "--max-tokens", "10", "--temperatures", "0,1", "--budget", "6"),
        *("--json", str(out), "--plot", str(plot)),
        monkeypatch=monkeypatch,
    )
    assert result.exit_code == 0, result.stderr + str(result.exception)
    record = json.loads(result.stdout.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert (record["bench"], record["prompts"], record["budget"], record["max_tokens"]) == ("verifiers", 2, 6, 10)
    found = {(pair["name"], pair["temperature"]): pair for pair in record["pairs"]}
    assert set(found) == {(name, t) for name in names.split(",") for t in (0.0, 1.0)}
    assert found["mine", 0.0]["rule"] == "margin" and found["mine", 0.0]["lossy_tokens"] > 0
    assert all(pair["lossy_tokens"] == 0 for key, pair in found.items() if key != ("mine", 0.0))
    assert all(pair["verifications"] > 0 and pair["seconds"]["step"] > 0 for pair in record["pairs"])
    for word in ("own share", "delayed+khisti", "depth 1", "drafts by medium, budget 6, 2 prompts"):
        assert word in result.stdout, word
    with Image.open(plot) as image:
        assert image.height > 900, "two temperatures, two rows"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--temperatures", "0,warm"), "temperatures: 'warm'"),
        (("--temperatures", "3"), "temperatures"),
        (("--pairs", "chain+walk,oak+walk"), "pairs: 'oak+walk' is not one of chain+walk"),
        (("--budget", "1"), "budget must be at least 2"),
        (("--medium", "none"), "there is none"),
        (("--drafter", "small"), "drafter 'small' is not one that runs a model here: medium"),
        (("--plot", "out.gif"), "out.gif"),
        (("--json", "nowhere/out.json"), "nowhere"),
        (("--prompts", "missing.txt"), "missing.txt: no such file"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_loaded(
    arguments: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target here does not even exist."""
    result = command(tmp_path / "no-model", *arguments, monkeypatch=monkeypatch)
    assert result.exit_code == 2 and named in result.stderr and result.stderr.count("\n") == 1, result.stderr

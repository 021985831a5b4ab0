"""The neural selector of delayed trees: shapes, prices, loss, training on worlds whose best shape is known, labels, files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner

from app.commands import COMMANDS
from app.drafter_quality import Text
from app.drafting import SHIPPED
from app.selector_labels import LabelPlan, NoDistribution, label_text
from app.teacher_forcing import Memory, read_text
from drafters.ngram import NgramDrafter
from models.sampling import SamplingParams
from models.toy import byte_tokenizer
from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.selected import SERVED
from scheduler.selector import SCALARS, SHAPES, Selector, SelectorConfig, all_ms, scalars, step_ms
from scheduler.selector_fit import (
    Samples,
    SelectorFit,
    fit_selector,
    loss,
    oracle_rate,
    static_shapes,
    tail_penalty,
    throughput,
)
from scheduler.selector_samples import Label, LabelHeader, label_line, labels_header_line, priced_samples, read_labels
from tests.engine_world import World
from tests.toy_heads import tail_head
from tree.draws import TreeKind, draw, record_draws
from tree.policies.sampled import Delayed
from tree.tree import TokenTree
from verify.efficiency import LAWS, expected_tokens, tokens_by_depth

TinyModel = Callable[..., PreTrainedModel]
LINEAR = CostProfile(
    {
        "target": LatencyModel((1, 64), (21.0, 84.0), context_ms=0.01),  # 20 + n
        "medium": LatencyModel((1, 64), (2.1, 8.4), context_ms=0.001),  # 2 + n / 10
    },
    Origin("toy", "toy", "fp32", "1", "2026"),
)
CHAIN = np.array([shape.num_paths == 1 for shape in SHAPES])
LENGTH = np.array([shape.trunk + shape.branch for shape in SHAPES])


def world(tokens: Callable[[np.ndarray], np.ndarray], *, count: int = 120, seed: int = 0) -> Samples:
    """Roots with random features; `tokens(features)` are the expected tokens by shape, priced by `LINEAR`."""
    features = np.random.default_rng(seed).standard_normal((count, len(SCALARS)))
    features[:, SCALARS.index("temperature")], features[:, SCALARS.index("top_p")] = 1.0, 1.0
    value = np.stack([tokens(row) for row in features])
    ms = np.stack([all_ms(LINEAR, "medium", 100)] * count)
    return Samples(np.arange(count) % 10, features, value, ms)


# ---- shapes and prices ----------------------------------------------------------------------------------------------


def test_every_distinct_shape_is_there_once() -> None:
    """324 actions, 233 shapes: a duplicate would split its own probability."""
    assert len(SHAPES) == len(set(SHAPES)) == 233
    assert SHAPES[0].budget == 1 and all(shape == shape.canonical() for shape in SHAPES)
    assert {Delayed(k, a, b).canonical() for k in range(1, 5) for a in range(9) for b in range(9)} == set(SHAPES)


def test_a_step_costs_its_layers_and_its_rows() -> None:
    """By hand for (1, 0, 0), a chain of three, and (3, 2, 2) at a context of 1,000 tokens."""

    def draft(rows: int, context: int) -> float:
        return 2 + rows / 10 + context / 1000

    def verify(rows: int) -> float:
        return 20 + rows + 10.0

    assert step_ms(Delayed(1, 0, 0), LINEAR, "medium", 1000) == pytest.approx(verify(1))
    chain = sum(draft(1, 1000 + j) for j in range(3))
    assert step_ms(Delayed(1, 3, 0), LINEAR, "medium", 1000) == pytest.approx(chain + verify(4))
    # The first layer below the branching point still has one row: all paths begin at one node.
    tree = draft(1, 1000) + draft(1, 1001) + draft(1, 1002) + draft(3, 1005)
    assert step_ms(Delayed(3, 2, 2), LINEAR, "medium", 1000) == pytest.approx(tree + verify(9))
    assert step_ms(Delayed(3, 2, 2), LINEAR, "ngram", 1000) == pytest.approx(verify(9)), "lookup is free"


def test_scalars_by_hand() -> None:
    """Entropies, divergences and distances of small distributions; a token that one side excludes is no infinity."""
    p, q, r = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    values = scalars(p, q, r, context=9, temperature=0.7, top_p=0.9, draft_ms=2.0, target_ms=20.0)
    row = dict(zip(SCALARS, values, strict=True))
    assert row["target_entropy"] == pytest.approx(math.log(2)) and row["draft_entropy"] == 0.0
    assert row["root_entropy"] == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2))
    assert row["kl_draft_target"] == pytest.approx(math.log(2)) and row["distance"] == pytest.approx(1.0)
    assert math.isfinite(row["kl_target_draft"]) and row["log_context"] == pytest.approx(math.log(10))
    assert (row["temperature"], row["top_p"]) == (0.7, 0.9) and row["log_target_ms"] == pytest.approx(math.log(20))


# ---- loss -----------------------------------------------------------------------------------------------------------


def test_throughput_is_a_ratio_of_expectations() -> None:
    """An expectation of ratios would favor rare long steps."""
    tokens, ms = torch.tensor([[1.0, 4.0]]), torch.tensor([[10.0, 20.0]])
    assert throughput(torch.zeros(1, 2), tokens, ms).item() == pytest.approx(2.5 / 15)


def test_the_penalty_is_zero_exactly_where_nothing_is_lost() -> None:
    """And looks at the worst share only."""
    assert tail_penalty(torch.tensor([1.0, 1.5, 2.0]), 1.0).item() == 0.0
    assert tail_penalty(torch.tensor([0.9, 1.5, 2.0]), 1.0).item() == pytest.approx(0.01 / 3)
    assert tail_penalty(torch.tensor([0.9, 1.5, 2.0]), 0.1).item() == pytest.approx(0.01)


def test_the_loss_does_not_depend_on_the_unit_of_time() -> None:
    """Milliseconds or seconds: the same network comes out."""
    torch.manual_seed(0)
    logits, tokens, ms = torch.randn(5, 7), 1 + torch.rand(5, 7), 1 + torch.rand(5, 7)
    base = torch.rand(5)
    options = SelectorFit()
    assert torch.isclose(loss(logits, tokens, ms, base, options), loss(logits, tokens, 1000 * ms, base / 1000, options))


def test_the_gradient_of_the_loss_is_right() -> None:
    """Against finite differences, penalty included."""
    torch.manual_seed(0)
    tokens, ms = 1 + torch.rand(4, 5, dtype=torch.float64), 1 + torch.rand(4, 5, dtype=torch.float64)
    base = torch.full((4,), 1.4, dtype=torch.float64)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, tokens, ms, base, SelectorFit(tail=0.5)), (logits,))


# ---- training -------------------------------------------------------------------------------------------------------


def test_where_drafts_are_worth_nothing_plain_decoding_is_chosen() -> None:
    """Every shape emits one token, and only time differs."""
    selector, report = fit_selector(world(lambda row: np.ones(len(SHAPES))), "specinfer")
    for row in world(lambda row: np.ones(len(SHAPES)), seed=1).features[:20]:
        assert selector.select(row) == Delayed(1, 0, 0)
    assert report["held_out"]["selector"] == pytest.approx(report["held_out"]["oracle"])


def test_where_branches_bring_nothing_there_are_none() -> None:
    """Expected tokens depend on the length alone."""
    selector, _ = fit_selector(world(lambda row: 1 + 0.8 * LENGTH.clip(max=6)), "specinfer")
    for row in world(lambda row: np.ones(len(SHAPES)), seed=1).features[:20]:
        assert selector.select(row).num_paths == 1


def test_a_hundred_roots_are_learned_nearly_as_an_oracle_knows_them() -> None:
    """Capacity: long chains pay where one feature is high, wide trees where another is.

    The loss is of each root's own throughput, so each root's best is what is compared with.
    """

    def tokens(row: np.ndarray) -> np.ndarray:
        chain = 1 + LENGTH * (0.9 if row[0] > 0 else 0.05)
        return chain + np.where(~CHAIN, 1.5 if row[1] > 0 else 0.0, 0.0)

    samples = world(tokens, count=100)
    options = SelectorFit(epochs=400, dropout=0.0, weight_decay=0.0, held_out=10, batch=100)
    selector, report = fit_selector(samples, "specinfer", options)
    own = samples.take(samples.groups != 0)  # the rest is held out
    picked = np.array([SHAPES.index(selector.select(row)) for row in own.features])
    rate = own.tokens / own.ms
    share = rate[np.arange(len(rate)), picked] / rate.max(axis=1)
    assert share.mean() > 0.99, f"{share.mean():.4f} of the best, at worst {share.min():.4f}"
    assert report["trained"]["selector"] > 1.3 * report["trained"]["static"], report["trained"]


def test_training_is_deterministic_and_leaves_the_generator_alone() -> None:
    """Two files from the same trace must agree; and nobody else's random numbers move."""
    samples, options = world(lambda row: 1 + 0.5 * LENGTH.clip(max=3)), SelectorFit(epochs=3)
    torch.manual_seed(5)
    first, _ = fit_selector(samples, "walk", options)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    second, _ = fit_selector(samples, "walk", options)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_base_is_the_best_single_shape_of_each_setting() -> None:
    """What is best at temperature 0.2 is not at 1.0."""
    samples = world(lambda row: np.ones(len(SHAPES)), count=40)
    features, tokens = samples.features.copy(), samples.tokens.copy()
    features[20:, SCALARS.index("temperature")] = 0.2
    tokens[20:] = 1 + 0.9 * LENGTH.clip(max=4)
    found = static_shapes(Samples(samples.groups, features, tokens, samples.ms))
    assert SHAPES[found[1.0, 1.0]] == Delayed(1, 0, 0) and SHAPES[found[0.2, 1.0]] == Delayed(1, 4, 0)


def test_no_choice_beats_the_oracle() -> None:
    """Nor does it fall short of the best single shape."""
    generator = np.random.default_rng(3)
    shape = (8, len(SHAPES))
    samples = Samples(
        np.arange(8), np.zeros((8, len(SCALARS))), 1 + generator.random(shape), 10 + 90 * generator.random(shape)
    )
    best = oracle_rate(samples)
    assert best >= (samples.tokens.sum(axis=0) / samples.ms.sum(axis=0)).max()
    assert (samples.tokens - best * samples.ms).max(axis=1).sum() == pytest.approx(0.0, abs=1e-9)


# ---- at work --------------------------------------------------------------------------------------------------------


def test_a_budget_bounds_the_shape() -> None:
    """A tree larger than what is verified would be cut by value, which sampled trees must not be."""
    selector = Selector(SelectorConfig("walk"))
    row = [0.5] * len(SCALARS)
    for budget in (1, 2, 5, 17, 41):
        assert selector.select(row, budget=budget).budget <= budget
    with pytest.raises(ValueError, match="budget"):
        selector.select(row, budget=0)


def test_a_selector_survives_its_file(tmp_path: Path) -> None:
    """With hidden states among its features."""
    torch.manual_seed(1)
    selector = Selector(SelectorConfig("khisti", hidden=(6, 4)))
    selector.center.fill_(0.25)
    selector.save(tmp_path / "selector.safetensors")
    again = Selector.load(tmp_path / "selector.safetensors")
    assert again.config == selector.config
    row, states = [0.1] * len(SCALARS), [torch.randn(6), torch.randn(4)]
    assert again.select(row, states) == selector.select(row, states)
    rows = torch.randn(3, len(SCALARS))
    hidden = [torch.randn(3, 6), torch.randn(3, 4)]
    assert torch.equal(again(rows, hidden), selector(rows, hidden))


def test_other_files_are_refused(tmp_path: Path) -> None:
    """By name, and with what is wrong."""
    from safetensors.torch import save_file

    text, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    text.write_text("no weights")
    save_file({"x": torch.zeros(1)}, other)
    for file in (text, other):
        with pytest.raises(ValueError, match=str(file)):
            Selector.load(file)
    with pytest.raises(FileNotFoundError):
        Selector.load(tmp_path / "c.safetensors")


# ---- labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["walk", "naive", "specinfer", "spectr", "khisti"])
def test_one_pass_values_every_cut(law: str) -> None:
    """Against the recursion, depth by depth."""
    generator = torch.Generator().manual_seed(4)
    tree = TokenTree(0, TreeKind.IID)
    layer = [0]
    for number in range(3):
        nexts = []
        for node in layer:
            q = torch.rand(5, generator=generator)
            count = 2 if number else 3
            nexts += record_draws(tree, node, draw(q, torch.rand(count, generator=generator).tolist()), q, "d")
        layer = list(dict.fromkeys(nexts))
    rows = torch.rand(len(tree), 5, generator=generator).double()
    rows /= rows.sum(dim=-1, keepdim=True)
    found = tokens_by_depth(tree, rows, LAWS[law], 5)
    for depth in range(6):
        expected = expected_tokens(tree, range(len(tree)), rows, LAWS[law], max_depth=depth)
        assert found[depth] == pytest.approx(expected, abs=1e-12)


def plan_of(world: World, drafter: str, **options: object) -> LabelPlan:
    sampling = SamplingParams(temperature=1.0, seed=0)
    values = {"law": LAWS["specinfer"], "sampling": sampling, "stop_tokens": frozenset(), "trees": 2, "stride": 8, **options}
    return LabelPlan(world.lm, world.drafters[drafter], **values)  # type: ignore[arg-type]


def labels_of(world: World, plan: LabelPlan, count: int = 12) -> list[Label]:
    prompt = tuple(b"one two three")
    known = Text((*prompt, *range(97, 97 + count)), len(prompt))  # whose text it is does not matter

    def memory(text: Text, layers: tuple[int, ...]) -> Memory:
        return read_text(world.lm, text.tokens, layers)

    return list(label_text(known, 3, plan, memory))


def test_a_drafter_that_is_the_target_is_always_accepted(tiny_model: TinyModel) -> None:
    """Every shape is worth its length and one token more, whatever is drawn; and nobody keeps a row."""
    here = World(tiny_model("llama", 259, 1), medium=tiny_model("llama", 259, 1), num_rows=3000)
    labels = labels_of(here, plan_of(here, "medium"))
    assert [label.context for label in labels] == [14, 22] and labels[0].prompt == 3
    for label in labels:
        assert np.array(label.tokens) == pytest.approx(1.0 + LENGTH, abs=1e-3)
        row = dict(zip(SCALARS, label.scalars, strict=False))
        assert row["distance"] == pytest.approx(0.0, abs=1e-3) and row["temperature"] == 1.0
    here.check_books()


@pytest.mark.parametrize("kind", ["lm", "head"])
def test_labels_grow_with_the_shape(kind: str, tiny_model: TinyModel) -> None:
    """A longer trunk, longer paths or (with the walk) more paths never lose tokens; that is what time is set against."""
    target = tiny_model("llama", 259, 1)
    medium = tiny_model("llama", 259, 2) if kind == "lm" else tail_head(target, num_draft=120)
    here = World(target, medium=medium, num_rows=3000)
    labels = labels_of(here, plan_of(here, "medium", law=LAWS["walk"]))
    at = {shape: index for index, shape in enumerate(SHAPES)}
    for label in labels:
        assert label.tokens[0] == pytest.approx(1.0) and min(label.tokens) >= 1.0
        for shape, index in at.items():
            if shape.num_paths > 1:
                longer = Delayed(shape.num_paths, shape.trunk, shape.branch + 1)
                wider = Delayed(shape.num_paths + 1, shape.trunk, shape.branch)
                for other in (longer, wider):
                    if other in at:
                        assert label.tokens[at[other]] >= label.tokens[index] - 1e-9
    here.check_books()


def test_a_stop_token_ends_every_path(tiny_model: TinyModel) -> None:
    """Tokens behind the end of an answer are worth nothing: where every token ends it, one is all a tree can bring."""
    here = World(tiny_model("llama", 259, 1), medium=tiny_model("llama", 259, 1), num_rows=3000)
    (label, *_) = labels_of(here, plan_of(here, "medium", stop_tokens=frozenset(range(259))))
    assert np.array(label.tokens) == pytest.approx(np.where(LENGTH > 0, 2.0, 1.0), abs=1e-3)


def test_a_drafter_without_a_distribution_is_refused(tiny_model: TinyModel) -> None:
    """Lookup proposes, but nothing can be drawn from it."""
    here = World(tiny_model("llama", 259, 1), num_rows=3000)
    assert isinstance(here.drafters["ngram"], NgramDrafter)
    with pytest.raises(NoDistribution, match="ngram"):
        labels_of(here, plan_of(here, "ngram"))
    here.check_books()


def test_labels_survive_their_file_and_take_any_prices() -> None:
    """Made once, trained for every machine."""
    label = Label(2, 100, (0.5,) * 9, tuple(1.0 + LENGTH / 2))
    text = labels_header_line(LabelHeader("toy", "medium", "walk", 4), LINEAR) + label_line(label)
    labels = read_labels(text)
    assert labels.labels == (label,) and labels.profile == LINEAR
    samples = priced_samples(labels, LINEAR)
    assert samples.features[0, -1] == pytest.approx(math.log(LINEAR.ms("target", 1, context=100)))
    assert samples.ms[0, 0] == pytest.approx(LINEAR.ms("target", 1, context=100))
    with pytest.raises(ValueError, match="no medium"):
        priced_samples(labels, CostProfile({"target": LINEAR.models["target"]}, LINEAR.origin))
    for broken, named in (("{}", "line 1"), (text + "{}", "line 3"), ("", "empty")):
        with pytest.raises(ValueError, match=named):
            read_labels(broken)


def features(label: Label) -> dict[str, float]:
    return dict(zip(SCALARS, label.scalars, strict=False))


def test_from_prompts_to_a_selector(tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both commands, on a toy model that drafts for itself."""
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "cache"))
    folder, prices, log, out = tmp_path / "tiny", tmp_path / "costs.json", tmp_path / "s.jsonl", tmp_path / "s.safetensors"
    tiny_model("llama", 259, 1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    prices.write_text(LINEAR.to_json())
    (tmp_path / "prompts.txt").write_text("one two\nhello\n")
    program = typer.Typer()
    for name in ("trace-shapes", "fit-scheduler"):
        program.command(name)(COMMANDS[name])
    models = ("--target", str(folder), "--medium", str(folder), "--small", "ngram", "--weights", "fp32", "--device", "cpu")
    extent = ("--kv-rows", "2500", "--max-tokens", "12", "--stride", "6", "--trees", "1", "--verifier", "naive")
    files = ("--prompts", str(tmp_path / "prompts.txt"), "--profile", str(prices), "--out", str(log))
    result = CliRunner().invoke(program, ["trace-shapes", *models, *extent, *files])
    assert result.exit_code == 0, result.stderr + str(result.exception)
    found = read_labels(log.read_text())
    assert found.header == LabelHeader("tiny", "medium", "naive", 1)
    # Two prompts, each at the three temperatures. Entropies of a greedy request are those at temperature 1.
    temperatures = [(label.prompt, row["temperature"]) for label in found.labels for row in [features(label)]]
    assert list(dict.fromkeys(temperatures)) == [(prompt, value) for prompt in range(2) for value in (0.0, 0.7, 1.0)]
    entropies = {row["temperature"]: row["target_entropy"] for label in found.labels for row in [features(label)]}
    assert 0.0 < entropies[0.7] < min(entropies[0.0], entropies[1.0])
    result = CliRunner().invoke(program, ["fit-scheduler", str(log), "--kind", "nde", "--out", str(out)])
    assert result.exit_code == 0, result.stderr + str(result.exception)
    assert Selector.load(out).config.verifier == "naive"
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["held_out"]["roots"] >= 1 and report["verifier"] == "naive"
    assert report["prices"] == asdict(LINEAR.origin), "a selector is for the prices it was trained with"
    for arguments, named in (
        (["fit-scheduler", str(prices), "--kind", "nde", "--out", str(out)], "costs.json"),
        (["trace-shapes", "--verifier", "traversal", "--out", str(log)], "traversal"),
        (["trace-shapes", *models, "--drafter", "small", *files], "--drafter small"),
        (["trace-shapes", *models, "--temperature", "3", *files], "--temperature"),
    ):
        result = CliRunner().invoke(program, arguments)
        assert result.exit_code == 2 and named in result.stderr, result.stderr


def test_the_network_that_ships_is_worth_more_than_the_best_single_shape() -> None:
    """On prompts that it was not trained on, by its own report; it looks at nothing that a server does not know."""
    selector = Selector.load(SHIPPED / "selector.safetensors")
    report = json.loads((SHIPPED / "selector.json").read_text())
    assert selector.config.verifier == report["verifier"] and set(selector.config.inputs) <= set(SERVED)
    held_out = report["held_out"]
    assert held_out["selector"] > held_out["static"] and held_out["shapes_used"] > 1 and held_out["roots"] >= 200

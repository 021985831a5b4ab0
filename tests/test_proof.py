"""A proof that could not fail would prove nothing: equal texts pass, sabotage fails, near ties are told apart."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner

import bench.forward
from app.cli import application
from app.local import Question
from app.proof import (
    GREEDY,
    Difference,
    Judge,
    Outcome,
    Reference,
    Result,
    Subject,
    Trial,
    plan_trials,
    prove,
    tolerance_of,
    transformers_text,
    verdict,
)
from app.proof_report import as_json, explain, sentence
from models.reference import PlainModel
from models.sampling import SamplingParams
from models.toy import tiny_causal_lm
from scheduler.schedule import Schedule
from tests.engine_world import World, _own
from tree.draws import TreeKind
from tree.tree import TokenTree
from verify import EVERY_VERIFIER
from verify.base import Noise, Verdict
from verify.walk import descend

TinyModel = Callable[..., PreTrainedModel]

PROMPTS = [tuple(range(5 + i, 12 + i)) for i in range(3)]
VOCAB = 40


class FirstChild:
    """A verifier that is no verifier: it accepts whatever was drafted first, and claims to be lossless."""

    name, lossless, accepts, needs_chain, reads_logits = "first-child", True, frozenset(TreeKind), False, True

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
        first = {node: next((c for c in tree.children[node].values() if c in nodes), None) for node in nodes}
        wanted = [int(row.argmax()) if (c := first[n]) is None else tree.token[c] for n, row in zip(nodes, rows, strict=True)]
        return descend(tree, nodes, wanted.__getitem__)


class Neighbor:
    """Takes the twin of the best token: 2k + 1 for 2k and the other way round."""

    name, lossless, accepts, needs_chain, reads_logits = "neighbor", True, frozenset(TreeKind), False, True

    def __call__(self, tree: TokenTree, nodes: Sequence[int], rows: torch.Tensor, noise: Noise) -> Verdict:
        return descend(tree, nodes, lambda i: int(rows[i].argmax()) ^ 1)


def run(world: World, model: PreTrainedModel, names: Sequence[str], reference: Reference | None) -> list[Result]:
    subject = Subject(world.engine, PROMPTS, max_tokens=30, seed=7)
    told: list[str] = []
    trials = plan_trials(names, 3, plain_is_reference=reference is None)
    results = prove(subject, trials, Judge(lambda: PlainModel(_own(model))), reference, told.append)
    assert len(told) == len(PROMPTS) * (len(trials) + 2), "a progress bar that never fills, or overflows"
    return results


def twins(size: float = 0.0) -> PreTrainedModel:
    """A model that gives tokens 2k and 2k + 1 logits `size` times apart, always."""
    model = tiny_causal_lm("llama", VOCAB, 1)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[1::2] = head[0::2] * (1 - size)
    return model


@pytest.fixture(autouse=True)
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saboteurs, where a schedule can name them; and no settings of this machine."""
    for rule in (FirstChild(), Neighbor()):
        monkeypatch.setitem(EVERY_VERIFIER, rule.name, rule)
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured


def sabotaged(world: World, **verifier: str) -> Schedule:
    return replace(world.schedules["small"], name="sabotaged", **verifier)


@pytest.mark.parametrize("kind", ["transformers", "ar"])
def test_honest_schedules_are_equal(tiny_model: TinyModel, kind: str) -> None:
    """The machinery must not report differences of its own making, whoever is the reference."""
    target = tiny_model("llama", VOCAB, 1)
    reference = transformers_text(PlainModel(_own(target)), frozenset({3})) if kind == "transformers" else None
    with World(target, small=tiny_model("llama", VOCAB, 9), medium=target, stop_tokens=[3]) as world:
        results = run(world, target, list(world.schedules), reference)
    assert verdict(results) == "equal", list(explain(results, str))
    assert [result.equal for result in results] == [len(PROMPTS)] * len(results)
    assert sum(result.num_accepted for result in results) > 0, "nothing was drafted well, so nothing was tested"
    assert {result.trial.schedule for result in results} == set(world.schedules)
    assert {result.trial.sampled for result in results} == {False, True}
    assert sentence(results).startswith("Equal: all ")


@pytest.mark.parametrize(
    ("verifier", "fails_at"), [({"greedy_verifier": "first-child"}, False), ({"sampling_verifier": "first-child"}, True)]
)
def test_a_schedule_that_accepts_anything_fails(tiny_model: TinyModel, verifier: dict[str, str], fails_at: bool) -> None:
    """Negative control, at temperature 0 and above: drafted tokens that the target would not write must be found."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target, small=tiny_model("llama", VOCAB, 9)) as world:
        world.engine.schedules["sabotaged"] = sabotaged(world, **verifier)
        results = run(world, target, ["ar", "sabotaged"], None)
    verdicts = {(result.trial.schedule, result.trial.sampled): result.verdict for result in results}
    assert verdicts == {
        ("ar", False): "equal",
        ("ar", True): "equal",
        ("sabotaged", False): "equal" if fails_at else "FAIL",
        ("sabotaged", True): "FAIL" if fails_at else "equal",
    }
    assert verdict(results) == "FAIL" and sentence(results).startswith("FAIL")
    lines = list(explain(results, str))
    assert lines and all(line.startswith("FAIL: sabotaged") and "tolerance" in line for line in lines)


@pytest.mark.parametrize(("size", "expected"), [(0.0, "near ties"), (1e-6, "near ties"), (0.05, "FAIL")])
def test_a_near_tie_is_told_from_a_failure(size: float, expected: str) -> None:
    """A verifier that takes the twin of the best token stands for rounding if twins score alike, and for a bug if not."""
    target = twins(size)
    with World(target, small=target) as world:
        world.engine.schedules["neighbor"] = replace(sabotaged(world, greedy_verifier="neighbor"), name="neighbor")
        results = [r for r in run(world, target, ["neighbor"], None) if not r.trial.sampled]
    assert [result.verdict for result in results] == [expected, expected]
    found = [difference for result in results for difference in result.differences]
    assert len(found) == 2 * len(PROMPTS)
    for difference in found:
        assert difference.position == 0 and difference.expected is not None
        assert difference.got == difference.expected ^ 1
        assert difference.gap is not None and (difference.gap < 1e-3) == (expected == "near ties")
    for line in explain(results, str):
        assert line.startswith("near tie" if expected == "near ties" else "FAIL")


def test_the_race_of_a_seed_is_recomputed_as_evidence(tiny_model: TinyModel) -> None:
    """Above temperature 0 the scores hold the seed's noise: the token drawn has the best one, others miss it by more."""
    target = tiny_model("llama", VOCAB, 1)
    with World(target) as world:
        reply = world.run(PROMPTS[0], "ar", temperature=1.0, seed=7, max_tokens=12)
    question = Question(PROMPTS[0], 12, SamplingParams(temperature=1.0, seed=7))
    written = Outcome(tuple(reply.tokens), "length")
    model = PlainModel(_own(target))
    judge, lenient = Judge(lambda: model), Judge(lambda: model, tolerance=100.0)
    for position in range(0, 12, 3):
        other = (*reply.tokens[:position], (reply.tokens[position] + 1) % VOCAB, *reply.tokens[position + 1 :])
        found = judge.weigh(0, question, written, Outcome(other, "length"))
        assert found is not None and found.position == position and not found.is_near_tie
        assert found.gap is not None and found.expected_score is not None and found.got_score is not None
        easy = lenient.weigh(0, question, written, Outcome(other, "length"))
        assert easy is not None and easy.is_near_tie and easy.gap == found.gap
        # The reference's token is the winner: the whole gap is the other one's.
        assert found.gap == pytest.approx(found.expected_score - found.got_score, abs=1e-4)


def test_both_tokens_of_a_near_tie_must_be_the_best(tiny_model: TinyModel) -> None:
    """Two unlikely tokens that score alike are no tie: neither decoder should have written either."""
    target = twins()
    logits = PlainModel(_own(target)).next_logits(PROMPTS[0])
    worst = int(logits.argmin()) & ~1
    found = Judge(lambda: PlainModel(_own(target))).weigh(
        0, Question(PROMPTS[0], 5), Outcome((worst,), "length"), Outcome((worst + 1,), "length")
    )
    assert found is not None and found.gap is not None and found.gap > 1 and not found.is_near_tie


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (Outcome((1, 2), "stop"), Outcome((1, 2), "length")),
        (Outcome((1, 2), "length"), Outcome((1,), "stop")),
        (Outcome((1,), "stop"), Outcome((1, 2), "length")),
    ],
)
def test_another_end_is_a_failure(expected: Outcome, got: Outcome) -> None:
    """A lost or an extra token at the end has no second token to be tied with."""

    def load() -> PlainModel:
        raise AssertionError("there is nothing to weigh")

    found = Judge(load).weigh(0, Question((1,), 5, GREEDY), expected, got)
    assert found is not None and not found.is_near_tie


def test_tolerance_follows_the_number_format() -> None:
    """One tolerance for all would excuse bugs in float32 or condemn rounding in bfloat16."""
    assert tolerance_of(torch.float32, 20.0) == 1e-3
    assert tolerance_of(torch.float16, 20.0) == 5e-2
    assert tolerance_of(torch.bfloat16, 20.0) == pytest.approx(0.3125)
    assert tolerance_of(torch.bfloat16, 0.1) == 5e-2


def test_generation_defaults_of_a_model_do_not_reach_the_reference(tiny_model: TinyModel) -> None:
    """A repetition penalty in generation_config.json would make the reference another text than plain decoding."""
    clean, tainted = _own(tiny_model("llama", VOCAB, 1)), _own(tiny_model("llama", VOCAB, 1))
    tainted.generation_config.repetition_penalty = 5.0
    tainted.generation_config.eos_token_id = list(range(VOCAB))
    texts = [PlainModel(model).generate(PROMPTS[0], max_tokens=20) for model in (clean, tainted)]
    assert texts[0] == texts[1] and len(texts[0]) == 20


def test_the_reference_writes_no_padding_ids(tiny_model: TinyModel) -> None:
    """Rows of the embedding beyond the tokenizer's ids are never served, so the reference must not take them either."""
    model = PlainModel(_own(tiny_model("llama", VOCAB, 1)), num_tokens=20)
    assert max(model.generate(PROMPTS[0], max_tokens=20)) < 20
    assert model.next_logits(PROMPTS[0])[20:].isneginf().all()


@pytest.mark.parametrize("sabotage", [False, True])
def test_the_command_ends_in_json_and_its_status_is_the_verdict(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: bool
) -> None:
    """Scripts read the status and the last line; a proof that fails with status 0 is worse than none."""
    if sabotage:
        monkeypatch.setitem(EVERY_VERIFIER, "greedy", FirstChild())
    copy = tmp_path / "result.json"
    arguments = f"--target {model_folder} --weights fp32 --device cpu --max-model-len 300"
    arguments += " --limit 2 --max-tokens 8 --concurrency 2"
    result = CliRunner().invoke(
        application(), ["prove", *arguments.split(), "--schedules", "ar,treegraft", "--json", str(copy)]
    )
    assert result.exit_code == (1 if sabotage else 0), result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert record == json.loads(copy.read_text())
    assert (record["verdict"], record["reference"]) == ("FAIL" if sabotage else "equal", "transformers")
    assert {entry["schedule"] for entry in record["results"]} == {"ar", "treegraft"}
    assert {"commit", "versions", "threads"} <= set(record["machine"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--reference", "transformers", "--weights", "bf16"], "--weights fp32"),
        (["--reference", "other"], "'other'"),
        (["--prompts", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_a_mistake_is_known_before_the_models_load(arguments: list[str], named: str) -> None:
    """Status 2 and one line, as everywhere else."""
    result = CliRunner().invoke(application(), ["prove", "--target", "no/such/folder", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr and result.stderr.count("\n") == 1


def test_results_are_json(tiny_model: TinyModel) -> None:
    """Infinite gaps have no place in JSON."""
    result = Result(Trial("small", 8, True), 2, 20, 10, 4, (Difference(1, 0, 3, None),))
    shown = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert (shown["equal"], shown["failures"], shown["verdict"]) == (1, 1, "FAIL")
    assert shown["differences"][0]["is_near_tie"] is False


def test_the_forward_bench_runs_and_ends_in_json(model_folder: Path) -> None:
    """A bench is run rarely, and its code rots in between. Nothing is said about the times."""
    program = typer.Typer()
    program.command()(bench.forward.main)
    options = f"--target {model_folder} --weights fp32 --device cpu --rounds 1 --contexts 8 --rows 1,3"
    result = CliRunner().invoke(program, options.split())
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["machine"]["versions"]["torch"] == torch.__version__

"""The measuring of drafters, on drafters whose agreement with the target is known beforehand."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from app.commands.bench import bench
from app.drafter_price import TARGET, Plan, prices
from app.drafter_quality import FLOOR, DepthQuality, Extent, Text, measure, num_positions
from app.drafter_report import calibration_line, panels, quality_json, quality_rows
from app.measure import WARM_UP, Timed, take_turns
from app.plots import draw
from app.teacher_forcing import Memory, Trail, read_text
from drafters.base import DraftRequest, Halt
from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from drafters.ngram import NgramDrafter
from models.causal_lm import CausalLM
from models.draft_head import DraftHead, HeadConfig
from models.head_lm import HeadLM
from tests.engine_world import World, _own
from tree.growth import Answer, Candidates
from tree.tree import TokenTree

TinyModel = Callable[..., PreTrainedModel]
VOCAB = 40


class Told:
    """A drafter that is told what to say: `say(text up to and including a node's token)` -> candidates."""

    name, runs_model = "told", False

    def __init__(self, say: Callable[[tuple[int, ...]], Candidates], layers: tuple[int, ...] = ()) -> None:
        self.say, self.layers = say, layers
        self.contexts: list[tuple[int, ...]] = []  # of all questions
        self.heard: list[torch.Tensor] = []  # of the first sequence
        self.heard_before: list[int] = []  # tokens observed before each question
        self.num_open = 0

    def open(self) -> list[torch.Tensor]:
        self.num_open += 1
        return []

    def observe(self, state: list[torch.Tensor], start: int, hidden: torch.Tensor) -> None:
        assert start == sum(map(len, state)), "hidden states out of order"
        state.append(hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: DraftRequest) -> Answer | Halt:
        self.contexts.append(tuple(request.context))
        self.heard_before.append(sum(map(len, request.state)))
        texts = {node: (*request.context, *request.tree.path_tokens(node)) for node in request.ask.nodes}
        return Answer({node: self.say(text) for node, text in texts.items()}, {})

    def commit(self, state: Any, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        assert tree is not None and tree.token[0] == context[-1] and not path, "the engine would commit something else"

    def close(self, state: list[torch.Tensor]) -> None:
        self.num_open -= 1
        self.heard = self.heard or list(state)
        state.clear()


def only(token: int, p: float = 1.0) -> Candidates:
    return Candidates((token,), (math.log(p),))


def no_hidden(text: Text, layers: tuple[int, ...]) -> torch.Tensor:
    raise AssertionError("a drafter that reads tokens needs no hidden states")


def counting(num_prompt: int, num_answer: int) -> Text:
    """Token t follows t - 1."""
    return Text(tuple(range(num_prompt + num_answer)), num_prompt)


def answers_of(target: PreTrainedModel, prompts: Sequence[tuple[int, ...]], count: int) -> list[Text]:
    with World(target) as world:
        replies = world.run_all(prompts, "ar", max_tokens=count)
    return [Text((*prompt, *reply.tokens), len(prompt)) for prompt, reply in zip(prompts, replies, strict=True)]


PROMPTS = [tuple(range(3 + i, 9 + 2 * i)) for i in range(4)]


@pytest.fixture(scope="module")
def target(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama", VOCAB, 1)


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel) -> list[Text]:
    return answers_of(target, PROMPTS, 24)


def test_the_target_as_its_own_drafter_is_always_right(target: PreTrainedModel, texts: list[Text]) -> None:
    """A position off by one, a node off by one or a stale cache row would all show here; nothing else would show them all."""
    lm = CausalLM(_own(target), num_rows=600)
    quality = measure(CausalLMDrafter("medium", lm), texts, Extent(stride=1), no_hidden)
    for counts in quality.depths:
        assert counts.top1 == counts.top4 == 1.0, f"depth {counts.depth}: {counts.top1_hits} of {counts.positions}"
        assert counts.positions == sum(24 - counts.depth for _ in texts)
    assert lm.pool.num_used == 0
    # Its log-loss is the target's own of the text that it chose.
    losses = []
    for text in texts:
        logits = target(torch.tensor([text.tokens])).logits[0].log_softmax(-1)
        losses += [-logits[i - 1, text.tokens[i]].item() for i in range(text.num_prompt + 1, len(text.tokens))]
    assert quality.depths[0].log_loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_another_model_is_not_always_right(tiny_model: TinyModel, texts: list[Text]) -> None:
    """Negative control: what calls every drafter perfect would pass the test above."""
    lm = CausalLM(_own(tiny_model("llama", VOCAB, 2)), num_rows=600)
    quality = measure(CausalLMDrafter("medium", lm), texts, Extent(stride=1), no_hidden)
    assert all(counts.top1 < 0.5 and counts.log_loss > 1 for counts in quality.depths)  # type: ignore[operator]


def test_a_drafter_that_is_always_wrong_agrees_nowhere() -> None:
    """Agreement by chance of bookkeeping would be counted as skill."""
    drafter = Told(lambda text: only(text[-1] + 2))
    quality = measure(drafter, [counting(5, 20), counting(3, 30)], Extent(stride=1), no_hidden)
    for counts in quality.depths:
        assert counts.top1 == counts.top4 == 0.0
        assert counts.impossible == counts.answered == counts.positions
        assert counts.log_loss == pytest.approx(-math.log(FLOOR))
        assert counts.calibration_error == pytest.approx(1.0), "it is certain, and never right"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_right_every_second_token_is_a_half_at_every_depth(depth: int) -> None:
    """Teacher forcing: a wrong guess must not spoil the depths behind it."""
    drafter = Told(lambda text: only(text[-1] + 1 + text[-1] % 2, 0.5))
    # Depth d has 20 - d + 1 positions.
    counts = measure(drafter, [counting(5, 20 + depth)], Extent(stride=1, depth=depth), no_hidden).depths[depth - 1]
    assert counts.positions == 20
    assert counts.top1 == 0.5
    assert counts.log_loss == pytest.approx(-0.5 * math.log(0.5) - 0.5 * math.log(FLOOR))
    assert counts.calibration_error == pytest.approx(0.0), "it says one half and is right half of the time"


def test_the_second_of_four_candidates_counts_for_top_4_only() -> None:
    """Width is what a tree buys; the two columns must not be mixed up."""
    drafter = Told(lambda text: Candidates((39, text[-1] + 1), (math.log(0.6), math.log(0.3))))
    counts = measure(drafter, [counting(4, 12)], Extent(), no_hidden).depths[0]
    assert (counts.top1, counts.top4, counts.impossible) == (0.0, 1.0, 0)
    assert counts.log_loss == pytest.approx(-math.log(0.3))


def calibration_of(stated: Callable[[float], float]) -> float:
    """Error of a drafter whose best token is right with a probability that the last token says, and which states another."""
    rng = random.Random(3)
    chance = [0.1, 0.35, 0.62, 0.9]  # of the token after one that is i modulo 4
    text = [0]
    while len(text) < 6000:
        right = rng.random() < chance[text[-1] % 4]
        text.append(rng.randrange(4) + (0 if right else 4))

    def say(seen: tuple[int, ...]) -> Candidates:
        # Its best is the lower half's token that comes, or any other one if an upper one comes.
        following = text[len(seen)] if len(seen) < len(text) else 0
        return only(following if following < 4 else 8, stated(chance[seen[-1] % 4]))

    quality = measure(Told(say), [Text(tuple(text), 1)], Extent(stride=1000), no_hidden)
    error = quality.depths[0].calibration_error
    assert error is not None
    return error


def test_calibration_error_tells_honest_from_boastful() -> None:
    """Tree policies multiply these probabilities; a measure that misses overconfidence would recommend too deep trees.

    Four bins of at least 800 positions: a bin's share is off by 0.06 with probability below 1e-3 each; the seed is fixed.
    """
    assert calibration_of(lambda p: p) < 0.04
    boastful = calibration_of(lambda p: p**0.25)
    assert boastful > 0.2, "negative control: 0.1 stated as 0.56 and so on"


def test_counts_of_a_small_case_by_hand() -> None:
    """Golden: five answers to one question each."""
    counts = DepthQuality(1)
    counts.add(7, Candidates((7, 3), (math.log(0.85), math.log(0.1))), math.log(0.85))
    counts.add(7, Candidates((7, 3), (math.log(0.89), math.log(0.1))), math.log(0.89))
    counts.add(3, Candidates((7, 3), (math.log(0.81), math.log(0.1))), math.log(0.1))
    counts.add(5, Candidates((7,), (0.0,)), -40.0)  # probable as one in 10^17: not impossible, and floored all the same
    counts.add(5, Candidates(), None)
    assert (counts.positions, counts.answered, counts.top1_hits, counts.top4_hits, counts.impossible) == (5, 4, 2, 3, 1)
    losses = [-math.log(p) for p in (0.85, 0.89, 0.1, FLOOR, FLOOR)]
    assert counts.log_loss == pytest.approx(sum(losses) / 5)
    assert [(b.count, b.hits) for b in counts.bins if b.count] == [(3, 2), (1, 0)]
    assert counts.bins[9].count == 1, "certainty belongs to the last bin"
    assert counts.calibration_error == pytest.approx((3 * abs(2 / 3 - 0.85) + 1.0) / 4)


@given(st.lists(st.integers(1, 14), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_every_position_is_measured_once(lengths: list[int], depth: int, stride: int, max_texts: int) -> None:
    """However texts are grouped and however long they are: shares of a wrong total would be wrong."""
    texts = [counting(2 + i, length) for i, length in enumerate(lengths)]
    drafter = Told(lambda text: only(text[-1] + 1))
    told: list[int] = []
    extent = Extent(depth=depth, stride=stride, max_texts=max_texts, max_rows=40)
    quality = measure(drafter, texts, extent, no_hidden, lambda: told.append(1))
    assert len(told) == quality.depths[0].positions == num_positions(texts) == sum(length - 1 for length in lengths)
    for counts in quality.depths[1:]:
        expected = sum(1 for n in lengths for i in range(n - 1) if i % stride == 0 and i + counts.depth <= n - 1)
        assert counts.positions == expected, f"depth {counts.depth}"
    assert drafter.num_open == 0
    assert all(counts.top1 in (None, 1.0) for counts in quality.depths)


@pytest.mark.parametrize("kind", ["causal", "ngram", "head"])
def test_one_question_about_the_chain_is_as_good_as_one_per_depth(
    kind: str, target: PreTrainedModel, tiny_model: TinyModel, texts: list[Text]
) -> None:
    """The engine asks layer by layer. If asking at once changed an answer, the figures would be another drafter's."""
    text = texts[3]
    lm = CausalLM(_own(target), num_rows=200, capture=(0, 1))
    drafter = a_drafter(kind, target, tiny_model)
    at_once, stepwise = (
        Trail(drafter, text.tokens, text.num_prompt, read_text(lm, text.tokens, drafter.layers) if drafter.layers else None)
        for _ in range(2)
    )
    for _ in range(6):
        question = at_once.ask_along_truth(4, 4)
        (whole,) = drafter.propose([question])
        assert isinstance(whole, Answer)
        tree = TokenTree(text.tokens[stepwise.root])
        for node in range(4):
            (part,) = drafter.propose([stepwise.ask(tree, [node], 4)])
            assert isinstance(part, Answer)
            assert part.candidates[node].tokens == whole.candidates[node].tokens
            assert part.candidates[node].lps == pytest.approx(whole.candidates[node].lps, abs=1e-4)
            token = text.tokens[stepwise.root + 1 + node]
            listed = dict(zip(part.candidates[node].tokens, part.candidates[node].lps, strict=True))
            if token in listed:
                assert whole.rescored[node + 1] == pytest.approx(listed[token], abs=1e-4)
            tree.add(node, token, -1.0, drafter.name)
        at_once.advance()
        stepwise.advance()
    at_once.close()
    stepwise.close()


@pytest.mark.parametrize("kind", ["causal", "ngram", "head"])
def test_texts_followed_together_give_what_they_give_alone(
    kind: str, target: PreTrainedModel, tiny_model: TinyModel, texts: list[Text]
) -> None:
    """A mix-up between texts would still look like plausible numbers."""
    lm = CausalLM(_own(target), num_rows=200, capture=(0, 1))

    def memory_of(text: Text, layers: tuple[int, ...]) -> Memory:
        return read_text(lm, text.tokens, layers, chunk=5)

    together, alone = (
        measure(a_drafter(kind, target, tiny_model), texts, Extent(stride=2, max_texts=n), memory_of) for n in (8, 1)
    )
    assert lm.pool.num_used == 0
    for a, b in zip(together.depths, alone.depths, strict=True):
        assert (a.positions, a.answered, a.top1_hits, a.top4_hits) == (b.positions, b.answered, b.top1_hits, b.top4_hits)
        assert a.log_loss == pytest.approx(b.log_loss, abs=1e-4)
    assert together.depths[0].answered > 0


def a_drafter(kind: str, target: PreTrainedModel, tiny_model: TinyModel) -> Any:
    if kind == "ngram":
        return NgramDrafter()
    if kind == "causal":
        return CausalLMDrafter("medium", CausalLM(_own(tiny_model("llama", VOCAB, 2)), num_rows=600))
    config = HeadConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        draft_vocab_size=20,
        target_layers=(0, 1),
        target_hidden_size=32,
        own_output=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = DraftHead(config).eval().requires_grad_(False)
    embedding = target.get_input_embeddings().weight.detach()
    return HeadDrafter("medium", HeadLM(head, embedding, num_rows=600))


def test_hidden_states_are_those_of_the_tokens_before_the_root(target: PreTrainedModel, texts: list[Text]) -> None:
    """One token too many and a feature drafter looks into the future; one too few and it is measured half blind."""
    lm = CausalLM(_own(target), num_rows=200, capture=(0, 1))
    drafter = Told(lambda text: only(1), layers=(1, 0))
    text = texts[0]
    measure(drafter, [text], Extent(), lambda text, layers: read_text(lm, text.tokens, layers, chunk=7))
    assert drafter.heard_before == [len(context) - 1 for context in drafter.contexts]
    assert drafter.contexts[1:] == [text.tokens[: root + 1] for root in range(text.num_prompt, len(text.tokens) - 1)]
    heard = torch.cat(drafter.heard)
    seen: list[torch.Tensor] = []  # by plain transformers; its own list of hidden states has the last norm in it

    def remember(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(remember) for layer in target.model.layers]  # type: ignore[union-attr]
    with torch.inference_mode():
        target(torch.tensor([text.tokens]))
    for hook in hooks:
        hook.remove()
    plain = torch.stack([seen[layer].view(-1, 32)[: len(heard)] for layer in (1, 0)], dim=1)
    assert heard.shape == plain.shape and torch.allclose(heard, plain, atol=1e-4)


def test_a_long_prompt_is_read_before_anything_is_counted(target: PreTrainedModel) -> None:
    """Drafters read long prompts in pieces and have no candidates meanwhile, which would count as wrong answers."""
    prompt = tuple(random.Random(5).randrange(VOCAB) for _ in range(1300))
    text = answers_of(target, [prompt], 8)
    lm = CausalLM(_own(target), num_rows=1400)
    quality = measure(CausalLMDrafter("medium", lm), text, Extent(), no_hidden)
    assert [counts.top1 for counts in quality.depths] == [1.0] * 5
    assert quality.depths[0].answered == 7


def test_a_text_that_the_drafter_gives_up_is_counted_so_far_and_no_further(texts: list[Text]) -> None:
    """Its later positions are unknown, neither right nor wrong, and the other texts go on."""

    class Tiring(Told):
        def _answer(self, request: DraftRequest) -> Answer | Halt:
            tired = request.context[0] == 0 and len(request.context) > 10
            return Halt("context") if tired else super()._answer(request)

    drafter = Tiring(lambda text: only(text[-1] + 1))
    other = Text(tuple(range(1, 31)), 5)
    quality = measure(drafter, [counting(5, 25), other], Extent(stride=1), no_hidden)
    assert quality.halts == {"context": 1}
    assert quality.depths[0].positions == 5 + num_positions([other])
    assert quality.depths[0].top1 == 1.0


def test_rows_are_given_back_when_a_drafter_breaks(target: PreTrainedModel, texts: list[Text]) -> None:
    """The next drafter of the same run would find the pool full."""
    lm = CausalLM(_own(target), num_rows=600)
    drafter = CausalLMDrafter("medium", lm)
    told: list[int] = []

    def stop() -> None:
        told.append(1)
        if len(told) == 10:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        measure(drafter, texts, Extent(), no_hidden, stop)
    assert lm.pool.num_used == 0
    lm.pool.check()


def test_every_price_is_one_forward_of_so_many_rows(target: PreTrainedModel, tiny_model: TinyModel) -> None:
    """A price of two forwards, or of fewer rows than it says, would misplace every policy that is tuned with it."""
    plan, rounds = Plan(rows=(1, 4), context=20, rounds=2), WARM_UP + 2
    lm = CausalLM(_own(target), num_rows=300, capture=(0, 1))
    drafters = [a_drafter(kind, target, tiny_model) for kind in ("causal", "ngram", "head")]
    drafters[2].name = "head"
    found, missing = prices(lm, drafters, plan)
    assert missing == {}
    assert {(price.who, price.rows) for price in found} == {(w, n) for w in (TARGET, "medium", "head") for n in (1, 4)}
    assert all(len(price.seconds) == 2 for price in found)
    # The target: its context, the context once more for the hidden states, and one per round and number of rows.
    assert lm.num_forwards == 2 + 2 * rounds
    for drafter in (drafters[0], drafters[2]):
        # One for the text so far in every round, then one per number of rows.
        assert drafter.lm.num_forwards == rounds * 3
        first = 20 - rounds // 2
        assert drafter.lm.num_rows_forwarded == first - (drafter.name == "head") + (rounds - 1) + rounds * 5
        assert drafter.lm.pool.num_used == 0
    assert lm.pool.num_used == 0


def test_a_drafter_without_room_is_left_out_of_the_prices_and_named(target: PreTrainedModel) -> None:
    """One drafter's small pool should not cost the figures of the others."""
    lm = CausalLM(_own(target), num_rows=300)
    cramped = CausalLMDrafter("small", CausalLM(_own(target), num_rows=22))
    fine = CausalLMDrafter("medium", CausalLM(_own(target), num_rows=300))
    found, missing = prices(lm, [cramped, fine], Plan(rows=(1, 4), context=20, rounds=1))
    assert missing == {"small": "rows"}
    assert {price.who for price in found} == {TARGET, "medium"}
    assert cramped.lm.pool.num_used == fine.lm.pool.num_used == lm.pool.num_used == 0


def test_turns_alternate_and_the_warm_up_is_thrown_away() -> None:
    """A machine that gets slower during a run must not make the last model look slow."""
    order: list[str] = []
    things = [Timed(lambda name=name: order.append(name), lambda: order.append("-")) for name in "ab"]  # type: ignore[misc]
    take_turns(things, 2, torch.device("cpu"))
    assert "".join(order) == "-b-a-a-b" * 2 + "-b-a"
    assert [len(thing.seconds) for thing in things] == [2, 2]


def test_a_drafter_without_any_position_is_reported_and_not_divided_by(tmp_path: Path) -> None:
    """A run over answers of one token each should end in a report, not in a traceback."""
    quality = measure(Told(lambda text: only(1)), [counting(3, 1)], Extent(), no_hidden)
    assert quality_rows(quality)[0] == ("1", "0", "-", "-", "-", "-", "-", "-")
    assert "no calibration" in calibration_line(quality)
    assert json.loads(json.dumps(quality_json(quality)))["depths"][0]["top1"] is None
    draw(panels([quality]), tmp_path / "empty.svg")
    ElementTree.parse(tmp_path / "empty.svg")


def test_the_charts_show_every_share_that_was_measured() -> None:
    """A drafter that is missing there, or a curve under the wrong name, would be chosen or dropped for another's numbers."""
    drafter = Told(lambda text: only(text[-1] + 1 + text[-1] % 3 // 2, 0.7))
    quality = measure(drafter, [counting(4, 30)], Extent(), no_hidden)
    agreement, calibration = panels([quality])
    for curve, name in zip(agreement.curves, ("top1", "top4"), strict=True):
        assert curve.name.startswith("told, top-") and list(curve.xs) == [1, 2, 3, 4, 5]
        assert list(curve.ys) == [getattr(counts, name) for counts in quality.depths]
    diagonal, bins = calibration.curves
    assert diagonal.name == "" and len(bins.xs) == len(bins.ys) == len(bins.sizes) == 1
    assert (bins.xs[0], bins.ys[0]) == (pytest.approx(0.7), quality.depths[0].top1)


# ---- the command ----------------------------------------------------------------------------------------------------


def command(target: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_COSTS", "none")  # nothing is measured
    program = typer.Typer()
    program.add_typer(bench, name="bench")
    options = ("--target", str(target), "--weights", "fp32", "--device", "cpu", "--max-model-len", "300")
    return CliRunner().invoke(program, ["bench", "drafters", *options, *arguments])


def test_the_command_measures_every_drafter_and_ends_in_json(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts read the last line; a drafter or a depth that is missing there was measured for nothing."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    files = [str(tmp_path / name) for name in ("out.json", "out.svg")]
    more = ("--prompts", str(prompts), "--limit", "2", "--max-tokens", "12", "--stride", "2", "--rounds", "1")
    # The small drafter is the target itself.
    result = command(
        *(model_folder, *more, "--small", str(model_folder), "--json", files[0], "--plot", files[1]), monkeypatch=monkeypatch
    )
    assert result.exit_code == 0, result.stderr + str(result.exception)
    record = json.loads(result.stdout.splitlines()[-1])
    assert record == json.loads(Path(files[0]).read_text())
    ElementTree.fromstring(Path(files[1]).read_text())
    assert record["bench"] == "drafters" and record["machine"]["versions"]["torch"] == torch.__version__
    assert (record["prompts"], record["answer_tokens"], record["max_tokens"], record["stride"]) == (2, 24, 12, 2)
    assert record["floor"] == FLOOR and record["settings"]["small"] == str(model_folder)
    by_name = {drafter["name"]: drafter for drafter in record["drafters"]}
    assert set(by_name) == {"ngram", "small", "medium"}
    for drafter in by_name.values():
        assert [entry["depth"] for entry in drafter["depths"]] == [1, 2, 3, 4, 5]
        assert [entry["positions"] for entry in drafter["depths"]] == [22, 10, 10, 8, 8]
        assert all(len(entry["bins"]) == 10 for entry in drafter["depths"]) and drafter["halts"] == {}
        assert sum(entry["count"] for entry in drafter["depths"][0]["bins"]) == drafter["depths"][0]["answered"]
    assert [entry["top1"] for entry in by_name["small"]["depths"]] == [1.0] * 5
    samples = record["prices"]["samples"]
    assert {(s["who"], s["rows"]) for s in samples} == {(w, n) for w in ("target", "small", "medium") for n in (1, 4, 8, 16)}
    assert all(s["ratio_to_target"] == 1.0 for s in samples if s["who"] == "target")
    for word in ("agreement with tiny", "log-loss", "small / target", "no token below p = 1e-06", "22 positions"):
        assert word in result.stdout + result.stderr, word


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no such file"),
        ("", "holds no prompt"),
        ('{"prompt": "p"}\n{"question": "q"}\n', ":2"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_a_bad_file_of_prompts_is_named(
    content: str | bytes | None, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before any model is loaded: the target here does not even exist."""
    file = tmp_path / "bad.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = command(tmp_path / "no-model", "--prompts", str(file), monkeypatch=monkeypatch)
    assert result.exit_code == 2 and result.stdout == ""
    assert str(file) in result.stderr and named in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "file"), [("--json", "nowhere/out.json"), ("--plot", "nowhere/out.svg"), ("--plot", "out.gif")]
)
def test_what_could_not_be_written_is_refused_before_measuring(
    option: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else minutes of measuring end in a traceback."""
    result = command(tmp_path / "no-model", option, str(tmp_path / file), monkeypatch=monkeypatch)
    assert result.exit_code == 2 and file in result.stderr

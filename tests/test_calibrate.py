"""Measuring a cost profile: every model that runs one, no row kept, once per machine and models; and `graftserve calibrate`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from app import calibration, forward_costs
from app.calibration import cache_file, in_own_thread, profile_for
from app.commands.calibrate import calibrate
from app.config import Settings
from app.drafter_price import Plan, Price, prices
from app.forward_costs import Effort, measure_models
from app.measure import WARM_UP
from app.serving import LoadedEngine
from drafters.base import Drafter
from drafters.causal_lm import CausalLMDrafter
from models.loading import choose_placement
from scheduler.cost import CostProfile, LatencyModel, Point
from tests.engine_world import World
from tests.toy_heads import tail_head

TinyModel = Callable[..., PreTrainedModel]
QUICK = Effort(rows=(1, 2, 4), contexts=(8, 20), sequences=(4,), shared_rows=(1, 2), rounds=2, passes=1)


def world(tiny_model: TinyModel) -> World:
    """A tail head as the small and a language model as the medium drafter; prompt lookup, which runs no model, is there too."""
    target = tiny_model("llama", 259, 1)
    return World(target, small=tail_head(target, num_draft=30), medium=tiny_model("llama", 259, 2), num_rows=600)


def loaded(world: World) -> LoadedEngine:
    return LoadedEngine(world.engine, world.tokenizer)


def plain_settings(**changes: object) -> Settings:
    return Settings(**{"target": "tiny", "small": "ngram", "medium": "none", "device": "cpu", "weights": "fp32", **changes})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.upper().startswith("GRAFTSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_MOST_MISFIT", math.inf)  # tests run side by side, which is as busy as a machine gets
    return tmp_path / "cache"


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_every_model_gets_prices_and_every_row_comes_back(tiny_model: TinyModel) -> None:
    """A head on the target's cache included; a model without prices could not be scheduled."""
    here, said = world(tiny_model), []
    models = measure_models(here.lm, list(here.drafters.values()), 300, 8, QUICK, said.append)
    assert list(models) == ["target", "small", "medium"] and not said
    for model in models.values():
        alone = {(n, 1, c) for n in QUICK.rows for c in QUICK.contexts}
        shared = {(4 * n, 4, 4 * 8) for n in QUICK.shared_rows}
        assert {(p.rows, p.sequences, p.context) for p in model.points} == alone | shared
        assert model.rows == (1, 2, 4, 8)
    here.check_books()


def test_a_head_on_the_targets_cache_has_a_price(tiny_model: TinyModel) -> None:
    """It is asked beside the target's cache rows, as in the engine."""
    here = world(tiny_model)
    priced, missing = prices(here.lm, list(here.drafters.values()), Plan(rows=(1,), context=8, rounds=1))
    assert not missing and {price.who for price in priced} == {"target", "small", "medium"}
    here.check_books()


def test_a_drafter_that_gives_up_is_named_and_has_no_price(tiny_model: TinyModel) -> None:
    """At the longer context here; half of its measurements would be worse than none."""
    here, said = world(tiny_model), []
    here.drafters["medium"].lm.pool.allocate(600 - 20)  # type: ignore[attr-defined]
    models = measure_models(here.lm, list(here.drafters.values()), 300, 8, QUICK, said.append)
    assert list(models) == ["target", "small"]
    assert len(said) == 1 and "medium gave up" in said[0] and "rows" in said[0]


def test_the_time_ends_the_passes_but_not_the_first(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not take minutes at its first start, and must get a profile nevertheless."""
    here, clock = world(tiny_model), [0.0]
    passes: list[int] = []

    def a_pass(*_: object) -> list[Drafter]:
        passes.append(1)
        clock[0] += 10.0
        return []

    monkeypatch.setattr(forward_costs, "_one_pass", a_pass)
    monkeypatch.setattr(forward_costs.time, "monotonic", lambda: clock[0])
    for seconds, expected in [(0.0, 1), (19.9, 1), (20.0, 2), (25.0, 2), (99.0, 3)]:
        passes.clear()
        effort = Effort(rows=(1, 2), contexts=(4,), sequences=(), rounds=1, passes=3, seconds=seconds)
        measure_models(here.lm, [], 300, 8, effort, print)
        assert len(passes) == expected, seconds


def test_a_batch_is_one_forward_over_all_its_sequences(tiny_model: TinyModel) -> None:
    """Else several sequences would look as dear as several forwards, and nothing would ever be shared."""
    here = world(tiny_model)
    medium = here.drafters["medium"]
    assert isinstance(medium, CausalLMDrafter)
    before, rows_before, drafted = here.lm.num_forwards, here.lm.num_rows_forwarded, medium.lm.num_forwards
    found, missing = prices(here.lm, [medium], Plan(rows=(1, 2), context=10, rounds=3, sequences=4))
    assert not missing and {(price.who, price.rows, len(price.seconds)) for price in found} == {
        (who, rows, 3) for who in ("target", "medium") for rows in (1, 2)
    }
    assert here.lm.num_forwards - before == 4 + 2 * (WARM_UP + 3)
    assert here.lm.num_rows_forwarded - rows_before == 4 * 10 + 12 * (WARM_UP + 3)
    # The drafter looks at the new root of all four in every round, and then at one and at two nodes of each.
    assert medium.lm.num_forwards - drafted == 3 * (WARM_UP + 3)
    here.check_books()


@pytest.mark.parametrize(
    ("num_rows", "max_len", "contexts"), [(600, 300, [8, 20]), (600, 24, [8, 12]), (24, 300, [8, 15]), (16, 9, [4])]
)
def test_contexts_fit_the_models(num_rows: int, max_len: int, contexts: list[int], tiny_model: TinyModel) -> None:
    """Small servers exist; measuring must not end in a pool without rows."""
    here = World(tiny_model("llama", 259, 1), num_rows=num_rows)
    assert [plan.context for plan in QUICK.plans(here.lm, [], max_len, 8) if plan.sequences == 1] == contexts
    measure_models(here.lm, [], max_len, 8, QUICK, print)
    here.check_books()


# ---- keeping --------------------------------------------------------------------------------------------------------


def test_a_profile_is_measured_once(cache: Path, tiny_model: TinyModel) -> None:
    """Half a minute at every start would be felt; `fresh` is there for those who moved to another machine's load."""
    here, said = world(tiny_model), []
    first = profile_for(loaded(here), plain_settings(), said.append, effort=QUICK)
    (file,) = (cache / "costs").iterdir()
    assert CostProfile.from_json(file.read_text()) == first and str(file) in said[-1]
    assert first.origin.model == "toy" and first.origin.weights == "fp32"
    forwards = here.lm.num_forwards
    assert profile_for(loaded(here), plain_settings(), said.append, effort=QUICK) == first
    assert here.lm.num_forwards == forwards and len(said) == 2
    profile_for(loaded(here), plain_settings(), said.append, effort=QUICK, fresh=True)
    assert here.lm.num_forwards > forwards
    assert list((cache / "costs").iterdir()) == [file]


QUIET = ((1, 64, 25.1), (1, 512, 29.4), (2, 64, 28.0), (2, 512, 31.6), (4, 64, 31.4), (4, 512, 35.7), (8, 64, 42.8))
BUSY = ((1, 64, 99.6), (1, 512, 37.0), (2, 64, 100.8), (2, 512, 34.2), (4, 64, 73.4), (4, 512, 70.9), (8, 64, 119.0))


@pytest.mark.parametrize(("measured", "is_kept"), [(QUIET, True), (BUSY, False)])
def test_prices_of_a_busy_machine_are_used_but_not_kept(
    measured: Sequence[tuple[int, int, float]],
    is_kept: bool,
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both were measured on one machine, minutes apart. Kept, the second made speculation look too dear ever after."""
    monkeypatch.setenv("GRAFTSERVE_CACHE", str(tmp_path))
    model = LatencyModel.fit(Point(rows, 1, context, ms) for rows, context, ms in measured)
    monkeypatch.setattr(calibration, "measure_models", lambda *_: {"target": model})
    here, said = world(tiny_model), []
    assert profile_for(loaded(here), plain_settings(), said.append, effort=QUICK).models == {"target": model}
    assert (tmp_path / "costs").exists() == is_kept
    assert ("kept in" if is_kept else "measured again at the next start") in said[-1]


def test_disturbed_rounds_do_not_change_a_price(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs only add time, so what most rounds say is too much if they ran in more than half of them."""
    monkeypatch.setattr(
        forward_costs,
        "prices",
        lambda target, drafters, plan: ([Price("target", n, (1e-3 * n, 1e-3 * n, 9.0, 9.0, 9.0)) for n in plan.rows], {}),
    )
    models = measure_models(world(tiny_model).lm, [], 300, 8, QUICK, print)
    assert {point.ms for point in models["target"].points} == {1.0, 2.0, 4.0}


def test_a_damaged_profile_is_measured_again(cache: Path, tiny_model: TinyModel) -> None:
    """And not served, nor fatal."""
    here, said = world(tiny_model), []
    profile_for(loaded(here), plain_settings(), print, effort=QUICK)
    (file,) = (cache / "costs").iterdir()
    file.write_text(file.read_text()[:100])
    profile = profile_for(loaded(here), plain_settings(), said.append, effort=QUICK)
    assert "damaged" in said[0] and CostProfile.from_json(file.read_text()) == profile


def test_a_cache_that_cannot_be_written_costs_a_line(cache: Path, tiny_model: TinyModel) -> None:
    """A read-only container should still serve."""
    cache.write_text("a file where the folder should be")
    said: list[str] = []
    profile = profile_for(loaded(world(tiny_model)), plain_settings(), said.append, effort=QUICK)
    assert "target" in profile.models and "cannot be kept" in said[-1]


def test_what_changes_a_price_changes_the_place(cache: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Prices of another model, number format, thread count or drafter would be taken for this one's."""
    here, cpu = world(tiny_model), choose_placement("cpu", "fp32")
    other = World(tiny_model("llama", 259, 1, layers=1), num_rows=600)
    drafter = tmp_path / "drafter"
    drafter.mkdir()

    def place(world: World = here, placement: object = cpu, effort: Effort = QUICK, **changes: object) -> Path:
        return cache_file(world.engine, plain_settings(**changes), placement, effort)  # type: ignore[arg-type]

    places = [
        place(),
        place(other),
        place(threads=3),
        place(placement=choose_placement("cpu", "bf16")),
        place(small=str(drafter)),
        place(effort=Effort()),
    ]
    (drafter / "model.safetensors").write_text("weights")
    places.append(place(small=str(drafter)))
    assert len(set(places)) == len(places)
    assert place() == places[0] == place(port=9, plan="MS")


def test_measuring_has_a_thread_of_its_own_and_hands_on_what_it_raises() -> None:
    """A team of OpenMP helpers that outlives the measuring would slow down the engine for good."""
    assert in_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)
    before = torch.get_num_threads()
    try:
        assert in_own_thread(torch.get_num_threads, 2) == 2
    finally:
        torch.set_num_threads(before)


def tasks() -> set[int]:
    """The threads of this process, as the system knows them."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def compute() -> set[int]:
    """Compute in parallel; returns this thread and those that came with it. Other threads may come and go meanwhile."""
    before = tasks()
    torch.exp(torch.ones(1000, 1000))
    return {threading.get_native_id()} | (tasks() - before)


def are_gone(those: set[int], within_s: float) -> bool:
    """Whether none of them is left; the system takes a moment to bury a thread."""
    deadline = time.monotonic() + within_s
    while those & tasks() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not those & tasks()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_helper_outlives_the_measuring() -> None:
    """What the thread of its own is for: helpers live as long as the thread that they help."""
    limit = torch.get_num_threads()
    try:
        in_own_thread(compute, 2)  # what torch starts once per process, whoever computes, is there from now on
        measuring = in_own_thread(compute, 2)
        assert len(measuring) >= 2, "no helper came"
        assert are_gone(measuring, within_s=10)

        # Negative control: a thread that goes on, as a caller's would.
        found: list[set[int]] = []
        computed, end = threading.Event(), threading.Event()

        def go_on() -> None:
            found.append(compute())
            computed.set()
            end.wait(20)

        caller = threading.Thread(target=go_on, daemon=True)
        caller.start()
        assert computed.wait(20)
        stays = not are_gone(found[0] - {caller.native_id}, within_s=0.3)
        end.set()
        caller.join(20)
        assert len(found[0]) >= 2 and stays, "helpers would go by themselves"
    finally:
        torch.set_num_threads(limit)


# ---- the command ----------------------------------------------------------------------------------------------------


def command(target: Path, *arguments: str) -> Result:
    program = typer.Typer()
    program.command("calibrate")(calibrate)
    options = ("--target", str(target), "--weights", "fp32", "--device", "cpu", "--max-model-len", "200")
    return CliRunner().invoke(program, [*options, *arguments])


def test_the_command_shows_prices_and_writes_them(model_folder: Path, tmp_path: Path, cache: Path) -> None:
    """People read the table, a server the file."""
    out = tmp_path / "costs.json"
    result = command(model_folder, "--small", "ngram", "--medium", str(model_folder), "--seconds", "0", "--out", str(out))
    assert result.exit_code == 0, result.stderr + str(result.exception)
    profile = CostProfile.from_json(out.read_text())
    assert list(profile.models) == ["target", "medium"]
    assert profile.models["target"].rows == Effort().rows
    titles = ("target: milliseconds", "medium: milliseconds")
    for word in (*titles, "1, 64, measured", "1, 100, fitted", "4, 256, measured", "misfit"):
        assert word in result.stdout, word
    assert "graftserve: tiny, fp32" in result.stderr
    assert out.read_text() == next((cache / "costs").iterdir()).read_text()


def test_what_could_not_be_written_is_refused_before_measuring(tmp_path: Path, cache: Path) -> None:
    """And before any model is loaded: the target here does not even exist."""
    result = command(tmp_path / "no-model", "--out", str(tmp_path / "nowhere" / "costs.json"))
    assert result.exit_code == 2 and "nowhere" in result.stderr and result.stderr.count("\n") == 1

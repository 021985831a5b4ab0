"""One run: the methods take turns over the questions, in the order and with the log that the plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import drafters
from app.commands.serve import say
from app.config import Settings
from app.decode_bench.methods import Theirs, our_method, spread_evenly, their_method
from app.decode_bench.plain_process import PlainProcess
from app.decode_bench.progress import bar
from app.decode_bench.run_log import RunLog, file_states
from app.decode_bench.turns import Method, measure, num_answers
from app.local import Question, running
from app.prompt_sets import Prompt, encode
from app.serving import LoadedEngine
from models.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    schedules: Sequence[str]  # plain decoding first
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    repeats: int
    theirs: Theirs
    theirs_limit: int | None  # prompts that transformers is asked; None: all


def questions_of(loaded: LoadedEngine, prompts: Sequence[Prompt], plan: Plan) -> list[Question]:
    """The prompts as token ids, each with a seed of its own. Raises RequestError as the HTTP API does."""
    room, questions = loaded.engine.max_model_len, []
    for index, prompt in enumerate(prompts):
        ids = encode(loaded.tokenizer, prompt.messages)
        sampling = SamplingParams(temperature=plan.temperature, seed=plan.seed + index)
        questions.append(Question(ids, min(plan.max_tokens, max(room - len(ids), 1)), sampling))
    return questions


def open_log(
    file: Path, settings: Settings, loaded: LoadedEngine, questions: Sequence[Question], plan: Plan, here: dict[str, Any]
) -> RunLog:
    """The log of this run, begun or gone on with. `here` is this machine with the commit, as `app.machine` describes it.

    Raises what RunLog.open raises.
    """
    log = RunLog.open(file, _identity(settings, loaded, questions, plan, here), here["commit"])
    if len(log):
        say(f"{len(log)} measurements are in {file} already")
    return log


def answer_all(
    settings: Settings, loaded: LoadedEngine, questions: Sequence[Question], plan: Plan, log: RunLog | None = None
) -> list[Method]:
    """All methods with their work, plain decoding first. Raises RequestError, RequestFailed and PlainProcessFailed."""
    engine = loaded.engine
    methods = [our_method(loaded, name, plan.concurrency) for name in plan.schedules]
    chosen = spread_evenly(len(questions), plan.theirs_limit)
    with ExitStack() as stack:
        if plan.theirs.names:
            say("loading the model once more for transformers' generate (float32)")
            process = stack.enter_context(
                PlainProcess.start(
                    settings.target,
                    settings.device,
                    threads=torch.get_num_threads(),
                    num_tokens=engine.vocab_size,
                    stop_tokens=engine.stop_tokens,
                    assistant=plan.theirs.assistant,
                )
            )
            methods += [their_method(n, process, plan.theirs, engine.stop_tokens, chosen) for n in plan.theirs.names]
        stack.enter_context(running(engine))
        total = num_answers(methods, len(questions), concurrency=plan.concurrency, repeats=plan.repeats)
        told = stack.enter_context(bar(total))
        measure(methods, questions, concurrency=plan.concurrency, repeats=plan.repeats, log=log, told=told)
    return methods


def _identity(
    settings: Settings, loaded: LoadedEngine, questions: Sequence[Question], plan: Plan, here: dict[str, Any]
) -> dict[str, Any]:
    """What measurements must have in common to stand in one log; only `repeats` may grow."""
    asked = repr([(q.prompt, q.max_tokens, q.sampling) for q in questions])
    set_to = settings.model_dump(mode="json")
    shipped = Path(drafters.__file__).parent / "pretrained"
    values = [*set_to.values(), plan.theirs.assistant]
    named = [Path(value) for value in values if isinstance(value, str)]  # those that are paths, that is
    prompts = sorted(spread_evenly(len(questions), plan.theirs_limit)) if plan.theirs.names else None
    return {
        "settings": set_to,
        "schedules": {name: str(loaded.engine.schedules[name]) for name in plan.schedules},
        "transformers": {**asdict(plan.theirs), "prompts": prompts},
        "concurrency": plan.concurrency,
        "prompts": {"number": len(questions), "tokens and sampling": hashlib.sha256(asked.encode()).hexdigest()[:16]},
        "model files": file_states(path for path in [*named, shipped] if path.exists()),
        "machine": {name: value for name, value in here.items() if name != "commit"},
    }

"""A whole engine over tiny random models, for tests: any mix of drafters, submit and wait, books checked."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from drafters.base import Drafter
from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from drafters.ngram import NgramDrafter
from drafters.tail import TailDrafter
from engine.admission import Limits
from engine.engine import Engine
from engine.request import Delta, FinishReason, Request, RequestStats
from models import toy
from models.causal_lm import CausalLM
from models.draft_head import DraftHead
from models.head_lm import HeadLM
from models.sampling import SamplingParams
from models.tail_lm import TailLM
from scheduler.auto_budget import AutoBudget
from scheduler.registry import build_schedules
from scheduler.schedule import Action, Schedule, Word
from tree.policies.chain import Chain

_ids = itertools.count()


@dataclass(frozen=True)
class Reply:
    """All deltas of one request, put together."""

    tokens: list[int]
    creators: list[str]
    text: str
    finish: FinishReason
    error: str | None
    stats: RequestStats
    deltas: list[Delta]


class Pending:
    """A submitted request."""

    def __init__(self, request_id: str, deltas: queue.Queue[Delta]) -> None:
        self.id = request_id
        self._deltas = deltas

    def next(self, timeout: float = 60.0) -> Delta:
        return self._deltas.get(timeout=timeout)

    def result(self, timeout: float = 60.0, before: Sequence[Delta] = ()) -> Reply:
        got = list(before)
        while not got or got[-1].finish_reason is None:
            got.append(self._deltas.get(timeout=timeout))
        last = got[-1]
        assert last.finish_reason is not None and last.stats is not None
        return Reply(
            [t for d in got for t in d.token_ids],
            [c for d in got for c in d.creators],
            "".join(d.text for d in got),
            last.finish_reason,
            last.error,
            last.stats,
            got,
        )


class World:
    """An engine over `target`, with a small and a medium drafter made of the models or heads given; a context manager.

    The target captures the layers that heads, and drafters given ready-made, listen to.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        small: PreTrainedModel | DraftHead | Drafter | None = None,
        medium: PreTrainedModel | DraftHead | Drafter | None = None,
        limits: Limits | None = None,
        num_rows: int = 6000,
        stop_tokens: Iterable[int] = (),
        word: str = "SMS",
        budget: int = 12,
        max_model_len: int | None = None,
        schedules: Sequence[Schedule] = (),
        auto: AutoBudget | None = None,
        allow_lossy: bool = False,
    ) -> None:
        self.tokenizer = toy.byte_tokenizer()
        heard = {layer for model in (small, medium) for layer in _listens_to(model)}
        self.lm = CausalLM(_own(target), num_rows=num_rows, capture=sorted(heard))
        self.drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
        for role, model in (("small", small), ("medium", medium)):
            if isinstance(model, PreTrainedModel):
                self.drafters[role] = CausalLMDrafter(role, CausalLM(_own(model), num_rows=num_rows))
            elif isinstance(model, DraftHead):
                embedding = self.lm.model.get_input_embeddings().weight.detach()
                if model.config.context == "target":
                    self.drafters[role] = TailDrafter(role, TailLM(model, embedding, self.lm.pool, num_rows=num_rows))
                else:
                    self.drafters[role] = HeadDrafter(role, HeadLM(model, embedding, num_rows=num_rows))
            elif model is not None:
                self.drafters[role] = model
        known = build_schedules(
            small="small" if small is not None else "ngram",
            medium="medium" if medium is not None else None,
            budget=budget,
            word=word,
            is_auto=auto is not None,
        )
        known.update({schedule.name: schedule for schedule in schedules})
        self.schedules = known
        self.engine = Engine(
            target=self.lm,
            drafters=self.drafters,
            schedules=known,
            default_schedule="ar",
            decode=lambda ids: self.tokenizer.decode(ids, clean_up_tokenization_spaces=False),
            stop_tokens=frozenset(stop_tokens),
            model_id="toy",
            max_model_len=max_model_len,
            limits=limits,
            allow_lossy=allow_lossy,
        )
        self.engine.auto = auto

    def __enter__(self) -> World:
        self.engine.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.engine.stop()
        if kind is None:
            self.check_books()

    def check_books(self) -> None:
        """Every row of every model is free again, and the pools' own books agree."""
        drafters = [d for d in self.drafters.values() if isinstance(d, CausalLMDrafter | HeadDrafter | TailDrafter)]
        for lm in [self.lm, *(drafter.lm for drafter in drafters)]:
            assert lm.pool.num_used == 0, f"{lm.pool.num_used} rows were never given back"
            lm.pool.check()

    def submit(
        self, prompt: Sequence[int] | str, schedule: str | None = None, *, max_tokens: int | None = 24, **options: Any
    ) -> Pending:
        deltas: queue.Queue[Delta] = queue.Queue()
        sampling = SamplingParams(temperature=options.pop("temperature", 0.0), seed=options.pop("seed", 0))
        request_id = f"r{next(_ids)}"
        ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
        self.engine.submit(
            Request(
                id=request_id,
                prompt=ids,
                sampling=sampling,
                max_tokens=max_tokens,
                emit=deltas.put,
                schedule=schedule,
                stop=tuple(options.pop("stop", ())),
                **options,
            )
        )
        return Pending(request_id, deltas)

    def run(self, prompt: Sequence[int] | str, schedule: str | None = None, **options: Any) -> Reply:
        return self.submit(prompt, schedule, **options).result()

    def run_all(self, prompts: Sequence[Sequence[int] | str], schedule: str | None = None, **options: Any) -> list[Reply]:
        """All at once."""
        return [pending.result() for pending in [self.submit(p, schedule, **options) for p in prompts]]


def self_draft_chain(length: int = 5, drafter: str = "medium") -> Schedule:
    """A plain chain, for which acceptance rates mean what they say."""
    return Schedule("chain", "test", Chain(length), Word("M*"), {Action.MEDIUM: drafter})


def greedy_reference(model: PreTrainedModel, prompt: Sequence[int], count: int, stop_tokens: Iterable[int] = ()) -> list[int]:
    """What transformers' own `generate` continues the prompt with, on a model untouched by us."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=0,
        use_cache=True,
    )
    return [int(token) for token in output[0, len(prompt) :]]


def _listens_to(model: PreTrainedModel | DraftHead | Drafter | None) -> tuple[int, ...]:
    if isinstance(model, DraftHead):
        return model.config.target_layers
    return () if model is None or isinstance(model, PreTrainedModel) else model.layers


def _own(model: PreTrainedModel) -> PreTrainedModel:
    """A second model object over the same weights: the engine sets its own attention function, the reference keeps its."""
    import copy

    twin = copy.copy(model)
    twin.config = copy.deepcopy(model.config)
    twin = type(model)(twin.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()

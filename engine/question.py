"""Who goes on with a tree, and what he is asked: the plan's next letter, and whether its answer can be worth its price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from drafters.base import Drafter, DraftRequest
from engine.sequence import Sequence
from scheduler.auto_budget import AutoBudget, Offer, Question
from scheduler.features import Moment, features
from scheduler.schedule import Action, Signals
from scheduler.traces import cost_ratio
from tree.graft import GraftGrowth, TreeGraft
from tree.growth import Ask, Growth

_MOST_TURNED_AWAY = 64  # decisions in a row that found nothing to do: a plan may name one drafter for ever


@dataclass(slots=True, eq=False)
class Draft:
    """One sequence's tree in the making."""

    sequence: Sequence
    growth: Growth
    step: int = 0  # drafting steps decided
    is_over: bool = False  # an answer could not be used; no further questions in this step
    exhausted: set[str] = field(default_factory=set)  # drafters with nothing to do since the tree last changed
    forwards: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    drafter_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # in the drafters' calls
    turned_away: dict[str, str] = field(default_factory=dict)  # drafters that were to draft and were not asked, and why
    hindrance: str | None = None  # why there is no drafting at all in this step: "prompt", "end"
    halts: list[tuple[str, str]] = field(default_factory=list)  # drafters that gave up in this step, and why
    declined: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # calls that would not have paid
    ruled: list[int] = field(default_factory=list)  # drafting steps of the growth at which the rule called the medium
    sized: str | None = None  # what bounded the tree, where prices did the cutting; see `scheduler.load`
    tree_s: float = 0.0  # in the policy: what to ask, where answers go, what is verified
    chances: list[float] | None = None  # of the tree as it stands, where they were reckoned

    @property
    def draft_s(self) -> float:
        """Seconds in the drafters' calls."""
        return sum(self.drafter_s.values())

    def chances_by(self, auto: AutoBudget) -> list[float]:
        """By node of the tree, the probability that it is accepted."""
        if self.chances is None:
            self.chances = auto.chances(self.growth.tree, self.sequence.record)
        return self.chances

    def skipped(self, drafter: str) -> str:
        """Why `drafter`, one of the schedule's, was not called in this step."""
        return self.hindrance or self.turned_away.get(drafter, "plan")


def next_question(
    draft: Draft, drafters: Mapping[str, Drafter], auto: AutoBudget | None, *, sharing: int = 1
) -> tuple[str, Ask] | None:
    """The drafter that goes on with this tree and what it is asked; None when drafting is over.

    `sharing` trees are grown together, and a call's price is shared by them.
    """
    schedule = draft.sequence.schedule
    plan = schedule.plan if schedule.is_auto or schedule.fixed_plan is None else schedule.fixed_plan
    turned_away = 0
    while not draft.is_over and turned_away < _MOST_TURNED_AWAY:
        signals = Signals(step=draft.step, num_nodes=len(draft.growth.tree), budget=schedule.budget)
        action = plan.decide(signals)
        if action is Action.STOP:
            return None
        draft.step += 1
        if action is Action.VALUE:
            action = _by_rule(draft, auto)
            if action is Action.STOP:
                return None
            if action is Action.MEDIUM:  # the rule has weighed the price already
                return _called(draft, drafters[schedule.drafters[action]])
        names = list(schedule.drafters.values()) if action is Action.BEST else [schedule.drafters[action]]
        question = _worthwhile(draft, names, drafters, auto, sharing)
        if question is not None:
            return question
        draft.exhausted.update(names)
        turned_away += 1
        # Every drafter of the schedule was turned away since the tree last changed: no later answer can differ.
        if draft.exhausted.issuperset(schedule.drafters.values()):
            return None
    return None


def offer(draft: Draft, ask: Ask, drafter: Drafter) -> Offer:
    """The call that would answer `ask`, as its price is reckoned."""
    sequence = draft.sequence
    return Offer(
        drafter=drafter.name,
        tree=draft.growth.tree,
        nodes=ask.nodes,
        passes=drafter.passes(request(draft, ask, drafter)),
        context=len(sequence.tokens),
        last_accepted=sequence.stats.accepted[-1] if sequence.stats.accepted else 0,
        record=sequence.record,
    )


def request(draft: Draft, ask: Ask, drafter: Drafter) -> DraftRequest:
    """`ask` with all that the drafter needs to answer it."""
    sequence = draft.sequence
    return DraftRequest(
        state_of(sequence, drafter),
        sequence.tokens,
        draft.growth.tree,
        ask,
        sequence.request.sampling,
        sequence.rows.view(),
        None if sequence.lease is None else sequence.num_cached,
        sequence.noise.exponentials if sequence.is_raced else None,
    )


def state_of(sequence: Sequence, drafter: Drafter) -> object:
    """What the drafter remembers about the sequence; opened with the first question."""
    if drafter.name not in sequence.drafter_states:
        sequence.drafter_states[drafter.name] = drafter.open()
    return sequence.drafter_states[drafter.name]


def _by_rule(draft: Draft, auto: AutoBudget | None) -> Action:
    """What a V stands for now: free lookups first, then whom the schedule's rule names; nobody if he has no more to say."""
    sequence, growth, schedule = draft.sequence, draft.growth, draft.sequence.schedule
    rule, policy = schedule.rule, schedule.policy
    assert rule is not None and isinstance(policy, TreeGraft) and isinstance(growth, GraftGrowth), "checked by the schedule"

    def is_able(action: Action) -> bool:
        name = schedule.drafters.get(action)
        return name is not None and name not in draft.exhausted and not sequence.is_without(name)

    if is_able(Action.LOOKUP):
        return Action.LOOKUP
    small, medium = schedule.drafters[Action.SMALL], schedule.drafters[Action.MEDIUM]
    if is_able(Action.MEDIUM) and growth.num_steps < policy.steps:
        moment = Moment(
            context=len(sequence.tokens),
            step=growth.num_steps,
            steps=policy.steps,
            calls=draft.ruled,
            accepted_mean=sequence.accepted_mean,
            cost_ratio=1.0 if auto is None else cost_ratio(auto.costs.profile, medium, len(sequence.tokens)),
        )
        row = features(growth.tree, growth.frontier(small), growth.frontier(medium), moment)
        if rule.decide(row, len(draft.ruled)) and growth.ask(medium) is not None:
            draft.ruled.append(growth.num_steps)
            return Action.MEDIUM
    return Action.SMALL if is_able(Action.SMALL) else Action.STOP


def _called(draft: Draft, drafter: Drafter) -> tuple[str, Ask]:
    """The question that a call by the rule puts: as much of it as one forward answers, for which the rule was fitted."""
    ask = draft.growth.ask(drafter.name)
    assert ask is not None, "the rule does not call where there is nothing to ask"
    return drafter.name, ask.within_one_forward(
        draft.growth.tree, lambda part: len(drafter.passes(request(draft, part, drafter)))
    )


def _worthwhile(
    draft: Draft, names: list[str], drafters: Mapping[str, Drafter], auto: AutoBudget | None, sharing: int
) -> tuple[str, Ask] | None:
    """The question to one of `names` that is worth most, narrowed to the part that is; None if there is none to ask."""
    schedule = draft.sequence.schedule
    halted = [name for name in names if draft.sequence.is_without(name)]
    draft.turned_away.update((name, "halted") for name in halted)
    able = [name for name in names if name not in halted and name not in draft.exhausted]
    asks: dict[str, Ask] = {}
    for name in sorted(able, key=lambda name: drafters[name].runs_model):  # what costs nothing comes first
        ask = draft.growth.ask(name)
        if ask is None:
            draft.turned_away[name] = "tree"
        elif drafters[name].runs_model:
            asks[name] = ask
        else:
            return name, ask
    if not asks:
        return None
    if auto is None or not schedule.is_auto:
        *_, (name, ask) = asks.items()  # of several the last one, which is the better model
        nodes = ask.nodes
    else:
        questions = [Question(ask.nodes, _parts(draft, ask, drafters[name])) for name, ask in asks.items()]
        best = auto.best_call(schedule.name, questions, sharing=sharing, chances=draft.chances_by(auto))
        if best is None:
            for name in asks:
                draft.declined[name] += 1
                draft.turned_away[name] = "price"
            return None
        name, nodes = best.drafter, tuple(best.nodes)
    asked = draft.growth.ask(name)  # the growth expects the answer to what it was asked last
    assert asked is not None, "it had a question just now"
    return name, replace(asked, nodes=nodes)


def _parts(draft: Draft, ask: Ask, drafter: Drafter) -> Iterator[Offer]:
    """The calls that would answer more and more of a question, the topmost nodes first."""
    return (offer(draft, part, drafter) for part in ask.tops(draft.growth.tree))

"""The bodies of the admin API's calls on experiments."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from app.body import Body
from app.experiments.experiment import MAX_ARMS, Arm, Experiment, Mode


class ArmBody(Body):
    """One arm."""

    name: str
    schedule: str = Field(description="A name from /v1/schedules; 'ar' is plain decoding.")
    budget: int | None = Field(None, description="Nodes verified per step, root included. Default: the schedule's own.")
    weight: float = Field(1.0, description="Share of the requests, relative to the other arms' weights.")


class ExperimentBody(Body):
    """Body of ``POST /admin/experiments``."""

    name: str
    arms: Annotated[list[ArmBody], Field(fail_fast=True, min_length=2, max_length=MAX_ARMS)]
    control: str | None = Field(None, description="The arm that the others are compared with. Default: the first.")
    mode: Literal["fixed", "bandit"] = "fixed"
    alpha: float = Field(0.05, description="Chance of any wrong statement about differences, at any time.")
    guard: float | None = Field(0.05, description="Arms surely that much slower than the control are stopped; null: none.")
    floor: float | None = Field(None, description="Least share of an arm under a bandit. Default: 0.05 at most.")
    sticky: bool = Field(True, description="The same session, user or API key gets the same arm.")

    def experiment(self) -> Experiment:
        """The experiment as asked for, unchecked."""
        arms = tuple(Arm(arm.name, arm.schedule, arm.budget, arm.weight) for arm in self.arms)
        return Experiment(
            name=self.name,
            arms=arms,
            control=arms[0].name if self.control is None else self.control,
            salt="",
            created_s=0.0,
            mode=Mode(self.mode),
            alpha=self.alpha,
            guard=self.guard,
            floor=min(0.05, 0.5 / len(arms)) if self.floor is None else self.floor,
            sticky=self.sticky,
        )


class WeightsBody(Body):
    """Body of ``POST /admin/experiments/{name}/weights``."""

    weights: Annotated[dict[str, float], Field(min_length=1, max_length=MAX_ARMS)]


class PromoteBody(Body):
    """Body of ``POST /admin/experiments/{name}/promote``."""

    arm: str | None = Field(None, description="Default: the winner.")

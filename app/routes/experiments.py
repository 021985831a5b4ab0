"""Experiments between schedules: ``/admin/experiments…`` for who runs them, ``/v1/experiments`` for everybody.

The handlers are plain functions, which the framework runs on threads: a change waits for the disk.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.admin_access import Admin
from app.protocol_experiments import ExperimentBody, PromoteBody, WeightsBody
from app.serving import Ready

router = APIRouter()
admin = APIRouter(prefix="/admin/experiments", dependencies=[Admin])


@router.get("/v1/experiments", response_model=None)
def list_public(serving: Ready) -> dict[str, Any]:
    """Names, arms and intervals of all experiments, the newest first."""
    return {"object": "list", "data": serving.experiments.public()}


@admin.get("", response_model=None)
def list_experiments(serving: Ready) -> dict[str, Any]:
    """All experiments with their reports, the newest first, and the default schedule."""
    return serving.experiments.overview()


@admin.get("/{name}", response_model=None)
def get_experiment(serving: Ready, name: str) -> dict[str, Any]:
    """One experiment with its report."""
    return serving.experiments.one(name)


@admin.post("", response_model=None)
def start_experiment(serving: Ready, body: ExperimentBody) -> dict[str, Any]:
    """Start an experiment; from now on requests that leave their schedule open get its arms."""
    return serving.experiments.start(body.experiment())


@admin.post("/{name}/stop", response_model=None)
def stop_experiment(serving: Ready, name: str) -> dict[str, Any]:
    """End an experiment."""
    return serving.experiments.stop(name)


@admin.post("/{name}/weights", response_model=None)
def set_weights(serving: Ready, name: str, body: WeightsBody) -> dict[str, Any]:
    """Change arms' weights; arms that are not named keep theirs."""
    return serving.experiments.set_weights(name, body.weights)


@admin.post("/{name}/promote", response_model=None)
def promote_arm(serving: Ready, name: str, body: PromoteBody | None = None) -> dict[str, Any]:
    """Make the winner, or the arm named, the server's default; ends the experiment if it is running."""
    return serving.experiments.promote(name, None if body is None else body.arm)


router.include_router(admin)

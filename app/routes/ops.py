"""What operators and clients ask about the service itself: models, schedules, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from app.answers import check_model
from app.metrics import CONTENT_TYPE, Metrics
from app.serving import Ready, Serving
from engine.admission import is_lossless, keeps_seeded_text

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(serving: Ready) -> dict[str, Any]:
    """The one model served."""
    return {"object": "list", "data": [_model(serving)]}


# A path, since hub ids hold a slash.
@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(serving: Ready, name: str) -> dict[str, Any]:
    """The model of that name, or 404."""
    check_model(serving, name)
    return _model(serving)


@router.get("/v1/schedules", response_model=None)
async def list_schedules(serving: Ready) -> dict[str, Any]:
    """The values that ``speculative.schedule`` may have."""
    engine = serving.engine
    data = [
        {
            "name": name,
            "description": schedule.description,
            "budget": schedule.budget,
            "auto": schedule.is_auto,  # the budget is the most, and prices decide
            "lossless": is_lossless(schedule),
            "keeps_seeded_text": keeps_seeded_text(schedule),
            "default": name == engine.default_schedule,
        }
        for name, schedule in engine.schedules.items()
    ]
    return {"object": "list", "data": data}


@router.head("/health", include_in_schema=False)  # some balancers ask this way
@router.get("/health", response_model=None)
async def health(http: HttpRequest) -> JSONResponse:
    """200 if requests are served, else 503; ``status`` says why."""
    state = http.app.state
    if state.failure is not None:
        status = "failed"
    elif state.serving is None:
        status = "loading"
    else:
        # Of a failure only the word: its text is in the log.
        status = state.serving.engine.health().partition(":")[0]
    return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)


@router.get("/metrics", response_model=None)
async def scrape(http: HttpRequest) -> Response:
    """Prometheus metrics, also while the models load."""
    metrics: Metrics = http.app.state.metrics
    return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": serving.created,
        "owned_by": "graftserve",
        "root": serving.engine.model_id,
        "max_model_len": serving.engine.max_model_len,
    }

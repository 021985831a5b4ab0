"""The application object: routes, error answers, and a lifespan that loads the models while the server already answers.

    app = create_app(load, settings)      # load() -> LoadedEngine, run in a thread when the server starts
    uvicorn.Server(uvicorn.Config(app)).run()

Until ``load`` has returned, /health is 503 ``loading`` and the API answers 503. If it raises, ``app.state.failure`` is
the exception and ``on_failure`` is called with it; the caller stops the server there and exits with a status above 0.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app.bridge import Engine
from app.config import Settings
from app.errors import HANDLED, answer_error
from app.experiments.experiment import Experiment, arm_label
from app.experiments.live import Experiments
from app.experiments.store import Store
from app.heap import give_back_at_rest
from app.metrics import Metrics
from app.middleware import Edge, rules_of
from app.openapi import describe_api
from app.pace import Pace
from app.routes import chat, completions, experiments, ops, pages, tokens
from app.serving import LoadedEngine, Serving
from app.spans import Spans, open_spans
from app.version import version
from engine.admission import is_lossless

T = TypeVar("T")
_log = logging.getLogger(__name__)


def create_app(
    load: Callable[[], LoadedEngine],
    settings: Settings,
    *,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        load: builds the engine (not started) and the tokenizer; called once, in a thread of its own.
        settings: read for what concerns the edge: the model's name, keys, limits, origins.
        on_failure: called on the event loop if ``load`` raises, e.g. to set ``server.should_exit``.
    """
    metrics = Metrics()

    async def work_behind(app: FastAPI) -> None:
        """Load, and from then on give free memory back whenever nobody asks for anything."""
        await _become_ready(app, load, settings, metrics, on_failure)
        if app.state.serving is not None:
            await give_back_at_rest(app.state.serving.engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        background = asyncio.create_task(work_behind(app))
        try:
            yield
        finally:
            background.cancel()  # the thread that loads cannot be stopped, but nobody waits for it
            await asyncio.gather(background, return_exceptions=True)
            serving: Serving | None = app.state.serving
            if serving is not None:
                await to_thread.run_sync(serving.engine.stop)
                await to_thread.run_sync(serving.experiments.close)
                if serving.spans is not None:
                    await to_thread.run_sync(serving.spans.close)

    app = FastAPI(title="graftserve", version=version(), lifespan=lifespan)
    app.state.serving = None
    app.state.failure = None
    app.state.metrics = metrics
    app.state.admin_key = settings.admin_key
    for handled in HANDLED:
        app.add_exception_handler(handled, answer_error)
    app.add_middleware(Edge, metrics=metrics, rules=rules_of(settings))
    if settings.cors_origins:  # outermost: a preflight brings no key, and errors must be readable for the page too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    for routes in (completions, chat, tokens, ops, experiments, pages):
        app.include_router(routes.router)
    description: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not description:  # made once, when all routes are there
            asks = bool(settings.api_keys)
            description.update(describe_api(app, asks_for_keys=asks, metrics_auth=settings.metrics_auth))
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _become_ready(
    app: FastAPI,
    load: Callable[[], LoadedEngine],
    settings: Settings,
    metrics: Metrics,
    on_failure: Callable[[BaseException], None] | None,
) -> None:
    store: Store | None = None
    spans: Spans | None = None
    try:
        store = await _in_own_thread(lambda: Store(settings.state_dir))  # first: it fails in no time if it fails
        if settings.otlp_endpoint is not None:
            spans = open_spans(settings.otlp_endpoint)
        loaded = await _in_own_thread(load)
        engine = loaded.engine
        metrics.attach(engine)
        engine.subscribe(metrics)
        pace = Pace()
        engine.subscribe(pace)
        trials = _take_up_experiments(store, engine, settings, metrics)
        store = None  # the experiments' to close
        serving = Serving(
            engine,
            loaded.tokenizer,
            metrics,
            model=settings.served_model_name or engine.model_id,
            created=int(time.time()),
            experiments=trials,
            pace=pace,
            request_timeout_s=settings.request_timeout_s,
            spans=spans,
        )
        engine.start()
    except Exception as error:
        app.state.failure = error
        if spans is not None:
            spans.close()
        _log.error("the model could not be loaded: %s", error)
        if on_failure is not None:
            on_failure(error)
        return
    finally:
        if store is not None:
            store.close()
    app.state.serving = serving
    _log.info("serving %s", serving.model)


def _take_up_experiments(store: Store, engine: Engine, settings: Settings, metrics: Metrics) -> Experiments:
    """The experiments of the state folder, and the default schedule that one of them may have made."""

    def on_default(schedule: str) -> None:
        engine.default_schedule = schedule

    def on_running(experiment: Experiment) -> None:
        for arm in experiment.arms:
            metrics.expect_arm(engine, arm.schedule, arm_label(experiment.name, arm.name))

    lossy = [name for name, schedule in engine.schedules.items() if not is_lossless(schedule)]
    return Experiments(
        store,
        engine.schedules,
        engine.default_schedule,
        configured=settings.schedule,
        on_default=on_default,
        on_running=on_running,
        lossy=lossy,
        persistent=settings.state_dir is not None,
    )


async def _in_own_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a daemon thread: unlike a pool's, it does not keep alive a process whose server has stopped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit and the like would end only this thread, unseen
            error = RuntimeError(f"loading ended with {type(raised).__name__}: {raised}")
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the server stopped and closed its loop
            pass

    threading.Thread(target=run, name="load-models", daemon=True).start()
    return await done

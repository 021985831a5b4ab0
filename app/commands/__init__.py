"""The commands of the command line, one module each. Heavy imports wait until a command runs."""

from collections.abc import Callable

import typer

from app.commands.bench import bench
from app.commands.calibrate import calibrate
from app.commands.config import config
from app.commands.corpus import corpus
from app.commands.distill import distill
from app.commands.docs import docs
from app.commands.experiments import experiments
from app.commands.fit_scheduler import fit_scheduler
from app.commands.generate import generate
from app.commands.prove import prove
from app.commands.serve import serve
from app.commands.simulate import simulate
from app.commands.trace import trace
from app.commands.trace_shapes import trace_shapes
from app.commands.version import version

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "generate": generate,
    "prove": prove,
    "calibrate": calibrate,
    "trace": trace,
    "trace-shapes": trace_shapes,
    "fit-scheduler": fit_scheduler,
    "simulate": simulate,
    "corpus": corpus,
    "distill": distill,
    "config": config,
    "version": version,
}

GROUPS: dict[str, typer.Typer] = {"bench": bench, "docs": docs, "experiments": experiments}

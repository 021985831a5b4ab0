"""What a selector of delayed trees learns from, as a file: roots along a target's texts, with the value of every shape.

One JSON object per line: a header, then one record per root. Prices are not in the records, they come from a cost profile when
the file is read for training, so one file serves every machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scheduler.cost import CostProfile
from scheduler.selector import SCALARS, SHAPES, all_ms
from scheduler.selector_fit import Samples
from scheduler.traces import json_line

FORMAT = "graftserve-selector-labels"
VERSION = 1
UNPRICED: tuple[str, ...] = SCALARS[:-2]
"""The scalar features that a record holds; the two prices follow."""


@dataclass(frozen=True, slots=True)
class Label:
    """One root."""

    prompt: int
    context: int  # tokens of the text
    scalars: tuple[float, ...]  # as `UNPRICED`
    tokens: tuple[float, ...]  # expected per step, by shape


@dataclass(frozen=True, slots=True)
class LabelHeader:
    """What the labels were made with."""

    model: str
    drafter: str  # its name, as a cost profile has it
    verifier: str
    trees: int  # sampled per root


@dataclass(frozen=True, slots=True)
class Labels:
    """A file's content."""

    header: LabelHeader
    labels: tuple[Label, ...]
    profile: CostProfile | None = None  # of the machine that it was made on


def labels_header_line(header: LabelHeader, profile: CostProfile | None) -> str:
    """The first line."""
    costs = None if profile is None else json.loads(profile.to_json())
    shapes = [[shape.num_paths, shape.trunk, shape.branch] for shape in SHAPES]
    about = {"format": FORMAT, "version": VERSION, **asdict(header), "scalars": UNPRICED}
    return json_line({**about, "shapes": shapes, "costs": costs})


def label_line(label: Label) -> str:
    """A further line."""
    rounded = [round(value, 6) for value in label.scalars], [round(value, 5) for value in label.tokens]
    return json_line({"prompt": label.prompt, "context": label.context, "scalars": rounded[0], "tokens": rounded[1]})


def read_labels(text: str) -> Labels:
    """The content of a file. ValueError that names the line for what is none."""
    place = 0
    try:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not lines:
            raise ValueError("it is empty")
        place, line = lines[0]
        document = json.loads(line)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"expected {FORMAT}, version {VERSION}")
        shapes = [[shape.num_paths, shape.trunk, shape.branch] for shape in SHAPES]
        if tuple(document["scalars"]) != UNPRICED or document["shapes"] != shapes:
            raise ValueError("it has other features or shapes than this version; make it again")
        header = LabelHeader(document["model"], document["drafter"], document["verifier"], int(document["trees"]))
        costs = document["costs"]
        profile = None if costs is None else CostProfile.from_json(json.dumps(costs))
        labels = []
        for number, line in lines[1:]:
            place = number
            labels.append(_label(json.loads(line)))
        return Labels(header, tuple(labels), profile)
    except KeyError as error:
        raise ValueError(f"not labels of shapes: line {place}: {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not labels of shapes: line {place}: {error}") from error


def priced_samples(labels: Labels, profile: CostProfile) -> Samples:
    """The samples at the prices of a profile. ValueError for a profile without the target or the drafter."""
    drafter = labels.header.drafter
    for name in ("target", drafter):
        if name not in profile.models:
            raise ValueError(f"the cost profile has no {name}, only {', '.join(profile.models)}")
    if not labels.labels:
        raise ValueError("there is no label")
    rows = []
    for label in labels.labels:
        prices = (profile.ms(name, 1, context=label.context) for name in (drafter, "target"))
        rows.append((*label.scalars, *map(math.log, prices)))
    return Samples(
        np.array([label.prompt for label in labels.labels], dtype=np.intp),
        np.array(rows),
        np.array([label.tokens for label in labels.labels]),
        np.array([all_ms(profile, drafter, label.context) for label in labels.labels]),
    )


def _label(entry: Any) -> Label:
    label = Label(
        int(entry["prompt"]),
        int(entry["context"]),
        tuple(map(float, entry["scalars"])),
        tuple(map(float, entry["tokens"])),
    )
    if len(label.scalars) != len(UNPRICED) or len(label.tokens) != len(SHAPES):
        raise ValueError(f"a root has {len(UNPRICED)} features and {len(SHAPES)} shapes")
    return label

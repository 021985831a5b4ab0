"""The pages of the documentation as tests see them: fenced blocks, the commands in them, links, and tables.

The info string of a block begins with its language. Further words are for the tests: `status=400` is what a command's request
is answered with, `chat` and `completions` say where a JSON body goes, and `not run: WHY` leaves a block alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(.*)$")
_ENDS = {"|", "||", ">", ">>", "<", "&", "&&", ";", "2>"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # of its first line of text, from 1
    info: str
    text: str

    @property
    def language(self) -> str:
        """The first word of the info string; empty if there is none."""
        return self.info.split(maxsplit=1)[0] if self.info else ""

    @property
    def is_run(self) -> bool:
        """False if the info string gives a reason why not."""
        return not re.search(r"not run: \S+", self.info)

    @property
    def status(self) -> int:
        """HTTP status that requests in it are answered with."""
        found = re.search(r"status=(\d+)", self.info)
        return int(found[1]) if found else 200

    @property
    def place(self) -> str:
        """For messages and test ids."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page; one without an end is an error."""
    info: str | None = None
    begin, lines = 0, []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif info is None:
            info, begin, lines = fence[1].strip(), number + 1, []
        else:
            yield Block(page, begin, info, "\n".join(lines) + "\n")
            info = None
    assert info is None, f"{page.name}:{begin - 1}: the block has no end"


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words, comments and variables' assignments left out.

    A command ends with its line unless a quote is open or the line ends in a backslash; what comes after a pipe, a redirection
    or an ampersand is not part of it.
    """
    open_lines = ""
    for line in text.splitlines():
        if line.endswith("\\"):
            open_lines += line[:-1]
            continue
        open_lines += line + "\n"
        try:
            words = shlex.split(open_lines, comments=True)
        except ValueError:  # a quote is open
            continue
        open_lines = ""
        while words and re.fullmatch(r"[A-Z][A-Z_0-9]*=.*", words[0], re.DOTALL):
            words.pop(0)
        end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
        if words[:end]:
            yield words[:end]
    assert not open_lines.strip(), f"a command without an end: {open_lines!r}"


def links(page: Path) -> Iterator[str]:
    """Targets of the page's links to other files of the project, without the part after #."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


def sections(text: str, level: int) -> dict[str, str]:
    """Text by heading of a level, up to the next heading of that level or above."""
    found: dict[str, str] = {}
    name: str | None = None
    for line in text.splitlines():
        heading = re.match(r"^(#+) (.*)$", line)
        if heading is not None and len(heading[1]) <= level:
            name = heading[2] if len(heading[1]) == level else None
            if name is not None:
                found[name] = ""
        elif name is not None:
            found[name] += line + "\n"
    return found

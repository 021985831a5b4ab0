"""``graftserve generate``: one answer on the terminal, every token in the color of who drafted it.

Standard output holds the answer (and drawn trees, if asked for) and nothing else, so that it can be piped; the legend and the
counts go to standard error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import fail, takes_settings
from app.config import Settings

if TYPE_CHECKING:
    from engine.request import Delta, RequestStats


@takes_settings
def generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="What to say to the model.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides what is drawn at a temperature above 0.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    show_tree: Annotated[int, typer.Option(min=0, metavar="N", help="Draw the draft trees of the last N steps.")] = 0,
) -> None:
    """Answer one prompt here, without a server, and show who drafted each token."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    from app.commands.loading import load
    from app.errors import RequestFailed
    from app.local import Question, running, stream
    from app.token_authors import TokenAuthors
    from app.tree_view import colors, draw
    from engine.request import RequestError
    from engine.text import byte_fallback_ids
    from models.sampling import ParamError, SamplingParams

    if raw and system is not None:
        fail("--system is part of a conversation and --raw leaves that out; use one of them")
    try:
        sampling = SamplingParams(temperature=temperature, seed=seed)
    except ParamError as error:
        fail(str(error))
    _, loaded = load(settings)
    engine, tokenizer = loaded.engine, loaded.tokenizer

    def decode(ids: Any) -> str:  # as the engine does
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]

    out, err = Console(highlight=False), Console(highlight=False, stderr=True)
    authors = TokenAuthors(decode, byte_fallback_ids(tokenizer.get_vocab()))  # type: ignore[attr-defined]
    color = colors(engine.drafter_names)
    last: Delta | None = None
    try:
        ids = _ids(tokenizer, prompt, system, raw)
        question = Question(ids, min(max_tokens, max(engine.max_model_len - len(ids), 1)), sampling, keep_trees=show_tree)
        with running(engine):
            for last in stream(engine, question):
                pieces = [Segment(text, Style.parse(color[author])) for text, author in authors.split(last)]
                # Segments, not text: rich would wrap lines, expand tabs and drop control characters.
                out.print(Segments(pieces), end="", soft_wrap=True)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"\ngraftserve: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        out.print()
        raise typer.Exit(130) from None
    assert last is not None and last.stats is not None, "an answer ends in its last delta"
    out.print()
    for record in last.trees:
        out.print(draw(record, lambda ids: tokenizer.decode(ids), color))  # type: ignore[arg-type, attr-defined]
    if err.is_terminal and not err.no_color:
        err.print(*(f"[{color[name]}]■ {name}[/]" for name in color))
    typer.echo(f"graftserve: {statistics(last.stats)}; {last.finish_reason}", err=True)


def statistics(stats: RequestStats) -> str:
    """Counts of one answer in one line; the speed includes reading the prompt."""
    seconds = stats.finished_s - stats.admitted_s
    parts = [
        f"{stats.schedule}: {stats.num_output_tokens} tokens in {stats.num_steps} steps "
        f"({stats.num_output_tokens / max(stats.num_steps, 1):.2f} per step)",
        f"{stats.num_output_tokens / max(seconds, 1e-9):.1f} tokens/s",
    ]
    for name, count in stats.drafters.items():
        parts.append(f"{name} {count.drafted} drafted, {count.accepted} accepted, {count.forwards} forwards")
    parts += [f"{name} gave up ({reason})" for name, reason in stats.halts.items()]
    return "; ".join(parts)


def _ids(tokenizer: Any, prompt: str, system: str | None, raw: bool) -> tuple[int, ...]:
    from app.prompt_sets import encode
    from app.protocol import Message

    if not raw and not tokenizer.chat_template:
        fail("this model's tokenizer has no chat template; use --raw to continue the prompt as it is")
    turns = [{"role": "user", "content": prompt}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return encode(tokenizer, [Message.model_validate(turn) for turn in turns], raw=raw)

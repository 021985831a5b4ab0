"""What the target writes, for commands that measure along known texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from app.commands.options import fail

if TYPE_CHECKING:
    from app.drafter_quality import Text
    from app.protocol import Message
    from app.serving import LoadedEngine


def greedy_texts(loaded: LoadedEngine, conversations: Sequence[Sequence[Message]], max_tokens: int) -> list[Text]:
    """What the target answers at temperature 0, without drafts; starts and stops the engine. Ends the program if it cannot."""
    from app.drafter_quality import Text
    from app.errors import RequestFailed
    from app.local import Question, ask_all, running
    from app.prompt_sets import encode
    from engine.request import RequestError
    from scheduler.registry import PLAIN

    engine = loaded.engine
    try:
        asked = [encode(loaded.tokenizer, messages) for messages in conversations]
        questions = [
            Question(ids, min(max_tokens, max(engine.max_model_len - len(ids), 1)), schedule=PLAIN) for ids in asked
        ]
        with running(engine):
            answers = ask_all(engine, questions, concurrency=engine.max_num_seqs)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None
    return [Text((*ids, *answer.token_ids), len(ids)) for ids, answer in zip(asked, answers, strict=True)]

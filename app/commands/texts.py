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
    from models.sampling import SamplingParams


def written_texts(
    loaded: LoadedEngine,
    conversations: Sequence[Sequence[Message]],
    max_tokens: int,
    samplings: Sequence[SamplingParams] | None = None,  # one per conversation; None: temperature 0
) -> list[Text]:
    """What the target answers, without drafts; starts and stops the engine. Ends the program if it cannot."""
    from app.drafter_quality import Text
    from app.errors import RequestFailed
    from app.local import Question, ask_all, running
    from app.prompt_sets import encode
    from engine.request import RequestError
    from models.sampling import SamplingParams
    from scheduler.registry import PLAIN

    engine = loaded.engine
    try:
        asked = [encode(loaded.tokenizer, messages) for messages in conversations]
        questions = [
            Question(ids, min(max_tokens, max(engine.max_model_len - len(ids), 1)), sampling, schedule=PLAIN)
            for ids, sampling in zip(asked, samplings or [SamplingParams(temperature=0.0)] * len(asked), strict=True)
        ]
        with running(engine):
            answers = ask_all(engine, questions, concurrency=engine.max_num_seqs)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None
    return [Text((*ids, *answer.token_ids), len(ids)) for ids, answer in zip(asked, answers, strict=True)]

"""``graftserve corpus``: make a file of texts that prompt lookup may draft from, besides the text of the request itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import describe, fail


def corpus(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; named by --ngram-corpus later.")],
    texts: Annotated[list[Path], typer.Argument(metavar="FILE…", help="UTF-8 text files.")],
    target: Annotated[str, typer.Option(help="Whose tokens: 'embedded', a folder or a hub id.")] = "embedded",
) -> None:
    """Index texts for prompt lookup. What stands in them can be inferred from the speed of answers: no secrets."""
    from app.commands.loading import local_target
    from app.commands.serve import say
    from drafters.corpus import build_corpus
    from drafters.vocab import tokenizer_hash
    from models.loading import load_tokenizer

    try:
        tokenizer = load_tokenizer(local_target(target))
        count = build_corpus(
            texts, lambda text: tokenizer.encode(text, add_special_tokens=False), out, tokenizer_hash(tokenizer)
        )
    except (ValueError, OSError) as error:
        fail(describe(error))
    say(f"{out}: {count:,} tokens of {len(texts)} files")

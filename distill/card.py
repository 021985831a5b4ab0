"""The model card of a trained drafter: what it is for, what it learned from, how well it agrees."""

from __future__ import annotations

from typing import Any

from models.draft_files import DrafterInfo


def model_card(info: DrafterInfo, log: list[dict[str, Any]]) -> str:
    """Markdown; `log` is what `distill.train.read_log` returns."""
    training, last = info.training, log[-1]
    kind = "draft head on the target's hidden states" if info.family == "head" else "decoder that reads tokens"
    lines = [
        f"# Drafter for {info.target}",
        "",
        f"A {kind}, {info.num_layers} layer{'s' if info.num_layers > 1 else ''}, made by `graftserve distill`. It shares the "
        "target's embedding and output rows, which are not stored here, and works with this target only.",
        "",
        f"* output vocabulary: {training['draft_vocab']} of the target's ids",
        f"* parameters of its own: {training['parameters']:,}",
        f"* data: {training['data_tokens']:,} tokens that the target wrote in conversation with itself"
        + (f", and {training['extra_tokens']:,} tokens of given text" if training.get("extra_tokens") else ""),
        f"* training: {last['tokens']:,} tokens read, {last['step']:,} steps, {last['seconds'] / 60:.0f} minutes",
        "",
        f"Agreement with the target's first choice on {_held_out(training)}, given that all tokens drafted before are right:",
        "",
        "| depth | agreement | KL divergence, nats |",
        "|---|---|---|",
    ]
    for depth, (hit, nats) in enumerate(zip(last["agreement"], last["divergence"], strict=True), start=1):
        lines.append(f"| {depth} | {hit:.3f} | {nats:.2f} |")
    return "\n".join(lines) + "\n"


def _held_out(training: dict[str, Any]) -> str:
    if training.get("extra_tokens"):  # the first texts of the data are held out, and those are the given ones
        return "held-out texts, given ones first"
    return "held-out answers of the target (half of them sampled at temperature 0.7)"

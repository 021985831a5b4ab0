"""One transformers decoder that scores a ragged batch of tree segments against its own pool of rows.

Targets and drafters are the same class. The model's own modelling code runs; only the attention function is ours, and on a
CPU the modules that `models.packed` swaps. What comes back are the logits of the tokens that were asked for and, for layers
chosen at construction, the hidden states of every row that was computed (feature-conditioned drafters read them at commit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from models.attention import NAME, Segment
from models.attention_plan import make_plan
from models.kv_cache import RowPool


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Result of one forward over segments.

    `logits` is `[num_wanted, vocab]` float32, in segment order; `offsets[i]` is where segment `i`'s rows begin.
    `hidden[layer]` is `[total_tokens, hidden_size]` for each captured layer; `starts[i]` is segment `i`'s first row there.
    """

    logits: torch.Tensor
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, index: int) -> torch.Tensor:
        """Logits of segment `index`, a view `[num_wanted_of_it, vocab]`."""
        return self.logits[self.offsets[index] : self.offsets[index + 1]]

    def hidden_of(self, index: int, count: int) -> dict[int, torch.Tensor]:
        """Captured hidden states of segment `index`, which had `count` tokens: views `[count, hidden]` by layer."""
        start = self.starts[index]
        return {layer: rows[start : start + count] for layer, rows in self.hidden.items()}


class CausalLM:
    """A loaded model (see `models.loading`) with `num_rows` cache rows.

    `slots` maps the layer index that each attention module carries to a layer of the pool; a truncated model that borrows
    another model's layers has gaps in it. `num_tokens` is how many token ids the tokenizer knows: logits of padding ids
    beyond it come out as -inf, so that no padding id can ever be drafted or emitted.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_rows: int,
        num_tokens: int | None = None,
        slots: dict[int, int] | None = None,
        capture: Sequence[int] = (),
    ) -> None:
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.model = model
        self.config = config
        self.max_positions = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.num_tokens = min(num_tokens or self.vocab_size, self.vocab_size)
        self.slots = slots if slots is not None else {i: i for i in range(config.num_hidden_layers)}
        heads = config.num_attention_heads
        parameter = next(model.parameters())
        self.device = parameter.device
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._group = heads // kv_heads
        self.pool = RowPool(
            len(self.slots),
            num_rows,
            kv_heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=parameter.dtype,
            device=self.device,
        )
        self.num_forwards = 0
        self.num_rows_forwarded = 0
        self._captured: dict[int, torch.Tensor] = {}
        model.config._attn_implementation = NAME  # type: ignore[union-attr, assignment]
        config._attn_implementation = NAME
        for layer in capture:
            self._capture(layer)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Scores:
        """Run all segments as one `[1, total]` forward. Keys and values land in each segment's `rows`."""
        assert segments, "an empty batch"
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        offsets, starts = [0], []
        for segment in segments:
            assert len(segment.tokens) == len(segment.positions) == len(segment.rows), "ragged segment"
            start = len(tokens)
            starts.append(start)
            tokens.extend(segment.tokens)
            positions.extend(segment.positions)
            wanted.extend(start + index for index in segment.wanted)
            offsets.append(len(wanted))
        # The model has no way to ask for no logits at all; one row is the cheapest question.
        keep = torch.tensor(wanted or [0], dtype=torch.int64, device=self.device)
        self._captured.clear()
        output = self.model(
            input_ids=torch.tensor([tokens], dtype=torch.int64, device=self.device),
            position_ids=torch.tensor([positions], dtype=torch.int64, device=self.device),
            use_cache=False,
            logits_to_keep=keep,
            ragged_plan=make_plan(segments, self.pool, self.slots, union=self.device.type != "cpu", group=self._group),
        )
        self.num_forwards += 1
        self.num_rows_forwarded += len(tokens)
        logits = output.logits[0, : len(wanted)].float()
        if self.num_tokens < logits.shape[-1]:
            logits[:, self.num_tokens :] = float("-inf")
        return Scores(logits, tuple(offsets), tuple(starts), dict(self._captured))

    def _capture(self, layer: int) -> None:
        layers = decoder_layers(self.model)
        if not 0 <= layer < len(layers):
            raise ValueError(f"capture: layer {layer} of a model with {len(layers)} layers")

        def remember(_module: nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            self._captured[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        layers[layer].register_forward_hook(remember)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a transformers causal LM; ValueError if the model is not built that way."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    for name in ("layers", "h", "blocks"):
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ValueError(f"{type(model).__name__} keeps its decoder layers in no known place")

"""Drafters as folders: what is stored comes back, what is damaged or made for another target is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from app import drafting
from drafters.base import Drafter, DraftRequest
from drafters.vocab import tokenizer_hash
from models.adapted import adapt
from models.borrowed_layers import take_last_layers
from models.causal_lm import CausalLM
from models.draft_files import DrafterInfo, is_drafter_folder, load_drafter, read_info, save_drafter
from models.draft_head import DraftHead
from models.loading import Placement
from models.refusal import UnservableModel
from models.shared_lm import output_rows, shared_lm
from models.toy import tiny_causal_lm
from tests.distill_world import HIDDEN, TOKENIZER, VOCAB, toy_target
from tests.toy_heads import tail_head, toy_head
from tree.growth import Answer, Ask
from tree.tree import TokenTree

HASH = tokenizer_hash(TOKENIZER)
CPU = Placement(torch.device("cpu"), "fp32")
KINDS = ("tail", "adapted tail", "own head", "lm")
NUM_DRAFT = 150


def make(kind: str) -> tuple[DrafterInfo, nn.Module, torch.Tensor]:
    """A random drafter of `kind` for the toy target; its ids are in no order."""
    target = toy_target()
    if kind == "lm":
        ids = torch.tensor(random.Random(2).sample(range(VOCAB), NUM_DRAFT))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return DrafterInfo("lm", "toy", HASH, 2, {"steps": 3}), shared_lm(target, 2, ids), ids
    if kind == "own head":
        head = toy_head(target, num_draft=NUM_DRAFT, layers=(2, 4))
    else:
        rank = 4 if kind == "adapted tail" else 0
        head = tail_head(target, num_layers=3, num_draft=NUM_DRAFT, layers=[2], rank=rank)
        if rank:
            take_last_layers(head, target)
            adapt(head.layers, rank, seed=1)
            with torch.no_grad():
                for name, weight in head.named_parameters():
                    if name.endswith(".up"):
                        weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
    head.output.weight = nn.Parameter(output_rows(target)[head.id_map].clone())
    return DrafterInfo("head", "toy", HASH, head.config.num_layers, {"steps": 3}, head.config), head, head.id_map


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("drafter") / kind.replace(" ", "-")
        save_drafter(folder, *make(kind))
        return folder

    return save


def load(folder: Path, *, target: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    return load_drafter(folder, target or toy_target(), **{"tokenizer_hash": HASH, "dtype": torch.float32, **options})


def logits_of(module: nn.Module) -> torch.Tensor:
    """What a drafter says of some fixed inputs."""
    generator = torch.Generator().manual_seed(3)
    if not isinstance(module, DraftHead):
        return module(torch.randint(0, VOCAB, (2, 9), generator=generator)).logits  # type: ignore[no-any-return]

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return seen.transpose(1, 2).flatten(2)

    features = torch.randn(2, 9, len(module.config.target_layers), HIDDEN, generator=generator)
    embeddings = torch.randn(2, 9, HIDDEN, generator=generator)
    return module.read_out(module.extend(module.fuse(features), embeddings, torch.arange(9)[None], attend))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_stored_comes_back(kind: str, saved: Callable[[str], Path]) -> None:
    """Up to half precision; and what is not stored is the target's own."""
    info, module, ids = make(kind)
    folder = saved(kind)
    assert is_drafter_folder(folder) and read_info(folder) == info
    stored = load_file(folder / "model.safetensors")
    assert not [name for name in stored if "embed_tokens" in name or name == "output.weight" or "lm_head" in name]
    again, their_ids = load(folder)
    assert their_ids.tolist() == ids.tolist(), "the id map, in its order"
    wanted, found = logits_of(module), logits_of(again)
    assert float((found - wanted).abs().max()) < 0.05 * float(wanted.std()), "as it was stored"
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    rows = again.output.weight if isinstance(again, DraftHead) else again.get_output_embeddings().weight  # type: ignore[operator]
    assert torch.equal(rows, output_rows(toy_target())[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_frequencies_stay_exact_in_half_precision(kind: str, saved: Callable[[str], Path]) -> None:
    """Rounded to eight bits they turn the thousandth token by a whole radian, on accelerators only."""
    exact = {name: b for name, b in load(saved(kind))[0].named_buffers() if name.endswith("inv_freq")}
    halved, _ = load(saved(kind), dtype=torch.bfloat16)
    assert exact and all(p.dtype == torch.bfloat16 for p in halved.parameters())
    found = dict(halved.named_buffers())
    assert all(torch.equal(found[name], exact[name]) and found[name].dtype == torch.float32 for name in exact)


def drafter_of(folder: Path) -> tuple[Drafter, CausalLM, int]:
    """By the way that the server takes; also the target, and the number of layers whose states the drafter hears."""
    target = toy_target()
    loaded = drafting.load(str(folder), "medium", target, TOKENIZER, CPU)
    assert loaded is not None
    served = CausalLM(target, num_rows=100, num_tokens=VOCAB, capture=loaded.layers)
    drafter = drafting.make("medium", str(folder), loaded, served, CPU, num_rows=300, max_num_seqs=2)
    assert drafter is not None
    return drafter, served, len(loaded.layers)


@pytest.fixture(scope="module")
def drafters(saved: Callable[[str], Path]) -> dict[str, tuple[Drafter, CausalLM, int]]:
    return {kind: drafter_of(saved(kind)) for kind in KINDS}


@given(st.sampled_from(KINDS), st.integers(0, 1000), st.integers(2, 12), st.integers(1, 8), st.integers(1, 300), st.booleans())
def test_no_id_outside_the_map_is_ever_proposed(
    drafters: dict[str, Any], kind: str, seed: int, num_text: int, num_nodes: int, width: int, rescore: bool
) -> None:
    """Whatever stands in the text and in the tree, tokens without an entry included: those get no probability."""
    drafter, served, num_layers = drafters[kind]
    known = set(make_ids(kind))
    rng = random.Random(seed)
    context = [rng.randrange(VOCAB) for _ in range(num_text)]
    tree = TokenTree(context[-1])
    for token in rng.sample(range(VOCAB), num_nodes):
        tree.add(rng.randrange(len(tree)), token, -1.0, "ngram")
    asked = tuple(sorted(rng.sample(range(len(tree)), rng.randint(1, len(tree)))))
    rows = served.pool.allocate(num_text - 1)
    state = drafter.open()
    if num_layers:
        hidden = torch.randn(num_text - 1, num_layers, HIDDEN, generator=torch.Generator().manual_seed(seed))
        drafter.observe(state, 0, hidden)
    request = DraftRequest(state, context, tree, Ask(asked, width, rescore), target_rows=np.array(rows))
    (answer,) = drafter.propose([request])
    drafter.close(state)
    served.pool.release(rows)
    assert isinstance(answer, Answer)
    assert set(answer.candidates) == set(asked)
    for candidates in answer.candidates.values():
        assert len(candidates.tokens) == min(width, NUM_DRAFT)
        assert set(candidates.tokens) <= known
    for node, lp in answer.rescored.items():
        assert (lp > float("-inf")) == (tree.token[node] in known), f"node {node}, token {tree.token[node]}"


@cache
def make_ids(kind: str) -> tuple[int, ...]:
    return tuple(make(kind)[2].tolist())


def damaged(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    copy.mkdir()
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors")
    (copy / "config.json").write_text((folder / "config.json").read_text())
    return copy


WEIGHT = {
    "tail": "layers.1.o_proj.weight",
    "adapted tail": "layers.1.o_proj.up",
    "own head": "embed_proj.weight",
    "lm": "model.layers.1.mlp.up_proj.weight",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["nan", "inf", "missing", "extra", "misshaped"])
def test_a_wrong_weight_is_refused_by_name(what: str, kind: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """With one weight lost or random the drafter would be worse, and nothing would say so."""
    name = WEIGHT[kind]

    def change(weights: dict[str, torch.Tensor]) -> None:
        match what:
            case "missing":
                del weights[name]
            case "extra":
                weights["layers.99.weight"] = torch.zeros(2)
            case "misshaped":
                weights[name] = weights[name][:-1].contiguous()
            case _:
                weights[name][0, 0] = float(what)

    named = {"nan": "holds NaN or infinite", "inf": "holds NaN or infinite", "missing": "is missing"}
    named |= {"extra": "unknown weight layers.99.weight", "misshaped": "expected"}
    folder = damaged(saved(kind), tmp_path / "copy", change)
    with pytest.raises(UnservableModel, match=named[what]) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert what == "extra" or name in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (None, "no id map"),
        ([[1, 2]], "no id map"),
        ([0.5, 1.5], "no id map"),
        ([0] * NUM_DRAFT, "one id twice"),
        ([*range(NUM_DRAFT - 1), VOCAB], "outside the target's 259"),
        ([*range(1, NUM_DRAFT), -1], "outside the target's 259"),
    ],
)
@pytest.mark.parametrize("kind", ["tail", "lm"])
def test_a_wrong_id_map_is_refused(kind: str, ids: Any, named: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """It would propose tokens that mean something else, or that do not exist."""
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["id_map"]
        if ids is not None:
            weights["id_map"] = torch.tensor(ids)

    with pytest.raises(UnservableModel, match=named):
        load(damaged(saved(kind), tmp_path / "copy", change))


def test_a_map_shorter_than_the_head_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Its last output columns would stand for no token."""
    folder = damaged(saved("tail"), tmp_path / "copy", lambda weights: weights.update(id_map=torch.tensor([1, 2, 3])))
    with pytest.raises(UnservableModel, match="sizes are not those of the target"):
        load(folder)


@pytest.mark.parametrize("kind", ["tail", "lm"])
def test_a_file_that_is_cut_off_is_refused(kind: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """As after a copy that ran out of space."""
    folder = damaged(saved(kind), tmp_path / "copy", lambda weights: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnservableModel, match="cannot read model.safetensors"):
        load(folder)
    file.unlink()
    with pytest.raises(UnservableModel, match="cannot read model.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("graftserve_drafter", 2, "format 2, this version reads 1"),
        ("family", "tree", "family 'tree'"),
        ("num_layers", "many", "config.json"),
        ("head", None, "config.json"),
        ("head.num_heads", "four", "config.json"),
        ("head.head_dim", None, "config.json"),
        ("head.num_experts", 8, "unknown key 'num_experts'"),
        ("head.target_layers", [2, 6], "reads layer 6, the target has 6"),
        ("head.target_layers", [-1], "reads layer -1, the target has 6"),
        ("head.target_hidden_size", 64, "sizes are not those of the target"),
        ("head.num_layers", 7, "the last 7 layers, the target has 6|weight layers.3"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    key: str, value: Any, named: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """One line that names the folder, not a traceback out of somebody's constructor."""
    for kind in ("tail", "adapted tail"):
        folder = damaged(saved(kind), tmp_path / kind, lambda weights: None)
        config = json.loads((folder / "config.json").read_text())
        inner = config["head"] if key.startswith("head.") else config
        inner[key.removeprefix("head.")] = value
        (folder / "config.json").write_text(json.dumps(config))
        assert is_drafter_folder(folder)
        with pytest.raises(UnservableModel, match=named) as caught:
            load(folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_drafter_of_another_target_is_refused(kind: str, saved: Callable[[str], Path]) -> None:
    """It would run without an error and be right only by chance."""
    with pytest.raises(UnservableModel, match="trained for toy, whose tokenizer is not the target's"):
        load(saved(kind), tokenizer_hash="0" * 64)
    wider = tiny_causal_lm("llama", VOCAB, 1, layers=6, hidden=64)
    with pytest.raises(UnservableModel, match="sizes are not those|expected"):
        load(saved(kind), target=wider)
    if kind != "own head":
        shallower = tiny_causal_lm("llama", VOCAB, 1, layers=1, hidden=HIDDEN)
        with pytest.raises(UnservableModel, match="the target has 1|of a model with 1"):
            load(saved(kind), target=shallower)


def test_weights_that_half_precision_cannot_hold_are_not_stored(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """They would be stored as infinite and refused at load; the drafter that was there before must stay."""
    folder = damaged(saved("tail"), tmp_path / "copy", lambda weights: None)
    before = (folder / "model.safetensors").read_bytes()
    info, module, ids = make("tail")
    assert isinstance(module, DraftHead)
    module.norm.data[3] = 1e6
    with pytest.raises(ArithmeticError, match="weight norm holds numbers that half precision cannot"):
        save_drafter(folder, info, module, ids)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_other_folders_are_no_drafters(tmp_path: Path) -> None:
    """Models in transformers format lie in folders with a config.json too."""
    assert not is_drafter_folder(tmp_path) and not is_drafter_folder(tmp_path / "nowhere")
    for content in (b'{"architectures": ["LlamaForCausalLM"]}', b"[1]", b"{", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content)
        assert not is_drafter_folder(tmp_path)

"""From names to drafters: every kind of name stands for what the settings' help says, and a wrong one costs one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import PreTrainedModel

from app import drafting
from app.config import EMBEDDED
from app.drafting import LoadedDrafter, load, make, resolve
from drafters.base import Drafter
from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from drafters.tail import TailDrafter
from drafters.vocab import VocabMismatch, tokenizer_hash
from models.causal_lm import CausalLM
from models.draft_files import DrafterInfo, save_drafter
from models.loading import ModelNotFound, Placement
from models.refusal import UnservableModel
from models.shared_lm import shared_lm
from models.toy import byte_tokenizer, tiny_causal_lm
from tests.distill_world import TOKENIZER, VOCAB
from tests.toy_heads import checkpoint_tensors, tail_head, toy_head, write_release, write_speculators

CPU = Placement(torch.device("cpu"), "fp32")
LAYERS = 8


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Loading a drafter leaves it as it is."""
    return tiny_causal_lm("llama", VOCAB, 1, layers=LAYERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target: PreTrainedModel) -> dict[str, Path]:
    """One of each kind that can be named."""
    root = tmp_path_factory.mktemp("drafters")
    found = {name: root / name for name in ("model", "tail", "own head", "lm", "release", "speculators")}
    tiny_causal_lm("llama", VOCAB, 2).save_pretrained(found["model"])
    TOKENIZER.save_pretrained(found["model"])
    identity = tokenizer_hash(TOKENIZER)
    for name, head in (("tail", tail_head(target, num_layers=2)), ("own head", toy_head(target, num_draft=99))):
        info = DrafterInfo("head", "toy", identity, head.config.num_layers, {}, head.config)
        save_drafter(found[name], info, head, head.id_map)
    ids = torch.arange(30, 130)
    save_drafter(found["lm"], DrafterInfo("lm", "toy", identity, 2, {}), shared_lm(target, 2, ids), ids)
    write_release(found["release"], target, checkpoint_tensors(target))
    write_speculators(found["speculators"], target, checkpoint_tensors(target))
    return found


def load_by(name: str | Path, target: PreTrainedModel, role: str = "medium") -> LoadedDrafter | None:
    return load(str(name), role, target, TOKENIZER, CPU)


def drafter_by(name: str | Path, target: PreTrainedModel) -> Drafter | None:
    loaded = load_by(name, target)
    twin = tiny_causal_lm("llama", VOCAB, 1, layers=LAYERS)
    served = CausalLM(twin, num_rows=200, num_tokens=VOCAB, capture=() if loaded is None else loaded.layers)
    return make("medium", str(name), loaded, served, CPU, num_rows=50, max_num_seqs=2)


@pytest.mark.parametrize(
    ("name", "role", "of", "stands_for"),
    [
        ("auto", "small", EMBEDDED, "pretrained"),
        ("auto", "medium", EMBEDDED, "truncated"),  # none is shipped for this role
        ("auto", "small", "owner/model", "ngram"),
        ("auto", "medium", "/models/some", "truncated"),
        ("ngram", "medium", EMBEDDED, "ngram"),
        ("truncated:3+1", "small", EMBEDDED, "truncated:3+1"),
        ("owner/drafter", "small", "owner/model", "owner/drafter"),
        (None, "medium", EMBEDDED, None),
    ],
)
def test_auto_is_decided_by_role_and_target(
    name: str | None, role: str, of: str, stands_for: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is shipped belongs to the embedded target; for others it would be refused at start."""
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(drafting, "SHIPPED", tmp_path)
    assert resolve(name, role, of) == stands_for


@pytest.mark.parametrize("name", ["ngram", "truncated", "truncated:2+1"])
def test_what_has_no_model_of_its_own_loads_none(name: str, target: PreTrainedModel) -> None:
    """Loading one would look for a folder of that name."""
    assert load_by(name, target) is None
    made = drafter_by(name, target)
    assert (made is None) == (name == "ngram")
    if isinstance(made, CausalLMDrafter):
        assert len(made.lm.slots) == (3 if ":" in name else 4 + 2), "layers of the target"


@pytest.mark.parametrize(
    ("kind", "drafter", "layers", "num_ids", "row_bytes"),
    [
        ("model", CausalLMDrafter, (), None, 2 * 2 * 2 * 8 * 4),
        ("lm", CausalLMDrafter, (), 100, 2 * 2 * 2 * 8 * 4),
        ("tail", TailDrafter, (0, 1, 5), VOCAB, 256),
        ("own head", HeadDrafter, (0, 1, 2), 99, 2 * 1 * 2 * 8 * 4),
        ("release", HeadDrafter, (1, 3, 4), None, 2 * 1 * 2 * 8 * 4),
        ("speculators", HeadDrafter, (1, 3, 4), None, 2 * 1 * 2 * 8 * 4),
    ],
)
def test_every_kind_of_folder_becomes_its_kind_of_drafter(
    kind: str,
    drafter: type,
    layers: tuple[int, ...],
    num_ids: int | None,
    row_bytes: int,
    folders: dict[str, Path],
    target: PreTrainedModel,
) -> None:
    """With the layers it listens to and the memory it takes, by which the server is laid out."""
    loaded = load_by(folders[kind], target)
    assert loaded is not None
    assert (loaded.name, loaded.layers, loaded.row_bytes(4)) == (str(folders[kind]), layers, row_bytes)
    assert num_ids == (None if loaded.ids is None else len(loaded.ids))
    made: Any = drafter_by(folders[kind], target)
    assert type(made) is drafter and (made.name, made.layers) == ("medium", layers)
    assert made.lm.pool.num_free == (1024 if kind == "tail" else 50), "a tail head has rows for trees only"


def test_the_shipped_drafter_is_loaded_by_its_role(
    folders: dict[str, Path], target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where none is shipped one line says so: no model of that name is looked for on the hub."""
    (tmp_path / "small").symlink_to(folders["tail"])
    monkeypatch.setattr(drafting, "SHIPPED", tmp_path)
    loaded = load_by("pretrained", target, "small")
    assert loaded is not None and loaded.layers == (0, 1, 5)
    with pytest.raises(ValueError, match="medium = 'pretrained': no drafter of this role is shipped"):
        load_by("pretrained", target, "medium")


def into_hub_cache(folder: Path, cache: Path, name: str) -> None:
    """Lay a folder out as the hub client does."""
    place, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots").mkdir()
    (place / "snapshots" / commit).symlink_to(folder)


def test_an_eagle3_head_can_be_named_by_its_hub_id(
    folders: dict[str, Path], target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its authors publish it there; as a plain model it would be refused for weights that are missing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    into_hub_cache(folders["release"], tmp_path, "owner/eagle3-head")
    into_hub_cache(folders["model"], tmp_path, "owner/model")
    loaded = load_by("owner/eagle3-head", target)
    assert loaded is not None and loaded.eagle3 is not None and loaded.layers == (1, 3, 4)
    assert not drafting._names_eagle3("owner/model"), "negative control"
    with pytest.raises(ModelNotFound, match="owner/unknown"):
        load_by("owner/unknown", target)


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("truncated:x", ValueError, "medium = 'truncated:x': expected 'truncated' or 'truncated:FIRST[+]LAST'"),
        ("truncated:8+8", ValueError, "8"),
        ("/no/such/folder", ModelNotFound, "/no/such/folder: no such folder"),
        ("a/b/c", ModelNotFound, "a/b/c: no such folder"),
        ("not an id", ModelNotFound, "not an id"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, error: type[Exception], named: str, target: PreTrainedModel) -> None:
    """In one line, before anything is served."""
    with pytest.raises(error, match=named) as caught:
        drafter_by(name, target)
    assert "\n" not in str(caught.value)


def test_a_file_or_an_unfit_folder_is_refused(
    folders: dict[str, Path], target: PreTrainedModel, tmp_path: Path
) -> None:
    """Each by the check of its own kind."""
    with pytest.raises(ModelNotFound, match="config.json is a file"):
        load_by(folders["tail"] / "config.json", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="empty"):
        load_by(tmp_path / "empty", target)
    other = byte_tokenizer([(b"a", b"b")])
    with pytest.raises(UnservableModel, match="tokenizer is not the target's"):
        load(str(folders["tail"]), "medium", target, other, CPU)
    with pytest.raises(VocabMismatch):
        load(str(folders["model"]), "medium", target, other, CPU)
    shallow = tiny_causal_lm("llama", VOCAB, 1, layers=2)
    with pytest.raises(UnservableModel, match="this one has 2"):
        load(str(folders["release"]), "medium", shallow, TOKENIZER, CPU)

"""Published EAGLE-3 heads: read from both formats, drafting as the oracle says, refused for a reason where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from drafters.base import DraftRequest
from drafters.eagle3 import load_eagle3
from drafters.vocab import VocabMismatch
from models import toy
from models.eagle3 import read_eagle3, read_id_map
from models.eagle3_config import is_eagle3, read_head_config
from models.loading import ModelNotFound, Placement
from models.refusal import UnservableModel
from tests.engine_world import World, greedy_reference
from tests.plain_draft_head import PlainHead, target_states
from tests.toy_heads import (
    EPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LLAMA3,
    Tensors,
    checkpoint_tensors,
    write_release,
    write_speculators,
)
from tree.growth import Answer, Ask
from tree.tree import TokenTree

VOCAB = 41
PLACEMENT = Placement(torch.device("cpu"), "fp32")
LISTENED = (1, 3, 4)  # outputs of layers 1, n // 2 - 1 and n - 4 of 8: what enters layers 2, 4 and 5


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return toy.tiny_causal_lm("llama", VOCAB, 3, layers=8)


def oracle(target: PreTrainedModel, tensors: Tensors, **options: Any) -> PlainHead:
    """The head by its published tensors, which it takes as they are."""
    weights = {name: weight for name, weight in tensors.items() if name not in ("d2t", "t2d", "embed_tokens.weight")}
    embedding = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist() if "d2t" in tensors else list(range(VOCAB))
    options = {"layers": LISTENED, "rope": {"rope_theta": 5000.0}, **options}
    return PlainHead(weights, embedding, ids, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, eps=EPS, **options)


def check_drafts(folder: Path, target: PreTrainedModel, plain: PlainHead, length: int = 12) -> None:
    """Three asks, the later ones below drafted nodes, against the oracle."""
    drafter = load_eagle3(
        "medium", folder, target=target, tokenizer=toy.byte_tokenizer(), placement=PLACEMENT, num_rows=200
    )
    assert drafter.layers == tuple(plain.layers)
    tokens = [(7 * i + 2) % VOCAB for i in range(length)]
    state, tree = drafter.open(), TokenTree(tokens[-1])
    drafter.observe(state, 0, target_states(target, tokens[:-1], plain.layers))
    nodes: tuple[int, ...] = (0,)
    for _ in range(3):
        answer = drafter.propose([DraftRequest(state, tokens, tree, Ask(nodes, 3))])[0]
        assert isinstance(answer, Answer)
        made = []
        for node in nodes:
            row = plain.row(target, tokens, tree.path_tokens(node))
            want = sorted(row, key=lambda token: -row[token])[:3]
            found = answer.candidates[node]
            assert found.tokens == tuple(want)
            assert found.lps == pytest.approx([row[token] for token in want], abs=2e-4)
            made += [tree.add(node, token, lp, "medium") for token, lp in zip(found.tokens, found.lps, strict=True)]
        nodes = (made[0], made[-1])
    drafter.close(state)


@pytest.mark.parametrize("pickled", [True, False])
def test_a_release_drafts_as_the_oracle_says(tmp_path: Path, target: PreTrainedModel, pickled: bool) -> None:
    """One wrong name or order of weights would leave a head that drafts noise and loads without a word."""
    tensors = checkpoint_tensors(target)
    check_drafts(write_release(tmp_path, target, tensors, pickled=pickled), target, oracle(target, tensors))


def test_a_speculators_head_drafts_as_the_oracle_says(tmp_path: Path, target: PreTrainedModel) -> None:
    """Here the normed feature starts the residual stream, as the config says."""
    tensors = checkpoint_tensors(target, seed=1)
    folder = write_speculators(tmp_path, target, tensors)
    assert read_eagle3(folder, target.config).verifier == "toys/target"
    check_drafts(folder, target, oracle(target, tensors, norm_before_residual=True))


def test_norm_before_residual_matters(tmp_path: Path, target: PreTrainedModel) -> None:
    """Negative control: an oracle with the other convention must not agree."""
    tensors = checkpoint_tensors(target, seed=1)
    with pytest.raises(AssertionError):
        check_drafts(write_speculators(tmp_path, target, tensors), target, oracle(target, tensors))


def test_layer_ids_count_what_enters_or_what_leaves(tmp_path: Path, target: PreTrainedModel) -> None:
    """The two places for them in a config differ by one: a head that listens one layer off is worse, silently."""
    tensors = checkpoint_tensors(target, seed=2)
    plain = oracle(target, tensors, layers=(0, 2, 5), norm_before_residual=True)
    check_drafts(write_speculators(tmp_path / "s", target, tensors, eagle_aux_hidden_state_layer_ids=[1, 3, 6]), target, plain)
    folder = write_release(tmp_path / "r", target, tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]})
    check_drafts(folder, target, oracle(target, tensors, layers=(0, 2, 5)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5000.0}},
    ],
)
def test_scaled_rotations_are_the_configs(tmp_path: Path, target: PreTrainedModel, rope: dict[str, Any]) -> None:
    """Heads for long-context targets carry the target's scaling, by the old keys or the new one."""
    tensors = checkpoint_tensors(target, seed=3)
    wanted = {"rope_type": "linear", "rope_theta": 5000.0, **(rope.get("rope_scaling") or rope["rope_parameters"])}
    folder = write_release(tmp_path / "r", target, tensors, **rope)
    check_drafts(folder, target, oracle(target, tensors, rope=wanted), length=70)  # for stretched rotations to show
    with pytest.raises(AssertionError):  # negative control: unscaled rotations do not agree
        check_drafts(folder, target, oracle(target, tensors), length=70)


def test_several_layers_and_the_norms_of_later_heads(tmp_path: Path, target: PreTrainedModel) -> None:
    """Only the first layer sees the embedding; norms before fc, per layer or joint, and after the head are the config's."""
    hidden, generator = target.config.hidden_size, torch.Generator().manual_seed(5)
    deep = checkpoint_tensors(target, seed=4, num_layers=2)
    folder = write_speculators(tmp_path / "deep", target, deep, layer={"num_hidden_layers": 2}, norm_output=True)
    check_drafts(folder, target, oracle(target, deep, norm_before_residual=True, norm_fed_back=True))
    each = {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(hidden, generator=generator) for i in range(3)}
    folder = write_speculators(tmp_path / "each", target, {**deep, **each}, layer={"num_hidden_layers": 2}, fc_norm=True)
    check_drafts(folder, target, oracle(target, {**deep, **each}, norm_before_residual=True, norm_each=True))
    joint = {**checkpoint_tensors(target), "input_norm.weight": 1 + 0.3 * torch.randn(3 * hidden, generator=generator)}
    folder = write_speculators(tmp_path / "joint", target, joint, norm_before_fc=True, norm_before_residual=False)
    check_drafts(folder, target, oracle(target, joint, norm_together=True))


def test_a_head_may_bring_its_own_embedding_and_a_full_vocabulary(tmp_path: Path, target: PreTrainedModel) -> None:
    """Without d2t the draft ids are the target's; a copy of the target's embedding is not kept twice."""
    tensors = checkpoint_tensors(target, num_draft=VOCAB)
    del tensors["d2t"], tensors["t2d"]
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    folder = write_speculators(tmp_path / "own", target, tensors, norm_before_residual=False)
    check_drafts(folder, target, oracle(target, tensors))
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    folder = write_speculators(tmp_path / "copy", target, tensors, norm_before_residual=False)
    drafter = load_eagle3("small", folder, target=target, tokenizer=toy.byte_tokenizer(), placement=PLACEMENT, num_rows=9)
    assert drafter.lm._embedding.data_ptr() == target.get_input_embeddings().weight.data_ptr()


def test_in_the_engine_the_text_stays_the_targets(tmp_path: Path, target: PreTrainedModel) -> None:
    """From a folder to answers: the target is wrapped with the layers that the drafter names."""
    folder = write_release(tmp_path, target, checkpoint_tensors(target))
    drafter = load_eagle3(
        "medium", folder, target=target, tokenizer=toy.byte_tokenizer(), placement=PLACEMENT, num_rows=900
    )
    with World(target, medium=drafter) as world:
        replies = world.run_all([[1, 2, 3], [9]], "treegraft", max_tokens=12)
    assert [reply.tokens for reply in replies] == [greedy_reference(target, prompt, 12) for prompt in ([1, 2, 3], [9])]
    assert all(reply.stats.drafters["medium"].drafted and not reply.stats.halts for reply in replies)


def test_the_released_weights_are_not_changed(tmp_path: Path, target: PreTrainedModel) -> None:
    """Half-precision checkpoints are read into float32 without loss and keep their meaning."""
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in checkpoint_tensors(target).items()}
    head = read_eagle3(write_release(tmp_path, target, tensors), target.config).head
    assert head.norm.dtype == torch.float32
    assert torch.equal(head.output.weight, tensors["lm_head.weight"].float())
    assert head.id_map.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_default_layers_are_those_of_the_releases(target: PreTrainedModel) -> None:
    """What enters layers 2, n // 2 and n - 3; for 32 layers that is 2, 16 and 29."""
    values = {"draft_vocab_size": 9, "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4}

    def layers(num: int) -> tuple[int, ...]:
        return read_head_config(
            values, "x", num_target_layers=num, target_hidden_size=32, target_vocab_size=VOCAB
        ).target_layers

    assert layers(32) == (1, 15, 28)
    assert layers(7) == (1, 2, 3)
    with pytest.raises(UnservableModel, match="this one has 6"):
        layers(6)


@pytest.mark.parametrize("key", sorted(checkpoint_tensors(toy.tiny_causal_lm("llama", VOCAB, 3, layers=1))))
def test_every_weight_that_is_missing_is_named(tmp_path: Path, target: PreTrainedModel, key: str) -> None:
    """A weight left at its initial value would make a drafter of noise."""
    tensors = checkpoint_tensors(target)
    draft_vocab_size = len(tensors["d2t"])
    del tensors[key]
    if key == "t2d":  # says the same as d2t
        read_eagle3(write_speculators(tmp_path, target, tensors), target.config)
        return
    folder = write_speculators(tmp_path, target, tensors, draft_vocab_size=draft_vocab_size)
    with pytest.raises(UnservableModel, match=f"{key} is missing"):
        read_eagle3(folder, target.config)


def _spoiled(tensors: Tensors, **changes: Any) -> Tensors:
    return {**tensors, **{name.replace("__", "."): change for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc__weight": torch.zeros(32, 64)}, r"fc.weight is \(32, 64\), expected \(32, 96\)"),
        ({"norm__weight": torch.full((32,), torch.nan)}, "norm.weight hold NaN or infinite"),
        ({"lm_head__weight": torch.full((20, 32), torch.inf)}, "lm_head.weight hold NaN or infinite"),
        ({"d2t": torch.zeros(19, dtype=torch.int64)}, r"d2t is \(19,\) of torch.int64, expected \(20,\)"),
        ({"d2t": torch.zeros(20)}, "d2t is .* of torch.float32"),
        ({"d2t": torch.full((20,), 30)}, "draft id 11 to 41, outside the target's vocabulary of 41"),
        ({"d2t": torch.full((20,), -1)}, "draft id 0 to -1, outside"),
        ({"d2t": torch.tensor([0] * 19 + [-1])}, "draft ids 18 and 19 both to 18"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d and d2t name different tokens"),
        ({"layers__0__self_attn__q_norm__weight": torch.ones(8)}, "not served, the first is layers.0.self_attn.q_norm.weight"),
        ({"embed_tokens__weight": torch.zeros(VOCAB, 16)}, r"embed_tokens.weight is \(41, 16\), expected \(41, 32\)"),
        ({"embed_tokens__weight": torch.zeros(9, 32)}, r"embed_tokens.weight is \(9, 32\), expected \(41, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, target: PreTrainedModel, change: dict[str, torch.Tensor], message: str
) -> None:
    """Each would be a wrong draft or a failed pass later; the message says which tensor and why."""
    tensors = _spoiled(checkpoint_tensors(target), **change)
    folder = write_speculators(tmp_path, target, tensors)
    with pytest.raises(UnservableModel, match=message) as caught:
        read_eagle3(folder, target.config)
    assert str(folder) in str(caught.value) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "made for a target of hidden size 64, this one's is 32"),
        ({"target_hidden_size": 48}, "made for a target of hidden size 48, this one's is 32"),
        ({"hidden_size": 16, "target_hidden_size": 32}, r"fc.weight is \(32, 96\), expected \(16, 96\)"),
        ({"hidden_size": "many"}, "config.json: invalid literal"),
        ({"hidden_size": None}, "config.json gives no hidden_size"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"layer_types": ["sliding_attention"]}, "'sliding_attention' are not served"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' depends on the batch's longest"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json: "),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "what leaves layer -1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "what leaves layer 8"),
        ({"speculators_model_type": "dflash"}, "dflash is not an EAGLE-3 draft head"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 30}, r"lm_head.weight is \(20, 32\), expected \(30, 32\)"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, target: PreTrainedModel, change: dict[str, Any], message: str
) -> None:
    """What the arithmetic here does not cover, or what was made for another target."""
    folder = write_release(tmp_path, target, checkpoint_tensors(target), **change)
    with pytest.raises(UnservableModel, match=message):
        read_eagle3(folder, target.config)


def test_what_is_no_head_is_told_from_one(target: PreTrainedModel) -> None:
    """A setting takes a model or a head; its config decides which."""
    assert is_eagle3({"architectures": ["LlamaForCausalLMEagle3"]})
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert is_eagle3({"speculators_model_type": "eagle3"})
    assert not is_eagle3({"speculators_model_type": "eagle"})
    assert not is_eagle3(target.config.to_dict())


def test_folders_that_cannot_be_read_say_why(tmp_path: Path, target: PreTrainedModel) -> None:
    """No traceback of a library, one line that names the file."""
    tensors = checkpoint_tensors(target)

    def refused(source: str | Path, message: str) -> None:
        with pytest.raises(ModelNotFound, match=message):
            read_eagle3(source, target.config)

    refused(tmp_path / "nowhere", "no such folder")
    refused("owner/name", "owner/name: ")
    refused("not a repository name", "not a repository name: ")
    refused(tmp_path, "config.json: ")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json is not an object")
    folder = write_release(tmp_path / "r", target, tensors)
    weights = folder / "pytorch_model.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(folder, "pytorch_model.bin: ")
    weights.unlink()
    refused(folder, "neither")
    folder = write_speculators(tmp_path / "s", target, tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:500])
    refused(folder, "model.safetensors: ")


class _Intruder:
    def __reduce__(self) -> Any:
        return (print, ("a checkpoint ran code",))


def test_a_pickle_runs_no_code(tmp_path: Path, target: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """pytorch_model.bin is a pickle from the internet."""
    folder = write_release(tmp_path, target, checkpoint_tensors(target))
    torch.save({"fc.weight": _Intruder()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound):
        read_eagle3(folder, target.config)
    assert "ran code" not in capsys.readouterr().out


def test_several_files_make_one_head(tmp_path: Path, target: PreTrainedModel) -> None:
    """Large heads are split."""
    tensors = checkpoint_tensors(target)
    folder = write_speculators(tmp_path, target, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, folder / "model-00002-of-00002.safetensors")
    read_eagle3(folder, target.config)


def test_a_tokenizer_beside_the_head_must_be_the_targets(tmp_path: Path) -> None:
    """A head made for another tokenizer drafts ids that mean something else."""
    ours, theirs = toy.byte_tokenizer(), toy.byte_tokenizer([(b"a", b"b")])
    target = toy.tiny_causal_lm("llama", len(theirs), 3, layers=8)
    folder = write_release(tmp_path, target, checkpoint_tensors(target))
    given = {"target": target, "placement": PLACEMENT, "num_rows": 10}
    theirs.save_pretrained(folder)
    load_eagle3("medium", folder, tokenizer=theirs, **given)  # type: ignore[arg-type]
    with pytest.raises(VocabMismatch, match="token id 256"):
        load_eagle3("medium", folder, tokenizer=ours, **given)  # type: ignore[arg-type]


def test_id_maps_without_a_table_need_equal_vocabularies() -> None:
    """Golden: offsets [0, 1, 1, 4] are ids 0, 2, 3, 7."""
    assert read_id_map({"d2t": torch.tensor([0, 1, 1, 4])}, 4, 8, "x").tolist() == [0, 2, 3, 7]
    assert read_id_map({}, 3, 3, "x").tolist() == [0, 1, 2]
    with pytest.raises(UnservableModel, match="d2t is missing, and without it 3 draft ids"):
        read_id_map({}, 3, 8, "x")


def test_configs_are_json(tmp_path: Path, target: PreTrainedModel) -> None:
    """The toy checkpoints of this file are what they claim to be: files of the published formats."""
    tensors = checkpoint_tensors(target)
    release = write_release(tmp_path / "r", target, tensors)
    assert {"midlayer.hidden_norm.weight", "fc.weight", "d2t"} <= set(torch.load(release / "pytorch_model.bin"))
    speculators = json.loads((write_speculators(tmp_path / "s", target, tensors) / "config.json").read_text())
    assert speculators["transformer_layer_config"]["hidden_size"] == target.config.hidden_size

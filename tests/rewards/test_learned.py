"""Learned rewards: what every one must keep, and what is refused of a checkpoint. Equality with the references is in
test_references.py."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import in_folder, merges, save, small_clip
from torch import Tensor

from treegrpo_core.rewards import REWARDS, Reward, load_reward, module_of
from treegrpo_core.rewards.batch import in_batches
from treegrpo_core.rewards.hpsv3 import HpsV3
from treegrpo_core.rewards.learned import LEARNED
from treegrpo_core.rewards.prepare import cropped, letterboxed
from treegrpo_core.rewards.tokens import BertTokenizer, ClipTokenizer, tidy

PROMPTS = ["a fox on red", "fox", "", "fox on red, " * 60, "Ωmega, naïve 狐 🦊", "a fox on red"]


@pytest.fixture(scope="module")
def rewards(models: Path) -> dict[str, Reward]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HpsV3, "dtype", torch.float32)  # else a batch is its parts to three digits only
        return {name: load_reward(name, locate=in_folder(models)) for name in LEARNED}


def pictures(count: int, height: int = 48, width: int = 48, seed: int = 0) -> Tensor:
    return torch.rand(count, height, width, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LEARNED)
def test_a_batch_of_mixed_prompts_scores_as_one_by_one(name: str, rewards: dict[str, Reward]) -> None:
    images = pictures(18)
    prompts = PROMPTS * 3
    together = rewards[name].score(images, prompts)
    alone = torch.cat([rewards[name].score(images[n : n + 1], prompts[n : n + 1]) for n in range(18)])
    assert together.shape == (18,) and together.dtype == torch.float32 and together.device.type == "cpu"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert together.unique().numel() > 10


@pytest.mark.parametrize("name", LEARNED)
def test_the_prompt_counts_exactly_if_the_entry_says_so(name: str, rewards: dict[str, Reward]) -> None:
    one = pictures(1).repeat(2, 1, 1, 1)
    first, second = rewards[name].score(one, ["fox", "red"])
    assert (first != second) == LEARNED[name].needs_prompt


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("side", [1, 4096])
def test_the_smallest_and_the_largest_pictures_score(name: str, side: int, rewards: dict[str, Reward]) -> None:
    image = torch.full((1, side, side, 3), 0.5)
    score = rewards[name].score(image, ["fox"])
    small = rewards[name].score(torch.full((1, 224, 224, 3), 0.5), ["fox"])
    torch.testing.assert_close(score, small, rtol=1e-3, atol=1e-3)  # grey is grey at any size


@pytest.mark.parametrize("name", LEARNED)
def test_grey_pictures_and_missing_prompts_are_refused(name: str, rewards: dict[str, Reward]) -> None:
    with pytest.raises(ValueError, match=r"expected \(N, H, W, 3\)"):
        rewards[name].score(torch.rand(1, 8, 8, 1), ["fox"])
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        rewards[name].score(pictures(2), ["fox"])


@pytest.mark.parametrize("name", LEARNED)
def test_weights_are_frozen_float32_in_a_module_for_the_host(name: str, rewards: dict[str, Reward]) -> None:
    module = module_of(rewards[name])
    assert module is not None and rewards[name].name == name
    assert not module.training
    assert all(each.dtype == torch.float32 and not each.requires_grad for each in module.parameters())


@pytest.mark.parametrize("name", LEARNED)
def test_a_missing_file_is_named_with_where_to_get_and_where_to_put_it(name: str, tmp_path: Path) -> None:
    first = LEARNED[name].checkpoints[0]
    with pytest.raises(FileNotFoundError) as refusal:
        load_reward(name, locate=in_folder(tmp_path))
    told = str(refusal.value)
    how = "tick download" if first.repository else "put it into"
    assert all(part in told for part in (first.file, first.repository, first.path, "models/reward_models", how))


@pytest.mark.parametrize("config", ["{half", "[]", '{"vision_config": "x"}'])
def test_an_odd_config_beside_a_clip_is_named(models: Path, tmp_path: Path, config: str) -> None:
    for name in ("clip-vit-large-patch14.safetensors", "clip_merges.txt"):
        (tmp_path / name).symlink_to(models / name)
    (tmp_path / "mine.safetensors").symlink_to(models / "clip-vit-large-patch14.safetensors")
    (tmp_path / "mine.json").write_text(config, encoding="utf-8")
    with pytest.raises(ValueError, match="'clipscore' cannot be made of its files or its source"):
        load_reward("clipscore", source="mine.safetensors", locate=in_folder(tmp_path))


def test_entries_are_complete() -> None:
    assert LEARNED.items() <= REWARDS.items()
    for info in LEARNED.values():
        assert info.measures.endswith(".") and info.range and info.licence and info.checkpoints


def test_batches_halve_when_memory_runs_out_and_nothing_is_lost() -> None:
    seen = []

    def work(part: slice) -> Tensor:
        seen.append(part.stop - part.start)
        if seen[-1] > 3:
            raise torch.cuda.OutOfMemoryError("full")
        return torch.arange(part.start, part.stop).double()

    module = torch.nn.Linear(1, 1)
    assert in_batches(module, 10, 16, work).tolist() == list(range(10))
    assert seen == [10, 8, 4, 2, 2, 2, 2, 2]
    seen.clear()
    assert in_batches(module, 4, 16, work).tolist() == list(range(4))
    assert seen == [2, 2], "what did not fit once is not tried again"

    def never(part: slice) -> Tensor:
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        in_batches(torch.nn.Linear(1, 1), 2, 2, never)


# what is refused of a checkpoint


def hpsv2(folder: Path, content: object) -> Reward:
    torch.save(content, folder / "HPS_v2.1_compressed.pt")
    (folder / "clip_merges.txt").symlink_to(merges())
    return load_reward("hpsv2.1", locate=in_folder(folder))


class Malicious:
    """Unpickled by an ordinary loader, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_with_code_is_refused_and_its_code_not_run(archive: bool, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    content = {"state_dict": small_clip(), "extra": Malicious(mark)}
    if archive:
        with pytest.raises(ValueError, match=r"HPS_v2\.1_compressed\.pt.*not run"):
            hpsv2(tmp_path, content)
    else:
        file = tmp_path / "ImageReward.pt"
        file.write_bytes(pickle.dumps(Malicious(mark), protocol=2))
        (tmp_path / "bert_vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]")
        with pytest.raises(ValueError, match=r"ImageReward\.pt.*not run"):
            load_reward("imagereward", locate=in_folder(tmp_path))
    assert not mark.exists()


def test_missing_keys_are_named(tmp_path: Path) -> None:
    weights = small_clip()
    del weights["visual.ln_post.bias"], weights["transformer.resblocks.1.mlp.c_fc.weight"]
    with pytest.raises(ValueError) as refusal:
        hpsv2(tmp_path, {"state_dict": weights})
    told = str(refusal.value)
    assert "HPS_v2.1_compressed.pt" in told and "is missing" in told
    assert "visual.ln_post.bias" in told and "transformer.resblocks.1.mlp.c_fc.weight" in told


def test_wrong_shapes_unknown_keys_and_broken_numbers_are_named(tmp_path: Path) -> None:
    weights = small_clip()
    weights["visual.ln_pre.weight"] = torch.ones(3)
    weights["surprise"] = torch.ones(1)
    weights["text_projection"][0, 0] = math.nan
    with pytest.raises(ValueError) as refusal:
        hpsv2(tmp_path, {"state_dict": weights})
    told = str(refusal.value)
    assert "visual.ln_pre.weight (3,) (expected (128,)) has another shape" in told
    assert "surprise does not belong there" in told and "text_projection is not finite" in told


@pytest.mark.parametrize("content", [{"a": torch.ones(1)}, {"state_dict": {}}, [1, 2], {"a": 1}, torch.ones(3)])
def test_a_file_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"HPS_v2\.1_compressed\.pt"):
        hpsv2(tmp_path, content)


@pytest.mark.parametrize("name", ["HPS_v2.1_compressed.pt", "PickScore_v1.safetensors"])
@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "clip_merges.txt").symlink_to(merges())
    with pytest.raises(ValueError, match=name):
        load_reward("hpsv2.1" if name.endswith(".pt") else "pickscore", locate=in_folder(tmp_path))


def test_names_of_a_parallel_training_are_understood(tmp_path: Path, models: Path) -> None:
    wrapped = {f"module.{name}": value for name, value in small_clip().items()}
    ours = hpsv2(tmp_path, {"state_dict": wrapped}).score(pictures(2), ["fox", "red"])
    assert torch.equal(ours, load_reward("hpsv2.1", locate=in_folder(models)).score(pictures(2), ["fox", "red"]))


# sources


def test_clipscore_takes_any_clip_by_name_and_others_take_none(models: Path) -> None:
    save(small_clip(), models / "mine.safetensors")
    mine = load_reward("clipscore", source="mine.safetensors", locate=in_folder(models))
    usual = load_reward("clipscore", locate=in_folder(models))
    assert not torch.equal(mine.score(pictures(1), ["fox"]), usual.score(pictures(1), ["fox"]))
    with pytest.raises(FileNotFoundError, match=r"other\.safetensors is missing.*correct source"):
        load_reward("clipscore", source="other.safetensors", locate=in_folder(models))
    with pytest.raises(ValueError, match="takes none"):
        load_reward("pickscore", source="mine.safetensors", locate=in_folder(models))


def test_a_file_beside_the_checkpoint_says_its_activation(models: Path) -> None:
    scores = []
    for name, act in (("quick", "quick_gelu"), ("plain", "gelu")):
        save(small_clip(), models / f"{name}.safetensors")
        (models / f"{name}.json").write_text(json.dumps({"vision_config": {"hidden_act": act}}))
        clip = load_reward("clipscore", source=f"{name}.safetensors", locate=in_folder(models))
        scores.append(clip.score(pictures(1), ["fox"]).item())
    assert scores[0] != scores[1]


# pictures and words


def test_letterbox_pads_with_black_and_crop_keeps_the_middle() -> None:
    white = torch.ones(1, 100, 50, 3)
    boxed = letterboxed(white, 224)
    assert boxed.shape == (1, 3, 224, 224)
    black, full = boxed[0, :, 0, 0], boxed[0, :, 112, 112]
    assert (boxed[0, :, :, :56] == black[:, None, None]).all() and torch.allclose(
        boxed[0, :, :, 56:168], full[:, None, None]
    )
    stripe = torch.zeros(1, 100, 300, 3)
    stripe[:, :, 100:200] = 1
    assert (cropped(stripe, 224)[0, 0, :, 5:-5] > 1).all()


def test_prompts_are_cut_to_the_window_with_the_end_kept() -> None:
    tokens = ClipTokenizer(merges())
    ids = tokens(["fox " * 200, "", "a"])
    assert ids.shape == (3, 77) and ids[0, 0] == 49406 and ids[0, -1] == 49407
    assert ids[1, :3].tolist() == [49406, 49407, 0] and (ids.argmax(1) == torch.tensor([76, 1, 2])).all()


def test_tidy_does_to_prompts_what_open_clip_does() -> None:
    odd = "\u201cfox\u2019s\u201d  \ufb01ne \uff46\uff4f\uff58\u3000e\u0301\x07 "
    assert tidy("  a &amp;amp; b\n" + odd) == 'a & b "fox\'s" fine fox \u00e9'


def test_a_vocabulary_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version\na b\n")
    with pytest.raises(ValueError, match=r"merges\.txt has 1 merges"):
        ClipTokenizer(tmp_path / "merges.txt")
    with pytest.raises(ValueError, match=r"merges\.txt is not BERT's"):
        BertTokenizer(tmp_path / "merges.txt")

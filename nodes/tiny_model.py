"""The bundled model as ordinary MODEL, CLIP and VAE objects of ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.clip_model
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.sd1_clip
import comfy.supported_models_base
import comfy.taesd.taesd
import comfy.utils
import torch
from comfy_api.latest import io

from ..treegrpo_core.bundled.captions import MAX_TOKENS, VOCABULARY
from ..treegrpo_core.bundled.vae import TinyVAE
from .types import CATEGORY

ASSETS = Path(__file__).resolve().parents[1] / "assets"
TEXT_WIDTH = 128
START, END, UNKNOWN = (VOCABULARY.index(word) for word in ("[START]", "[END]", "[UNK]"))


class _WordTokenizer:
    """Whole words to ids, with the two methods that core's tokenizer wrapper uses of a transformers tokenizer."""

    @classmethod
    def from_pretrained(cls, _path: str, **_: Any) -> _WordTokenizer:
        return cls()

    def __call__(self, text: str) -> dict[str, list[int]]:
        words = text.lower().replace(",", " ").split()
        ids = [VOCABULARY.index(word) if word in VOCABULARY else UNKNOWN for word in words]
        return {"input_ids": [START, *ids, END]}

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(VOCABULARY)}


class _Tokenizer(comfy.sd1_clip.SDTokenizer):
    def __init__(self, embedding_directory: str | None = None, tokenizer_data: dict[str, Any] | None = None) -> None:
        super().__init__(
            "words",
            max_length=MAX_TOKENS,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=TEXT_WIDTH,
            tokenizer_class=_WordTokenizer,
            tokenizer_data=tokenizer_data or {},
        )
        # A text without weights is one group of words, and core keeps a group of fewer than this together in a row. A
        # row has room for all but its start and end, and core looks for that room for ever if a kept group needs more.
        self.max_word_length = MAX_TOKENS - 1


class _TextModel(comfy.clip_model.CLIPTextModel):
    """Core's CLIP text model with a vocabulary of whole words."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: Any, operations: Any) -> None:
        super().__init__(config, dtype, device, operations)
        self.set_input_embeddings(operations.Embedding(len(VOCABULARY), TEXT_WIDTH, dtype=dtype, device=device))


class _ClipModel(comfy.sd1_clip.SDClipModel):
    def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: dict[str, Any] | None = None) -> None:
        config = {
            "num_hidden_layers": 1,
            "hidden_size": TEXT_WIDTH,
            "num_attention_heads": 4,
            "intermediate_size": 2 * TEXT_WIDTH,
            "hidden_act": "gelu",
            "max_position_embeddings": MAX_TOKENS,
            "eos_token_id": END,
        }
        super().__init__(
            device=device,
            dtype=dtype,
            max_length=MAX_TOKENS,
            textmodel_json_config=config,
            model_class=_TextModel,
            special_tokens={"start": START, "end": END, "pad": 0},
            model_options=model_options or {},
        )
        self.dtypes = {dtype} if dtype is not None else set()

    def process_tokens(self, tokens: list[list[Any]], device: Any) -> Any:
        """As core's, but the pooled output is read at the token with the highest id, the colour.

        transformers, with which the encoder was trained, does so for every CLIP whose end token has id 2.
        """
        embeds, mask, _, info = super().process_tokens(tokens, device)
        ids = [[token if isinstance(token, int) else -1 for token in row] for row in tokens]
        return embeds, mask, [row.index(max(row)) + 1 for row in ids], info


def _load_clip() -> Any:
    target = comfy.supported_models_base.ClipTarget(_Tokenizer, _ClipModel)
    # fp32: the encoder is tiny, and half precision would only add noise.
    clip = comfy.sd.CLIP(target, model_options={"dtype": torch.float32})
    missing, unexpected = clip.load_sd(comfy.utils.load_torch_file(str(ASSETS / "text_encoder.safetensors")))
    if unexpected or [name for name in missing if "logit_scale" not in name]:
        raise ValueError(f"assets/text_encoder.safetensors does not fit: missing {missing}, unexpected {unexpected}")
    return clip


def _load_vae() -> Any:
    """Core's VAE object around our module.

    Core builds only the architectures it knows, so it is made as the smallest of those and given the module afterwards.
    """
    vae = comfy.sd.VAE(sd=comfy.taesd.taesd.TAESD(latent_channels=16).state_dict(), dtype=torch.float32)
    module = TinyVAE().eval()
    module.load_state_dict(comfy.utils.load_torch_file(str(ASSETS / "vae.safetensors")))
    # The order of the channels in memory in which a CPU's convolutions are faster.
    module.to(memory_format=torch.channels_last)
    vae.first_stage_model = module.to(vae.vae_dtype).requires_grad_(False)
    patcher = vae.patcher
    vae.patcher = comfy.model_patcher.ModelPatcher(module, patcher.load_device, patcher.offload_device)
    return vae


class TinyModel(io.ComfyNode):
    """Hands out the bundled text-to-image model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TreeGRPOTinyModel",
            display_name="TreeGRPO Tiny Model",
            category=CATEGORY,
            description="The bundled text-to-image model (64 x 64 pixels, SD3.5 type, prompts like 'small fox on "
            "blue'). It trains on a "
            "CPU in minutes, for learning and trying things out.",
            inputs=[],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="The denoiser: a tiny SD3.5, 16 latent channels."),
                io.Clip.Output(display_name="CLIP", tooltip="Its text encoder; knows about 80 words."),
                io.Vae.Output(display_name="VAE", tooltip="Its VAE, factor 8."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        for name in ("denoiser", "text_encoder", "vae"):
            if not (ASSETS / f"{name}.safetensors").exists():
                raise FileNotFoundError(f"assets/{name}.safetensors is missing from the pack; install the pack again")
        model = comfy.sd.load_diffusion_model(str(ASSETS / "denoiser.safetensors"))
        return io.NodeOutput(model, _load_clip(), _load_vae())

"""What is known of the rewards whose weights people published: one entry each, nothing imported."""

from __future__ import annotations

from . import Checkpoint, RewardInfo

CLIP_MERGES = Checkpoint(
    "clip_merges.txt",
    "openai/clip-vit-large-patch14",
    "merges.txt",
    size=524_619,
    sha256="9fd691f7c8039210e0fced15865466c65820d09b63988b0174bfe25de299051a",
)
BERT_VOCABULARY = Checkpoint(
    "bert_vocab.txt",
    "google-bert/bert-base-uncased",
    "vocab.txt",
    size=231_508,
    sha256="07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
)
CLIP_L14 = Checkpoint(
    "clip-vit-large-patch14.safetensors",
    "openai/clip-vit-large-patch14",
    "model.safetensors",
    size=1_710_540_580,
    sha256="a2bf730a0c7debf160f7a6b50b3aaf3703e7e88ac73de7a314903141db026dcb",
)
QWEN_VOCABULARY = Checkpoint("qwen2_vocab.json", "Qwen/Qwen2-VL-7B-Instruct", "vocab.json")
QWEN_MERGES = Checkpoint("qwen2_merges.txt", "Qwen/Qwen2-VL-7B-Instruct", "merges.txt")

HPSV3_INSTRUCTION = Checkpoint(
    "hpsv3_instruction.txt",
    "",
    "a text file of what the model was trained to read: INSTRUCTION and, directly behind it, prompt_with_special_token "
    "of hpsv3/dataset/data_collator_qwen.py in the Python package hpsv3 1.0.0",
)

LEARNED: dict[str, RewardInfo] = {
    "hpsv2.1": RewardInfo(
        ".hpsv2:HpsV21",
        "Which picture people would choose for this prompt (Human Preference Score v2.1).",
        range="-1 to 1, mostly 0.2 to 0.4",
        licence="Apache-2.0",
        checkpoints=(Checkpoint("HPS_v2.1_compressed.pt", "xswu/HPSv2", "HPS_v2.1_compressed.pt"), CLIP_MERGES),
    ),
    "hpsv2.0": RewardInfo(
        ".hpsv2:HpsV20",
        "The same of version 2.0.",
        range="-1 to 1, mostly 0.2 to 0.4",
        licence="Apache-2.0",
        checkpoints=(Checkpoint("HPS_v2_compressed.pt", "xswu/HPSv2", "HPS_v2_compressed.pt"), CLIP_MERGES),
    ),
    "pickscore": RewardInfo(
        ".pickscore:PickScore",
        "Which picture users of an image generator would choose for their prompt (PickScore v1).",
        range="-100 to 100, mostly 15 to 25",
        licence="MIT (the authors' repository)",
        checkpoints=(
            Checkpoint("PickScore_v1.safetensors", "yuvalkirstain/PickScore_v1", "model.safetensors"),
            CLIP_MERGES,
        ),
    ),
    "clipscore": RewardInfo(
        ".clipscore:ClipScore",
        "How near the picture is to the prompt for a CLIP of your choice.",
        range="-1 to 1, mostly 0.1 to 0.4",
        licence="MIT (OpenAI's ViT-L/14)",
        source="a CLIP checkpoint with image and text tower, or two with one each (a.safetensors + b.safetensors), in "
        "models/reward_models, clip_vision or text_encoders; empty: OpenAI's ViT-L/14",
        checkpoints=(CLIP_L14, CLIP_MERGES),
    ),
    "aesthetic": RewardInfo(
        ".aesthetic:Aesthetic",
        "How beautiful people would call the picture (LAION's aesthetic predictor v2).",
        range="mostly 1 to 10",
        licence="Apache-2.0, CLIP MIT",
        needs_prompt=False,
        checkpoints=(
            Checkpoint(
                "sac+logos+ava1-l14-linearMSE.pth",
                "camenduru/improved-aesthetic-predictor",
                "sac+logos+ava1-l14-linearMSE.pth",
                size=3_714_759,
                sha256="21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
            ),
            CLIP_L14,
        ),
    ),
    "aesthetic2.5": RewardInfo(
        ".aesthetic_v25:AestheticV25",
        "How beautiful people would call the picture, drawings too (Aesthetic Predictor V2.5).",
        range="mostly 1 to 10, very good above 5.5",
        licence="that of its repository, SigLIP Apache-2.0",
        needs_prompt=False,
        checkpoints=(
            Checkpoint(
                "aesthetic_predictor_v2_5.pth",
                "",
                "models/aesthetic_predictor_v2_5.pth of github.com/discus0434/aesthetic-predictor-v2-5",
            ),
            Checkpoint(
                "siglip-so400m-patch14-384.safetensors", "google/siglip-so400m-patch14-384", "model.safetensors"
            ),
        ),
    ),
    "imagereward": RewardInfo(
        ".imagereward:ImageReward",
        "How people would rate the picture for this prompt (ImageReward v1.0).",
        range="mostly -2.3 to 2",
        licence="Apache-2.0",
        checkpoints=(Checkpoint("ImageReward.pt", "THUDM/ImageReward", "ImageReward.pt"), BERT_VOCABULARY),
    ),
    "hpsv3": RewardInfo(
        ".hpsv3:HpsV3",
        "How people would rate the picture for this prompt (HPSv3, a language model of 7 billion parameters).",
        range="mostly -5 to 15",
        licence="MIT, Qwen2-VL Apache-2.0",
        checkpoints=(
            Checkpoint("HPSv3.safetensors", "MizzenAI/HPSv3", "HPSv3.safetensors"),
            HPSV3_INSTRUCTION,
            QWEN_VOCABULARY,
            QWEN_MERGES,
        ),
    ),
}

"""The types that travel along the graph's wires."""

from __future__ import annotations

from comfy_api.latest import io

CATEGORY = "TreeGRPO"

PolicyType = io.Custom("POLICY")
TreeType = io.Custom("TREE")
PlanType = io.Custom("TREE_PLAN")
RewardType = io.Custom("REWARD_MODEL")
LoopType = io.Custom("TREEGRPO_LOOP")
LoraModelType = io.Custom("LORA_MODEL")
"""Core's own type: works with Save LoRA Weights and Load LoRA Model."""
LossMapType = io.Custom("LOSS_MAP")
"""Core's own type: works with Plot Loss Graph."""

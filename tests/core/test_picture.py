"""The picture of a tree."""

from __future__ import annotations

import numpy as np
import torch
from toy import grow_toy, toy_run, with_rewards

from treegrpo_core.picture import BAD, GOOD, draw_tree
from treegrpo_core.plan import dance_grpo_plan, tree_plan


def close_to(picture, colour) -> int:
    return int((np.abs(np.asarray(picture, dtype=int) - colour).max(axis=2) < 25).sum())


def test_a_tree_is_drawn_at_every_stage(tmp_path):
    _, policy = toy_run(tmp_path)
    bare = grow_toy(policy)
    scored = with_rewards(bare)
    assert close_to(draw_tree(bare), GOOD) == 0
    picture = draw_tree(scored)
    assert close_to(picture, GOOD) > 100
    assert close_to(picture, BAD) > 100


def test_leaves_show_their_thumbnails_and_trees_grow_in_height(tmp_path):
    _, policy = toy_run(tmp_path)
    small, large = (with_rewards(grow_toy(policy, plan)) for plan in (tree_plan(10, 2, 2), dance_grpo_plan(10, 12)))
    small.growth.thumbnails = torch.full((4, 2, 8, 8, 3), 0, dtype=torch.uint8)
    small.growth.thumbnails[:, 1, :, :, 2] = 255
    assert close_to(draw_tree(small, 1), (0, 0, 255)) > 4 * 50 * 50
    assert close_to(draw_tree(small, 0), (0, 0, 255)) == 0
    assert draw_tree(large).height > draw_tree(small).height


def test_a_freed_tree_can_still_be_drawn(tmp_path):
    _, policy = toy_run(tmp_path)
    tree = with_rewards(grow_toy(policy))
    before = draw_tree(tree)
    tree.growth.free()
    assert draw_tree(tree).tobytes() == before.tobytes()

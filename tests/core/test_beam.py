"""Trees with a beam: exact counts, the best really go on, and nothing depends on how the work is cut."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy import LATENT, SIGMAS, grow_toy, roots_for, toy_run

from treegrpo_core.plan import Plan, tree_plan, with_tail
from treegrpo_core.sampler import grow
from treegrpo_core.tree import Rewards, Tree

PROMPTS = 2
PLANS = [
    tree_plan(10, 3, 3, 2, beam=2),
    tree_plan(10, 2, 4, 0, roots=3, beam=4),
    tree_plan(10, 1, 1, 4, roots=8, beam=3),
    tree_plan(10, 4, 2, 7, beam=1),
    replace(Plan.parse("2 1 1 2 1 1 2 1 1 0", roots=2), beam=3),
    tree_plan(10, 3, 3, 2, beam=1000),
]


class Denoiser:
    """Contracts towards 0; counts the rows it is asked for."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        self.rows += len(x)
        return torch.tanh(x) * (1 - sigma / 2)


def brightness(denoised: Tensor) -> Tensor:
    return denoised.flatten(2).mean(2)


def searched(plan: Plan, *, score=brightness, denoise=None, **options):
    roots = roots_for(plan, PROMPTS)
    return grow(denoise or Denoiser(), roots, SIGMAS, plan, kernel="flow_sde", eta=0.7, seed=3, score=score, **options)


def ids(plan: Plan) -> str:
    return f"{plan}, {plan.roots} roots, beam {plan.beam}"


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=ids)
def test_forwards_leaves_and_stored_latents_are_exactly_the_formulas(plan, second_order):
    denoise = Denoiser()
    growth = searched(plan, denoise=denoise, second_order=second_order)
    assert denoise.rows == plan.nfe_sample * PROMPTS
    assert growth.forwards == plan.nfe_sample
    assert growth.leaves.shape == (plan.leaves, PROMPTS, *LATENT)
    tensors = [tensor for level in growth.levels for tensor in (level.parents, level.children)] + [growth.leaves]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    assert sum(len(tensor) for tensor in storages.values()) == plan.stored


def test_counts_of_one_beam_by_hand():
    """2 deterministic steps, 3 of branching with 1, 3, then 6 nodes denoised of which 2 go on, and 6 once more."""
    plan = tree_plan(10, 3, 3, 2, beam=2)
    assert [plan.nodes(step) for step in range(11)] == [1, 1, 1, 3, 6, 6, 2, 2, 2, 2, 2]
    assert [step for step in range(10) if plan.narrows(step)] == [3, 4, 5]
    assert (plan.leaves, plan.nfe_sample) == (2, 26)
    assert with_tail(plan, SIGMAS, 2)[0].nfe_sample == 3 + 3 + 6 + 6 + 2


@pytest.mark.parametrize("beam", [27, 1000])
def test_a_beam_that_holds_every_node_changes_nothing(beam):
    def never(denoised):
        raise AssertionError("there is nothing to choose")

    plan = tree_plan(10, 3, 3, 2)
    plain, wide = searched(plan, score=None), searched(replace(plan, beam=beam), score=never)
    assert torch.equal(plain.leaves, wide.leaves)
    for a, b in zip(plain.levels, wide.levels, strict=True):
        assert torch.equal(a.children, b.children) and torch.equal(a.log_prob, b.log_prob)


def test_the_best_predictions_go_on_prompt_by_prompt():
    """From one level to the next: the parents are the beam's best children, judged by their own predictions."""
    plan = tree_plan(10, 3, 3, 2, beam=2)
    levels = searched(plan).levels
    for before, after in itertools.pairwise(levels):
        scores = brightness(Denoiser()(before.children.flatten(0, 1), SIGMAS[after.step]).view_as(before.children))
        for prompt in range(PROMPTS):
            best = scores[:, prompt].topk(2).indices.sort().values
            assert torch.equal(after.parents[:, prompt], before.children[best, prompt])
    best = [set(scores[:, prompt].topk(2).indices.tolist()) for prompt in range(PROMPTS)]
    assert best[0] != best[1], "or the prompts could have been mixed up unseen"


def test_what_was_searched_for_is_found():
    """Of trees with equally many leaves the searched one ends brighter, for every prompt."""
    searched_for = searched(tree_plan(10, 4, 4, 1, beam=4)).leaves
    random = searched(tree_plan(10, 4, 1, 1), score=None).leaves
    assert (brightness(searched_for).amax(0) > brightness(random).amax(0)).all()


@pytest.mark.parametrize("plan", PLANS, ids=ids)
def test_the_result_does_not_depend_on_the_micro_batch(plan):
    whole = searched(plan)
    for max_batch in (2, 7, 16):
        assert torch.equal(searched(plan, max_batch=max_batch).leaves, whole.leaves)


def test_a_prompt_finds_the_same_alone_and_in_company():
    plan = tree_plan(10, 3, 3, 2, beam=2)
    together = searched(plan).leaves
    roots = roots_for(plan, PROMPTS)[:, 1:]
    alone = grow(
        Denoiser(), roots, SIGMAS, plan, kernel="flow_sde", eta=0.7, seed=3, prompts=[1], score=brightness
    ).leaves
    assert torch.equal(together[:, 1:], alone)


@pytest.mark.parametrize(
    ("plan", "score"), [(tree_plan(10, beam=2), None), (tree_plan(10), brightness)], ids=["no score", "no beam"]
)
def test_beam_and_score_go_together(plan, score):
    with pytest.raises(ValueError, match=f"beam is {plan.beam}.*needs a score"):
        searched(plan, score=score)


def test_a_searched_tree_gets_no_advantages(tmp_path):
    """Its siblings are not all there, so a comparison among them would be biased."""
    _, policy = toy_run(tmp_path)
    whole = grow_toy(policy)
    plan = replace(whole.plan, beam=2)
    tree = Tree(plan, SIGMAS, "flow_sde", 0.7, ("a", "b"), policy, 0, searched(plan))
    scored = tree.scored(Rewards(("toy",), (1.0,), brightness(tree.leaves)[None]))
    with pytest.raises(ValueError, match="searched with beam 2"):
        scored.with_advantages()


def test_leaves_are_ranked_by_standardised_rewards():
    """The scale of a reward is irrelevant, and one of weight 0 plays no part."""
    small = torch.tensor([[0.0], [0.2], [0.3]])
    large = torch.tensor([[1000.0], [900.0], [200.0]])
    rewards = Rewards(("small", "large", "watched"), (1.0, 1.0, 0.0), torch.stack([small, large, -small]))
    assert rewards.best(3)[:, 0].tolist() == [1, 2, 0]
    assert Rewards(("one",), (-1.0,), small[None]).best(1).tolist() == [[0]]
    assert Rewards(("one",), (1.0,), small[None, :1]).best(1).tolist() == [[0]], "a single leaf is the best"
    with pytest.raises(ValueError, match="all weights are 0"):
        Rewards(("one",), (0.0,), small[None]).best(1)

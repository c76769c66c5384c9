"""A denoiser that remembers or draws is told from one that does not, whatever it does with what it remembers."""

from __future__ import annotations

import pytest
import torch

from treegrpo_core.patches import PROBE_ROWS, REFUSED, Patch, UnfitError, refusal, require_no_memory, unknown

SHAPE = (2, 4, 8, 8)
SIGMAS = (0.7, 0.6)


def model(noise, sigma):
    """A stand-in for a model: (N, P, *latent) -> (N * P, *latent), and not linear."""
    x = noise.flatten(0, 1) * sigma
    return (1 - sigma) * torch.tanh(3 * x) + 0.1 * x.roll(1, -1) ** 2


def probe(begin):
    """Try the denoiser that ``begin()`` makes at the beginning of each sampling; the rows it was asked for."""
    rows = []

    def use(evaluate):
        denoise = begin()

        def predict(noise, sigma):
            rows.append(noise.shape[0] * noise.shape[1])
            return denoise(noise, sigma)

        return evaluate(predict)

    require_no_memory(use, SHAPE, SIGMAS)
    return sum(rows)


def test_a_function_of_latent_and_noise_level_passes_at_the_cost_that_is_written():
    assert probe(lambda: model) == PROBE_ROWS * SHAPE[0]


def test_rounding_passes():
    rounding = torch.Generator().manual_seed(1)

    def rounded(noise, sigma):
        return model(noise, sigma) * (1 + 1e-3 * torch.randn(1, generator=rounding))

    probe(lambda: rounded)


class Cache:
    """Gives the last change again if ``again(cache, x)`` says so, or the last prediction's shape is another one."""

    def __init__(self, again):
        self.again, self.count, self.x, self.sigma = again, 0, None, None

    def __call__(self, noise, sigma):
        x, self.count = noise.flatten(0, 1), self.count + 1
        fits = self.x is not None and self.x.shape == x.shape
        if not (fits and self.again(self, x, sigma)):
            self.x, self.sigma, self.added = x, sigma, model(noise, sigma) - x
        return x + self.added


CACHES = {
    "similar to the last one evaluated": lambda cache, x, sigma: (x - cache.x).abs().mean() < 0.1,
    "every second call": lambda cache, x, sigma: cache.count % 2 == 0,
    "every third call is evaluated": lambda cache, x, sigma: cache.count % 3 != 1,
    "every tenth call is evaluated": lambda cache, x, sigma: cache.count % 10 != 1,
    "always after two": lambda cache, x, sigma: cache.count > 2 and (x - cache.x).abs().mean() < 0.1,
    "at the same noise level": lambda cache, x, sigma: sigma == cache.sigma,
    "at another noise level": lambda cache, x, sigma: sigma != cache.sigma,
}


@pytest.mark.parametrize("lasting", [False, True], ids=["emptied with each sampling", "never emptied"])
@pytest.mark.parametrize("case", CACHES)
def test_caches_are_found(case, lasting):
    cache = Cache(CACHES[case])
    with pytest.raises(UnfitError, match="predictions of one latent differ by"):
        probe((lambda: cache) if lasting else lambda: Cache(CACHES[case]))


def test_means_over_earlier_predictions_are_found():
    before = [0.0]

    def momentum(noise, sigma):
        now = model(noise, sigma)
        before[0] = now if torch.is_tensor(before[0]) is False or before[0].shape != now.shape else before[0] / 2 + now
        return before[0]

    with pytest.raises(UnfitError, match="depends on earlier evaluations"):
        probe(lambda: momentum)


def test_random_numbers_are_found():
    with pytest.raises(UnfitError, match="or on random numbers"):
        probe(lambda: lambda noise, sigma: model(noise, sigma) + 0.01 * torch.randn(noise.flatten(0, 1).shape))


def test_rows_that_look_at_each_other_are_found():
    def frames(noise, sigma):
        alone = model(noise, sigma)
        return alone * torch.linspace(0.8, 1, len(alone)).view(-1, 1, 1, 1)

    with pytest.raises(UnfitError, match="depends on the others in the batch"):
        probe(lambda: frames)


def test_what_takes_one_size_of_batch_only_is_found():
    sizes = set()

    def first_size_only(noise, sigma):
        sizes.add(noise.shape)
        if len(sizes) > 1:
            raise RuntimeError("The size of tensor a (4) must match the size of tensor b (2)")
        return model(noise, sigma)

    with pytest.raises(UnfitError, match=r"one size after another \(The size of tensor a"):
        probe(lambda: first_size_only)


def test_an_error_that_has_another_reason_is_passed_on():
    def broken(noise, sigma):
        raise RuntimeError("no such conditioning")

    with pytest.raises(RuntimeError, match="^no such conditioning"):
        probe(lambda: broken)


def of_core(name, settings, source="comfy_extras/nodes_apg"):
    return Patch("sampler_pre_cfg_function", source, name, True, settings)


def test_the_setting_decides_where_there_is_one():
    name = "APG.execute.<locals>.pre_cfg_function"
    assert refusal([of_core(name, {"momentum": 0.0, "eta": 1.0})]) is None
    assert "momentum" in str(refusal([of_core(name, {"momentum": -0.75})]))
    assert refusal([of_core(name, {"momentum": 0.0}), of_core(name, {"momentum": 0.5})]) is not None
    assert refusal([of_core(name, {"beta": 0.0})]) is not None, "a newer core calls it otherwise: refused to be safe"


def test_a_setting_that_older_cores_do_not_have_is_not_missed():
    windows = ("IndexListContextHandler", "comfy/context_windows")
    assert refusal([of_core(windows[0], {"dim": 2}, windows[1])]) is None
    assert "freenoise" in str(refusal([of_core(windows[0], {"dim": 2, "freenoise": True}, windows[1])]))
    assert "dim 0" in str(refusal([of_core(windows[0], {"dim": 0}, windows[1])]))


def test_a_patch_of_the_same_name_in_another_file_is_no_known_one():
    other = Patch("sampler_pre_cfg_function", "pack/nodes_apg", "APG.execute", False, {"momentum": 1.0})
    assert refusal([other]) is None
    assert unknown([other, of_core("APG.execute", {})]) == [other]
    assert unknown([of_core("New.execute", {}, "comfy_extras/nodes_that_came_later")])


def test_no_entry_stands_twice():
    assert len({(entry.owner, entry.setting) for entry in REFUSED}) == len(REFUSED)

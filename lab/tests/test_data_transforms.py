"""Transforms of whole batches against plain loops over pixels."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp

from fastcaps_lab.data import Chain, ColorJitter, Draws, ImageDataset, Mixup, RandomCropFlip, ResizeCrop, crops
from fastcaps_lab.data.transforms import resized


def noise(count: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    numbers = np.random.RandomState(seed).randint(0, 256, (count, channels, height, width))
    return torch.from_numpy(numbers.astype(np.uint8))


def draws(count: int, seed: int = 0) -> Draws:
    return Draws(seed, torch.arange(count))


EVERY: dict[str, Any] = {
    "crop": RandomCropFlip(2, flip=True),
    "resize": ResizeCrop(12, 9, flip=True),
    "colours": ColorJitter(),
    "chain": Chain(RandomCropFlip(2), ColorJitter(), ResizeCrop(9, 7)),
}


@pytest.mark.parametrize("name", EVERY)
def test_an_image_does_not_depend_on_its_batch(name: str) -> None:
    images = noise(9, 3, 10, 10)
    whole = EVERY[name](images, draws(9))
    assert whole.dtype == torch.uint8
    for k in (0, 4, 8):
        one = EVERY[name](images[k : k + 1], Draws(0, torch.tensor([k])))
        # the colours' sums may be rounded another way
        assert (one[0].int() - whole[k].int()).abs().max() <= (1 if name in ("colours", "chain") else 0)
    assert not torch.equal(EVERY[name](images, draws(9, seed=1)), whole)
    torch.manual_seed(0)
    first = EVERY[name](images)
    torch.manual_seed(0)
    assert torch.equal(EVERY[name](images), first) and not torch.equal(EVERY[name](images), first)


@pytest.mark.parametrize(
    ("transform", "larger"),
    [
        (RandomCropFlip(3), lambda images: torch.nn.functional.pad(images, (3,) * 4)),
        (RandomCropFlip(3, flip=True), lambda images: torch.nn.functional.pad(images, (3,) * 4)),
        (ResizeCrop(14, 9, flip=True), lambda images: resized(images, 14)),
    ],
)
def test_a_crop_is_a_window_of_a_larger_image(transform: Any, larger: Any) -> None:
    images, again = noise(60, 2, 5, 7), draws(60)
    made, whole = transform(images, draws(60)), larger(images)
    height, width = made.shape[2:]
    starts, turned = again.integers(whole.shape[2] - height + 1, 2), again.uniform(1, 1, 1) < 0.5
    assert turned.any() and not turned.all()
    for k, (top, left) in enumerate(starts.tolist()):
        wanted = whole[k, :, top : top + height, left : left + width]
        assert torch.equal(made[k], wanted.flip(2) if transform.flip and turned[k] else wanted)
    with pytest.raises(ValueError, match="size: got 11, want 1 to 10"):
        ResizeCrop(10, 11)


@pytest.mark.parametrize(("side", "size"), [(8, 11), (12, 7), (9, 9)])
def test_resizing_is_pillows(side: int, size: int) -> None:
    images = noise(3, 1, side, side)
    made = resized(images, size)
    for k in range(3):
        wanted = Image.fromarray(images[k, 0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(wanted).astype(int) - made[k, 0].numpy().astype(int)).max() <= 1


@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.4, 0.1), (0, 0.5, 0, 0), (0, 0, 0.9, 0.5)])
def test_colours_pixel_by_pixel(strengths: tuple[float, ...]) -> None:
    images = 60 + noise(6, 3, 4, 5) // 3  # away from the ends, where all that is cut looks alike
    made = ColorJitter(*strengths)(images, draws(6))
    drawn = draws(6).between(-1, 1, 4).double() * torch.tensor(strengths, dtype=torch.float64)
    to_yiq = np.array([[0.3, 0.59, 0.11], [0.599, -0.2773, -0.3217], [0.213, -0.5251, 0.3121]])
    np.testing.assert_allclose(to_yiq @ [0.2, 0.6, 0.4], colorsys.rgb_to_yiq(0.2, 0.6, 0.4))
    for k in range(6):
        brightness, contrast, saturation, hue = drawn[k].tolist()
        pixels = images[k].double().numpy().reshape(3, 20) * (1 + brightness)
        mean = (to_yiq[0] @ pixels).mean()
        luma, i, q = to_yiq @ (mean + (1 + contrast) * (pixels - mean))
        colour = (i + 1j * q) * (1 + saturation) * np.exp(2j * math.pi * hue)
        wanted = np.linalg.solve(to_yiq, np.stack([luma, colour.real, colour.imag])).clip(0, 255)
        assert np.abs(made[k].flatten(1).numpy() - wanted).max() < 0.51


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    shares = Mixup(2, alpha).shares(draws(40_000))
    assert shares.min() >= 0 and shares.max() <= 1
    theirs = np.random.RandomState(0).beta(alpha, alpha, 40_000)  # rounded, as float32 cannot tell 1 − 1e-9 from 1
    assert ks_2samp(shares.numpy().round(3), theirs.astype(np.float32).round(3)).pvalue > 1e-4
    assert Mixup(2, 0.01).shares(draws(5000)).isfinite().all()


def test_a_data_set_mixes_last() -> None:
    images, labels = noise(20, 3, 8, 8).numpy(), np.arange(20) % 4
    augment, mixup, order = RandomCropFlip(2, flip=True), Mixup(4), Draws(1 * 1_000_003, torch.arange(20))
    options: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": augment, "seed": 1}
    mixed = ImageDataset(images, labels, mixup=mixup, **options)
    augment(torch.from_numpy(images), order)
    wanted = mixup(*ImageDataset(images, labels, **options).batch(slice(None)), order)
    torch.testing.assert_close(mixed.batch(slice(None)), wanted)


def test_crops_are_the_corners_and_the_centre() -> None:
    images = noise(2, 1, 7, 8)
    made = crops(images, 4, flip=True)
    assert made.shape == (2, 10, 1, 4, 4)
    for k, (top, left) in enumerate([(0, 0), (0, 4), (3, 0), (3, 4), (1, 2)]):
        wanted = images[:, :, top : top + 4, left : left + 4]
        assert torch.equal(made[:, k], wanted) and torch.equal(made[:, 5 + k], wanted.flip(-1))
    assert crops(images, (7, 8)).shape == (2, 5, 1, 7, 8)
    with pytest.raises(ValueError, match=r"size: got .* want 1 x 1 to 7 x 8"):
        crops(images, 9)


def test_mixup_blends_images_and_targets_alike() -> None:
    images, labels = torch.randn(8, 2, 3, 3), torch.arange(8) % 5
    mixup, again = Mixup(5, 0.4), draws(8)
    made, targets = mixup(images, labels, draws(8))
    shares, order = mixup.shares(again), again.uniform().argsort().tolist()
    assert order != list(range(8))
    one_hot = torch.eye(5)[labels]
    for k, (share, other) in enumerate(zip(shares, order, strict=True)):
        torch.testing.assert_close(made[k], share * images[k] + (1 - share) * images[other])
        torch.testing.assert_close(targets[k], share * one_hot[k] + (1 - share) * one_hot[other])
    soft = mixup(images, targets, draws(8, seed=1))[1]
    torch.testing.assert_close(soft.sum(1), torch.ones(8))
    with pytest.raises(ValueError, match=r"alpha: got 0\.0"):
        Mixup(2, 0.0)

"""Transforms of batches and generated digits, against the papers' words as plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import affine_transform
from scipy.stats import chisquare, ks_2samp

from fastcaps_lab.data import AffineDigits, ImageDataset, Mixup, OverlappingDigits, RandomCropFlip, ResizeCrop
from fastcaps_lab.data.transforms import DRAWS, resized

RAW = {"mean": (0.0,), "std": (1.0 / 255,)}
"""Normalised like this, pixels come out as bytes."""


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8))


def digits(count: int = 100, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Noise without a black pixel, and labels."""
    random = np.random.RandomState(1)
    images = random.randint(1, 256, (count, 1, size, size)).astype(np.uint8)
    return images, random.randint(0, 10, count)


# --- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "larger"),
    [
        (RandomCropFlip(3), lambda images: torch.nn.functional.pad(images, (3,) * 4)),
        (RandomCropFlip(3, flip=True), lambda images: torch.nn.functional.pad(images, (3,) * 4)),
        (ResizeCrop(14, 9, flip=True), lambda images: resized(images, 14)),
    ],
)
def test_a_crop_is_a_window_of_a_larger_image(transform: Any, larger: Any) -> None:
    images, numbers = noise(60, 2, 5, 7), torch.rand(60, DRAWS)
    made, whole = transform(images, numbers), larger(images)
    height, width = made.shape[2:]
    for k, (y, x, turned) in enumerate(numbers[:, :3].tolist()):
        top, left = int(y * (whole.shape[2] - height + 1)), int(x * (whole.shape[3] - width + 1))
        wanted = whole[k, :, top : top + height, left : left + width]
        assert torch.equal(made[k], wanted.flip(2) if transform.flip and turned < 0.5 else wanted)
    assert torch.equal(transform(images[7:9], numbers[7:9]), made[7:9])  # whatever else is in the batch


@pytest.mark.parametrize(("side", "size"), [(8, 11), (12, 7), (9, 9)])
def test_resizing_is_pillows(side: int, size: int) -> None:
    images = noise(3, 1, side, side)
    made = resized(images, size)
    for k in range(3):
        wanted = Image.fromarray(images[k, 0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(wanted).astype(int) - made[k, 0].numpy().astype(int)).max() <= 1


def test_mixup_blends_images_and_targets_alike() -> None:
    images, labels, numbers = torch.randn(8, 2, 3, 3), torch.arange(8) % 5, torch.rand(8, DRAWS)
    mixup = Mixup(5, 0.4)
    made, targets = mixup(images, labels, numbers)
    shares, order = mixup.shares(numbers), numbers[:, 5].argsort().tolist()
    one_hot = torch.eye(5)[labels]
    for k, (share, other) in enumerate(zip(shares, order, strict=True)):
        torch.testing.assert_close(made[k], share * images[k] + (1 - share) * images[other])
        torch.testing.assert_close(targets[k], share * one_hot[k] + (1 - share) * one_hot[other])
    for alpha in (0.2, 1.0, 3.0):
        shares = Mixup(2, alpha).shares(torch.rand(40_000, DRAWS))
        theirs = np.random.RandomState(0).beta(alpha, alpha, 40_000)  # rounded, as float32 cannot tell 1 − 1e-9 from 1
        assert ks_2samp(shares.numpy().round(3), theirs.astype(np.float32).round(3)).pvalue > 1e-4
    # a data set mixes last
    options: dict[str, Any] = {**RAW, "augment": RandomCropFlip(1, flip=True), "seed": 1}
    pixels = noise(8, 1, 4, 4).numpy()
    mixed, plain = (ImageDataset(pixels, labels, mixup=each, **options) for each in (mixup, None))
    wanted = mixup(*plain.batch(slice(None)), plain.gather(slice(None))[-1])
    torch.testing.assert_close(mixed.batch(slice(None)), wanted)


# --- shifts and overlays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [0.0, 1 / 6], ids=["multi", "diverse"])
def test_every_pixel_is_that_of_its_shifted_digits(single: float) -> None:
    def ink(square: np.ndarray) -> np.ndarray:
        return square[square.any(1)][:, square.any(0)]

    images, labels = digits(60, size=5)
    made = OverlappingDigits(images, labels, single=single, shift=4, seed=2, **RAW)
    seen, targets = made.batch(slice(None))
    gathered = made.gather(slice(None))
    layers, names = made.apart(gathered[0], gathered[2]), gathered[1]
    assert seen.shape == (60, 1, 13, 13) and targets.dtype == torch.bool and targets.shape == (60, 10)
    for i, (under, over) in enumerate(layers.numpy().astype(int)):
        assert np.array_equal(ink(under), images[i, 0]) and int(names[i, 0]) == labels[i]
        there = {int(labels[i])}
        if names[i, 1] < 0:
            assert single and not over.any()
        else:
            (top,) = (k for k in range(60) if np.array_equal(ink(over), images[k, 0]))
            assert labels[top] == int(names[i, 1]) != labels[i]
            there.add(int(labels[top]))
        np.testing.assert_array_equal(seen[i, 0].round().numpy(), np.minimum(under + over, 255))
        assert {k for k in range(10) if targets[i, k]} == there
    with pytest.raises(ValueError, match="labels: got digits of class 0 alone"):
        OverlappingDigits(images, labels * 0)


def test_proportions_of_a_large_draw() -> None:
    images, labels = digits(60_000, size=2)
    labels = np.maximum(labels - 6, 0)  # seven digits of class 0 for each of 1, 2 and 3
    made = OverlappingDigits(images, labels, single=1 / 6, shift=4, classes=4, seed=1)
    pairs, names, numbers = made.gather(slice(None))
    alone = int((names[:, 1] < 0).sum())
    assert abs(alone - 10_000) < 4 * math.sqrt(60_000 * 5 / 36)
    for under in range(4):  # every digit of the other classes is as likely
        over = names[(names[:, 0] == under) & (names[:, 1] >= 0), 1].bincount(minlength=4)
        others = np.bincount(labels[labels != under], minlength=4) / (labels != under).sum()
        there = others > 0
        assert over[under] == 0 and chisquare(over[there], others[there] * int(over.sum())).pvalue > 1e-4
    # both digits shift alike, each by itself: 9 x 9 places
    tops = (made.apart(pairs, numbers)[names[:, 1] >= 0] > 0).any(3).to(torch.uint8).argmax(2)
    assert chisquare((tops[:, 0] * 9 + tops[:, 1]).bincount(minlength=81)).pvalue > 1e-4


# --- affine maps -----------------------------------------------------------------------------------------------------


def sampled(image: np.ndarray, matrix: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """The image under an affine map, by SciPy, which looks back from each pixel, and counts rows first."""
    back = np.linalg.inv(matrix)[::-1, ::-1]
    offset = (len(image) - 1) / 2 - back @ ((size - 1) / 2 + place[::-1])
    return affine_transform(image.astype(float), back, offset, (size, size), order=1, mode="grid-constant")


def test_affine_digits_are_the_sampled_map_of_their_draws() -> None:
    images, labels = digits(12, size=9)
    images[:, :, :2] = images[..., 7:] = 0  # ink from 0 to 7 across, from 2 to 9 down
    made = AffineDigits(images, labels, size=15, seed=3, **RAW)
    seen, targets = made.batch(slice(None))
    numbers = made.gather(slice(None))[-1]
    matrices, places = made.maps(made.images, numbers)
    assert seen.shape == (12, 1, 15, 15) and targets.tolist() == labels.tolist()
    for i, (rotated, slant, wide, tall, *at) in enumerate(numbers.tolist()):
        angle, k = math.radians(20 * (2 * rotated - 1)), 0.2 * (2 * slant - 1)
        rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        matrix = rotation @ np.array([[1, k], [0, 1]]) @ np.diag([0.8 + 0.4 * wide, 0.8 + 0.4 * tall])
        corners = np.array([matrix @ [x, y] for x in (-4.5, 2.5) for y in (-2.5, 4.5)])
        place = (15 - np.ptp(corners, 0)) * at - 7.5 - corners.min(0)
        np.testing.assert_allclose(matrices[i].numpy(), matrix, atol=1e-5)
        np.testing.assert_allclose(places[i].numpy(), place, atol=1e-4)
        np.testing.assert_allclose(seen[i, 0].numpy(), sampled(images[i, 0], matrix, place, 15), atol=0.05)
    assert not AffineDigits(images * 0, labels, **RAW).batch(slice(None))[0].any()

"""Digits that are shifted, laid over each other or transformed, against the papers' words as plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import affine_transform
from scipy.stats import chisquare
from torch.utils.data import DataLoader

from fastcaps_lab.data import (
    AffineDigits,
    BatchDataset,
    Draws,
    ImageDataset,
    OverlappingDigits,
    RandomCropFlip,
    ShiftedDigits,
)
from fastcaps_lab.data.draws import _STEP, _mix

RAW = {"mean": (0.0,), "std": (1.0 / 255,)}
"""Normalised like this, pixels come out as bytes."""
KINDS: list[tuple[type[BatchDataset], dict[str, Any]]] = [
    (ImageDataset, {"augment": RandomCropFlip(2, flip=True), **RAW}),
    (ShiftedDigits, {"shift": 3}),
    (OverlappingDigits, {}),
    (OverlappingDigits, {"single": 1 / 6}),
    (AffineDigits, {"size": 16}),
]


def digits(count: int = 100, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Noise without a black pixel, and labels."""
    random = np.random.RandomState(1)
    images = random.randint(1, 256, (count, 1, size, size)).astype(np.uint8)
    return images, random.randint(0, 10, count)


def ink(square: np.ndarray) -> np.ndarray:
    """What a black square shows, cut out."""
    return square[square.any(1)][:, square.any(0)]


# --- random numbers --------------------------------------------------------------------------------------------------


def test_draws_are_those_of_splitmix64() -> None:
    def plain(seed: int, item: int, count: int) -> list[int]:
        whole, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

        def mix(z: int) -> int:
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & whole
            return z ^ (z >> 31)

        state = mix((item * step + mix((seed + step) & whole)) & whole)
        return [mix((state + (k + 1) * step) & whole) for k in range(count)]

    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of the state 0
    outputs = _mix(torch.arange(1, 4) * _STEP)
    assert [int(n) % (1 << 64) for n in outputs] == published
    draws = Draws(11, torch.tensor([0, 5, 2**40]))
    assert len(draws) == 3
    whole, shares = draws.integers(1000, 3), draws.uniform(2, 2)
    for row, item in enumerate((0, 5, 2**40)):
        numbers = plain(11, item, 7)
        assert whole[row].tolist() == [(n & ((1 << 63) - 1)) % 1000 for n in numbers[:3]]
        assert shares[row].flatten().tolist() == [(n >> 40) / 2**24 for n in numbers[3:]]


# --- what holds of all of them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=["plain", "shifted", "multi", "diverse", "affine"])
def test_an_item_follows_from_its_number_alone(kind: type[BatchDataset], options: dict[str, Any]) -> None:
    made = kind(*digits(), seed=4, **options)
    images, targets = made.batch(range(100))
    back, back_targets = made.batch(list(range(99, -1, -1)))
    assert torch.equal(back.flip(0), images) and torch.equal(back_targets.flip(0), targets)
    assert torch.equal(made[57][0], images[57]) and torch.equal(made[-1][0], images[99])
    loaded = torch.cat([batch[0] for batch in DataLoader(made, batch_size=7, num_workers=0)])
    assert torch.equal(loaded, images) and len(made) == 100
    assert not torch.equal(kind(*digits(), seed=5, **options).batch(slice(None))[0], images)
    made.set_epoch(1)
    assert not torch.equal(made.batch(slice(None))[0], images)
    made.set_epoch(0)
    assert torch.equal(made.to("cpu").batch(slice(None))[0], images)
    assert torch.equal(made.batch(slice(None, None, -2))[0], images.flip(0)[::2])
    assert made.batch(slice(0))[0].shape == images[:0].shape
    drawn = kind(*digits(), **options)  # without a seed torch decides
    torch.manual_seed(0)
    first, second = drawn.batch(range(20))[0], drawn.batch(range(20))[0]
    torch.manual_seed(0)
    assert torch.equal(drawn.batch(range(20))[0], first) and not torch.equal(first, second)


def test_data_sets_refuse_what_does_not_fit() -> None:
    images, labels = digits()
    alike = {"mean": 0.5, "std": 0.25}
    for kind, wrong, options, message in (
        (ImageDataset, (images, labels[:-1]), alike, r"want \[n, c, h, w\] and \[n\]"),
        (ImageDataset, (images, labels + 0.5), alike, "labels: got float64, want whole"),
        (ImageDataset, (images - np.int16(9), labels), alike, "bytes.*got int16"),
        (ImageDataset, (images, labels), {**alike, "mean": (0, 0)}, "mean: got 2 numbers for 1 channels"),
        (ImageDataset, (images, labels), {**alike, "std": [0]}, r"std: got \[0\], want numbers above 0"),
        (AffineDigits, (images, labels), {"classes": 9}, "labels: got 0 to 9, want 0 to 8"),
        (ShiftedDigits, (images, labels), {"shift": -1}, "shift must be an int >= 0, got -1"),
        (OverlappingDigits, (images, labels), {"single": 1.5}, r"single: got 1\.5, want 0 to 1"),
        (OverlappingDigits, (images, labels), {"overlay": "mean"}, "overlay must be one of 'sum', 'max', got 'mean'"),
        (AffineDigits, (images, labels), {"scale": (1.2, 0.8)}, r"scale: got \(1.2, 0.8\)"),
        (AffineDigits, (images, labels), {"scale": (0, 1)}, r"scale: got \(0, 1\), want two numbers above 0"),
        (AffineDigits, (images, labels), {"rotation": -1}, "rotation must be a finite number >= 0, got -1"),
        (ShiftedDigits, (images[:0], labels[:0]), {}, "labels: got none"),
        (OverlappingDigits, (images, labels * 0), {}, "labels: got digits of class 0 alone"),
        (AffineDigits, (images[:, :, :4], labels), {}, "images: got 4 x 6 pixels, want squares"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*wrong, **options)
    assert OverlappingDigits(images, labels * 0, single=1.0, seed=0).batch(range(3))[1].sum() == 3


# --- shifts and overlays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("single", "overlay"), [(0.0, "sum"), (1 / 6, "max")], ids=["multi", "diverse"])
def test_every_pixel_is_that_of_its_shifted_digits(single: float, overlay: str) -> None:
    images, labels = digits(60, size=5)
    made = OverlappingDigits(images, labels, single=single, overlay=overlay, shift=4, seed=2, **RAW)
    seen, targets = made.batch(slice(None))
    layers, names = made.layers(slice(None))
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
        both = np.minimum(under + over, 255) if overlay == "sum" else np.maximum(under, over)
        np.testing.assert_array_equal(seen[i, 0].round().numpy(), both)
        assert {k for k in range(10) if targets[i, k]} == there


def test_proportions_of_a_large_draw() -> None:
    images, labels = digits(60_000, size=2)
    labels = np.maximum(labels - 6, 0)  # seven digits of class 0 for each of 1, 2 and 3
    made = OverlappingDigits(images, labels, single=1 / 6, shift=4, classes=4, seed=1)
    layers, names = made.layers(slice(None))
    alone = int((names[:, 1] < 0).sum())
    assert abs(alone - 10_000) < 4 * math.sqrt(60_000 * 5 / 36)
    _, present = made.batch(slice(None))
    assert int(present.sum()) == 120_000 - alone
    for under in range(4):  # every digit of the other classes is as likely
        over = names[(names[:, 0] == under) & (names[:, 1] >= 0), 1].bincount(minlength=4)
        others = np.bincount(labels[labels != under], minlength=4) / (labels != under).sum()
        there = others > 0
        assert over[under] == 0 and chisquare(over[there], others[there] * int(over.sum())).pvalue > 1e-4
    # both digits shift alike, each by itself: 9 x 9 places
    tops = [(layers[names[:, 1] >= 0, k] > 0).any(2).to(torch.uint8).argmax(1) for k in (0, 1)]
    assert chisquare((tops[0] * 9 + tops[1]).bincount(minlength=81)).pvalue > 1e-4


# --- affine maps -----------------------------------------------------------------------------------------------------


def sampled(image: np.ndarray, matrix: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """The image under an affine map, by SciPy, which looks back from each pixel, and counts rows first."""
    back = np.linalg.inv(matrix)[::-1, ::-1]
    offset = (len(image) - 1) / 2 - back @ ((size - 1) / 2 + place[::-1])
    return affine_transform(image.astype(float), back, offset, (size, size), order=1, mode="grid-constant")


def test_affine_digits_are_the_sampled_map() -> None:
    images, labels = digits(12, size=9)
    made = AffineDigits(images, labels, size=15, seed=3, **RAW)
    seen, targets = made.batch(slice(None))
    matrix, place = made.maps(made.images, Draws(3 * 1_000_003, torch.arange(12)))
    assert seen.shape == (12, 1, 15, 15) and targets.tolist() == labels.tolist()
    for i in range(12):
        wanted = sampled(images[i, 0], matrix[i].double().numpy(), place[i].double().numpy(), 15)
        np.testing.assert_allclose(seen[i, 0].numpy(), wanted, atol=0.05)


@pytest.mark.parametrize(
    "options", [{}, {"size": 15, "rotation": 50.0, "shear": 0.7, "scale": (0.5, 0.9)}], ids=["defaults", "options"]
)
def test_affine_maps_are_the_formula_of_their_draws(options: dict[str, Any]) -> None:
    images, labels = digits(5, size=9)
    images[:, :, :2] = images[..., 7:] = 0  # ink from 0 to 7 across, from 2 to 9 down
    made, items = AffineDigits(images, labels, **options), torch.arange(5)
    given = {"size": 40, "rotation": 20.0, "shear": 0.2, "scale": (0.8, 1.2), **options}
    matrix, place = made.maps(made.images, Draws(7, items))
    for i, (rotated, slant, wide, tall, *at) in enumerate(Draws(7, items).uniform(6).tolist()):
        angle, k = math.radians(given["rotation"] * (2 * rotated - 1)), given["shear"] * (2 * slant - 1)
        low, high = given["scale"]
        rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        scale = np.diag([low + (high - low) * wide, low + (high - low) * tall])
        wanted = rotation @ np.array([[1, k], [0, 1]]) @ scale
        np.testing.assert_allclose(matrix[i].numpy(), wanted, atol=1e-5)
        corners = [wanted @ [x, y] for x in (-4.5, 2.5) for y in (-2.5, 4.5)]
        room = given["size"] - np.ptp(corners, 0)
        assert (room > 0).all()
        wanted_place = room * at - given["size"] / 2 - np.min(corners, 0)
        np.testing.assert_allclose(place[i].numpy(), wanted_place, atol=1e-4)
    wide = AffineDigits(np.full((50, 1, 28, 28), 9, np.uint8), np.zeros(50, int), size=20)  # is centred
    assert wide.maps(wide.images, Draws(0, torch.arange(50)))[1].abs().max() < 1e-5
    assert not AffineDigits(images * 0, labels, **RAW).batch(slice(None))[0].any()

"""EncapNet's layers by the paper's procedure, as plain loops over numbers (Li et al., 2018, section 3.1)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

Map = list[list[list[float]]]  # channels, rows, columns of one sample


def convolve(conv: nn.Conv2d, image: Map) -> Map:
    """A convolution with stride, padding and groups, number by number."""
    weight = conv.weight.tolist()
    bias = [0.0] * len(weight) if conv.bias is None else conv.bias.tolist()
    height, width, (high, wide) = len(image[0]), len(image[0][0]), conv.kernel_size
    (down, across), (over, beside) = conv.stride, conv.padding
    below, above = len(image) // conv.groups, len(weight) // conv.groups
    rows, columns = (height + 2 * over - high) // down + 1, (width + 2 * beside - wide) // across + 1
    out = [[[0.0] * columns for _ in range(rows)] for _ in weight]
    for m, matrix in enumerate(weight):
        for y in range(rows):
            for x in range(columns):
                total = bias[m]
                for c in range(below):
                    channel = image[m // above * below + c]
                    for ky in range(high):
                        for kx in range(wide):
                            row, column = y * down + ky - over, x * across + kx - beside
                            if 0 <= row < height and 0 <= column < width:
                                total += matrix[c][ky][kx] * channel[row][column]
                out[m][y][x] = total
    return out


def normalize(norm: nn.BatchNorm2d, batch: list[Map]) -> list[Map]:
    """BatchNorm while training (statistics of the batch) or afterwards (those that were kept), then ReLU."""
    out = [[[list(row) for row in channel] for channel in image] for image in batch]
    for m in range(len(batch[0])):
        numbers = [value for image in batch for row in image[m] for value in row]
        if norm.training:
            mean = sum(numbers) / len(numbers)
            variance = sum((value - mean) ** 2 for value in numbers) / len(numbers)
        else:
            mean, variance = norm.running_mean[m].item(), norm.running_var[m].item()
        scale, shift = norm.weight[m].item(), norm.bias[m].item()
        for image in out:
            for row in image[m]:
                for x, value in enumerate(row):
                    row[x] = max(0.0, (value - mean) / math.sqrt(variance + norm.eps) * scale + shift)
    return out


def squash(numbers: list[float]) -> list[float]:
    square = sum(number * number for number in numbers)
    return [number * math.sqrt(square) / (1 + square) for number in numbers]


def squash_map(types: int, image: Map) -> Map:
    """Squash each type's capsule at each position."""
    dim = len(image) // types
    out = [[list(row) for row in channel] for channel in image]
    for t in range(types):
        for y, row in enumerate(image[0]):
            for x in range(len(row)):
                for k, number in enumerate(squash([image[t * dim + k][y][x] for k in range(dim)])):
                    out[t * dim + k][y][x] = number
    return out


def coefficients(layer: Any, master: Map, aide: Map) -> tuple[Map, Map]:
    """The coefficient of either branch for each type and position."""
    of_master, of_aide = convolve(layer.of_master, master), convolve(layer.of_aide, aide)
    if layer.coefficients == "own":
        return of_master, of_aide
    if layer.coefficients == "other":
        return of_aide, of_master
    both = [
        [[one + other for one, other in zip(a, b, strict=True)] for a, b in zip(m, n, strict=True)]
        for m, n in zip(of_master, of_aide, strict=True)
    ]
    return both[0::2], both[1::2]


def cap_conv(layer: Any, capsules: Tensor, skipped: Tensor | None = None) -> Tensor:
    """The whole layer; ``skipped`` as the layer takes it."""
    batch = capsules.tolist()
    masters = [convolve(layer.master, image) for image in batch]
    if layer.aide is not None:
        aides = [convolve(layer.aide, image) for image in batch]
        squashed = [
            [squash_map(layer.types, image) for image in normalize(norm, images)]
            for norm, images in ((layer.master_norm, masters), (layer.aide_norm, aides))
        ]
        masters = []
        for master, aide in zip(*squashed, strict=True):
            a, b = coefficients(layer, master, aide)
            for m in range(len(master)):
                for y, row in enumerate(master[m]):
                    for x in range(len(row)):
                        t = m // layer.out_dim
                        row[x] = row[x] * a[t][y][x] + aide[m][y][x] * b[t][y][x]
            masters.append(master)
    if skipped is not None:
        added = skipped.tolist()
    elif layer.shortcut is not None:
        added = [convolve(layer.shortcut, image) for image in batch]
    else:
        added = batch if layer.skip else None
    summed = torch.tensor(masters, dtype=torch.float64)
    if added is not None:
        summed = summed + torch.tensor(added, dtype=torch.float64)
    done = [squash_map(layer.types, image) for image in normalize(layer.norm, summed.tolist())]
    return torch.tensor(done, dtype=torch.float64)


def cap_fc(weight: Tensor, capsules: Tensor) -> Tensor:
    """Number k above from number k of every capsule of a set below."""
    dim, count, classes = weight.shape
    out = torch.zeros(len(capsules), classes, dim, dtype=torch.float64)
    for sample in range(len(capsules)):
        for j in range(classes):
            pose = [sum((weight[k, i, j] * capsules[sample, i, k]).item() for i in range(count)) for k in range(dim)]
            out[sample, j] = torch.tensor(squash(pose))
    return out

"""Twins of the convolutional capsules of 3D-UCaps, which also has SegCaps: votes by convolutions, routed by cosines.

Every position of the parents' grid is independent. So all iterations run on one slab of positions after another, and
again in the backward. The largest tensors are the votes of one slab, and the layer's input and result; nothing is
stored for each child and parent of the whole grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastcaps.checks import accumulation_dtype, require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin
from fastcaps.vectors import squash
from fastcaps.votes import autocast_dtype

SLAB = 1 << 20  # values in a slab's votes: 4 MB of float32, which fit into a cache
SHORTEST = 1e-8  # the length to which the published code raises shorter vectors
Size = int | tuple[int, ...]


class Slab(NamedTuple):
    """Some samples, rows first to last - 1 of the parents' grid, and the rows of children in their windows."""

    samples: tuple[int, int]
    rows: tuple[int, int]
    seen: tuple[int, int]

    def of(self, x: Tensor, children: bool = False) -> Tensor:
        """Return a view of the slab in parents, or in children, ``[batch, types, atoms, rows, ...]``."""
        first, last = self.seen if children else self.rows
        return x[slice(*self.samples), :, :, first:last]


class InSlabs(torch.autograd.Function):
    """Route slabs one after the other into one tensor, and again, one after the other, in the backward.

    A checkpoint for each slab would do the same, but the small tensors that it allocates between large ones fragment
    the memory by several times a slab. A graph for second derivatives stores the votes of all slabs.
    """

    @staticmethod
    def forward(ctx: Any, layer: Any, slabs: Sequence[Slab], shape: tuple[int, ...], *inputs: Any) -> Tensor:
        ctx.layer, ctx.slabs, ctx.autocast = layer, slabs, autocast_dtype(inputs[0].device.type)
        ctx.save_for_backward(*inputs)
        x, *parameters = inputs
        made: Tensor = x.new_empty(shape)
        for slab in slabs:
            found = layer._route(slab, slab.of(x, children=True), *parameters)
            if found.dtype != made.dtype:
                made = made.to(found.dtype)
            slab.of(made).copy_(found)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, needs, graph = ctx.saved_tensors, ctx.needs_input_grad[3:], torch.is_grad_enabled()
        totals: list[Any] = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)]
        cast = torch.autocast(inputs[0].device.type, ctx.autocast, enabled=ctx.autocast is not None)
        for slab in ctx.slabs:
            own = [slab.of(inputs[0], children=True), *inputs[1:]]
            with torch.enable_grad(), cast:
                # views are new nodes, at which the first derivative stops
                own = [each if each is None else each.view_as(each) if graph else each.detach() for each in own]
                if not graph:
                    for each, need in zip(own, needs, strict=True):
                        if need:
                            each.requires_grad_()
                made = ctx.layer._route(slab, *own) if graph else ctx.layer._votes(slab, *own[:3])
            head = slab.of(gradient)
            if not graph:
                head, of_biases = ctx.layer._pull(made.detach(), own.pop(), head)
                if totals[3] is not None:
                    totals[3].add_(of_biases)
            wanted = [place for place, each in enumerate(own) if needs[place]]
            if wanted:
                found = torch.autograd.grad(made, [own[place] for place in wanted], head, create_graph=graph)
                for place, one in zip(wanted, found, strict=True):
                    (totals[place] if place else slab.of(totals[0], children=True)).add_(one)
        return None, None, None, *totals


def length(vectors: Tensor, dim: int) -> Tensor:
    """Return the length of vectors, clamped for the cosine; torch's norm over a dimension that is not last is slow."""
    wide = vectors.to(accumulation_dtype(vectors.dtype))
    return product_sum(wide, wide, dim).clamp(min=SHORTEST**2).sqrt().to(vectors.dtype)


def product_sum(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Return ``(a * b).sum(dim)``, where only the other dimensions broadcast.

    A CPU adds one slice after another, several times as fast as the product, of the votes' size, and its sum. Half
    types, whose sums need more bits, take that product.
    """
    if not a.is_cpu or accumulation_dtype(a.dtype) != a.dtype:
        return (a * b).sum(dim)
    total, *rest = zip(a.unbind(dim), b.unbind(dim), strict=True)
    found = total[0] * total[1]
    for one, other in rest:
        found.addcmul_(one, other)
    return found


class SlimTwin(Twin):
    r"""Convolutional capsules that route by cosines.

    A child type i votes by a convolution, :math:`V_{im} = w_{im} * P_i + c_{im}`. The parents compete for each child:
    :math:`r_{im} = \operatorname{softmax}_m b_{im}`, with logits of 0 at first; :math:`s_m = \sum_i r_{im} V_{im} +
    \beta_m`; in each iteration :math:`b_{im}` grows by :math:`\cos(s_m, V_{im})`. The last sums are squashed.

    It routes ``[batch, input_dim, input_atoms, *space]`` to ``[batch, output_dim, output_atoms, *space]`` in
    ``num_routing`` iterations, at least 1. ``kernel_size``, ``stride``, ``padding`` and ``dilation`` are the
    convolution's; with ``share_weight`` all child types have the same filters. The filters are drawn from N(0, 0.1^2);
    the parameter ``biases``, the :math:`\beta`, ``[output_dim, output_atoms, 1, 1]``, in 3-D with one more 1, is 0.1 at
    the start.

    Attributes
    ----------
    _places : (str, str)
        The attribute of the votes' module, and the convolution's name in it.
    _kind : type
        The convolution.
    """

    _places: ClassVar[tuple[str, str]]
    _kind: ClassVar[Any]
    _probes = (("num_routing", range(1, 7)),)
    input_dim: int
    output_dim: int
    input_atoms: int
    num_routing: int

    def __init__(
        self,
        kernel_size: Size,
        input_dim: int,
        output_dim: int,
        input_atoms: int = 8,
        output_atoms: int = 8,
        stride: Size = 2,
        padding: Size = 0,
        dilation: Size = 1,
        num_routing: int = 3,
        share_weight: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"input_atoms": input_atoms, "output_atoms": output_atoms, "num_routing": num_routing}
        self._count(input_dim=input_dim, output_dim=output_dim, **sizes)
        options = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        groups, votes = 1 if share_weight else input_dim, output_dim * output_atoms
        convolution = self._kind(groups * input_atoms, groups * votes, groups=groups, **options)
        if isinstance(convolution.padding, str):
            raise ValueError(f"padding must be whole numbers, got {convolution.padding!r}")
        steps = zip(convolution.stride, convolution.dilation, convolution.kernel_size, strict=True)
        if convolution.transposed and any(step > spread * (kernel - 1) + 1 for step, spread, kernel in steps):
            raise ValueError(f"stride must be no larger than the kernel, got {convolution.stride}")
        vars(self).update(options, share_weight=bool(share_weight))
        self.biases = nn.Parameter(torch.empty(output_dim, output_atoms, *[1] * len(convolution.kernel_size)))
        setattr(self, self._places[0], nn.ModuleDict({self._places[1]: convolution}))
        self._start()

    def _start(self) -> None:
        nn.init.normal_(self._convolution.weight, std=0.1)
        nn.init.constant_(self.biases, 0.1)

    @property
    def _convolution(self) -> Any:
        return getattr(getattr(self, self._places[0]), self._places[1])

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        self._convolution.reset_parameters()
        self._start()

    def forward(self, input_tensor: Tensor) -> Tensor:
        """Return the parents."""
        require_tensor(input_tensor, "input_tensor")
        x, made = input_tensor, self._convolution
        space = len(made.kernel_size)
        if x.dim() != 3 + space or x.shape[1:3] != (self.input_dim, self.input_atoms):
            wanted = f"[batch, {self.input_dim}, {self.input_atoms}, {', '.join('hwd'[:space])}]"
            raise ValueError(f"input_tensor must be {wanted}, got {shape_text(x)}")
        sizes = [self._grid(size, axis) for axis, size in enumerate(x.shape[3:])]
        if min(sizes) < 1:
            raise ValueError(f"input_tensor must be no smaller than the kernel, got {shape_text(x)}")
        row = prod(sizes[1:]) * self.input_dim * self.biases.numel()
        # a transposed convolution computes more rows than needed, relatively many for few rows
        step = max(2 * self._along(0)[0] if made.transposed else 1, SLAB // row)
        samples = max(1, SLAB // (row * sizes[0]))
        if not made.transposed and made.padding[0]:
            x = functional.pad(x, (*(0, 0) * (space - 1), *(made.padding[0],) * 2))
        ranges = [(first, min(first + step, sizes[0])) for first in range(0, sizes[0], step)]
        slabs = [
            Slab((start, start + samples), rows, self._seen(*rows, x.shape[3]))
            for start in range(0, len(x), samples)
            for rows in ranges
        ]
        shape = (len(x), *self.biases.shape[:2], *sizes)
        return InSlabs.apply(self, slabs, shape, x, made.weight, made.bias, self.biases)

    def _grid(self, size: int, axis: int) -> int:
        """Return the number of parents along an axis of the grid."""
        kernel, step, pad, dilation = self._along(axis)
        if self._convolution.transposed:
            return (size - 1) * step - 2 * pad + dilation * (kernel - 1) + 1
        return (size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1

    def _along(self, axis: int) -> tuple[int, int, int, int]:
        made = self._convolution
        return made.kernel_size[axis], made.stride[axis], made.padding[axis], made.dilation[axis]

    def _seen(self, first: int, last: int, count: int) -> tuple[int, int]:
        """Return the rows of children, among ``count`` (with padding), in the windows of rows first to last - 1."""
        kernel, step, pad, dilation = self._along(0)
        reach = dilation * (kernel - 1)
        if self._convolution.transposed:
            return max(0, -((reach - first - pad) // step)), min(count, (last - 1 + pad) // step + 1)
        return first * step, (last - 1) * step + reach + 1

    def _route(self, slab: Slab, x: Tensor, weight: Tensor, bias: Tensor | None, biases: Tensor) -> Tensor:
        """Return the parents' rows of some samples, from x, the rows in their windows."""
        return squash(self._iterate(self._votes(slab, x, weight, bias), biases)[0][-1], 2)

    def _iterate(self, votes: Tensor, biases: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Any]:
        """Return the sums of all iterations, coefficients and cosines of those after the first, and votes' lengths."""
        sums, shares, cosines = [votes.sum(1) / self.output_dim + biases], [], []
        logits: Any = 0.0
        sizes: Any = length(votes, 3) if self.num_routing > 1 else None
        for _ in range(self.num_routing - 1):
            size = length(sums[-1], 2)[:, None]
            cosines.append(product_sum(votes, sums[-1][:, None], 3) / (sizes * size))
            logits = logits + cosines[-1]
            shares.append(logits.softmax(2))
            sums.append(product_sum(votes, shares[-1].unsqueeze(3), 1) + biases)
        return sums, shares, cosines, sizes

    def _pull(self, votes: Tensor, biases: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of votes and biases. In a loop over iterations autograd would make twenty tensors of the
        votes' size; this makes one."""
        dtype = votes.dtype
        votes, biases, gradient = (each.to(accumulation_dtype(dtype)) for each in (votes, biases, gradient))
        sums, shares, cosines, sizes = self._iterate(votes, biases)
        with torch.enable_grad():
            last = sums[-1].detach().requires_grad_()
            (dsum,) = torch.autograd.grad(squash(last, 2), last, gradient)
        dvotes, dbiases = torch.zeros_like(votes), dsum
        dlogits: Any = 0.0
        stretch: Any = 0.0  # the gradient of a vote's length, divided by that length
        for r, cosine, total in zip(*(each[::-1] for each in (shares, cosines, sums[:-1])), strict=True):
            dr = product_sum(votes, dsum[:, None], 3)
            dlogits = dlogits + r * (dr - (r * dr).sum(2, keepdim=True))  # and of the cosine, which logits sum
            dvotes.addcmul_(r.unsqueeze(3), dsum[:, None])
            size = length(total, 2)
            dproduct = dlogits / (sizes * size[:, None])
            dvotes.addcmul_(dproduct.unsqueeze(3), total[:, None])
            turned = dlogits * cosine
            stretch = stretch - turned / sizes.square()
            shrink = (turned.sum(1) / size.square()).masked_fill(size <= SHORTEST, 0.0)
            dsum = product_sum(votes, dproduct.unsqueeze(3), 1) - shrink.unsqueeze(2) * total
            dbiases = dbiases + dsum
        if self.num_routing > 1:
            dvotes.addcmul_(stretch.masked_fill(sizes <= SHORTEST, 0.0).unsqueeze(3), votes)
        dvotes += (dsum / self.output_dim)[:, None]
        places = (0, *range(3, dbiases.dim()))
        return dvotes.to(dtype), dbiases.sum(places).view_as(biases)

    def _votes(self, slab: Slab, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return votes ``[batch, input_dim, output_dim, output_atoms, rows, ...]``."""
        made, (first, last) = self._convolution, slab.rows
        padding = (0, *made.padding[1:])

        def convolve(some: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            votes = torch.convolution(
                some, weight, bias, made.stride, padding, made.dilation, made.transposed, (0,) * len(padding), 1
            )
            if not made.transposed:
                return votes
            start = slab.seen[0] * made.stride[0] - made.padding[0]  # the index of the first row here
            return votes.narrow(2, first - start, last - first)

        if self.share_weight:
            votes = convolve(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
        else:
            biases = [None] * self.input_dim if bias is None else bias.chunk(self.input_dim)
            each = zip(x.unbind(1), weight.chunk(self.input_dim), biases, strict=True)
            votes = torch.stack([convolve(*parts) for parts in each], 1)
        return votes.unflatten(2, self.biases.shape[:2])

    @classmethod
    def _like(cls, old: Any, *parts: Any, **options: Any) -> Twin:
        votes = getattr(old, cls._places[0])
        return super()._like(old, votes, getattr(votes, cls._places[1]), *parts, **options)

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        made = self._convolution
        reach = [d * (k - 1) + 1 for k, d in zip(made.kernel_size, made.dilation, strict=True)]
        grid = [3, *[2] * (len(reach) - 1)] if made.transposed else [size + 2 for size in reach]
        return [(draw(2, self.input_dim, self.input_atoms, *grid),)]


class ConvSlimCapsule2D(SlimTwin):
    """``ConvSlimCapsule2D`` of 3D-UCaps (VinAIResearch) and of SegCaps in PyTorch: see :class:`SlimTwin`.

    Examples
    --------
    >>> import torch
    >>> layer = ConvSlimCapsule2D(kernel_size=5, input_dim=2, output_dim=4, input_atoms=16, output_atoms=8, padding=2)
    >>> layer(torch.randn(1, 2, 16, 32, 32)).shape
    torch.Size([1, 4, 8, 16, 16])
    """

    _known_by = ("input_dim", "output_dim", "num_routing", "biases", "depthwise_conv3d")
    _places, _kind = ("depthwise_conv3d", "conv2d"), nn.Conv2d

    def __init__(
        self,
        kernel_size: Size,
        input_dim: int,
        output_dim: int,
        input_atoms: int = 8,
        output_atoms: int = 8,
        stride: Size = 2,
        dilation: Size = 1,
        padding: Size = 0,
        num_routing: int = 3,
        share_weight: bool = True,
    ) -> None:
        sizes = (kernel_size, input_dim, output_dim, input_atoms, output_atoms)
        super().__init__(*sizes, stride, padding, dilation, num_routing, share_weight)


class ConvSlimCapsule3D(SlimTwin):
    """``ConvSlimCapsule3D`` of 3D-UCaps (VinAIResearch): see :class:`SlimTwin`."""

    _known_by = ("input_dim", "output_dim", "num_routing", "biases", "depthwise_conv4d")
    _places, _kind = ("depthwise_conv4d", "conv3d"), nn.Conv3d


class DeconvSlimCapsule2D(SlimTwin):
    """``DeconvSlimCapsule2D`` of 3D-UCaps (VinAIResearch), with transposed convolutions: see :class:`SlimTwin`."""

    _known_by = ("input_dim", "output_dim", "num_routing", "biases", "depthwise_deconv3d")
    _places = ("depthwise_deconv3d", "deconv2d")
    _kind: ClassVar[Any] = nn.ConvTranspose2d

    def __init__(
        self,
        kernel_size: Size,
        input_dim: int,
        output_dim: int,
        input_atoms: int = 8,
        output_atoms: int = 8,
        stride: Size = 2,
        padding: Size = 0,
        num_routing: int = 3,
        share_weight: bool = True,
    ) -> None:
        sizes = (kernel_size, input_dim, output_dim, input_atoms, output_atoms)
        super().__init__(*sizes, stride, padding, num_routing=num_routing, share_weight=share_weight)


class DeconvSlimCapsule3D(DeconvSlimCapsule2D):
    """``DeconvSlimCapsule3D`` of 3D-UCaps (VinAIResearch), with transposed convolutions: see :class:`SlimTwin`."""

    _known_by = ("input_dim", "output_dim", "num_routing", "biases", "depthwise_deconv4d")
    _places, _kind = ("depthwise_deconv4d", "deconv3d"), nn.ConvTranspose3d

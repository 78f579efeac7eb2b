"""How a call is cut into programs: a table of a few numbers and pure functions of shapes. No autotuning."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    """What a program may hold.

    ``forward`` and ``backward`` are for routings that keep three tiles (attention: votes, query, sums) and five; the
    :class:`Traits` of other routings say what they keep.
    """

    forward: int = 32  # numbers of one tile that a thread holds
    backward: int = 16
    warps: tuple[int, int] = (8, 16)  # the most; and the most if the pose of a single parent needs them
    positions: int = 64  # the most
    resident: int = 16  # warps that one processor should get: children are split over programs until there are as many
    part_bytes: int = 1 << 26  # the most for parts of dW in the deterministic mode, unless one part is larger


@dataclass(frozen=True)
class Traits:
    """The properties of a routing that its schedule depends on; the defaults are attention's.

    ``competing``: whether parents compete for a child, so that several tiles of them cost a second sweep. Else a
    program takes only as many parents as fill it.
    """

    forward: int = 1  # tiles that a forward keeps, as a multiple of attention's, if votes are made column by column,
    products: int = 1  # or by matrix products;
    backward: int = 1  # the same of a backward
    pose: int = 1  # the least size that a pose counts as: values of the parent also fill registers
    competing: bool = True
    same_votes: bool = False  # whether votes must have the same bits in all kernels

    def per_thread(self, limits: Limits, backward: bool, products: bool) -> int:
        """Return how many numbers of one tile a thread holds."""
        if backward:
            return max(1, limits.backward // self.backward)
        return max(1, limits.forward // (self.products if products else self.forward))


LIMITS = Limits()
ATTENTION = Traits()
_DOT = 16  # the least size of each side of a matrix product


@dataclass(frozen=True)
class Facts:
    """What a schedule depends on."""

    positions: int  # B * Ho * Wo
    children: int
    parents: int
    pose: tuple[int, int, int]  # (C, D, E)
    groups: int = 1
    products: bool | None = None  # whether votes are matrix products; None: the schedule decides
    tensor_cores: bool = False  # whether products may use them: half precision, or float32 with TF32 allowed
    processors: int = 132  # of an H200
    limits: Limits = LIMITS
    traits: Traits = ATTENTION


@dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    A tile has BL ``positions``, BC ``rows``, BM ``parents`` and BE ``columns`` of a pose, powers of two.
    """

    positions: int
    rows: int
    parents: int
    columns: int
    votes: int  # columns of a child's pose that a matrix product takes for votes; 0: they are made column by column
    depth: int  # the same for gradients
    blocks: int  # of positions
    tiles: int  # of parents
    splits: int  # ranges of children
    per_split: int  # children of a range
    warps: int  # of a program

    @property
    def numbers(self) -> int:
        """Numbers of a tile."""
        return self.positions * self.rows * self.parents * self.columns


@dataclass(frozen=True)
class MatrixSchedule:
    """How dW, dbias and dbetas are summed in a fixed order: in parts that are added up in order."""

    tile: Schedule  # its splits are not used
    depth: int  # rows of the matrices that a program gathers
    splits: int  # ranges of a group's children
    group_children: int  # of a range
    position_splits: int  # ranges of blocks of positions
    per_split: int  # blocks of a range


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def largest_pose(traits: Traits, limits: Limits = LIMITS) -> int:
    """Return how many numbers of a padded parent's pose a program can hold, forward and backward."""
    return min(traits.per_thread(limits, backward, False) for backward in (False, True)) * 32 * limits.warps[1]


def schedule(facts: Facts, *, backward: bool = False) -> Schedule:
    """Return how forward or ``backward`` is cut up."""
    limits, traits, positions, (rows, inner, columns) = facts.limits, facts.traits, facts.positions, facts.pose
    rows, columns = power_of_two(rows), power_of_two(columns)
    unit = max(rows * columns, traits.pose)
    # A matrix product needs at least 16 rows (positions x C), half of them not padding, and 16 columns (parents x E).
    least_positions, least_parents = max(1, _DOT // rows), max(1, _DOT // columns)
    least = least_positions * least_parents * unit
    products = 2 * max(1, positions) * rows >= _DOT if facts.products is None else facts.products
    products = products and all(
        least <= 32 * limits.warps[1] * traits.per_thread(limits, way, True) for way in (False, True)
    )
    # Votes are products if the depth is large enough. Backward sums over parents (dP) and positions (dW) always by
    # products: column by column each would cost a barrier. Its votes are products too, unless bits would change.
    deep = facts.products is True or inner >= (_DOT // 2 if facts.tensor_cores else _DOT)
    votes = _DOT if products and (deep or (backward and not traits.same_votes)) else 0
    products = products if backward else votes > 0
    if not products:
        least_positions = least_parents = 1
    per_thread = traits.per_thread(limits, backward, products)
    usual = 32 * limits.warps[0] * per_thread
    # Column by column one warp works best, since nothing waits for other warps; matrix products want four.
    target = 32 * per_thread * (4 if products else 1)
    tile_parents = max(power_of_two(facts.parents), least_parents)
    if not traits.competing:
        tile_parents = max(least_parents, min(tile_parents, target // (least_positions * unit)))
    if tile_parents * least_positions * unit > usual:
        # Two sweeps. Sixteen warps, with 128 registers a thread, only if the poses themselves are that large.
        capacity = max(usual, least_positions * least_parents * unit)
        tile_parents = max(least_parents, capacity // (least_positions * unit))
    tile_positions = least_positions
    wanted = min(power_of_two(max(1, positions)), limits.positions)
    while tile_positions < wanted and 2 * tile_positions * tile_parents * unit <= target:
        tile_positions *= 2
    numbers = tile_positions * tile_parents * unit
    warps = min(max(1, power_of_two(_ceil(numbers, 32 * per_thread))), limits.warps[1])
    blocks, tiles = _ceil(max(1, positions), tile_positions), _ceil(facts.parents, tile_parents)
    splits = min(facts.children, max(1, limits.resident * facts.processors // (blocks * tiles * warps)))
    per_split = _ceil(facts.children, splits)
    shape = (tile_positions, rows, tile_parents, columns, votes, _DOT if products else 0)
    return Schedule(*shape, blocks, tiles, _ceil(facts.children, per_split), per_split, warps)


def matrix_schedule(facts: Facts) -> MatrixSchedule:
    """Return how dW and dbias are made in a fixed order."""
    limits, positions, parents, (rows, inner, columns) = facts.limits, facts.positions, facts.parents, facts.pose
    rows, columns = power_of_two(rows), power_of_two(columns)
    depth = _DOT
    # The tile must take a matrix product whatever the pose: rows and columns are padded up to 16.
    tile = schedule(replace(facts, products=True), backward=True)
    least = {"positions": max(tile.positions, _ceil(_DOT, rows)), "parents": max(tile.parents, _ceil(_DOT, columns))}
    tile = replace(tile, votes=schedule(facts).votes, **least)
    if 2 * max(1, positions) * rows < _DOT:
        # Too few rows for one: outer products, of whose sum a thread holds 32 values.
        few = power_of_two(max(1, positions))
        room = 32 * 32 * limits.warps[0] // (few * rows)
        depth = max(1, min(power_of_two(inner), _DOT, room // columns))
        together = max(1, min(power_of_two(parents), room // (depth * columns)))
        tile = replace(tile, positions=few, parents=together, votes=0, depth=0, warps=limits.warps[0])
    blocks, tiles = _ceil(max(1, positions), tile.positions), _ceil(parents, tile.parents)
    tile = replace(tile, blocks=blocks, tiles=tiles, splits=1, per_split=facts.children)
    programs = facts.groups * tiles * _ceil(inner, depth)
    part = 4 * facts.groups * parents * facts.pose[2] * max(inner, facts.pose[0])
    wanted = limits.resident * facts.processors // (programs * tile.warps)
    parts = max(1, min(wanted, limits.part_bytes // part))
    in_group = facts.children // facts.groups
    per_split = _ceil(blocks, min(parts, blocks))
    position_splits = _ceil(blocks, per_split)
    group_children = _ceil(in_group, max(1, min(parts // position_splits, in_group)))
    return MatrixSchedule(tile, depth, _ceil(in_group, group_children), group_children, position_splits, per_split)

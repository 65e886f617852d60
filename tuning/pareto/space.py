"""The space that a search opens: axes with coarse points and a finest step, and points rounded to it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

Value = float | int | str
Point = Mapping[str, Value]
Key = tuple[int, ...]
"""A point rounded to the finest steps: for each axis the number of steps above its lowest value, or of its choice.
Two points with one key are the same point: it is evaluated once."""


@dataclass(frozen=True, slots=True)
class NumericAxis:
    """An ordered quantity (GiB, seconds, instances).

    `coarse` are the values that the search looks at first, rising; the first and the last are the bounds. `step` is the
    finest difference that it goes down to; every coarse value lies a whole number of steps above the first. When all of
    these are `int`, so are the values of points. Raises ValueError otherwise.
    """

    name: str
    coarse: tuple[float, ...]
    step: float

    def __post_init__(self) -> None:
        if not self.coarse or not all(math.isfinite(value) for value in (*self.coarse, self.step)):
            raise ValueError(
                f"axis {self.name!r}: coarse={self.coarse}, step={self.step}; give at least one finite value"
            )
        if self.step <= 0:
            raise ValueError(f"axis {self.name!r}: step={self.step}; it must be above 0")
        if any(low >= high for low, high in zip(self.coarse, self.coarse[1:], strict=False)):
            raise ValueError(f"axis {self.name!r}: coarse={self.coarse}; values must rise")
        for value in self.coarse:
            steps = (value - self.coarse[0]) / self.step
            if abs(steps - round(steps)) > 1e-6:
                raise ValueError(
                    f"axis {self.name!r}: {value} is not a whole number of steps of {self.step} above {self.coarse[0]}"
                )

    @property
    def is_integer(self) -> bool:
        return all(isinstance(value, int) for value in (*self.coarse, self.step))

    @property
    def num_positions(self) -> int:
        return self.position(self.coarse[-1]) + 1

    @property
    def coarse_positions(self) -> tuple[int, ...]:
        return tuple(self.position(value) for value in self.coarse)

    def position(self, value: Value) -> int:
        """The nearest number of steps above the lowest value. Raises ValueError outside the bounds."""
        if isinstance(value, str) or not self.coarse[0] <= value <= self.coarse[-1]:
            raise ValueError(f"{self.name}={value!r}; allowed are {self.coarse[0]} to {self.coarse[-1]}")
        return round((value - self.coarse[0]) / self.step)

    def value(self, position: int) -> Value:
        return min(self.coarse[0] + position * self.step, self.coarse[-1])


@dataclass(frozen=True, slots=True)
class CategoricalAxis:
    """A choice without order (a disk class, an eviction policy). Raises ValueError for no choices or the same twice."""

    name: str
    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.choices or len(set(self.choices)) != len(self.choices):
            raise ValueError(f"axis {self.name!r}: choices={self.choices}; give at least one, each once")

    @property
    def num_positions(self) -> int:
        return len(self.choices)

    @property
    def coarse_positions(self) -> tuple[int, ...]:
        return tuple(range(len(self.choices)))

    def position(self, value: Value) -> int:
        if value not in self.choices:
            raise ValueError(f"{self.name}={value!r}; allowed are {', '.join(self.choices)}")
        return self.choices.index(str(value))

    def value(self, position: int) -> Value:
        return self.choices[position]


Axis = NumericAxis | CategoricalAxis


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Axes in a fixed order. Raises ValueError for none, or two of one name."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"axes are {names}; give at least one, each under its own name")

    @property
    def numeric(self) -> tuple[int, ...]:
        """Indices of the ordered axes."""
        return tuple(index for index, axis in enumerate(self.axes) if isinstance(axis, NumericAxis))

    @property
    def num_points(self) -> int:
        """Points at the finest steps."""
        return math.prod(axis.num_positions for axis in self.axes)

    def key(self, point: Point) -> Key:
        """`point` rounded. Raises ValueError for an axis that is missing or unknown, or a value outside its bounds."""
        names = {axis.name for axis in self.axes}
        if set(point) != names:
            raise ValueError(f"a point gives {', '.join(sorted(point))}; the axes are {', '.join(sorted(names))}")
        return tuple(axis.position(point[axis.name]) for axis in self.axes)

    def point(self, key: Key) -> dict[str, Value]:
        return {axis.name: axis.value(position) for axis, position in zip(self.axes, key, strict=True)}

    def coarse_between(self, axis: int, low: int, high: int) -> tuple[int, ...]:
        """Positions of the axis's coarse values strictly between two positions."""
        positions = self.axes[axis].coarse_positions
        return positions[bisect.bisect_right(positions, low) : bisect.bisect_left(positions, high)]

    def is_coarse(self, key: Key) -> bool:
        return all(position in axis.coarse_positions for axis, position in zip(self.axes, key, strict=True))


def with_position(key: Key, axis: int, position: int) -> Key:
    """`key`, elsewhere along one axis."""
    return (*key[:axis], position, *key[axis + 1 :])

"""YAML files of experiments and tables: one file per paper, and one per entry of the user's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.training.fields import SettingError, changed, wrong

TOLD = ("source", "reported", "reading")
"""Fields of what a paper says, and our comments on it."""


MOST_VALUES = 100_000  # of a file, with every alias in full; the papers' files have some hundreds


class _Loader(yaml.SafeLoader):
    """YAML without repeated fields, integers beyond 64 bits, and aliases of aliases that grow without end."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and self._checked(node, "", {}) > MOST_VALUES:
            raise SettingError(f"got more than {MOST_VALUES:,} values, want fewer")
        return node

    def _checked(self, node: yaml.Node, path: str, counts: dict[yaml.Node, int]) -> int:
        """Check a node once; return the count of its values with every alias in full. ``counts`` are those known."""
        if counts.get(node) == 0:
            raise SettingError(f"{path}: got a value that contains itself, want a finite one")
        if node not in counts:
            counts[node] = 0
            counts[node] = 1 + sum(self._checked(inner, name, counts) for name, inner in self._inner(node, path))
        return counts[node]

    def _inner(self, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the values in a list or mapping with their paths; construct a scalar, to see that it is valid."""
        if isinstance(node, yaml.SequenceNode):
            yield from ((f"{path}[{place}]", value) for place, value in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                yield f"{path}, a key", key
                name = "<<" if key.tag.endswith(":merge") else self.construct_object(key, deep=True)
                problem = ""
                if not isinstance(name, Hashable):
                    problem = "got a list or mapping as a key"
                elif name in keys:
                    problem = f"{name} appears twice, want it once"
                if problem:
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add(name)
                yield f"{path}.{name}".removeprefix("."), value
        elif not node.tag.endswith(":merge"):
            kind = node.tag.rpartition(":")[2]
            try:
                value = self.construct_object(node)
                if isinstance(value, int) and value.bit_length() > 64:
                    raise ValueError
            except (ValueError, LookupError, OverflowError) as error:
                want = "an integer of at most 64 bits" if kind == "int" else f"a valid {kind}"
                raise wrong(path or "value", node.value, want) from error


def read_yaml(text: str) -> Any:
    """Return the content of YAML; SettingError in one line if it is invalid or nested too deeply."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise SettingError(f"{where}{' '.join(str(error.problem).split())}") from error
    except RecursionError as error:
        raise SettingError("brackets are nested too deeply") from error
    except Exception as error:  # PyYAML's constructors may raise anything, for example for a 13th month
        raise SettingError(" ".join(str(error).split())) from error


class Shelf:
    """The papers' entries in a folder's files, by name; messages use ``kind`` and ``listing``, a command.

    An entry with a ``base``, another entry's name, inherits the fields that it does not set. A path names a field of a
    field (``optimizer.lr``). If a ``name`` changes, the fields beside it start from their defaults. ``also`` is added
    to the base's ``reading``.
    """

    def __init__(self, folder: Path, kind: str, listing: str) -> None:
        self.folder, self.kind, self.listing = folder, kind, listing

    def names(self) -> list[str]:
        """Return the names of the papers' entries."""
        return sorted(self.entries)

    @cached_property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The papers' entries, each with the fields in its file."""
        files = sorted(self.folder.glob("*.yaml"))
        return {name: given for path in files for name, given in read_yaml(path.read_text(encoding="utf-8")).items()}

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of an entry or of the user's file, with those of its base; SettingError in one line."""
        if not name.endswith((".yaml", ".yml")):
            if name in self.entries:
                return self._based(self.entries[name])
            hint = did_you_mean(name, sorted(self.entries))
            want = f"one of those that fastcaps {self.listing} lists, or a .yaml file"
            raise SettingError(f"{self.kind}: got {name!r}{hint}, want {want}")
        path = Path(name).expanduser()
        if not path.is_file():
            raise SettingError(f"{self.kind}: got {name!r}, want an existing file")
        try:
            return self._based(read_yaml(path.read_text(encoding="utf-8")), from_user=True)
        except (SettingError, UnicodeDecodeError) as error:
            raise SettingError(f"{path.name}: {error}") from error

    def _based(self, given: Any, from_user: bool = False) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise wrong(self.kind, given, "a mapping of fields")
        made = {str(key): value for key, value in given.items()}  # YAML does not read on, no, null and 1 as text
        base, also = made.pop("base", None), made.pop("also", None)
        if base is None:
            if also is not None:
                raise wrong("also", also, "a base as well")
            return made
        if not isinstance(base, str) or base not in self.entries:
            hint = did_you_mean(base, sorted(self.entries)) if isinstance(base, str) else ""
            raise wrong("base", base, f"a {self.kind} that fastcaps {self.listing} lists{hint}")
        # a user's entry does not inherit what the paper says
        below = {key: value for key, value in self.fields(base).items() if not from_user or key not in TOLD}
        made = changed(below, made)
        if also is not None:
            made["reading"] = f"{made.get('reading', '')} {also}".strip()
        return made

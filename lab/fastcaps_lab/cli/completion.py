"""The script of ``fastcaps --show-completion``: it holds every word, so the Tab key starts no Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, get_args, get_type_hints

from fastcaps_lab.cli.explain import DTYPES

SCRIPT = """\
# Tab completion of the fastcaps command, for bash and zsh.
[ -n "${{ZSH_VERSION-}}" ] && autoload -U +X bashcompinit && bashcompinit
_fastcaps() {{
    local words= command=${{COMP_WORDS[1]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    [ "$COMP_CWORD" = 1 ] && command=fastcaps before=
    case "$command $before" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fastcaps fastcaps
"""


KNOWN: dict[str, str | Sequence[str]] = {
    "explain": "models",
    "recipes": "training.recipes",
    "reproduce": "training.tables",
    "--network": "models",
    "--data": "data",
    "--recipe": "training.recipes",
    "--backend": ("cuda", "triton", "cpu", "reference"),
    "--device": ("cpu", "cuda"),
    "--dtype": DTYPES,
}
"""What may follow a command or an option: a module's names, or these."""


def _known(before: str, command: str = "") -> list[str]:
    known = KNOWN.get(before, ())
    try:
        if command == "train" and not known:
            return _choices(before.lstrip("-"))
        return list(import_module(f"fastcaps_lab.{known}").names() if isinstance(known, str) else known)
    except ImportError:  # its extra is not installed
        return []


def _choices(setting: str) -> list[str]:
    """Return the values, or names of kinds, of a setting of a run that has only some."""
    from fastcaps_lab.training.config import TrainConfig

    kinds = get_args(get_type_hints(TrainConfig).get(setting))
    names = (get_args(get_type_hints(kind)["name"]) if isinstance(kind, type) else [kind] for kind in kinds)
    return [name for some in names for name in some]


def script(context: Any) -> str:
    """Return the shell's function, from the commands and what they take."""
    cases: dict[str, list[str]] = {}
    for name, command in context.command.commands.items():
        options = [each for each in command.params if each.param_type_name == "option"]
        flags = {word: each.is_flag for each in options for word in (*each.opts, *each.secondary_opts)}
        # what bench passes on
        flags |= {"--help": True} | {
            option: not value for option, value in re.findall(r"\[(--[a-z-]+)( ?[^]]*)\]", command.help)
        }
        values = {option: _known(option, name) for option, is_flag in flags.items() if not is_flag}
        values |= {name: [*names, *flags]} if (names := _known(name)) else {}
        cases |= {f'"{name} {before}"': words for before, words in values.items()}
        cases[f'"{name} "*'] = [*flags]
    cases['"fastcaps "*'] = [*context.command.commands, "--show-completion", "--version", "--help"]
    return SCRIPT.format(cases="\n".join(f'        {at}) words="{" ".join(words)}" ;;' for at, words in cases.items()))

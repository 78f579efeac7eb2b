"""The script of ``fastcaps --show-completion``: it holds every word, so no Python starts when the key is pressed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

SCRIPT = """\
# Tab completion of the fastcaps command, for bash and zsh.
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
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


def names_of(module: str) -> Callable[[], list[str]]:
    """Return what lists the names that a module knows; none if its extra is not installed."""

    def names() -> list[str]:
        try:
            return list(import_module(f"fastcaps.{module}").names())
        except ImportError:
            return []

    return names


def script(context: Any) -> str:
    """Return the shell's function, from the commands and what they take."""
    cases: dict[str, list[str]] = {}
    for name, command in context.command.commands.items():
        options: list[str] = []
        values: dict[str, list[str]] = {}  # by the word before
        for parameter in command.params:
            known = [item.value for item in parameter.shell_complete(context, "") if item.value]
            if parameter.param_type_name == "argument":
                values |= {name: known} if known else {}
                continue
            options += [*parameter.opts, *parameter.secondary_opts]
            if not parameter.is_flag:
                values |= dict.fromkeys(parameter.opts, known)
        for option, value in re.findall(r"\[(--[a-z-]+) ?([^]]*)\]", command.help):  # what bench and compare pass on
            options += [option]
            values |= {option: value.split("|") if "|" in value else []} if value else {}
        if name in values:
            values[name] += options
        free = "|".join(f'"{name} {option}"' for option, words in values.items() if not words)
        cases |= {f'"{name} {before}"': words for before, words in values.items() if words}
        cases |= {free: []} if free else {}  # files
        cases[f'"{name} "*'] = options
    cases['"fastcaps "*'] = [*context.command.commands, "--show-completion", "--version", "--help"]
    return SCRIPT.format(cases="\n".join(f'        {at}) words="{" ".join(words)}" ;;' for at, words in cases.items()))

"""Completion scripts for bash, zsh and fish, which `embedtrain completion SHELL` prints.

A script contains every word, so that a TAB starts no process.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum

from embedtrain.config.code import names_of
from embedtrain.config.commands import COMMANDS, Command
from embedtrain.config.hydra_files import GROUPS, choices
from embedtrain.config.kinds import KINDS, kinds
from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import Recipe

SHELLS = ("bash", "zsh", "fish")
_FLAGS = ["--help", "--cfg", "--config-dir"]
_LAUNCH_FLAGS = ["--gpus", "--nproc-per-node", "--nodes", "--node-rank", "--master", "--max-restarts"]

_BASH = r"""_embedtrain() {{
  local line=${{COMP_LINE:0:COMP_POINT}} list
  local current=${{line##* }}
  local -a words
  read -ra words <<< "$line"
  if (( ${{#words[@]}} < 2 )) || {{ (( ${{#words[@]}} == 2 )) && [[ -n $current ]]; }}; then
    list="{names}"
  else
    case ${{words[1]}} in
{cases}
    esac
  fi
  local config_dir='--config-dir[ =]([^ ]+)' file
  if [[ $list == *recipe=* && $line =~ $config_dir ]]; then
    for file in "${{BASH_REMATCH[1]/#\~/$HOME}}"/recipe/*.yaml; do
      file=${{file##*/}}
      [[ $file == "*.yaml" ]] || list+=" recipe=${{file%.yaml}}"
    done
  fi
  COMPREPLY=($(compgen -W "$list" -- "$current"))
  [[ $current == *= && ${{COMPREPLY[*]}} == "$current" ]] && COMPREPLY=()  # a value of its own: files
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  # bash has split the word at the equals sign
  [[ $current == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{current%=*}}="}}")
  return 0
}}
complete -o default -F _embedtrain embedtrain
"""
_ZSH = """#compdef embedtrain
_embedtrain() {{
  local -a list
  if (( CURRENT == 2 )); then
    list=({names})
  else
    case $words[2] in
{cases}
    esac
  fi
  local result=1
  compadd -- ${{list:#*=}} && result=0
  compadd -S '' -- ${{(M)list:#${{(b)PREFIX}}?*=}} && result=0  # a value follows, without a space
  if (( result )); then
    compset -P '*='
    _files && result=0
  fi
  return result
}}
# Either a folder of $fpath has this file, which is then run at the first TAB, or it was sourced.
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _embedtrain "$@"
else
  compdef _embedtrain embedtrain
fi
"""


def completion_script(shell: str) -> str:
    """The completion script of `bash`, `zsh` or `fish`."""
    words = {name: sorted(set(_words(command))) for name, command in COMMANDS.items()}
    names = " ".join(words)
    if shell == "fish":
        lines = [f"complete -c embedtrain -f -n __fish_use_subcommand -a '{names}'"]
        for name, listed in words.items():
            lines.append(f"complete -c embedtrain -n '__fish_seen_subcommand_from {name}' -a '{' '.join(listed)}'")
        return "\n".join(lines) + "\n"
    assignment = "      {}) list=({}) ;;" if shell == "zsh" else '      {}) list="{}" ;;'
    cases = "\n".join(assignment.format(name, " ".join(listed)) for name, listed in words.items())
    return (_ZSH if shell == "zsh" else _BASH).format(names=names, cases=cases)


def _words(command: Command) -> Iterator[str]:
    yield from _FLAGS
    if command.ranks:
        yield from _LAUNCH_FLAGS
    if command.takes_recipe:
        yield from _options(Recipe, "")
        for group in GROUPS:
            yield from (f"{group}={choice}" for choice in choices(group))
        for loss in LOSSES.values():
            yield from _options(loss, "loss.")
        for kind in kinds():
            yield from _options(kind.options, "model.")
        yield from (f"model.kind={name}" for name in KINDS)
    if command.option_class is not Recipe:
        yield from _options(command.option_class, "")


def _options(kind: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        inner = _classes(hints[field.name])
        groups = [cls for cls in inner if is_dataclass(cls) and cls is not LossConfig]
        values = [str(member.value) for cls in inner if issubclass(cls, Enum) for member in cls]
        if bool in inner:
            values = ["true", "false"]
        values += names_of(field)
        if groups:
            for group in groups:
                yield from _options(group, f"{prefix}{field.name}.")
        elif LossConfig not in inner:
            yield from (f"{prefix}{field.name}={value}" for value in values or [""])


def _classes(hint: object) -> list[type]:
    if isinstance(hint, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _classes(part)]
    return [hint] if isinstance(hint, type) else []

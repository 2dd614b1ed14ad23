"""The command `lightning-swarm completion`: scripts that complete a command line in bash and zsh.

A script is static text with the words of all parsers, because it would take too long to start Python at each press of
the tab key.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.cli import commands, programs, serving

# Lightning's own parser has hundreds of options, and takes seconds to build.
TRAINER_OPTIONS: Final[Mapping[str, str]] = {
    "--help": "show all options",
    "--config": "a file with these options",
    "--print_config": "print such a file",
    "--model": "the LightningModule's class, as my_project.Net",
    "--model.help": "show the options of a model's class",
    "--data": "the LightningDataModule's class, as my_project.Data",
    "--data.help": "show the options of a data module's class",
    "--trainer.accelerator": "kind of device: cpu, gpu",
    "--trainer.devices": "number of peers on this machine",
    "--trainer.max_epochs": "epochs to train",
    "--trainer.max_steps": "steps to train",
    "--trainer.strategy.num_stages": "number of stages",
    "--trainer.strategy.help": "show the options of the strategy",
    "--ckpt_path": "a checkpoint to start from",
}

_BASH: Final = """\
# Completion of lightning-swarm for bash, by `lightning-swarm completion bash`.
_lightning_swarm() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} place=1 words=
    case ${COMP_WORDS[1]} in -v | -vv | --verbose) ((COMP_CWORD > 1)) && place=2 ;; esac
    if ((COMP_CWORD == place)); then
        words=@commands@
    else
        case ${COMP_WORDS[place]}:$previous in
            @values@
            *) if [[ $word == -* ]]; then
                case ${COMP_WORDS[place]} in
                    @options@
                esac
            fi ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _lightning_swarm lightning-swarm  # default: names of files where no word fits
"""

_ZSH: Final = """\
#compdef lightning-swarm
# Completion of lightning-swarm for zsh, by `lightning-swarm completion zsh`.
_lightning_swarm() {
    local -a found
    local place=2
    [[ $words[2] == (-v|-vv|--verbose) ]] && ((CURRENT > 2)) && place=3
    if ((CURRENT == place)); then
        found=(
            @commands@
        )
        _describe command found
        return
    fi
    case $words[place]:$words[CURRENT-1] in
        @values@
    esac
    if (($#found)); then
        compadd -a found
    elif [[ $PREFIX == -* ]]; then
        case $words[place] in
            @options@
        esac
        _describe -o option found
    else
        _files
    fi
}
if [[ $funcstack[1] == _lightning-swarm ]]; then
    _lightning_swarm "$@"  # a file of this name in fpath is itself the function
else
    compdef _lightning_swarm lightning-swarm
fi
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script of a shell; returns the exit status."""
    sys.stdout.write({"bash": _bash, "zsh": _zsh}[arguments.shell](_words()))
    return 0


@dataclass
class _Words:
    """The commands, options and values that a script completes."""

    commands: dict[str, str]  # name -> help
    options: dict[str, dict[str, str]] = field(default_factory=dict)  # command -> option -> help
    values: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (command, word before) -> words

    def add(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Add the words of a command's parser."""
        formatter = parser._get_formatter()
        for action in parser._actions:  # argparse has no public list of them
            options = [option for option in action.option_strings if option.startswith("--")]
            for option in options:
                self.options.setdefault(command, {})[option] = formatter._expand_help(action) if action.help else ""
            # A value follows its option or, for a positional argument, the command.
            if action.choices is not None:
                self.values.update({(command, before): [*map(str, action.choices)] for before in options or [command]})


def _words() -> _Words:
    parser = commands.command_parser()
    listed = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    words = _Words({action.dest: action.help or "" for action in listed._get_subactions()})
    for name in words.commands:
        if name in programs.TRAINER_COMMANDS:
            words.options[name] = dict(TRAINER_OPTIONS)
        elif name in programs.PEER_COMMANDS:
            words.add(name, programs.PEER_COMMANDS[name].parser())
        else:
            words.add(name, listed.choices[name])
    words.add("serve", serving.serve_parser())  # `serve` has two sets of options
    return words


def _bash(words: _Words) -> str:
    return _filled(
        _BASH,
        commands=[_joined([*words.commands, "--help", "--version", "--verbose"])],
        values=[
            f"{command}:{before}) words={_joined(values)} ;;" for (command, before), values in words.values.items()
        ],
        options=[f"{command}) words={_joined(options)} ;;" for command, options in words.options.items()],
    )


def _joined(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _zsh(words: _Words) -> str:
    general = {"--help": "list the commands", "--version": "show the version", "--verbose": "print more on stderr"}
    return _filled(
        _ZSH,
        commands=_described({**words.commands, **general}),
        values=[
            f"({command}:{before}) found=({' '.join(values)}) ;;" for (command, before), values in words.values.items()
        ],
        options=[
            f"({command}) found=({' '.join(_described(options))}) ;;" for command, options in words.options.items()
        ],
    )


def _described(words: Mapping[str, str]) -> list[str]:
    """Return words with their help, quoted in the form that zsh's `_describe` expects."""
    return [shlex.quote(f"{word}:{text}" if text else word) for word, text in words.items()]


def _filled(script: str, **lines: list[str]) -> str:
    """Replace each marker ``@name@`` in a script by lines, all with the indentation of the marker's line."""
    for name, replacement in lines.items():
        [indentation] = re.findall(rf"^( *).*@{name}@", script, re.MULTILINE)
        script = script.replace(f"@{name}@", f"\n{indentation}".join(replacement))
    return script

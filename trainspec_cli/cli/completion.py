"""`trainspec completion SHELL`: print the script that makes a shell call `trainspec complete LINE` whenever Tab is
pressed."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

# bash splits words at `=`, and replaces only the part after it.
BASH = r"""_trainspec() {
    local line="${COMP_LINE:0:COMP_POINT}" word prefix IFS=$'\n'
    word="${line##*[[:space:]]}"
    COMPREPLY=($(trainspec complete "$line" 2>/dev/null))
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        prefix="${word%"${word##*=}"}"
        COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    return 0
}
complete -o default -F _trainspec trainspec
"""
ZSH = r"""#compdef trainspec
_trainspec() {
    local -a found
    found=(${(f)"$(trainspec complete "${(j: :)words[1,CURRENT-1]} ${PREFIX}" 2>/dev/null)"})
    if (( ! $#found )); then
        _files
        return
    fi
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
}
compdef _trainspec trainspec
"""
FISH = r"""function __trainspec_complete
    trainspec complete (commandline -cp | string collect) 2>/dev/null
end
complete -c trainspec -f -n 'test -n "$(__trainspec_complete)"' -a '(__trainspec_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> None:
    """Print a script that completes commands, recipes, keys, values and runs.

    Type eval "$(trainspec completion bash)" or "$(trainspec completion zsh)", also in ~/.bashrc or (after compinit)
    ~/.zshrc; in fish: trainspec completion fish > ~/.config/fish/completions/trainspec.fish
    """
    print(SCRIPTS[shell], end="")

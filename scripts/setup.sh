#!/usr/bin/env bash
# Makes .venv in the repository's folder, with all that the project and its tests need.
#   WLB_VENV=/path/to/venv   use that environment instead and install nothing
#   WLB_PYTHON=/path/python  make .venv from this interpreter
# Your own pip settings (indexes, a CPU build of torch) are respected.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -n "${WLB_VENV:-}" ]]; then
    if [[ ! -x "$WLB_VENV/bin/python" ]]; then
        echo "error: WLB_VENV must name a virtual environment, but $WLB_VENV/bin/python is not there" >&2
        exit 1
    fi
    if ! "$WLB_VENV/bin/python" -c 'import importlib.metadata as m; m.version("megatron-core"); import torch' 2>/dev/null; then
        echo "error: the environment WLB_VENV=$WLB_VENV must hold megatron-core and torch: install them with" >&2
        echo "       $WLB_VENV/bin/python -m pip install -c constraints.txt -e '.[dev]'" >&2
        exit 1
    fi
    exit 0
fi

stamp=.venv/.wlb-setup
wanted=$(cat constraints.txt pyproject.toml setup.py | sha256sum | cut -c1-16)
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

is_new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    # 3.12 is what CI tests; a pyenv shim may be on PATH without a version behind it, so each is tried.
    for candidate in ${WLB_PYTHON:+"$WLB_PYTHON"} python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[3-9]*/bin/python3; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
    echo "error: the megatron-core wheel is for Linux x86_64, this is $(uname -sm)" >&2
    exit 1
fi
if ! python=$(find_python); then
    echo "error: Python 3.12 or newer is needed and was not found on PATH or under pyenv." >&2
    echo "       Install it (for example: pyenv install 3.12, or apt install python3.12-venv) or set WLB_PYTHON." >&2
    exit 1
fi
echo "> environment: .venv from $python ($("$python" -V)); torch with its CUDA libraries takes about 5 GB and 2-3 minutes"
if [[ ! -x .venv/bin/python ]]; then
    # Under its final name only when complete, apart from packages: those are what the stamp vouches for.
    rm -rf .venv
    "$python" -m venv .venv
fi
rm -f "$stamp"
.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' |
    while read -r line; do
        case $line in
        Collecting* | Downloading* | Installing* | Successfully*) echo "  ${line:0:110}" ;;
        esac
    done
echo "$wanted" >"$stamp"
echo "> environment ready"

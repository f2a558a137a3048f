#!/usr/bin/env bash
# Checks the packed path on this machine's GPU: run this first there. At most 8 minutes on one GPU; needs no data.
#   scripts/gpu_check.sh                     every section; prints one page
#   scripts/gpu_check.sh --device cpu        the same as a rehearsal without a GPU, under a minute
#   scripts/gpu_check.sh --json FILE         write all that was measured, after each section
#   scripts/gpu_check.sh --cost-profile FILE write what the model costs here, for --wlb-cost-profile
#   scripts/gpu_check.sh --wheels FOLDER     without a network: take packages that python lacks (megatron-core; not torch)
#                                            from the wheels in FOLDER, for this check only; default: wheels/, if there
#   scripts/gpu_check.sh --help              all options, such as the sizes of the model whose costs are measured
#   WLB_VENV=/path/to/venv                   use that environment; without it .venv, else python3 (a container with
#                                            Transformer Engine)
# Exits with 0 only when every section passed.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda wheels="" arguments=()
while (($#)); do
    case $1 in
    --wheels=*) wheels=${1#--wheels=} ;;
    --wheels)
        if (($# < 2)); then
            echo "error: --wheels must be followed by a folder" >&2
            exit 1
        fi
        wheels=$2
        shift
        ;;
    --device=*) device=${1#--device=} && arguments+=("$1") ;;
    --device) device=${2:-} && arguments+=("$1") ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
[[ -n $wheels && $wheels != /* ]] && wheels=$called_from/$wheels
if [[ -n $wheels && ! -d $wheels ]]; then
    echo "error: --wheels must name a folder, got $wheels" >&2
    exit 1
fi
[[ -z $wheels && -d wheels ]] && wheels=$PWD/wheels

python="${WLB_VENV:-.venv}/bin/python"
if [[ ! -x $python ]]; then
    if [[ -n ${WLB_VENV:-} ]]; then
        echo "error: WLB_VENV must name a virtual environment, but $python is not there" >&2
        exit 1
    fi
    python=$(command -v python3) || python=python3
fi
[[ $python == */* && $python != /* ]] && python=$PWD/$python
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo "error: $python must be Python 3.12 or newer: set WLB_VENV to an environment of one" >&2
    exit 1
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n $wheels ]]; then
    packages=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check-packages.XXXXXX")
    trap 'rm -rf "$packages"' EXIT
    "$python" tools/missing_wheels.py "$wheels" >"$packages/list"
    if [[ -s $packages/list ]]; then
        echo "> from $wheels, for this check: $(sed 's|.*/||; s|-py.*||; s|-cp.*||' "$packages/list" | paste -sd ' ')" >&2
        # --no-deps: what the machine has, torch above all, stays as it is.
        xargs -d '\n' "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
            --target "$packages/site" <"$packages/list"
        PYTHONPATH="$PYTHONPATH:$packages/site"
    fi
fi
if ! problem=$("$python" -c 'import importlib.metadata as m; m.version("megatron-core"); import torch' 2>&1); then
    echo "error: $python must have megatron-core and torch (${problem##*$'\n'}): run scripts/setup.sh, or in a" >&2
    echo "       container that brings torch: $python -m pip install --no-deps megatron-core==0.19.2, or without a" >&2
    echo "       network put its wheel into a folder and add --wheels FOLDER (docs/gpu_check.md)" >&2
    exit 1
fi

[[ $device == cpu ]] && export CUDA_VISIBLE_DEVICES=""
# A machine's host name need not resolve; the loopback device always works for one process.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
# Paths among the options are of the folder from which this was called.
tool=$PWD/tools/gpu_check.py
cd "$called_from"
"$python" "$tool" ${arguments[@]+"${arguments[@]}"}

#!/usr/bin/env bash
# Checks the packed path on this machine's GPU: run this first there. At most 8 minutes on one GPU; needs no data.
#   scripts/gpu_check.sh                 kernels, a GPT and sharded attention against an oracle, times of all
#                                        context-parallel ranks beside the prediction, short training runs
#   scripts/gpu_check.sh --device cpu    the same as a rehearsal without a GPU, under a minute
#   scripts/gpu_check.sh --json FILE     write all that was measured
#   WLB_VENV=/path/to/venv               use that environment; without it .venv, else python3 (a container with
#                                        Transformer Engine)
# Exits with 0 only when every check passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${WLB_VENV:-.venv}/bin/python"
if [[ ! -x $python ]]; then
    if [[ -n ${WLB_VENV:-} ]]; then
        echo "error: WLB_VENV must name a virtual environment, but $python is not there" >&2
        exit 1
    fi
    python=$(command -v python3)
fi
if ! "$python" -c 'import importlib.metadata as m; m.version("megatron-core"); import torch' 2>/dev/null; then
    echo "error: $python must have megatron-core and torch: run scripts/setup.sh, or in a container that brings torch:" >&2
    echo "       $python -m pip install -e . -c constraints.txt (leave torch out of the constraints there)" >&2
    exit 1
fi

previous=
for argument in "$@"; do
    if [[ $argument == --device=cpu || "$previous $argument" == "--device cpu" ]]; then
        export CUDA_VISIBLE_DEVICES=""
    fi
    previous=$argument
done
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# A machine's host name need not resolve; the loopback device always works for one process.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
exec "$python" tools/gpu_check.py "$@"

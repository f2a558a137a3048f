#!/usr/bin/env bash
# Makes the environment if it is missing, then checks style and types and runs the tests.
#   scripts/test.sh            what every change runs, at most 8 minutes on 2 cores
#   scripts/test.sh --all      also the slow tests, the patch table and the dry run of the GPU check: what CI runs
#   scripts/test.sh ARGS ...   passed on to pytest, e.g. tests/unit -k packing
#   WLB_TEST_WORKERS=4         files tested side by side when nothing is passed on; 2 by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
python="${WLB_VENV:-.venv}/bin/python"
# An environment named by WLB_VENV need not hold this project.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 MPLBACKEND=Agg

selection=(-m "not slow")
# Files side by side, each in one process: its cases share started ranks. By hand (ARGS) one process is quicker to start.
workers=(-n "${WLB_TEST_WORKERS:-2}" --dist loadfile)
all=0
if [[ "${1:-}" == "--all" ]]; then
    all=1
    selection=()
    shift
fi

if (($#)); then workers=(); fi

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
if ((all)); then
    "$python" tools/check_patches.py
    scripts/gpu_check.sh --device cpu
fi
exec "$python" -m pytest ${workers[@]+"${workers[@]}"} "${selection[@]}" "$@"

#!/usr/bin/env bash
# Builds the quickstart's corpus, unless a complete one is there.
#   scripts/quickstart_corpus.sh FOLDER
# The scripts/setup.sh environment must exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# != 1)); then
    echo "error: usage: scripts/quickstart_corpus.sh FOLDER" >&2
    exit 2
fi
python="${WLB_VENV:-.venv}/bin/python"
if [[ ! -x $python ]]; then
    if [[ -n ${WLB_VENV:-} ]]; then
        echo "error: WLB_VENV must name a virtual environment, but $python is not there" >&2
    else
        echo "error: $python must be there: run scripts/setup.sh first, or set WLB_VENV" >&2
    fi
    exit 2
fi
# Files over 24 KB, about one window, are left out: as in practice at 128K, few documents exceed the window.
OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" \
    tools/build_corpus.py "$1" --max-document-bytes 24000 --vocab-size 2048

#!/usr/bin/env bash
# Trains a small GPT on real documents without a GPU, plain and balanced in two ways, and shows where the time went.
#   scripts/quickstart.sh               about 5 minutes on 2 cores, after the environment is made once
#   LAYOUT=pp2|dp2|tp2                  how the 2 processes share the work (default pp2: two pipeline stages)
#   WLB_VENV=/path/to/venv              use that environment
# Everything is written under runs/quickstart/. A second run uses the same environment and corpus.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

layout=${LAYOUT:-pp2}
case $layout in
pp2 | dp2 | tp2) ;;
*)
    echo "error: LAYOUT must be pp2, dp2 or tp2, got $layout" >&2
    exit 2
    ;;
esac
steps=18 seed=1
# Costs come from other documents than those whose times they predict.
calibration_steps=6 calibration_seed=2
out=runs/quickstart
corpus=$out/corpus
mkdir -p "$out"

stage() { echo "[$((SECONDS / 60)):$(printf '%02d' $((SECONDS % 60)))] $*"; }

# Runs a command whose output goes to a log as well; says the error and the log's path when it fails.
logged() {
    local log=$out/$1 status=0
    shift
    "$@" 2>&1 | tee "$log" || status=$?
    if ((status)); then
        echo "error: $(grep -aoE '(error: .*|^[A-Za-z_.]+(Error|Exception)\b.*)' "$log" | tail -n 1 | sed 's/^error: //')" >&2
        echo "       log: $PWD/$log" >&2
        exit 1
    fi
}

stage "environment"
logged setup.log scripts/setup.sh
python="${WLB_VENV:-.venv}/bin/python"
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
SECONDS=0 # the environment is made once and not counted

stage "corpus: sources and documentation of the installed Python"
logged corpus.log scripts/quickstart_corpus.sh "$corpus"

stage "costs: $calibration_steps steps over other documents, in micro-batches of many sizes ($layout)"
# Without a price per micro-batch makespan makes many small ones. Only unequal sizes tell the seconds of a token from
# those of a micro-batch; plain's micro-batches are all of one window.
scripts/quickstart_train.sh "$out/calibration" "$corpus" "$layout" "$calibration_steps" --seed "$calibration_seed" \
    --wlb-packing makespan --wlb-overhead-tokens 0
crossover=$("$python" tools/report.py cost "$out/calibration" --json "$out/cost.json")
echo "    attention takes as long as all else at $crossover tokens; all costs: $out/cost.json"

stage "training, plain: documents in arrival order, cut at the window ($layout, $steps steps)"
scripts/quickstart_train.sh "$out/plain" "$corpus" "$layout" "$steps" --seed "$seed" --wlb-packing plain

stage "training, wlb: the same documents in as many micro-batches, evened out over several steps"
scripts/quickstart_train.sh "$out/wlb" "$corpus" "$layout" "$steps" --seed "$seed" --wlb-packing wlb \
    --wlb-cost-profile "$out/cost.json"

stage "training, makespan: plain's documents in every step, in the micro-batches whose predicted step is shortest"
scripts/quickstart_train.sh "$out/makespan" "$corpus" "$layout" "$steps" --seed "$seed" --wlb-packing makespan \
    --wlb-cost-profile "$out/cost.json"

stage "report"
logged report.log "$python" tools/report.py compare --plain "$out/plain" \
    --balanced "wlb=$out/wlb" "makespan=$out/makespan" --fit-from "$out/calibration" \
    --corpus "$corpus/manifest.json" --layout "$layout" --json "$out/report.json" --png "$out/report.png"
stage "done"

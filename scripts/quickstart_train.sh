#!/usr/bin/env bash
# One training run of the quickstart's GPT: processes over gloo, no GPU.
#   scripts/quickstart_train.sh FOLDER CORPUS LAYOUT STEPS [further flags of pretrain_gpt_wlb.py]
# LAYOUT is pp2, dp2, tp2 or cp2, with 2 processes, or cp2pp2 or cp2dp2, with 4.
# FOLDER gets log.txt (everything the run printed), timeline/ and command.txt.
# The scripts/setup.sh environment must exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# < 4)); then
    sed -n '2,6s/^# *//p' "scripts/${BASH_SOURCE[0]##*/}" >&2
    exit 2
fi
folder=$1 corpus=$2 layout=$3 steps=$4
shift 4

# Attention takes as long as everything else at about a quarter of the window, as in a 7B model at 128K: see
# docs/quickstart.md. Small heads and few layers keep a step at a few seconds of one core.
MODEL=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 2
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --no-position-embedding
    --normalization RMSNorm --swiglu --disable-bias-linear
    --make-vocab-size-divisible-by 128 --attention-dropout 0 --hidden-dropout 0
)
# What Megatron needs on a machine without CUDA.
CPU=(
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 4 --train-iters "$steps"
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0
    --log-interval 1 --eval-iters 0 --eval-interval 1000000
)
DATA=(
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$corpus/tokenizer.model"
    --data-path "$corpus/corpus_text_document" --split "100,0,0"
)
case $layout in
pp2) LAYOUT_FLAGS=(--pipeline-model-parallel-size 2) ;;
dp2) LAYOUT_FLAGS=() ;;
tp2) LAYOUT_FLAGS=(--tensor-model-parallel-size 2) ;;
cp2) LAYOUT_FLAGS=(--context-parallel-size 2) ;;
cp2pp2) LAYOUT_FLAGS=(--context-parallel-size 2 --pipeline-model-parallel-size 2) ;;
cp2dp2) LAYOUT_FLAGS=(--context-parallel-size 2) ;;
*)
    echo "error: LAYOUT must be pp2, dp2, tp2, cp2, cp2pp2 or cp2dp2, got $layout" >&2
    exit 2
    ;;
esac
num_processes=2
[[ $layout == cp2?* ]] && num_processes=4

python="${WLB_VENV:-.venv}/bin/python"
if [[ ! -x $python ]]; then
    if [[ -n ${WLB_VENV:-} ]]; then
        echo "error: WLB_VENV must name a virtual environment, but $python is not there" >&2
    else
        echo "error: $python must be there: run scripts/setup.sh first, or set WLB_VENV" >&2
    fi
    exit 2
fi
# One thread a process: with more, processes would take the cores from each other.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES=""
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# A laptop's host name need not resolve; the loopback device always works.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
port=$("$python" -m wlb.ports)
COMMAND=(
    "$python" -m torch.distributed.run --nproc-per-node "$num_processes" --master-addr 127.0.0.1 --master-port "$port"
    pretrain_gpt_wlb.py "${MODEL[@]}" "${CPU[@]}" "${TRAINING[@]}" "${DATA[@]}" "${LAYOUT_FLAGS[@]}"
    --wlb-document-cut stream --wlb-timeline "$folder/timeline" "$@"
)

# An earlier run's files must not be taken for this one's.
rm -rf "$folder/timeline" "$folder/log.txt"
mkdir -p "$folder"
printf '%q ' "OMP_NUM_THREADS=1" "${COMMAND[@]}" >"$folder/command.txt"
echo >>"$folder/command.txt"

# A few fields of each iteration's line; the log keeps everything.
show_progress() {
    local line begin_s=$SECONDS
    local pattern='iteration +([0-9]+)/ *([0-9]+) .*elapsed time per iteration \(ms\): ([0-9]+).*lm loss: ([^ ]+)'
    echo "    starting $num_processes processes (about 10 seconds)"
    while IFS= read -r line; do
        if [[ $line =~ $pattern ]]; then
            printf '    step %3d of %d   loss %.3f   %5.2f s a step   %3d s so far\n' "${BASH_REMATCH[1]}" \
                "${BASH_REMATCH[2]}" "${BASH_REMATCH[4]}" "${BASH_REMATCH[3]}e-3" "$((SECONDS - begin_s))"
        fi
    done
}

if ! "${COMMAND[@]}" 2>&1 | tee "$folder/log.txt" | LC_ALL=C show_progress; then
    # Our own sentence if there is one, or the argument parser's, else the last line of the first traceback.
    reason=$(sed -nE 's/^(\[[a-z0-9]+\]:)?(error \(rank [0-9]+\)|[^ ]+\.py: error): //p' "$folder/log.txt" | head -n 1)
    if [[ -z $reason ]]; then
        reason=$(grep -aE '^(\[[a-z0-9]+\]:)?[A-Za-z_.]+(Error|Exception|Interrupt)\b' "$folder/log.txt" |
            grep -v ChildFailedError | head -n 1 || true)
    fi
    echo "error: training stopped: ${reason:-no error was printed}" >&2
    echo "       log: $(cd "$folder" && pwd)/log.txt" >&2
    exit 1
fi

#!/usr/bin/env bash
# Trains a 7B model of Llama-2's shape on windows of 128K tokens: in WLB-LLM's evaluation on 64 GPUs, as TP 8, CP 2, PP 4.
#
#   one node:      TP=8 CP=1 PP=1 RECOMPUTE=full scripts/train_7b_128k.sh CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER_MODEL DATA_PREFIX
#   several nodes: on each, NNODES=8 NODE_RANK=0..7 MASTER_ADDR=first-node scripts/train_7b_128k.sh ...
#   Slurm:         sbatch scripts/slurm/train.sbatch 7b_128k ...
#
# TOKENIZER_MODEL is a SentencePiece file or a Hugging Face folder, DATA_PREFIX a .bin/.idx prefix, or a blend in one
# argument ("0.7 a 0.3 b"). MOCK in place of either needs no file: documents of varied length, made up. Every number below
# can be set by the environment variable beside it; further flags, after -- or not, come last and win. DRY_RUN=1
# prints the command.
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
read_arguments "$@"

: "${TP:=8}" "${CP:=2}" "${PP:=4}"
count_processes
: "${SEQ_LENGTH:=131072}"

MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-32}"
    --hidden-size "${HIDDEN_SIZE:-4096}"
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-11008}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-32}"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --position-embedding-type rope
    # Llama-2's own base, 10000, turns too fast for distances of 128K.
    --rotary-base "${ROTARY_BASE:-500000}"
    --normalization RMSNorm
    --norm-epsilon "${NORM_EPSILON:-1e-5}"
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std "${INIT_METHOD_STD:-0.02}"
)

TRAINING_ARGS=(
    # A packed micro-batch is one sequence of many documents.
    --micro-batch-size 1
    # In windows, a multiple of the data-parallel size: 4M tokens, as Llama-2. WLB-LLM measured with PP x DP windows, which
    # leaves more of the step to the pipeline bubble.
    --global-batch-size "${GLOBAL_BATCH_SIZE:-32}"
    --train-iters "${TRAIN_ITERS:-10000}"
    --lr "${LR:-3e-4}"
    --min-lr "${MIN_LR:-3e-5}"
    --lr-decay-style cosine
    --lr-warmup-iters "${LR_WARMUP_ITERS:-200}"
    --weight-decay "${WEIGHT_DECAY:-0.1}"
    --adam-beta1 "${ADAM_BETA1:-0.9}"
    --adam-beta2 "${ADAM_BETA2:-0.95}"
    --clip-grad "${CLIP_GRAD:-1.0}"
    --seed "${SEED:-1234}"
    # Micro-batches differ in length: a mean of their means would weigh tokens unequally.
    --calculate-per-token-loss
    --transformer-impl "${TRANSFORMER_IMPL:-transformer_engine}"
)
case ${PRECISION:=bf16} in
bf16 | fp16) TRAINING_ARGS+=("--$PRECISION") ;;
fp32) ;;
*) fail "PRECISION must be bf16, fp16 or fp32, got $PRECISION" ;;
esac

# By count, a first stage of the default layout holds 36 GB of activations: 4 windows in flight, 8 layers, divided by TP x CP.
# modules: norms and MLPs are computed again, not attention, which is most of the work at this length.
# full: whole layers are, and a window fits where the model does.
case ${RECOMPUTE:=none} in
none) ;;
modules) TRAINING_ARGS+=(--recompute-granularity selective --recompute-modules layernorm mlp) ;;
full) TRAINING_ARGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
*) fail "RECOMPUTE must be none, modules or full, got $RECOMPUTE" ;;
esac

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --context-parallel-size "$CP"
    --pipeline-model-parallel-size "$PP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-backend "${DISTRIBUTED_BACKEND:-nccl}"
    # Longer than a checkpoint takes to load or a first step to compile.
    --distributed-timeout-minutes "${DISTRIBUTED_TIMEOUT_MINUTES:-30}"
)

WLB_ARGS=(
    --wlb-packing "${WLB_PACKING:-makespan}"
    --wlb-cp-sharding "${WLB_CP_SHARDING:-hybrid}"
    # 0: each step trains the very documents that plain packing would. 8 and more let long documents wait for each other:
    # faster steps, another order of documents (docs/packing.md).
    --wlb-max-delay-steps "${WLB_MAX_DELAY_STEPS:-0}"
    # Replace the cost model by what a run has measured: --wlb-cost-profile FILE (tools/report.py cost).
)

DATA_ARGS=("${TOKENIZER_ARGS[@]}" "${DATA_PATH_ARGS[@]}" --split "${SPLIT:-969,30,1}")

LOGGING_ARGS=(
    --log-interval "${LOG_INTERVAL:-1}"
    --log-throughput
    --tensorboard-dir "$tensorboard_dir"
    --save "$checkpoint_dir"
    # The same folder: a job that starts again goes on where it stopped, packing included.
    --load "$checkpoint_dir"
    --save-interval "${SAVE_INTERVAL:-500}"
    --ckpt-format torch_dist
    --eval-interval "${EVAL_INTERVAL:-1000}"
    --eval-iters "${EVAL_ITERS:-2}"
    # On SIGTERM: finish the step, save, exit. --exit-duration-in-mins does the same after a time.
    --exit-signal-handler
    # All ranks collect garbage in the same step, so that none waits for another's collector.
    --manual-gc
    --manual-gc-interval "${MANUAL_GC_INTERVAL:-50}"
)

launch "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${WLB_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "${EXTRA_ARGS[@]}"

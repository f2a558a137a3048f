# shellcheck shell=bash
# What the launchers scripts/train_*.sh share: arguments, environment, who starts the processes. Sourced, not run.
# shellcheck disable=SC2034 # the arrays are read by the launchers

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 2
}

# read_arguments "$@": sets checkpoint_dir, tensorboard_dir, TOKENIZER_ARGS, DATA_PATH_ARGS and EXTRA_ARGS.
read_arguments() {
    local names=(CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER_MODEL DATA_PREFIX) number
    for number in "${!names[@]}"; do
        if (($# <= number)) || [[ -z ${*:number+1:1} || ${*:number+1:1} == -* ]]; then
            echo "usage: ${0##*/} CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER_MODEL|MOCK DATA_PREFIX|MOCK [[--] FLAGS]" >&2
            fail "${names[number]} must be given as argument $((number + 1)), got ${*:number+1:1}"
        fi
    done
    checkpoint_dir=$1 tensorboard_dir=$2
    read_tokenizer "$3"
    read_data "$4"
    shift 4
    if [[ ${1:-} == -- ]]; then shift; fi
    EXTRA_ARGS=("$@")
}

read_tokenizer() {
    local model=$1
    if [[ $model == MOCK ]]; then
        TOKENIZER_ARGS=(--tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-32000}")
        return
    fi
    local type=${TOKENIZER_TYPE:-}
    if [[ -z $type ]]; then
        # A name on the Hugging Face hub is no file: say TOKENIZER_TYPE=HuggingFaceTokenizer for one.
        [[ -e $model ]] || fail "TOKENIZER_MODEL must be a file, a folder or MOCK, got $model"
        type=SentencePieceTokenizer
        if [[ -d $model ]]; then type=HuggingFaceTokenizer; fi
    fi
    TOKENIZER_ARGS=(--tokenizer-type "$type" --tokenizer-model "$model")
}

suffix_advice() {
    if [[ $1 =~ \.(bin|idx)$ ]]; then echo ": give the prefix without ${BASH_REMATCH[0]}"; fi
}

# One prefix, or a blend as one argument: "0.7 data/a 0.3 data/b".
read_data() {
    if [[ $1 == MOCK ]]; then
        DATA_PATH_ARGS=(--mock-data)
        return
    fi
    local words=("$1") word file weight='' num_weights=0 num_prefixes=0
    if [[ ! -e $1.idx ]]; then read -ra words <<<"$1"; fi
    for word in "${words[@]}"; do
        if [[ $word =~ ^[0-9]*\.?[0-9]+$ ]] && ((${#words[@]} > 1)); then
            [[ -z $weight ]] || fail "a weight of a blend must be followed by a prefix, got $weight $word"
            weight=$word num_weights=$((num_weights + 1))
            continue
        fi
        weight='' num_prefixes=$((num_prefixes + 1))
        for file in "$word.idx" "$word.bin"; do
            [[ -f $file ]] || fail "DATA_PREFIX must name .bin/.idx data or be MOCK, but $file is not a file$(suffix_advice "$word")"
        done
    done
    [[ -z $weight ]] || fail "a weight of a blend must be followed by a prefix, got $weight at its end"
    if ((num_weights && num_weights != num_prefixes)); then
        fail "all prefixes of a blend must have a weight, or none, got $num_weights for $num_prefixes in $1"
    fi
    DATA_PATH_ARGS=(--data-path "${words[@]}")
}

# require_task_variables NAME ...: what srun, or the batch script, sets for a task.
require_task_variables() {
    local name
    for name in "$@"; do
        [[ -n ${!name:-} ]] || fail "$name must be set with LAUNCHER=task: srun sets it, or scripts/slurm/train.sbatch; got none"
    done
}

# require_one_of NAME VALUE CHOICE ...
require_one_of() {
    local name=$1 value=$2 choice
    shift 2
    for choice in "$@"; do
        if [[ $value == "$choice" ]]; then return; fi
    done
    fail "$name must be one of $*, got $value"
}

# count_processes: from the environment sets num_processes, and refuses a layout that they do not fill.
#   LAUNCHER=torchrun, the default: this command runs once on each of NNODES nodes and starts GPUS_PER_NODE processes.
#   LAUNCHER=task: srun runs this command once for each GPU, as scripts/slurm/train.sbatch does.
count_processes() {
    local per_replica=$((TP * CP * PP)) where
    case ${LAUNCHER:=torchrun} in
    torchrun)
        : "${NNODES:=1}" "${GPUS_PER_NODE:=8}"
        num_processes=$((NNODES * GPUS_PER_NODE)) where="$NNODES x $GPUS_PER_NODE (NNODES x GPUS_PER_NODE)"
        ;;
    task)
        require_task_variables SLURM_NTASKS
        num_processes=$SLURM_NTASKS where="$num_processes (tasks of srun)"
        ;;
    *) fail "LAUNCHER must be torchrun or task, got $LAUNCHER" ;;
    esac
    if ((num_processes == 0 || num_processes % per_replica)); then
        fail "processes must be a multiple of TP x CP x PP = $TP x $CP x $PP = $per_replica, got $where;" \
            "set these variables to change the layout"
    fi
}

# export_for_run NAME VALUE: also names it for a dry run.
EXPORTED=()
export_for_run() {
    export "$1=$2"
    EXPORTED+=("$1")
}

set_environment() {
    # Kernels start in the order of their launch: tensor and sequence parallelism overlap communication only so.
    export_for_run CUDA_DEVICE_MAX_CONNECTIONS "${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # Micro-batches differ in length, so nearly every step asks for blocks of sizes that no step asked for before.
    # Segments that grow can hold any of them, where fixed ones would be left in pieces that fit none; and sizes rounded
    # up to sixteenths of a power of two (at most 6 % more) are met again, so that freed blocks are reused.
    export_for_run PYTORCH_CUDA_ALLOC_CONF "${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True,roundup_power2_divisions:16}"
    # Norms leave a few multiprocessors to the communication that runs beside them.
    export_for_run NVTE_FWD_LAYERNORM_SM_MARGIN "${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}"
    export_for_run NVTE_BWD_LAYERNORM_SM_MARGIN "${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}"
    # A rank whose peer has died stops with the name of the collective instead of waiting for ever; how long it waits is
    # --distributed-timeout-minutes.
    export_for_run TORCH_NCCL_ASYNC_ERROR_HANDLING "${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
    export_for_run NCCL_DEBUG "${NCCL_DEBUG:-WARN}"
    # Planning runs in a process of its own beside each rank; one thread each is enough for both.
    export_for_run OMP_NUM_THREADS "${OMP_NUM_THREADS:-1}"
    export_for_run PYTHONUNBUFFERED 1
    export_for_run PYTHONPATH "$root${PYTHONPATH:+:$PYTHONPATH}"
    # torchrun passes SIGTERM on and kills what still runs after 30 s: too soon to finish a step and save it. Versions of
    # torch that do not know this variable keep to 30 s; under Slurm there is no torchrun in between.
    export_for_run TORCH_ELASTIC_SHUTDOWN_TIMEOUT "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
}

# PYTHON, else the environment of scripts/setup.sh, else python3 (a container that brings torch).
find_python() {
    python=${PYTHON:-}
    if [[ -z $python ]]; then
        python="${WLB_VENV:-$root/.venv}/bin/python"
        if [[ ! -x $python ]]; then
            [[ -z ${WLB_VENV:-} ]] || fail "WLB_VENV must name a virtual environment, but $python is not there"
            python=python3
        fi
    fi
}

# launch FLAGS: becomes the training process, or torchrun. DRY_RUN=1 prints the command instead, with what it exports.
launch() {
    require_one_of WLB_PACKING "${WLB_PACKING:-makespan}" greedy makespan plain solver two_stage wlb
    require_one_of WLB_CP_SHARDING "${WLB_CP_SHARDING:-hybrid}" per_sequence per_document adaptive hybrid
    find_python
    set_environment
    local command=("$python")
    if [[ $LAUNCHER == task ]]; then
        require_task_variables MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_LOCALID
        export_for_run MASTER_ADDR "$MASTER_ADDR"
        export_for_run MASTER_PORT "$MASTER_PORT"
        export_for_run WORLD_SIZE "$num_processes"
        export_for_run RANK "$SLURM_PROCID"
        export_for_run LOCAL_RANK "$SLURM_LOCALID"
    else
        if ((NNODES > 1)) && [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
            fail "MASTER_ADDR must name the first node and NODE_RANK this one with NNODES=$NNODES," \
                "got MASTER_ADDR=${MASTER_ADDR:-} NODE_RANK=${NODE_RANK:-}"
        fi
        if [[ ! ${NODE_RANK:-0} =~ ^[0-9]+$ ]] || ((10#${NODE_RANK:-0} >= NNODES)); then
            fail "NODE_RANK must be a number from 0 to $((NNODES - 1)) with NNODES=$NNODES, got $NODE_RANK"
        fi
        command+=(
            -m torch.distributed.run --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}"
            --nproc-per-node "$GPUS_PER_NODE"
            --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        )
    fi
    command+=("$root/pretrain_gpt_wlb.py" "$@")
    if [[ -n ${DRY_RUN:-} ]]; then
        local name
        printf 'env '
        for name in "${EXPORTED[@]}"; do printf '%q ' "$name=${!name}"; done
        printf '%q ' "${command[@]}"
        echo
        exit 0
    fi
    mkdir -p "$checkpoint_dir" "$tensorboard_dir"
    # Not a child: a signal for the process that srun started must reach training, not a shell that dies of it.
    exec "${command[@]}"
}

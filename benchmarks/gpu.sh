#!/usr/bin/env bash
# The measurements of docs/performance.md, part by part, on a machine with an NVIDIA GPU: `benchmarks/gpu.sh tests tune kernels beside`.
# Parts may run at the same time on different GPUs (CUDA_VISIBLE_DEVICES). Every command has a time limit, and leaves nothing behind.
# RESULTS: folder for result files and logs (default: benchmarks/results). PYTHON: the interpreter that has torch, and vLLM where it is
# compared. TOKENIZER: folder with SmolLM2's tokenizer.json, for servers. REPETITIONS: of each workload (default: 3). LLAMA, SMOL,
# MODELS: the workloads of the 8B and 135M shapes and of the other families' (default: all that have a target). FEWER: options of the
# parts with several GPUs, such as "--repetitions-of seed64=1". UNTIL: Unix time at which everything is to end; what has been measured
# by then is kept.
set -uo pipefail
cd "$(dirname "$0")/.."
RESULTS=${RESULTS:-benchmarks/results}
PYTHON=${PYTHON:-python3}
REPETITIONS=${REPETITIONS:-3}
TOKENIZER=${TOKENIZER:-smollm2-135m}
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$RESULTS"
left() { # at most SECONDS
    local rest=$((${UNTIL:-9999999999} - $(date +%s)))
    echo $((rest < $1 ? rest : $1))
}
limited() { # SECONDS, then a command of pagecast: interrupted then, so that it writes what it has
    local seconds
    seconds=$(left "$1")
    [ "$seconds" -gt 5 ] || { echo "no time left for: pagecast ${*:2}" && return 1; }
    timeout -s INT -k 30 "$seconds" "$PYTHON" -m pagecast.cli.main "${@:2}"
}
offline() { # SECONDS, SHAPE, then options and workloads
    limited "$1" bench throughput --random-weights "$2" --repetitions "$REPETITIONS" --warmup 0 --results "$RESULTS" "${@:3}"
}
workloads() { printf -- '--workload %s ' "$@"; }
LLAMA=$(workloads ${LLAMA:-single decode short prefix seed64 chat prefill})
SMOL=$(workloads ${SMOL:-single chat short})
MODELS="$(workloads ${MODELS:-single decode chat}) --max-model-len 16384"
BESIDE="--peer vllm --gpu-memory-utilization 0.45"

part_tests() { "$PYTHON" -m pytest -q -p no:cacheprovider -W ignore $(grep -lE 'needs (a|two) CUDA device' -r tests --include='*.py' | sort); }
part_tune() { limited 900 bench kernels --results "$RESULTS" --tune llama8b; }
part_kernels() { limited 600 bench kernels --results "$RESULTS"; }
part_ours8b() { offline 600 llama8b $LLAMA; }
part_ours135m() { offline 300 smol135m $SMOL; }
part_beside8b() { offline 900 llama8b $BESIDE $LLAMA; }
part_beside135m() { offline 600 smol135m $BESIDE $SMOL; }
part_defaults() {
    limited 300 bench throughput --random-weights llama8b --peer vllm --peer-only --peer-defaults --workload chat --repetitions 1 --warmup 0 \
        --results "$RESULTS"
}
part_static() {
    limited 300 bench throughput --random-weights llama8b --peer transformers --gpu-memory-utilization 0.45 --workload seed64 --limit 64 \
        --max-num-seqs 64 --repetitions 1 --warmup 0 --results "$RESULTS"
}
# Other families. Of the mixture this GPU holds only one engine at a time; vLLM is not asked about the last.
part_qwen25() { offline 600 qwen2.5-7b $BESIDE $MODELS; }
part_qwen3() { offline 600 qwen3-8b $BESIDE $MODELS; }
part_mixture() { offline 900 qwen3-30b-a3b --peer vllm --in-turn $MODELS; }
part_deepseek() { offline 300 deepseek-v2-lite $MODELS; }
part_families() { limited 300 bench kernels --results "$RESULTS" --parts experts,latent; } # what their kernels are worth
# Two engines of ours do not share a GPU: each counts what is in use on it. So they run in turn.
part_invariant() { offline 600 llama8b --peer batch_invariant --in-turn --workload single --workload decode; }
part_classes() { offline 600 llama8b --peer normal_class --in-turn --workload seed64 --workload chat --workload short; }
part_plans() { # steps of a plan: one, or as many as nothing else asks for
    for steps in 1 0; do offline 300 llama8b --workload single --workload decode --set max_steps_per_plan=$steps; done
}
# Two GPUs: how the 8B shape scales, and the 70B shape beside vLLM, which has the GPUs after ours. NVLink multicast stays off in all of them.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
ranks() { offline "$1" "$2" --tensor-parallel-size "$3" --workload single ${FEWER:-} "${@:4}"; }
part_allreduce() { limited 200 bench allreduce --ranks 2 --results "$RESULTS"; }
part_scale1() { ranks 200 llama8b 1 --workload uniform64 --workload decode; }
part_scale2() { ranks 200 llama8b 2 --workload uniform64 --workload decode; }
part_ranks70b() { ranks 1200 llama70b 2 --workload decode --workload seed64 --peer vllm --in-turn; }
part_startup() { # with kernels of its own, so that the first start is one
    TRITON_CACHE_DIR="$WORK/kernels" limited 400 bench startup --random-weights llama8b --checkpoint "$WORK/llama8b" --tokenizer "$TOKENIZER" \
        --starts 3 --results "$RESULTS"
}
part_quantized() { limited 900 bench quantized --parts 8b,vllm,memory,70b --repetitions "$REPETITIONS" --results "$RESULTS"; }

# Both servers on this GPU at once, asked in turn; ours first, because both measure what memory is free. Without a peer ours is measured alone.
ended() { # a server, which is a process group: told twice not to drain, then killed
    for signal in TERM TERM - - - - - - - - - - - - - - - - - - KILL; do
        [ "$signal" = - ] || kill "-$signal" "$1" 2>/dev/null
        sleep 1
        kill -0 -- "-$1" 2>/dev/null || break
    done
    kill -KILL -- "-$1" 2>/dev/null
    wait "$1" 2>/dev/null
}
within() { # SECONDS, process, then what is true once that process serves
    local until=$((SECONDS + $(left "$1"))) process=$2
    shift 2
    while [ "$SECONDS" -lt "$until" ] && kill -0 "$process" 2>/dev/null; do "$@" && return 0; sleep 1; done
    return 1
}
answers() { # URL
    "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}
served() { # SHAPE, first of two ports, then options of `bench serve`, runs separated by --
    local shape=$1 port=$2 logs="$RESULTS/servers-$1" status=0 beside=() began=$SECONDS
    shift 2
    "$PYTHON" -c "import sys; sys.path.insert(0, 'client'); from pagecast.bench import model_shapes; model_shapes.write('$shape', '$WORK')"
    : >"$logs.log"
    set -m # each server a process group of its own
    "$PYTHON" -m pagecast.cli.main serve --random-weights "$WORK/$shape" --tokenizer "$TOKENIZER" --served-model-name "$shape" \
        --port "$port" --num-frontends 4 --gpu-memory-utilization 0.45 >"$logs.log" 2>&1 &
    local own=$!
    if ! within 150 "$own" grep -q '^serving' "$logs.log"; then
        tail -n 5 "$logs.log"
        set +m
        ended "$own"
        return 1
    fi
    "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$WORK/$shape" --tokenizer "$TOKENIZER" --load-format dummy --max-num-seqs 256 \
        --gpu-memory-utilization 0.45 --port $((port + 1)) >"$logs-peer.log" 2>&1 &
    local peer=$!
    set +m
    if within 240 "$peer" answers "http://127.0.0.1:$((port + 1))/health"; then
        beside=(--peer-url "http://127.0.0.1:$((port + 1))")
    else
        tail -n 5 "$logs-peer.log"
    fi
    echo "servers of $shape after $((SECONDS - began)) s; peer: ${beside[*]:-none}"
    while [ $# -gt 0 ]; do
        local run=()
        while [ $# -gt 0 ] && [ "$1" != -- ]; do run+=("$1") && shift; done
        [ $# -gt 0 ] && shift
        limited 180 bench serve --target "127.0.0.1:$port" --name "$shape" --repetitions "$REPETITIONS" --results "$RESULTS" "${beside[@]}" \
            "${run[@]}" || status=1
    done
    ended "$own"
    ended "$peer"
    return $status
}
part_servers8b() { served llama8b_text 50061 --rate 24 --num-prompts 240 -- --num-prompts 600; }
part_servers135m() { served smol135m 50071 --num-prompts 600 --clients 4; }

status=0
for part in "$@"; do
    declare -F "part_$part" >/dev/null || { echo "$0: no part $part; there are: $(declare -F | sed -n 's/.*part_//p' | tr '\n' ' ')" >&2 && exit 2; }
done
for part in "$@"; do
    echo "== $part $(date +%T)"
    began=$SECONDS
    "part_$part" || status=1
    echo "== $part took $((SECONDS - began)) s"
done
exit $status

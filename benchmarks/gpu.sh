#!/usr/bin/env bash
# The measurements of docs/performance.md, part by part, on a machine with an NVIDIA GPU: `benchmarks/gpu.sh tests tune kernels beside`.
# RESULTS: folder for result files (default: benchmarks/results). PYTHON: the interpreter that has torch, and vLLM where it is compared.
# TOKENIZER: folder with SmolLM2's tokenizer.json, for servers of random weights. REPETITIONS: of each workload (default: 3).
set -uo pipefail
cd "$(dirname "$0")/.."
RESULTS=${RESULTS:-benchmarks/results}
PYTHON=${PYTHON:-python3}
REPETITIONS=${REPETITIONS:-3}
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
pagecast() { "$PYTHON" -m pagecast.cli.main "$@"; }
offline() { pagecast bench throughput --repetitions "$REPETITIONS" --warmup 0 --json "$RESULTS" "$@"; }
LLAMA=(--workload single --workload decode --workload short --workload prefix --workload seed64 --workload chat --workload prefill)
SMOL=(--workload single --workload chat --workload short)

part_tests() { "$PYTHON" -m pytest -q -p no:cacheprovider -W ignore $(grep -lE 'needs (a|two) CUDA device' -r tests --include='*.py' | sort); }
part_tune() { pagecast bench kernels --results "$RESULTS" --tune llama8b; }
part_kernels() { pagecast bench kernels --results "$RESULTS"; }
part_ours() { offline --random-weights llama8b "${LLAMA[@]}" && offline --random-weights smol135m "${SMOL[@]}"; }
part_beside() {
    offline --random-weights llama8b --peer vllm --gpu-memory-utilization 0.45 "${LLAMA[@]}"
    offline --random-weights smol135m --peer vllm --gpu-memory-utilization 0.45 "${SMOL[@]}"
}
part_defaults() { pagecast bench throughput --random-weights llama8b --peer vllm --peer-only --peer-defaults --workload chat --repetitions 1 --warmup 0 --json "$RESULTS"; }
part_static() {
    pagecast bench throughput --random-weights llama8b --peer transformers --gpu-memory-utilization 0.45 --workload seed64 --limit 64 \
        --max-num-seqs 64 --repetitions 1 --warmup 0 --json "$RESULTS"
}
part_invariant() { offline --random-weights llama8b --peer batch_invariant --gpu-memory-utilization 0.45 --workload single --workload decode; }
part_plans() { # steps of a plan: one, or as many as nothing else asks for
    for steps in 1 0; do offline --random-weights llama8b --workload single --workload decode --set max_steps_per_plan=$steps; done
}
part_startup() { pagecast bench startup --random-weights llama8b --checkpoint "$WORK/llama8b" --starts 2 --json "$RESULTS"; }

# Both servers on this GPU at once, asked in turn.
served() { # SHAPE, then options of `bench serve`, runs separated by --
    local shape=$1 up=0
    shift
    "$PYTHON" -c "import sys; sys.path.insert(0, 'client'); from pagecast.bench import model_shapes; model_shapes.write('$shape', '$WORK')"
    "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$WORK/$shape" --tokenizer "$TOKENIZER" --load-format dummy --max-num-seqs 256 \
        --gpu-memory-utilization 0.45 --port 8001 >"$WORK/peer.log" 2>&1 &
    local peer=$!
    pagecast serve --random-weights "$WORK/$shape" --tokenizer "$TOKENIZER" --served-model-name "$shape" --port 50061 --num-frontends 4 \
        --gpu-memory-utilization 0.45 >"$WORK/serve.log" 2>&1 &
    local own=$!
    for _ in $(seq 240); do
        sleep 1
        if curl -sf localhost:8001/health >/dev/null && grep -q '^serving' "$WORK/serve.log"; then up=1 && break; fi
        kill -0 "$own" 2>/dev/null || break
    done
    if [ "$up" = 1 ]; then
        while [ $# -gt 0 ]; do
            local run=()
            while [ $# -gt 0 ] && [ "$1" != -- ]; do run+=("$1") && shift; done
            [ $# -gt 0 ] && shift
            timeout 150 "$PYTHON" -m pagecast.cli.main bench serve --target 127.0.0.1:50061 --peer-url http://127.0.0.1:8001 --name "$shape" \
                --json "$RESULTS" "${run[@]}"
        done
    else
        tail -n 5 "$WORK/serve.log" "$WORK/peer.log"
    fi
    kill -INT "$own" 2>/dev/null
    kill "$peer" 2>/dev/null
    wait "$own" "$peer"
}
part_servers() {
    served llama8b_text --rate 24 --num-prompts 240 -- --num-prompts 600
    served smol135m --num-prompts 600 --clients 4
}

status=0
for part in "$@"; do
    declare -F "part_$part" >/dev/null || { echo "$0: no part $part; there are: $(declare -F | sed -n 's/.*part_//p' | tr '\n' ' ')" >&2 && exit 2; }
done
for part in "$@"; do
    echo "== $part $(date +%T)"
    "part_$part" || status=1
done
exit $status

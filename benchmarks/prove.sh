#!/usr/bin/env bash
# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
#
# Proves a commit on a GPU: its tests, compute-sanitizer, every benchmark. Logs and results go to
# $OUT; a failing step fails the run at its end. Steps by name, or all:
#
#   OUT=proof COMMIT=$(git rev-parse HEAD) PEERS="--peer sglang=DIR --peer flashinfer=DIR" \
#     WATERFILL_PEER="--peer sglang=DIR" bash benchmarks/prove.sh [build] [tests] [sanitizer] [bench]
#
# Of WATERFILL_PEER, DIR has sglang's deepep_waterfill_kernels.py, which lies apart from its finalize.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${OUT:?a folder for logs and results}" "${COMMIT:?the commit of this tree}" "${PEERS:=}"
: "${WATERFILL_PEER:=}"
PYTHON=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# One cache for all steps, so that nothing is compiled twice.
export SGL_MOE_JIT_CACHE_DIR=${SGL_MOE_JIT_CACHE_DIR:-$OUT/cache}
export SGL_MOE_JIT_TEST_CACHE_DIR=$SGL_MOE_JIT_CACHE_DIR
mkdir -p "$OUT"
LAYERS=deepseek-v3,kimi-k2,glm-4.5,qwen3-235b
failed=()

# step LOG COMMAND...: run it, keep its output, show its end.
step() {
  local log=$OUT/$1.log started=$SECONDS
  shift
  "$@" >"$log" 2>&1 || failed+=("$log")
  printf '== %s (%d s)\n' "$*" $((SECONDS - started))
  tail -n "${SHOW:-5}" "$log" | cut -c1-160
}

build() {
  step build "$PYTHON" -m sgl_moe_jit compile
}

tests() {
  SHOW=25 step tests "$PYTHON" -m pytest -q -m gpu
}

sanitizer() {
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      step "$tool" compute-sanitizer --error-exitcode 1 --tool "$tool" "$PYTHON" tests/sanitizer/exercise.py
  done
}

# A subject without peers refuses --peer.
bench() {
  local subject
  for subject in finalize norm host; do
    # shellcheck disable=SC2086
    step "bench_$subject" "$PYTHON" -m sgl_moe_jit bench "$subject" $PEERS \
      --json "$OUT/$subject.json" --commit "$COMMIT"
  done
  # shellcheck disable=SC2086
  step bench_models "$PYTHON" -m sgl_moe_jit bench finalize --cases all --tokens 1,16,64,256,1024,8192 \
    --providers sgl_moe_jit,sglang,stream $PEERS --json "$OUT/finalize_models.json" --commit "$COMMIT"
  for subject in route layer memory; do
    step "bench_$subject" "$PYTHON" -m sgl_moe_jit bench "$subject" --cases "$LAYERS" \
      --json "$OUT/$subject.json" --commit "$COMMIT"
  done
  step bench_permute "$PYTHON" -m sgl_moe_jit bench permute --json "$OUT/permute.json" \
    --commit "$COMMIT"
  # shellcheck disable=SC2086
  step bench_waterfill "$PYTHON" -m sgl_moe_jit bench waterfill $WATERFILL_PEER \
    --json "$OUT/waterfill.json" --commit "$COMMIT"
  step bench_ep "$PYTHON" -m sgl_moe_jit bench ep --ranks 1,2 --enable-waterfill \
    --json "$OUT/ep.json" --commit "$COMMIT"
  # More ranks than GPUs, through the host: that it works, not how fast.
  step bench_ep_gloo "$PYTHON" -m sgl_moe_jit bench ep --backend gloo --ranks 2,4 --tokens 32 --rounds 5 \
    --enable-waterfill --dynamic --waterfill-mode exact_restricted --exchange-choices \
    --json "$OUT/ep_gloo.json" --commit "$COMMIT"
}

for name in "${@:-build tests sanitizer bench}"; do
  for part in $name; do "$part"; done
done
printf 'failed: %s\n' "${failed[*]:-nothing}"
((${#failed[@]} == 0))

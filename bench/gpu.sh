#!/usr/bin/env bash
# Everything that wants a GPU, in under ten minutes: build, test, bench, sanitize, profile.
#
#   bench/gpu.sh [--dry-run] [stage...]    # all stages, or some of them; or only what would run
#
# Wants Python with torch (CUDA) and Triton, setuptools, CMake, Ninja, pytest-benchmark, nvcc; no network and
# no virtual environment. Results go to $OUT (bench/results/gpu-<date>): logs, JSON files, summary.md, to be committed.
# A stage that fails does not stop those after it; the exit status is the number of stages that failed. The device's
# settings (clocks, power, persistence, MIG) are left as they are.
#
#   PYTHON                  interpreter (python3)
#   FASTCAPS_GPU_SECONDS    for everything (580): a stage gets the remaining time, at most its own limit
#   TORCH_CUDA_ARCH_LIST    what to build for (this device's capability)
set -uo pipefail

PYTHON=${PYTHON:-python3}
SECONDS_IN_ALL=${FASTCAPS_GPU_SECONDS:-580}
DRY_RUN=0
chosen=()
for argument in "$@"; do
  case "$argument" in
    build | test | sanitize | bench | profile) chosen+=("$argument") ;;
    --dry-run) DRY_RUN=1 ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu.sh: no stage $argument; there are: build test bench sanitize profile" >&2; exit 64 ;;
  esac
done
[ ${#chosen[@]} -gt 0 ] || chosen=(build test bench sanitize profile)

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ROOT=$PWD
OUT=$(realpath -m "${OUT:-bench/results/gpu-$(date -u +%Y-%m-%d)}")

export PYTHONUNBUFFERED=1 PYTHONPATH="$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
export TRITON_CACHE_DIR="$ROOT/.cache/triton" TORCHINDUCTOR_CACHE_DIR="$ROOT/.cache/torchinductor"
export FASTCAPS_CUDA=1 FASTCAPS_COMMIT="${FASTCAPS_COMMIT:-$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)}"

# Print a command; run it too, unless this is a dry run, within the given seconds. Output goes to the stage's log.
run() {
  local limit=$1 status=0 left=$((SECONDS_IN_ALL - SECONDS))
  shift
  echo "+ $*"
  [ "$DRY_RUN" = 1 ] && return 0
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    echo "left out: the time is used up" | tee -a "$log"
    return 1
  fi
  echo "+ $*" >>"$log"
  timeout --kill-after=10 "$limit" "$@" >>"$log" 2>&1 || status=$?
  case "$status" in
    0) ;;
    124 | 137) echo "stopped after $limit s" | tee -a "$log" ;;
    *) echo "exit status $status" | tee -a "$log" ;;
  esac
  return "$status"
}

stage_build() {
  if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ] && [ "$DRY_RUN" = 0 ]; then
    TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || return 1
    export TORCH_CUDA_ARCH_LIST
  fi
  # the second where the environment cannot be written to
  run 240 "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --editable . ||
    run 240 "$PYTHON" setup.py --quiet build_ext --inplace || return 1
  run 60 "$PYTHON" -c 'import fastcaps; fastcaps.backends.show(); assert fastcaps.backends.listing()[0].available' ||
    return 1
  ! command -v cuobjdump >/dev/null || run 60 "$PYTHON" -m tools.static_report
}

# Whether Triton's kernels run here: not with a Triton before 3.6.
has_triton() {
  [ "$DRY_RUN" = 1 ] || "$PYTHON" -c 'import fastcaps; raise SystemExit(not fastcaps.backends.listing()[1].available)'
}

# What runs on a device. Triton compiles at first calls: its kernels' own tests take four minutes on sixteen cores.
stage_test() {
  local parallel=() worst=0
  "$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n auto --maxprocesses 14)
  run 100 "$PYTHON" -m pytest -q tests/test_cuda_kernels.py tests/test_cuda_extremes.py tests/encapnet/test_squash_sum.py \
    tests/test_nn_on_gpu.py -k "on-cuda or gpu or device" "${parallel[@]}" || worst=1
  ! has_triton || run 80 "$PYTHON" -m pytest -q tests/test_verbs_triton.py -k "not compiles" "${parallel[@]}" || worst=1
  return "$worst"
}

# No caching allocator: a read past a tensor's end must leave its allocation. Without the tool these fail, and only the
# calls in bfloat16 run.
stage_sanitize() {
  local worst=0 tool backend
  # calls of torch's that fail by design (is there such a symbol? such a pointer?) are not the kernels' errors
  for tool in "memcheck --report-api-errors no" racecheck; do
    # shellcheck disable=SC2086
    run 40 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name \
      kernel_substring=fastcaps "$PYTHON" -m tools.sanitize --device cuda --backend cuda || worst=1
  done
  for backend in cuda $(has_triton && echo triton); do
    run 20 "$PYTHON" -m tools.sanitize --device cuda --backend "$backend" --dtype bfloat16 || worst=1
  done
  return "$worst"
}

# First as many rows as half the time does for, then those that matter most with torch.compile too, which takes long:
# where a row is in both records, the complete one counts.
stage_bench() {
  local worst=0 seconds=$(((SECONDS_IN_ALL - SECONDS - 220) / 2)) # sanitizers and the profiler take the last minutes
  [ "$seconds" -gt 130 ] || [ "$DRY_RUN" = 1 ] && seconds=130
  for compile in --no-compile ""; do
    # shellcheck disable=SC2086
    run $((seconds + 25)) "$PYTHON" -m pytest bench -q --device cuda --seconds "$seconds" --results "$OUT" $compile ||
      worst=1
  done
  return "$worst"
}

stage_profile() {
  local worst=0 target
  # workload, and which of its kernels; the first launch of each is warming up
  for target in "tsai-c10-conv1 forward_kernel" "tsai-c10-conv1 backward_kernel" "hinton-conv forward_kernel"; do
    run 45 ncu --clock-control none --target-processes all --set detailed --kernel-name "regex:${target#* }" \
      --launch-skip 1 --launch-count 1 "$PYTHON" -m bench.profiled "${target% *}" || worst=1
  done
  run 40 "$PYTHON" -m bench.profiled tsai-c10-conv1 --table || worst=1
  return "$worst"
}

log=/dev/stdout
summary=/dev/null
if [ "$DRY_RUN" = 0 ]; then
  mkdir -p "$OUT" || exit 1
  summary="$OUT/summary.md"
  [ -f "$summary" ] || {
    printf '# One run of bench/gpu.sh\n\n'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | sed 's/^/Device: /'
    "$PYTHON" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])' 2>&1
    echo "Commit ${FASTCAPS_COMMIT:-unknown}, $(date -u '+%Y-%m-%d %H:%M') UTC"
    printf '\n| stage | result | seconds |\n| --- | --- | ---: |\n'
  } >"$summary"
fi

failed=0
for stage in "${chosen[@]}"; do
  echo "== $stage"
  start=$SECONDS
  result=passed
  [ "$DRY_RUN" = 1 ] || { log="$OUT/$stage.log" && : >"$log"; }
  "stage_$stage" || { result=failed && failed=$((failed + 1)); }
  [ "$DRY_RUN" = 1 ] || tail -n 15 "$log"
  echo "| $stage | $result | $((SECONDS - start)) |" >>"$summary"
  echo "== $stage: $result, $((SECONDS - start)) s"
done
exit "$failed"

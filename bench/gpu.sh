#!/usr/bin/env bash
# Everything that wants a GPU, in under ten minutes: build, test, sanitize, bench, profile.
#
#   bench/gpu.sh                    # all stages
#   bench/gpu.sh build test         # some of them
#   bench/gpu.sh --dry-run bench    # what would run
#
# Wants Python with torch (CUDA) and Triton, setuptools, CMake, Ninja, pybind11, pytest, nvcc; no network and no virtual
# environment. Results go to $OUT (bench/results/gpu-<date>): logs, a JSON file and summary.md, to be committed.
# A stage that fails does not stop those after it; the exit status is the number of stages that failed. The device's
# settings (clocks, power, persistence, MIG) are left as they are.
#
#   PYTHON                  interpreter (python3)
#   FASTCAPS_GPU_SECONDS    for everything (580): a stage gets what is left, at most its own limit
#   TORCH_CUDA_ARCH_LIST    what to build for (this device's capability)
set -uo pipefail

# shellcheck disable=SC2329 # stages are called by name
readonly STAGES="build test sanitize bench profile"
PYTHON=${PYTHON:-python3}
SECONDS_IN_ALL=${FASTCAPS_GPU_SECONDS:-580}
DRY_RUN=0
chosen=()
for argument in "$@"; do
  case " $STAGES " in
    *" $argument "*) chosen+=("$argument"); continue ;;
  esac
  case "$argument" in
    --dry-run) DRY_RUN=1 ;;
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu.sh: no stage $argument; there are: $STAGES" >&2; exit 64 ;;
  esac
done
[ ${#chosen[@]} -gt 0 ] || read -r -a chosen <<<"$STAGES"

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ROOT=$PWD
OUT=${OUT:-bench/results/gpu-$(date -u +%Y-%m-%d)}
case "$OUT" in /*) ;; *) OUT="$ROOT/$OUT" ;; esac

export PYTHONUNBUFFERED=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PIP_DISABLE_PIP_VERSION_CHECK=1
export TRITON_CACHE_DIR="$ROOT/.cache/triton" TORCHINDUCTOR_CACHE_DIR="$ROOT/.cache/torchinductor"
export FASTCAPS_CUDA=1
FASTCAPS_COMMIT=${FASTCAPS_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || true)}
export FASTCAPS_COMMIT
log=/dev/stdout
failed=0

# Print a command; run it too, unless this is a dry run, within the given seconds. Output goes to the stage's log.
run() {
  local limit=$1 status=0 left
  shift
  echo "+ $*"
  [ "$DRY_RUN" = 1 ] && return 0
  left=$((SECONDS_IN_ALL - SECONDS))
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

have() { command -v "$1" >/dev/null 2>&1; }

# A tool that is not there is said to be missing; the stage goes on without it, and fails.
missing() {
  echo "no $1 here: $2" | tee -a "$log"
  return 1
}

stage_build() {
  if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ] && [ "$DRY_RUN" = 0 ]; then
    TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || return 1
    export TORCH_CUDA_ARCH_LIST
  fi
  if ! run 240 "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .; then
    run 240 "$PYTHON" setup.py --quiet build_ext --inplace || return 1 # an environment that cannot be written to
  fi
  run 60 "$PYTHON" -c 'import fastcaps; fastcaps.backends.show(); assert fastcaps.backends.listing()[0].available' ||
    return 1
  if have cuobjdump; then
    run 60 "$PYTHON" tools/static_report.py
  fi
}

stage_test() {
  local parallel=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    parallel=(-n 8 --dist loadfile)
  fi
  run 180 "$PYTHON" -m pytest tests -q --durations=15 "${parallel[@]}"
}

# No caching allocator: a read past a tensor's end must leave its allocation.
stage_sanitize() {
  local worst=0 tool backend
  have compute-sanitizer || [ "$DRY_RUN" = 1 ] || {
    missing compute-sanitizer "the calls run unwatched"
    run 60 "$PYTHON" tools/sanitize.py --device cuda
    return 1
  }
  # calls of torch's that fail by design (is there such a symbol? such a pointer?) are not the kernels' errors
  for tool in "memcheck --report-api-errors no" racecheck; do
    # shellcheck disable=SC2086
    run 55 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name \
      kernel_substring=fastcaps "$PYTHON" tools/sanitize.py --device cuda --backend cuda || worst=1
  done
  for backend in cuda triton; do
    run 40 "$PYTHON" tools/sanitize.py --device cuda --backend "$backend" --dtype bfloat16 || worst=1
  done
  return "$worst"
}

stage_bench() {
  local seconds=$((SECONDS_IN_ALL - SECONDS - 60)) # the last minute is the profiler's
  [ "$seconds" -gt 260 ] && seconds=260
  [ "$seconds" -lt 20 ] && seconds=20
  [ "$DRY_RUN" = 1 ] && seconds=260
  run $((seconds + 60)) "$PYTHON" -m pytest bench -q --device cuda --seconds "$seconds" --results "$OUT"
}

stage_profile() {
  local worst=0 target
  local sections=(--section SpeedOfLight --section Occupancy --section LaunchStats --section WarpStateStats)
  sections+=(--section InstructionStats --section MemoryWorkloadAnalysis --section SchedulerStats)
  if have ncu || [ "$DRY_RUN" = 1 ]; then
    # workload, and which of its kernels; the first launch of each is warming up
    for target in "tsai-c10-conv1 forward_kernel" "tsai-c10-conv1 backward_kernel" "hinton-conv forward_kernel"; do
      run 45 ncu --clock-control none --target-processes all "${sections[@]}" --kernel-name "regex:${target#* }" \
        --launch-skip 1 --launch-count 1 "$PYTHON" tools/profile_target.py --device cuda --workload "${target% *}" ||
        worst=1
    done
  else
    missing ncu "torch's own profile alone" || worst=1
  fi
  run 40 "$PYTHON" tools/profile_target.py --device cuda --table || worst=1
  return "$worst"
}

if [ "$DRY_RUN" = 0 ]; then
  mkdir -p "$OUT" || exit 1
  summary="$OUT/summary.md"
  if [ ! -f "$summary" ]; then
    {
      echo "# One run of bench/gpu.sh"
      echo
      nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | sed 's/^/Device: /'
      "$PYTHON" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])' 2>&1
      echo "Commit ${FASTCAPS_COMMIT:-unknown}, $(date -u '+%Y-%m-%d %H:%M') UTC"
      echo
      echo "| stage | result | seconds |"
      echo "| --- | --- | ---: |"
    } >"$summary"
  fi
fi

for stage in "${chosen[@]}"; do
  echo "== $stage"
  start=$SECONDS
  result=passed
  if [ "$DRY_RUN" = 0 ]; then
    log="$OUT/$stage.log"
    : >"$log"
  fi
  if ! "stage_$stage"; then
    result=failed
    failed=$((failed + 1))
  fi
  if [ "$DRY_RUN" = 0 ]; then
    tail -n 15 "$log"
    echo "| $stage | $result | $((SECONDS - start)) |" >>"$summary"
    [ -s "$log" ] || rm -f "$log"
  fi
  echo "== $stage: $result, $((SECONDS - start)) s"
done
exit "$failed"

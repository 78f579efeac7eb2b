#!/usr/bin/env bash
# A quarter of an hour on a GPU.
#
#   bench/gpu.sh pack                       # before, without a GPU: compile everything for sm_90 into .device/
#   bench/gpu.sh build:COMMIT...            # before: the package of a commit, for `compare`, into .device/builds/
#   bench/gpu.sh rehearse                   # before: the stages in a clean folder without compilers
#   bench/gpu.sh [--dry-run] [stage...]     # on the GPU: these stages, or those that are next; or what would run
#   bench/gpu.sh map -- --precision bf16    # what follows -- goes to `python -m bench.gpu`
#
# Stages: counters (of bare kernels), compare (builds), sweep:ROW (schedules), map (all rows), profile (counters of our
# kernels), alternatives (PyTorch), test, yardstick (bare kernels). None compiles anything where .device/ is; without it
# the installed libraries serve. Wants Python with torch (CUDA), Triton, pytest, hypothesis; ncu and compute-sanitizer.
#
# Results go to a folder in bench/results/; where $OUT is set, also to $OUT/results.tar.gz, after every command. A command
# that fails or outlasts its limit stops no other; the exit status is the number of stages that failed. The device's
# settings (clocks, power, persistence, MIG) are left as they are.
#
#   PYTHON                  interpreter (python3)
#   FASTCAPS_GPU_SECONDS    for everything (580): a stage gets the remaining time, at most its own limit
#   YARDSTICK               pack: folder of bare kernels, programs that are no part of the repository (*.cu)
set -uo pipefail

NEXT=(test compare map yardstick counters alternatives) # as docs/performance/gpu.md says
PYTHON=${PYTHON:-python3}
SECONDS_IN_ALL=${FASTCAPS_GPU_SECONDS:-580}
DRY_RUN=0
chosen=()
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    pack | rehearse | test | map | yardstick | counters | profile | alternatives | compare | sweep:?* | build:?*) chosen+=("$1") ;;
    --dry-run) DRY_RUN=1 ;;
    --) shift && options=("$@") && break ;;
    -h | --help) sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu.sh: no stage $1; there are: pack build:COMMIT rehearse ${NEXT[*]%:*} test yardstick" >&2; exit 64 ;;
  esac
  shift
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${NEXT[@]}")

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ROOT=$PWD DEVICE=$PWD/.device AWAY=${OUT:-}
RESULTS=$ROOT/bench/results/gpu-$(date -u +%Y-%m-%dT%H%M)
export PYTHONUNBUFFERED=1 PYTHONPATH="$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}" OUT=$RESULTS
export TRITON_CACHE_DIR="$ROOT/.cache/triton" TORCHINDUCTOR_CACHE_DIR="$ROOT/.cache/torchinductor"
commit=$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || cat "$DEVICE/commit" 2>/dev/null)
export FASTCAPS_COMMIT="${FASTCAPS_COMMIT:-$commit}"
packed() { for name in cpu cuda; do export "FASTCAPS_${name^^}_LIBRARY=$1/lib/libfastcaps_$name.so"; done; }
[[ " ${chosen[*]} " == *" pack "* ]] || [ ! -d "$DEVICE/lib" ] || packed "$DEVICE"

say() { echo "$*" | tee -a "$RESULTS/summary.md"; }
save() {
  [ -n "$AWAY" ] && [ -d "$RESULTS" ] && mkdir -p "$AWAY" && (
    flock 9
    tar -czf "$RESULTS.tar.gz" -C "$RESULTS" . 2>/dev/null # complains of files that grow
    mv "$RESULTS.tar.gz" "$AWAY/results.tar.gz"
  ) 9>"$RESULTS.lock"
  return 0
}

# run LIMIT FILE COMMAND...: print a command; run it too, unless this is a dry run, within LIMIT seconds and the time that
# is left. Its output goes to FILE among the results.
run() {
  local limit=$1 file=$2 status=0 left=$((SECONDS_IN_ALL - SECONDS))
  shift 2
  echo "+ $*"
  [ "$DRY_RUN" = 0 ] || return 0
  [ "$left" -ge "$limit" ] || limit=$left
  [ "$limit" -ge 5 ] || { say "- $file: left out, the time is used up" && return 1; }
  timeout --kill-after=5 "$limit" "$@" >>"$RESULTS/$file" 2>&1 || status=$?
  case "$status" in
    0) ;;
    124 | 137) say "- $file: stopped after $limit s" ;;
    *) say "- $file: exit status $status" ;;
  esac
  save
  return "$status"
}

# ---- before, without a GPU -------------------------------------------------------------------------------------------

build_ext() { "$PYTHON" setup.py -q build_ext --inplace; }
bare() { echo "-O3 -std=c++17 -arch=sm_90 -o $1 $1.cu"; }
travels() {
  local total
  total=$({ git ls-files -z | xargs -0 du -cb && du -cb "$DEVICE"; } | awk '$2 == "total" {n += $1} END {print int(n / 2^20)}')
  echo "$total MiB travel, the tracked files among them" && [ "$total" -lt 60 ]
}

# The sources of bare kernels travel, too: only where their programs do not start are they compiled on the device.
stage_pack() {
  local name
  PATH=$PATH:/usr/local/cuda/bin
  command -v nvcc || { echo "no nvcc" && return 1; }
  [ "$DRY_RUN" = 0 ] || return 0
  export FASTCAPS_LEVELS=all FASTCAPS_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0
  mkdir -p "$DEVICE/lib" "$DEVICE/builds" && echo "$FASTCAPS_COMMIT" >"$DEVICE/commit" || return 1
  FASTCAPS_EXPERIMENTS=1 build_ext && cp fastcaps/lib/libfastcaps_cuda.so "$DEVICE/experiments.so" || return 1
  build_ext && cp fastcaps/lib/*.so "$DEVICE/lib/" || return 1
  [ -n "${YARDSTICK:-}" ] || echo "YARDSTICK is not set: no bare kernels"
  for name in ${YARDSTICK:+"$YARDSTICK"/*.cu}; do
    cp "$name" "$DEVICE/" && name=$(basename "$name" .cu) || return 1
    (cd "$DEVICE" && nvcc $(bare "$name")) || return 1 # shellcheck disable=SC2046
  done
  travels
}

# The package of a commit with its library; the switches of that come from the environment, as NVCC_APPEND_FLAGS.
stage_build() {
  local tree status
  git rev-parse --verify "$1^{commit}" || return 1
  [ "$DRY_RUN" = 0 ] || return 0
  tree=$(mktemp -d) && git worktree add -q --detach "$tree" "$1" || return 1
  (cd "$tree" && FASTCAPS_LEVELS=default FASTCAPS_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 PYTHONPATH=$tree build_ext) &&
    rm -f "$tree/fastcaps/lib/libfastcaps_cpu.so" && mkdir -p "$DEVICE/builds/$1${NVCC_APPEND_FLAGS:+-switched}" &&
    cp -r "$tree/fastcaps" "$DEVICE/builds/$1${NVCC_APPEND_FLAGS:+-switched}"
  status=$?
  git worktree remove --force "$tree"
  travels && return "$status"
}

# In a clean folder, with compilers that only say that they were called: the device's tests are collected as on a GPU, then
# the stages run as far as they go without one.
stage_rehearse() {
  local clean worst=0 name small
  [ -d "$DEVICE/lib" ] || { echo "no $DEVICE/lib: bench/gpu.sh pack" && return 1; }
  [ "$DRY_RUN" = 0 ] || return 0
  clean=$(mktemp -d) && mkdir -p "$clean/bin" "$clean/tree" || return 1
  git archive HEAD | tar -x -C "$clean/tree" && cp -r "$DEVICE" "$clean/tree/" || return 1
  for name in nvcc c++ g++ gcc cc clang clang++ cmake ninja; do
    printf '#!/bin/sh\necho "%s $*" >>"%s"\nexit 1\n' "$name" "$clean/compiled" >"$clean/bin/$name" && chmod +x "$clean/bin/$name"
  done
  cd "$clean/tree" || return 1
  export PATH="$clean/bin:$PATH" PYTHONPATH="$clean/tree:$clean/tree/tests" OUT="$clean/out" FASTCAPS_GPU_SECONDS=60
  packed "$clean/tree/.device"
  for name in CUDA NAMED TRITON; do
    local -n tests="${name}_TESTS"
    "$PYTHON" -m pytest -p pretended_gpu --collect-only -q "${tests[@]}" | tail -n 1 || worst=1
  done
  small=(--device cpu --batch 2 --precision fp32 --seconds 60 --results "$clean/out")
  "$PYTHON" -m bench.gpu profile tsai-c10-conv1 --device cpu --batch 1 || worst=1
  "$PYTHON" -m bench.gpu map "${small[@]}" --workload tsai-c10-fc --workload hinton-fc || worst=1
  FASTCAPS_CUDA_LIBRARY="$clean/tree/.device/experiments.so" "$PYTHON" -m bench.gpu sweep tsai-c10-fc "${small[@]}" || worst=1
  "$PYTHON" -m bench.gpu alternatives "${small[@]}" --workload tsai-c10-fc --against batched-matmul || worst=1
  bench/gpu.sh yardstick test
  echo "$? of 2 stages failed without a GPU, as they should; results:" && tar -tzf "$clean/out/results.tar.gz" || worst=1
  [ ! -e "$clean/compiled" ] || { echo "compiled:" && cat "$clean/compiled" && worst=1; }
  rm -rf "$clean"
  return "$worst"
}

# ---- tests -----------------------------------------------------------------------------------------------------------

CUDA_TESTS=(tests/test_cuda_kernels.py tests/test_cuda_extremes.py tests/test_cuda_folded.py tests/test_nn_on_gpu.py
  -m "slow or not slow" -k "on-cuda or gpu and not triton and not inductor")
TRITON_TESTS=(tests/test_verbs_triton.py::test_every_verb tests/test_triton.py tests/test_nn_on_gpu.py
  -k "every_verb or on_a_gpu and triton or ways_to_run and (tiny or set) or step and triton and not function")
NAMED_TESTS=("tests/test_verbs_triton.py::test_every_verb[products]"
  "tests/test_cuda_kernels.py::test_a_bias_that_800_children_share" -k "not on-cpu")

# Everything at once, on the cores that there are: two cases that were beyond their limit once, sanitizers (without the
# caching allocator: a read past a tensor's end must leave its allocation), every CUDA case; then Triton's, which compile.
stage_test() {
  local worst=0 pids=() pid tool began=$SECONDS options=(-v --no-header -p no:cacheprovider)
  "$PYTHON" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout 60 --timeout-method thread)
  run 90 named.txt "$PYTHON" -m pytest "${options[@]}" "${NAMED_TESTS[@]}" & pids+=($!)
  for tool in memcheck racecheck; do # calls of torch's that fail by design are not the kernels' errors
    run 115 "$tool.txt" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --report-api-errors no \
      --error-exitcode 9 --kernel-name kernel_substring=fastcaps "$PYTHON" -m tools.sanitize --backend cuda & pids+=($!)
  done
  run 80 cuda.txt "$PYTHON" -m pytest "${options[@]}" -n 8 "${CUDA_TESTS[@]}" || worst=1
  run $((118 - SECONDS + began)) triton.txt "$PYTHON" -m pytest "${options[@]}" -n 12 "${TRITON_TESTS[@]}" || worst=1
  for pid in "${pids[@]}"; do wait "$pid" || worst=1; done
  [ "$DRY_RUN" = 1 ] || (cd "$RESULTS" && tail -qn 1 named.txt cuda.txt triton.txt memcheck.txt racecheck.txt &&
    grep -hoE '((FAILED|ERROR) tests/|^WRONG).*' named.txt cuda.txt triton.txt memcheck.txt racecheck.txt | sort -u) | tee -a "$RESULTS/summary.md"
  return "$worst"
}

# ---- times and counters ----------------------------------------------------------------------------------------------

# measured LIMIT FILE COMMAND [OPTION...]: `python -m bench.gpu`, which keeps to its time itself.
measured() {
  local seconds=$((SECONDS_IN_ALL - SECONDS - 8)) limit=$1 file=$2
  shift 2
  run "$limit" "$file" "$PYTHON" -m bench.gpu "$@" --seconds $((seconds < limit - 5 ? seconds : limit - 5)) "${options[@]}"
}

stage_map() { measured 150 map.txt map; }
stage_alternatives() { measured 120 alternatives.txt alternatives --precision fp32 --batch 128; }
stage_sweep() {
  FASTCAPS_CUDA_LIBRARY=$(ls "$DEVICE/experiments.so" 2>/dev/null) measured 45 "sweep-$1.txt" sweep "$1"
}
stage_compare() {
  local build builds=()
  for build in "$DEVICE"/builds/*; do [ ! -d "$build" ] || builds+=(--library "$(basename "$build")=$build"); done
  measured 110 compare.txt map --batch 128 --precision fp32 --library "packed=$DEVICE/lib/libfastcaps_cuda.so" "${builds[@]}" \
    --workload tsai-c10-conv1 --workload sabour-mnist --workload tsai-c100-conv1 --workload hinton-conv --workload tsai-dmm-vector-conv
}

# As ncu shows demangled names with casts that no other demangler writes, kernels are named as the linker knows them.
profiled() {
  local limit=$1 file=$2 kernels=$3
  shift 3
  run "$limit" "$file" ncu --clock-control none --target-processes all --kernel-name-base mangled --kernel-name "regex:$kernels" \
    --launch-count 24 --metrics "$counters" --csv --page raw "$@"
}

# Names of the bare kernels that are expected to be the fastest: forwards by multiply-adds, TF32, three TF32 products,
# bfloat16; backwards alike.
stage_counters() {
  local worst=0 what program
  local forward='BodyFILi2ELi2ELin1ELi8E|BodyFILi2ELi1ELi2E|BodyTILi[013]ELi1E' backward='BwdSI|BwdNI'
  for what in forward backward; do
    for program in "$DEVICE"/yardstick*.cu; do
      profiled 40 "$(basename "$program" .cu)-$what.csv" "${!what}" "${program%.cu}" 128 "${what:0:1}wd" 0 || worst=1
    done
  done
  return "$worst"
}

# One step of each workload, warmed up: its forward's kernels and its backward's.
stage_profile() {
  local worst=0 workload
  for workload in tsai-c10-conv1 tsai-c100-fc1 tsai-dr-c100 tsai-dmm-vector-conv hinton-conv; do
    profiled 30 "profile-$workload.csv" fastcaps --profile-from-start off "$PYTHON" -m bench.gpu profile "$workload" || worst=1
  done
  [ "$DRY_RUN" = 1 ] || "$PYTHON" -m bench.counters "$RESULTS" >"$RESULTS/counters.md" || worst=1
  save
  return "$worst"
}

stage_yardstick() (
  local worst=0 program batch what
  cd "$DEVICE" 2>/dev/null || [ "$DRY_RUN" = 1 ] || { echo "no $DEVICE: bench/gpu.sh pack" && return 1; }
  for program in yardstick*.cu folded.cu; do
    program=${program%.cu}
    [ -f "$program.cu" ] || continue
    what="1 none 1" && [ "$program" != folded ] || what="slot 1" # shellcheck disable=SC2046,SC2086
    run 20 yardstick-start.txt "./$program" $what || ! command -v nvidia-smi || # without a GPU nothing would start
      run 100 yardstick-start.txt nvcc $(bare "$program") || return 1
  done
  for program in yardstick*.cu; do
    [ ! -f "$program" ] || for what in fwd bwd; do
      run 30 "${program%.cu}-$what.txt" "./${program%.cu}" 128 "$what" 15 || worst=1
    done
  done
  [ ! -f folded.cu ] ||
    for what in dynamic none bwd vocabulary slot; do run 25 "folded-$what.txt" ./folded "$what" 15 || worst=1; done
  return "$worst"
)

counters=
if [ "$DRY_RUN" = 0 ] && ! [[ " ${chosen[*]}" =~ " "(pack|build:|rehearse) ]]; then
  mkdir -p "$RESULTS" || exit 1
  {
    printf '# One run of bench/gpu.sh\n\n'
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit --format=csv,noheader 2>&1
    "$PYTHON" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])' 2>&1
    printf 'Commit %s, %s UTC\n\n' "${FASTCAPS_COMMIT:-unknown}" "$(date -u '+%Y-%m-%d %H:%M')"
  } >>"$RESULTS/summary.md"
  [[ " ${chosen[*]} " =~ " "(counters|profile)" " ]] && counters=$(ncu --query-metrics 2>/dev/null | "$PYTHON" -m bench.counters)
fi

failed=0
for stage in "${chosen[@]}"; do
  echo "== $stage"
  start=$SECONDS result=passed
  "stage_${stage%%:*}" "${stage#*:}" || { result=failed && failed=$((failed + 1)); }
  [ ! -d "$RESULTS" ] || echo "$stage: $result, $((SECONDS - start)) s" >>"$RESULTS/summary.md"
  echo "== $stage: $result, $((SECONDS - start)) s"
  save
done
exit "$failed"

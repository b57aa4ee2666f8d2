#!/usr/bin/env bash
# What only GPUs can show, in under ten minutes: tests, host waits in a step, races, drills, speed.
#
#     bash benchmarks/gpu_day.sh [--dry-run]
#
# Runs in a clone that need not be installed, on a machine with NVIDIA GPUs. --dry-run walks all stages on a CPU: it shows that they
# work. Each stage prints ok or FAILED, and the others run in any case; the last lines name those that failed, and the folder with the
# logs. Exit code: 1 if a stage failed, 2 if packages are missing. Without a network, fetch those elsewhere, for the other Python:
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels torchdata tomli-w
# and there: pip install --no-index --no-deps wheels/*.whl
set -u
cd "$(dirname "$0")/.." || exit 2
dry=${1:-} end=590 out=$(mktemp -d)
python=$(command -v python || command -v python3) || exit 2
"$python" - <<'PYTHON' || exit 2
import importlib.util, sys
names = {"tomli_w": "tomli-w", "PIL": "pillow", "pytest_timeout": "pytest-timeout"}
modules = ("torch torchvision torchdata numpy safetensors xxhash tensorboard tomli_w tqdm matplotlib PIL pytest pytest_timeout "
           "hypothesis").split()
if missing := [names.get(m, m) for m in modules if importlib.util.find_spec(m) is None]:
    sys.exit(f"missing packages: {' '.join(missing)} (see the first lines of benchmarks/gpu_day.sh)")
PYTHON
export TMPDIR=$out TORCHINDUCTOR_CACHE_DIR=$out/compiled # compiled once, for all stages
if [ "$dry" = --dry-run ]; then
  device="cpu --world.threads 1" ranks=2 sanitizer= hang="--inject hang:rank=0:step=12:phase=backward"
else
  device=cuda sanitizer=TORCH_CUDA_SANITIZER=1 hang="--task.stuck-at 12"
  ranks=$("$python" -c "import torch; print(torch.cuda.device_count())")
  ((ranks > 0)) || { echo "torch finds no GPU; --dry-run needs none"; exit 2; }
fi
task="--task benchmarks.gpu_task:Waits --device $device --steps 20 --checkpoint.every 5 --eval.every off
  --batch.global-size 128 --batch.micro-size 8"
train="$python -m trainer"

stage() {  # stage NAME LIMIT_S COMMAND…
  local name=$1 limit=$2 began=$SECONDS word=ok
  shift 2
  ((limit > end - SECONDS)) && ((limit = end - SECONDS))
  echo "no time left" >"$out/$name.log"
  ((limit > 0)) && timeout -k 10 "$limit" bash -c "$*" >"$out/$name.log" 2>&1 </dev/null || word=FAILED
  echo "$word  $name  $((SECONDS - began)) s" | tee -a "$out/results"
  [ $word = ok ] || tail -n 5 "$out/$name.log" | sed 's/^/    /'
}

launch() {  # launch NAME FLAGS: the command of a run
  echo $python -m launch --nproc-per-node $ranks -- $task --run-dir $out/$1 "${@:2}"
}

drill() {  # drill NAME FLAGS: the run must meet its fault, and have the bits of the undisturbed one
  stage "$1" 120 "$(launch "$@") && grep -q '\"attempt\": 1' $out/$1/events.jsonl && $train compare $out/straight $out/$1"
}

# Beside the drills: most of the time of these tests goes into starts of processes.
stage tests 400 "$python" -m pytest -q -m gpu tests/gpu &
stage straight 120 "$(launch straight)"
stage waits 90 "$train" $task --task.refuse-waits --run-dir "$out/waits"
stage sanitizer 90 $sanitizer "$train" $task --steps 3 --precision.compile off --run-dir "$out/sanitizer"
drill kill --inject kill:rank=0:step=8:phase=backward
drill hang $hang --watchdog.limit-s 5
nan="--inject nan:rank=0:step=9"
stage nan 150 "$(launch nan $nan) && $(launch nan-killed $nan --inject kill:rank=0:step=12:phase=forward) &&
  $train compare $out/nan $out/nan-killed"
stage stop 120 "$(launch stop --inject term:step=7); [ \$? = 75 ] && $(launch stop) && $train compare $out/straight $out/stop"
wait
left=$((end - SECONDS))
stage speed $left "$python" -m benchmarks.gpu $dry --limit-s $((left > 140 ? left - 90 : 50))
grep "^|\|^$\|snapshot of" "$out/speed.log"
failed=$(sed -n 's/^FAILED  \([a-z]*\).*/\1/p' "$out/results" | paste -sd' ')
echo "$SECONDS s; failed: ${failed:-none}; logs: $out"
[ -z "$failed" ]

#!/usr/bin/env bash
# What only GPUs can show, in under ten minutes: tests, host waits in a step, races, drills, speed.
#
#     bash benchmarks/gpu_day.sh [--dry-run]
#
# Needs a machine with NVIDIA GPUs. --dry-run walks all stages on a CPU: it shows that they work; its figures mean nothing. Each stage
# prints ok or FAILED; the folder with the logs is printed at the end. Exit code: 1 if a stage failed.
set -u
dry=${1:-}
out=$(mktemp -d)
failed=0
if [ "$dry" = --dry-run ]; then
  device="cpu --world.threads 1" ranks=2 sanitizer= hang="--inject hang:rank=0:step=12:phase=backward"
else
  device=cuda ranks=$(nvidia-smi -L | wc -l) sanitizer=TORCH_CUDA_SANITIZER=1 hang="--task.stuck-at 12"
fi
task="--task benchmarks.gpu_task:Waits --device $device --steps 20 --checkpoint.every 5 --eval.every off"

stage() {  # stage NAME LIMIT_S COMMAND…
  local name=$1 limit=$2 began=$SECONDS word=ok
  shift 2
  timeout "$limit" bash -c "$*" >"$out/$name.log" 2>&1 || { word=FAILED failed=1; }
  echo "$word  $name  $((SECONDS - began)) s"
  [ $word = ok ] || tail -n 5 "$out/$name.log" | sed 's/^/    /'
}

launch() {  # launch NAME FLAGS: the command of a run
  echo "python -m launch --nproc-per-node $ranks -- $task --run-dir $out/$1 ${*:2}"
}

drill() {  # drill NAME FLAGS: the run must have the bits of the undisturbed one
  stage "$1" 90 "$(launch "$@") && python -m trainer compare $out/straight $out/$1"
}

stage tests 200 "python -m pytest -q -m gpu tests/gpu"
stage straight 60 "$(launch straight)"
stage waits 60 "python -m trainer $task --task.refuse-waits --run-dir $out/waits"
stage sanitizer 60 "$sanitizer python -m trainer $task --steps 3 --run-dir $out/sanitizer"
drill kill --inject kill:rank=0:step=8:phase=backward
drill hang "$hang" --watchdog.limit-s 3
nan="--inject nan:rank=0:step=9"
stage nan 120 "$(launch nan "$nan") && $(launch nan-killed "$nan" --inject kill:rank=0:step=12:phase=forward) &&
  python -m trainer compare $out/nan $out/nan-killed"
stage stop 90 "$(launch stop --inject term:step=7); $(launch stop) &&
  python -m trainer compare $out/straight $out/stop"
stage speed 260 "python -m benchmarks.gpu ${dry:-} --models ResNet-50,GPT --limit-s 200"
grep -A 100 "^| ResNet\|^| GPT\|snapshot of" "$out/speed.log" | grep -v '^{'
echo "logs: $out"
exit $failed

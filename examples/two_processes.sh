#!/bin/bash
# One program over two processes of this machine, a region each: what several hosts do, on a laptop.
#
#     examples/two_processes.sh runs/two --config.steps=200
#
# Both get the same command; --process tells them apart. Process 0 leads and prints.
set -u
workdir=${1:?give a folder for the run}
shift
coordinator=127.0.0.1:${PORT:-8476}
pids=()
trap 'kill -TERM "${pids[@]}"' TERM INT
for process in 0 1; do
    python -m experiments train --config=configs/streaming_diloco.py --config.regions=2 \
        --coordinator="$coordinator" --process="$process" --processes=2 \
        --workdir="$workdir" "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done  # a signal ends `wait` early
done
exit "$code"

#!/bin/bash
# Two sites end to end, on one machine: what you type on each, with a folder in the place of the bucket.
# Trains (a job per region, which share nothing but that folder), reports, and exports for transformers.
# Takes about two minutes on two cores.
#
#     examples/two_sites.sh runs/sites --config.steps=100
#
# Between real sites each has its own line of `site`, and `rendezvous` is a bucket (docs/regions.md).
set -eu
workdir=$(realpath -m "${1:?give a folder for the runs}")
shift
mkdir -p "$workdir"
# Whoever has the secret may take part. Every site needs the same; keep it out of the bucket.
[ -e "$workdir/secret" ] || (umask 077 && head -c 32 /dev/urandom | base64 >"$workdir/secret")

# In a url some characters of paths are written otherwise.
rendezvous=$(python -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$workdir/rendezvous")

site() { # REGION [OVERRIDES...]
    local region=$1
    shift
    exec python -m experiments train --config=configs/streaming_diloco.py \
        --config.regions=2 --config.region="$region" \
        --config.exchange=store --config.rendezvous="$rendezvous" \
        --config.secret="file:$workdir/secret" --workdir="$workdir/region$region" "$@"
}

pids=()
trap 'kill -TERM "${pids[@]}"' TERM INT # both save at a step they agree on; the same command goes on
for region in 0 1; do
    site "$region" "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done # a signal ends `wait` early
done
[ "$code" = 0 ] || exit "$code"

python -m experiments report "$workdir" --html="$workdir/report.html"
python -m experiments export --workdir="$workdir/region0" --output="$workdir/model"

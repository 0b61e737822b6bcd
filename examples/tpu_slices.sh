#!/bin/bash
# One program over two TPU slices, a region each: run it on every host of both.
#
#     gcloud compute tpus queued-resources create lowcomm --node-count=2 --node-prefix=slice \
#         --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --zone=ZONE
#     for slice in slice-0 slice-1; do
#         gcloud compute tpus tpu-vm ssh "$slice" --worker=all --zone=ZONE \
#             --command='cd lowcomm_jax && examples/tpu_slices.sh /mnt/bucket/run7' &
#     done
#
# The runtime's variables (MEGASCALE_*, TPU_WORKER_*) tell JAX who is who. Regions are slices: what
# is inside a region goes over the slice's own links, payloads between regions over the network.
set -eu
workdir=${1:?give a folder that process 0 reaches, also after a restart}
shift
exec python -m experiments train --config=configs/streaming_diloco.py --config.regions=2 \
    --config.mesh.region=2 --config.mesh.fsdp=16 --config.batch=64 --workdir="$workdir" "$@"

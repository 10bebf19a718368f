#!/bin/sh
# A tour of the `aiogpu` command: a node that all programs of one user share.
set -eu
here=$(dirname "$0")

aiogpu start --head --num-cpus=4 --num-gpus=1 > /dev/null

# Any command can wait for a share of a GPU, and finds its device in the environment.
aiogpu run --num-gpus=0.5 -- sh -c 'echo "a command on GPU $CUDA_VISIBLE_DEVICES"'

# Programs join the node; a detached actor stays when its program ends.
python3 "$here/12_service.py"
aiogpu list actors | cut -c 1-28

# What has run, what went wrong and why, what was printed.
aiogpu list tasks --state finished | grep -c embed
AIOGPU_ADDRESS=auto python3 "$here/05_errors.py" > /dev/null
aiogpu list tasks --state failed | wc -l
aiogpu why 6 | tail -n 1
aiogpu logs --task 6 | tail -n 1 | cut -d ")" -f 2

# End what is left.
aiogpu kill model
aiogpu stop > /dev/null 2>&1

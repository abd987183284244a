#!/usr/bin/env bash
# The first half hour on a GPU or TPU machine that has jax and no network.
#
#   first_device.sh pack FOLDER           with a network: the wheels to bring along go into FOLDER
#   first_device.sh run FOLDER [FLAG ...] there: jitney bench device, from this checkout
#
# Where a device is lent for 15 minutes in all, 10 a call, and only what a call writes into its own
# folder comes back, two calls do it. The first ends within 8 minutes, the second within 4, beside
# the start of their machines. The second is given the first one's folder (EARLIER):
#
#   first_device.sh run FOLDER --out-dir OUT --budget-s 420 --only check,attention,steps
#   first_device.sh run FOLDER --from EARLIER --out-dir OUT --budget-s 190 \
#       --only steps,loop,transformers
#
# Needed there: Python 3.12, jax with its plugin for the device, numpy, triton (NVIDIA), transformers
# and its needs; vLLM is measured too where it can be imported. A call that is cut off
# is run again as it was: it goes on where it stopped.
set -euo pipefail

# 12 MB. Versions as rehearsed (docs/devices.md).
WHEELS=(
    absl-py==2.5.1
    annotated-types==0.8.0
    anyio==4.16.0
    certifi==2026.10.19.post1
    click==8.5.1
    etils==1.15.0
    flax==0.12.12
    h11==0.16.0
    httpcore==1.0.9
    httpx==0.28.1
    idna==3.20
    jax-triton==0.4.1
    Jinja2==3.1.6
    lazy-loader==0.6
    llguidance==1.9.1
    markdown-it-py==4.3.0
    MarkupSafe==3.0.4
    mdurl==0.1.2
    msgpack==1.2.4
    msgspec==0.22.0
    optax==0.2.8
    orjson==3.13.0
    prometheus_client==0.26.0
    pydantic-core==2.50.4
    pydantic==2.14.3
    Pygments==2.21.0
    python-multipart==0.0.34
    pyzmq==27.3.0
    rich==15.0.0
    starlette==1.10.0
    treescope==0.1.10
    typing-inspection==0.4.5
    uvicorn==0.54.0
)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3}

usage() {
    sed -n '4,5s/^# *//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

[[ $# -ge 2 ]] || usage
action=$1
folder=$2
shift 2

case $action in
pack)
    "$PYTHON" -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_31_x86_64 \
        --dest "$folder" "${WHEELS[@]}"
    ;;
run)
    packages=$ROOT/build/first_device
    mkdir -p "$packages/jitney"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --find-links "$folder" \
        --target "$packages" "${WHEELS[@]}"
    ln -sfn "$ROOT/engine" "$ROOT/kernels" "$ROOT/dashboard" "$ROOT/__main__.py" \
        "$packages/jitney/"
    # The engine asks for its own version, as an installed package has it.
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/pyproject.toml")
    mkdir -p "$packages/jitney-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: jitney\nVersion: %s\n' "$version" \
        >"$packages/jitney-$version.dist-info/METADATA"
    export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
    cd "$ROOT"
    exec "$PYTHON" -m jitney bench device "$@"
    ;;
*)
    usage
    ;;
esac

#!/usr/bin/env bash
# A Python of 64-bit ARM with jax, for an emulator on any Linux machine:
#
#   tests/support/emulated_arm.sh FOLDER     makes it, once; prints the command that runs it
#
# It needs debootstrap, and qemu-aarch64 (of the package qemu-user) in version 9 or later: 7.2 crashes in
# XLA's compiler. Python and the C library come from Debian 13, jax and numpy from the package index that
# pip is configured with.
set -euo pipefail

folder=$(realpath -m "$1")
python=${PYTHON:-python3}
qemu=${QEMU:-qemu-aarch64}
# What jax 0.11 is built for.
release=trixie version=3.13

major=$("$qemu" --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -1)
if [ "${major:-0}" -lt 9 ]; then
  echo "qemu-aarch64 9 or later is needed (qemu-user of Debian 13, say); QEMU=PATH names one" >&2
  exit 1
fi
if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder" && mkdir -p "$folder"
  debootstrap --foreign --arch=arm64 --variant=minbase --include="python$version,libstdc++6,libgomp1" \
    "$release" "$folder/root" >"$folder/debootstrap.log"
  for package in "$folder"/root/var/cache/apt/archives/*.deb; do
    dpkg -x "$package" "$folder/root"
  done
  jax=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("jax"))')
  "$python" -m pip install --quiet --target "$folder/packages" --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "jax==$jax" numpy scipy
  touch "$folder/ready"
fi
# The packages of the caller's own PYTHONPATH come first: jitney's.
cat >"$folder/python" <<END
#!/usr/bin/env bash
exec "$qemu" -L "$folder/root" -E "PYTHONPATH=\${PYTHONPATH:-}:$folder/packages" \\
  -E "PYTHONHOME=$folder/root/usr" "$folder/root/usr/bin/python$version" "\$@"
END
chmod +x "$folder/python"
echo "$folder/python"

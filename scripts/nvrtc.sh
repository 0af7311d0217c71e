#!/usr/bin/env bash
# Puts earlier versions of NVRTC, as NVIDIA's Python packages have them, into target/nvrtc/VERSION. Run again, it does
# nothing. They stand apart from the newest, which is in .venv.
#
#   scripts/nvrtc.sh VERSION ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for version; do
    folder=$root/target/nvrtc/$version
    [[ ! -d $folder ]] || continue
    package=nvidia-cuda-nvrtc
    # From CUDA 13 on the name has no number.
    [[ $version == 13.* ]] || package=nvidia-cuda-nvrtc-cu${version%%.*}
    echo "setup: installing NVRTC $version into ${folder#"$root"/} (from its Python package, 90 MB)"
    rm -rf "$folder.part"
    if ! "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$folder.part" "$package==$version"; then
        echo "setup: $package $version could not be installed" >&2
        exit 1
    fi
    mv "$folder.part" "$folder"
done

#!/usr/bin/env bash
# Installs the PyTorch that the tests run scripts with, in .torch/: the pinned wheels alone (a download of 540 MB, 1.4 GB
# on disk), without the 3 GB of CUDA libraries that torch asks for. It computes on the CPU. Run again, it does nothing.
#
#   scripts/torch.sh           the pinned version, in .torch/
#   scripts/torch.sh latest    the newest on PyPI, in .torch-latest/; run again, it looks for a newer one
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$root/.torch
requirements=$root/scripts/requirements-torch.txt
newest=
if [[ ${1:-} == latest ]]; then
    newest=yes
    dir=$root/.torch-latest
fi
python=${PYTHON:-python3}
# The wheel, what is unpacked of it, and pip's copy of the download.
needs_mib=3000

say() { echo "torch: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

if [[ -z $newest && -n ${ELASTIC_TORCH_PYTHON:-} ]]; then
    say "ELASTIC_TORCH_PYTHON is set: the tests use $ELASTIC_TORCH_PYTHON"
    exit 0
fi
[[ $(uname -s) == Linux ]] || fail "this sets PyTorch up on Linux only; set ELASTIC_TORCH_PYTHON to a Python that has it"
# What is there was made by this script, of these versions and for this Python.
state=$("$python" --version; cat "$requirements" "$root/scripts/torch_stubs.py" "${BASH_SOURCE[0]}")
state=$(sha256sum <<<"$state")
if [[ -z $newest && -f $dir/installed && $(<"$dir/installed") == "$state" ]]; then
    exit 0
fi

version=$(sed -n 's/^torch==//p' "$requirements")
pins=()
if [[ -n $newest ]]; then
    # Only torch itself: what it imports is as old as it must be at most.
    version="newest (the tests' own is $version)"
    mkdir -p "$dir"
    sed 's/^torch==.*/torch/' "$requirements" >"$dir/requirements.txt"
    requirements=$dir/requirements.txt
    pins=(--upgrade)
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "PyTorch's tests need Python 3.11 or newer, and $python is $("$python" --version)"
"$python" -c 'import ensurepip' 2>/dev/null || fail "$python cannot make virtual environments: install python3-venv"
for tool in cc nm objdump; do
    command -v "$tool" >/dev/null || fail "$tool is missing: install build-essential"
done
free_mib=$(df --output=avail --block-size=1M "$root" | tail -1)
((free_mib >= needs_mib)) ||
    fail "PyTorch needs $needs_mib MiB of disk while it is installed, and $root has $free_mib MiB left"

say "installing PyTorch $version into ${dir#"$root"/}: a download of 540 MB, once"
[[ -n $newest ]] || rm -rf "$dir"
mkdir -p "$dir/tmp"
"$python" -m venv "$dir"
# pip unpacks here and not in /tmp, which may be small. Its own cache is left to its settings: another checkout on this
# machine then downloads nothing.
for attempt in 1 2; do
    if TMPDIR=$dir/tmp "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
        ${pins[@]+"${pins[@]}"} --retries 5 --timeout 60 --requirement "$requirements"; then
        break
    fi
    ((attempt == 1)) || fail "PyTorch could not be downloaded or installed: pip says why above. Run $0 to try again"
    say "that did not work, trying once more"
done
packages=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$dir/bin/python" "$root/scripts/torch_stubs.py" "$packages"
# pip's own compiling takes a minute for all of torch. What is imported here is compiled by that, whatever the
# environment says: without it each process of a test compiles it again, which is two thirds of its start.
env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX "$dir/bin/python" - <<'PYTHON' ||
import torch, torch.distributed, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run
assert torch.distributed.is_gloo_available() and not torch.cuda.is_available()
print(f"torch: PyTorch {torch.__version__} is ready, gloo included, {torch.get_num_threads()} threads")
PYTHON
    fail "PyTorch was installed and does not work here: the lines above say why"
rm -rf "$dir/tmp"
printf '%s\n' "$state" >"$dir/installed"

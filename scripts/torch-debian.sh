#!/usr/bin/env bash
# Unpacks Debian's own PyTorch, 1.13, into .torch-debian/, for the tests that have an old worker. Nothing is installed:
# no root is needed, and the system's Python knows nothing of it. A download of 150 MB, 0.6 GB on disk.
# Run again, it does nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$root/.torch-debian
python=/usr/bin/python3

say() { echo "torch-debian: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

[[ ! -f $dir/installed ]] || exit 0
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || fail "$tool is missing: this needs Debian"
done
version=$(apt-cache show --no-all-versions python3-torch 2>/dev/null | sed -n 's/^Version: //p')
[[ $version == 1.13* ]] || fail "this system's python3-torch is ${version:-unknown} and not 1.13, which Debian 12 has"

packages=$(apt-get install -s --no-install-recommends python3-torch 2>/dev/null | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
[[ -n $packages ]] || fail "apt-get would install nothing: is python3-torch installed, or are apt's lists too old?"
say "unpacking PyTorch $version of Debian into ${dir#"$root"/}, $(wc -w <<<"$packages") packages"
rm -rf "$dir"
mkdir -p "$dir/packages" "$dir/bin"
# shellcheck disable=SC2086 # a list of names
(cd "$dir/packages" && apt-get download --quiet --quiet $packages)
for package in "$dir"/packages/*.deb; do
    dpkg-deb --extract "$package" "$dir"
done
rm -rf "$dir/packages"

# Libraries that packages choose among by links, which unpacking alone does not make.
triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || gcc -print-multiarch)
libraries=$dir/usr/lib/$triplet
cat >"$dir/bin/python" <<WRAPPER
#!/bin/sh
export PYTHONPATH="$dir/usr/lib/python3/dist-packages\${PYTHONPATH:+:\$PYTHONPATH}"
libraries="$dir/usr/lib:$dir/lib/$triplet:$libraries:$libraries/blas:$libraries/lapack"
export LD_LIBRARY_PATH="\$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec $python "\$@"
WRAPPER
chmod +x "$dir/bin/python"
"$dir/bin/python" - <<'PYTHON' || fail "it was unpacked and does not work here: the lines above say why"
import torch, torch.distributed
assert torch.distributed.is_gloo_available()
print(f"torch-debian: PyTorch {torch.__version__} is ready, gloo included")
PYTHON
touch "$dir/installed"

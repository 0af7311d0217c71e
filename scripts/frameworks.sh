#!/usr/bin/env bash
# Installs Transformers, Lightning and Accelerate in .frameworks/, beside the PyTorch of .torch/, which it reads and leaves
# as it is (a download of 28 MB, 140 MB on disk). Run again, it does nothing. `make test-frameworks` calls it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=$root/.frameworks
requirements=$root/scripts/requirements-frameworks.txt

say() { echo "frameworks: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

[[ -f $root/.torch/installed ]] || fail "there is no PyTorch in .torch: run scripts/torch.sh first"
# The very Python that has the PyTorch.
python=$root/.torch/bin/python
state=$(cat "$root/.torch/installed" "$requirements" "${BASH_SOURCE[0]}" | sha256sum)
if [[ -f $dir/installed && $(<"$dir/installed") == "$state" ]]; then
    exit 0
fi
say "installing Transformers, Lightning and Accelerate into .frameworks: a download of 28 MB, once"
rm -rf "$dir"
"$python" -m venv "$dir"
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch-of-the-tests.pth"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --retries 5 --timeout 60 \
    --requirement "$requirements" || fail "they could not be installed: pip says why above. Run $0 to try again"
"$dir/bin/python" -c 'import accelerate, lightning.pytorch, transformers' || fail "they were installed and do not work here"
printf '%s\n' "$state" >"$dir/installed"

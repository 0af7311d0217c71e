#!/usr/bin/env bash
# Installs what some tests and benchmarks use beside the PyTorch of .torch/, which it reads and leaves unchanged. Run
# again, it does nothing.
#
#   scripts/beside-torch.sh frameworks    Transformers, Lightning, Accelerate and torchvision, in .frameworks/ (180 MB)
#   scripts/beside-torch.sh torchft       torchft, in .torchft/
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { echo "${name:-beside-torch}: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

name=${1:-}
case $name in
frameworks) what="Transformers, Lightning, Accelerate and torchvision" size="46 MB"
    imports="accelerate, lightning.pytorch, torchvision, transformers" ;;
torchft) what=torchft size="4 MB" imports=torchft ;;
*) name='' && fail "name what to install: frameworks or torchft" ;;
esac
dir=$root/.$name
requirements=$root/scripts/requirements-$name.txt

[[ -f $root/.torch/installed ]] || fail "there is no PyTorch in .torch: run scripts/torch.sh first"
# The very Python that has the PyTorch.
python=$root/.torch/bin/python
state=$(cat "$root/.torch/installed" "$requirements" "${BASH_SOURCE[0]}" | sha256sum)
if [[ -f $dir/installed && $(<"$dir/installed") == "$state" ]]; then
    exit 0
fi
say "installing $what into .$name: a download of $size, once"
rm -rf "$dir"
"$python" -m venv "$dir"
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch-of-the-tests.pth"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --retries 5 --timeout 60 \
    --requirement "$requirements" || fail "it could not be installed: pip says why above. Run $0 $name to try again"
"$dir/bin/python" -c "import $imports" || fail "it was installed and does not work here"
printf '%s\n' "$state" >"$dir/installed"

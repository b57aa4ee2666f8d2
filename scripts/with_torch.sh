#!/bin/bash
# Run the tests with another version of torch, in a new virtual environment in a temporary folder.
#
#   scripts/with_torch.sh VERSION [PYTEST ARGUMENTS]     default: -q tests/unit tests/ranks
#
# pip chooses the version of torchvision that belongs to it. Takes about two minutes before the tests.
set -e
version=${1:?usage: scripts/with_torch.sh VERSION [PYTEST ARGUMENTS]}
shift
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "torch==$version" torchvision -e ".[test]"
[ $# -gt 0 ] || set -- -q tests/unit tests/ranks
PYTHONPATH="$PWD" "$folder/bin/python" -m pytest "$@"

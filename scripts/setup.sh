#!/usr/bin/env bash
# Installs with apt what the build, the tests and the quickstart need and is missing; says nothing when nothing is.
# bash scripts/setup.sh [PACKAGE ...]     these as well
set -euo pipefail

packages=(cmake ninja-build g++ pkg-config git python3 libdnnl-dev libopenmpi-dev openmpi-bin libsentencepiece-dev
          libcli11-dev libgtest-dev nlohmann-json3-dev libxxhash-dev xz-utils clang-format clang-tidy "$@")

fail() {
  echo "setup.sh: $*" >&2
  exit 1
}

command -v apt-get >/dev/null ||
  fail "apt-get is not here (this is not Debian): install the counterparts of ${packages[*]} by hand"
missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

run=()
if [[ $(id -u) -ne 0 ]]; then
  sudo -n true 2>/dev/null || fail "this needs ${missing[*]}, which only root may install: run as root apt-get install ${missing[*]}"
  run=(sudo -n)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1
}
echo "setup.sh: installing ${missing[*]}"
# Package lists may be absent or old, which the first attempt shows.
install || { "${run[@]}" apt-get update >"$log" 2>&1 && install; } ||
  fail "apt-get cannot install ${missing[*]} ($(grep -m1 '^E:' "$log" || tail -n1 "$log")): repair that, then run it again"

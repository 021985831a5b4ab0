#!/usr/bin/env bash
# Installs the programs that tests run and pip does not bring: Prometheus with promtool, and a browser. For Debian, as root;
# does nothing where they are there.
set -euo pipefail

packages=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || packages+=(prometheus)
command -v chromium >/dev/null || packages+=(chromium)
[ "${#packages[@]}" -gt 0 ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${packages[*]}; as root on Debian: apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=120 update --quiet
apt-get -o DPkg::Lock::Timeout=120 install --quiet --yes --no-install-recommends "${packages[@]}"

# Debian starts what it installs; the tests start their own on ports of their own.
if [[ " ${packages[*]} " == *" prometheus "* ]] && command -v service >/dev/null; then
    service prometheus stop >/dev/null 2>&1 || true
fi

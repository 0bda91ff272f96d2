#!/usr/bin/env bash
# The way in: makes .venv, once, and runs a command in it. Threads and switches are not set here but
# in cpu3d/host/apply.py.
set -euo pipefail
unset CDPATH PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONSTARTUP PYTHONINSPECT PYTHONWARNINGS

root="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" # also when called through a link
venv="$root/.venv"

help() {
  cat <<'HELP'
Train a 3D U-Net on whole volumes, or on patches of them.

  ./run.sh                      set up on the first call, then run the demo
  ./run.sh setup                make .venv: TensorFlow 2.15 with Intel's extension on Linux x86-64 with
                                AVX2 and Python 3.9 to 3.11, TensorFlow 2.21 elsewhere
  ./run.sh setup --latest       TensorFlow 2.21
  ./run.sh setup --gpu          TensorFlow 2.21 with CUDA, for `train --mode patch` on an NVIDIA GPU
  ./run.sh test [--all] [...]   run the tests; --all adds the slow ones; the rest goes to pytest
  ./run.sh estimate ...         memory and time of a training: python -m memory_estimator ...
  ./run.sh SUBCOMMAND ...       one of those that `./run.sh help` lists after the set-up

PYTHON=/path/to/python ./run.sh setup takes that Python. Example:

  ./run.sh prepare --dataset ~/Task01_BrainTumour --store ~/brats-store
  ./run.sh train --store ~/brats-store --run ~/runs/first

HELP
  ! is_whole || run_module cpu3d --help
}

# fail LINE...: prints them and ends.
fail() {
  printf 'run.sh: %s\n' "$@" >&2
  exit 1
}

# run_module NAME ...: whatever the caller's folder holds (SAFEPATH: Python 3.11 on).
run_module() { PYTHONPATH="$root" PYTHONSAFEPATH=1 "$venv/bin/python" -m "$@"; }

# The requirements file that .venv was made of, or was being made of; nothing without.
engine() { cat "$venv/engine" 2>/dev/null || true; }

# The content of .venv/complete, which is written last.
stamp() { echo "$(engine) $(cat "$root"/requirements*.txt | cksum)"; }
is_whole() { [ "$(cat "$venv/complete" 2>/dev/null)" = "$(stamp)" ]; }

# python_for FILE: prints the first Python with venv for which a requirements file has packages.
python_for() {
  local versions="3.12 3.13 3.11 3.10" version name names probe
  [ "$1" != requirements.txt ] || versions="3.11 3.10 3.9"
  probe='import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2] * (sys.maxsize > 2**32))'
  for version in $versions; do
    names=("python$version" python3 python)
    [ -z "${PYTHON:-}" ] || names=("$PYTHON")
    for name in "${names[@]}"; do
      [ "$("$name" -c "$probe" 2>/dev/null)" != "$version" ] || { echo "$name" && return; }
    done
  done
  return 1
}

# fastest_engine: prints the requirements file of the fastest engine that this host takes.
fastest_engine() {
  local file=requirements-latest.txt
  if [ "$(uname -sm)" = "Linux x86_64" ] && grep -qw avx2 /proc/cpuinfo; then
    ! python_for requirements.txt >/dev/null || file=requirements.txt
  fi
  echo "$file"
}

# set_up FILE: makes .venv, or completes one of the same engine that was cut short.
set_up() (
  exec 9<"$root"
  flock 9 2>/dev/null || true # another task of a cluster may be at it
  # who has waited may find it made
  [ -n "${PYTHON:-}" ] || ! is_whole || [ "$(engine)" != "$1" ] || [ ! -x "$venv/bin/python" ] || exit 0
  if [ -n "${PYTHON:-}" ] || [ "$(engine)" != "$1" ] || [ ! -x "$venv/bin/python" ]; then
    python="$(python_for "$1")" ||
      fail "a 64-bit Python 3.10 to 3.13 (3.9 to 3.11 with Intel's extension) with venv must be" \
        "installed, got none${PYTHON:+ as $PYTHON}; install one (3.11 has the fastest engine), then run this again:" \
        "  Debian, Ubuntu: sudo apt install python3.11-venv, or python3-venv" \
        "  Fedora, RHEL:   sudo dnf install python3.11" \
        "  anywhere:       https://www.python.org/downloads or https://docs.conda.io"
    rm -f "$venv/complete"
    "$python" -m venv --clear "$venv"
    echo "$1" >"$venv/engine"
  fi
  rm -f "$venv/complete"
  echo "Installing $1 into .venv: 700 MB of downloads (3.5 GB with CUDA), 2.5 GB on disk"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -r "$root/$1" ||
    fail "$1 must be installed, got the lines above; the same command tries again"
  stamp >"$venv/complete"
)

# build: what is in C; a line for each part that cannot be built.
build() { run_module models.native.build && run_module cpu3d.data.native.samples; }

command="${1:-demo}"
[ $# = 0 ] || shift
case "$command ${1:-}" in
  help* | -h* | --help* | "setup -h" | "setup --help") help && exit ;;
  "setup " | "setup --latest" | "setup --gpu")
    file="requirements${1:+-${1#--}}.txt"
    [ $# != 0 ] || file="$(fastest_engine)"
    set_up "$file"
    build
    echo "Ready: .venv has $("$venv/bin/python" -V) and $file."
    exit
    ;;
  setup*)
    echo "run.sh: setup must be given --latest, --gpu or nothing, got $1" >&2
    exit 2
    ;;
esac
if ! is_whole; then
  light="${PYTHON:-python3}" # `estimate` needs no TensorFlow
  if [ "$command" = estimate ] && "$light" -c 'import rich, msgspec, psutil' 2>/dev/null; then
    PYTHONPATH="$root" exec "$light" -m memory_estimator "$@"
  fi
  file="$(engine)"
  set_up "${file:-$(fastest_engine)}" >&2
  build >&2
elif [ ! -x "$venv/bin/python" ]; then
  fail "$venv/bin/python must run, got one that is gone or closed to this user; run ./run.sh setup"
fi
export PYTHONPATH="$root" PYTHONSAFEPATH=1
case "$command" in
  estimate) exec "$venv/bin/python" -m memory_estimator "$@" ;;
  test)
    cd "$root"
    [ "${1:-}" != --all ] || set -- -m "" "${@:2}"
    exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 "$@"
    ;;
  *) exec "$venv/bin/python" -m cpu3d "$command" "$@" ;;
esac

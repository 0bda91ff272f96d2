#!/usr/bin/env bash
# The way in: finds a Python that can run cpu3d/util/environment.py, which makes .venv and runs the
# command in it. Threads and switches are not set here but in cpu3d/host/apply.py.
set -euo pipefail

# folder_of PATH: the folder that holds it, absolute. Whatever CDPATH is, which would let cd print.
folder_of() { CDPATH='' cd -P -- "$(dirname -- "$1")" && pwd -P; }

# end_of_links PATH: the file behind a chain of symbolic links. macOS has no readlink -f.
end_of_links() {
  local path="$1" next
  while [ -L "$path" ]; do
    next="$(readlink "$path")"
    case "$next" in
      /*) path="$next" ;;
      *) path="$(folder_of "$path")/$next" ;;
    esac
  done
  printf '%s\n' "$path"
}

help() {
  cat <<'HELP'
Train a 3D U-Net on whole volumes, or on patches of them.

  ./run.sh                      set up on the first call, then run the demo
  ./run.sh setup [--latest | --gpu]
                                make .venv and install the pinned packages, nothing else
  ./run.sh test [--all] [...]   run the tests; --all adds the slow ones; the rest goes to pytest
  ./run.sh demo [--smoke] [--policy P]
                                phantom volumes, training, scores, report; --smoke: smaller and
                                shorter; P: a memory policy
  ./run.sh estimate ...         memory and time of a training: python -m memory_estimator ...; needs
                                only rich and msgspec; for a store also numpy, nibabel, psutil
  ./run.sh SUBCOMMAND ...       one of those below, after a set-up if needed
  ./run.sh SUBCOMMAND --help    its options, with examples
  ./run.sh help                 this text

Subcommands:
  demo       make phantoms, train on them, score, predict, report: everything once, in minutes
  phantom    write a data set of made-up brains with tumours
  prepare    read a data set into a store
  store      print the content of a store, check it, add cases
  train      train a 3D U-Net on whole volumes or on patches, or continue
  launch     train with several workers: one per socket, or on several hosts
  status     print the state of a run: phase, progress, memory, and what to do next
  evaluate   score untouched cases on their full grids, or cross-validate folds
  predict    segment new cases on their own grids, with one run or several
  view       write a page to scroll through the slices of a case in a browser
  export     write a trained network for other programs: SavedModel or ONNX
  report     write one report.html of a run
  compare    train whole-volume and patch runs under one budget and compare them
  bench      measure time and memory of a training step, and how fast settings learn
  calibrate  measure this host's speed for the estimator, in about a minute
  doctor     check this host: cores, memory, settings of a training, a test of the engine

Exit codes: 0 done, 2 bad input; docs/long_runs.md has the others.

Example:
  ./run.sh prepare --dataset ~/Task01_BrainTumour --store ~/brats-store
  ./run.sh train --store ~/brats-store --run ~/runs/first

Engines: TensorFlow 2.15 with Intel's extension (requirements.txt) on Linux x86-64 with Python 3.9
to 3.11, TensorFlow 2.21 (requirements-latest.txt) elsewhere; `setup --latest` always takes the
second, `setup --gpu` the second with CUDA (requirements-gpu.txt, Linux x86-64), for `train --mode
patch` on an NVIDIA GPU. PYTHON=/path/to/python ./run.sh setup uses that Python. Another engine or
Python version makes a new .venv.
HELP
}

case "${1:-}/${2:-}" in
  help/* | -h/* | --help/* | setup/-h | setup/--help) help; exit ;;
esac

root="$(folder_of "$(end_of_links "${BASH_SOURCE[0]}")")" # also when called through a link
is_usable='import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'
for python in "$root/.venv/bin/python" ${PYTHON:+"$PYTHON"} \
  python3.11 python3.10 python3.9 python3.12 python3.13 python3 python; do
  if "$python" -c "$is_usable" >/dev/null 2>&1; then
    exec "$python" -I "$root/cpu3d/util/environment.py" "$@" # -I: without the caller's modules
  fi
done
cat >&2 <<'NONE'
run.sh: a 64-bit CPython 3.9 to 3.13 must be installed, got none;
run.sh: install one (3.11 gives the fastest engine), then run this again:
run.sh:   Debian, Ubuntu: sudo apt install python3 python3-venv
run.sh:   Fedora, RHEL:   sudo dnf install python3.11
run.sh:   anywhere:       https://www.python.org/downloads or https://docs.conda.io
NONE
exit 1

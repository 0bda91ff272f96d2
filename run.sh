#!/usr/bin/env bash
# Set up and run the project: finds a Python, picks the engine, makes .venv, passes everything else on.
# Threads and switches are not set here but in cpu3d/host/apply.py.
set -euo pipefail

# folder_of PATH: the folder that holds it, absolute. Whatever CDPATH is, which would let cd print.
folder_of() { CDPATH='' cd -P -- "$(dirname -- "$1")" && pwd -P; }

# end_of_links PATH: the file behind a chain of symbolic links, whether it exists or not. macOS has
# no readlink -f.
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

root="$(folder_of "$(end_of_links "${BASH_SOURCE[0]}")")" # also when called through a link
venv="$root/.venv"
stamp="$venv/installed"   # written last: without it the environment is incomplete, and .partial names what was chosen for it
log="$venv/install.log"
lock="$venv.lock" # a folder: mkdir succeeds for one process alone on every file system, also between hosts
beat=""           # the process that keeps our lock fresh, while we hold it

help() {
  cat <<'HELP'
Train a 3D U-Net on whole volumes, or on patches of them.

  ./run.sh                      set up on the first call, then run the demo
  ./run.sh setup [--latest | --gpu]
                                make .venv and install the pinned packages, nothing else
  ./run.sh test [--all] [...]   run the tests; --all adds the slow ones; the rest goes to pytest
  ./run.sh demo [--smoke] [--policy P]
                                phantom volumes, training, scores, report; --smoke: smaller and shorter; P: a memory policy
  ./run.sh estimate ...         memory and time of a training step: python -m memory_estimator ...; needs only rich and msgspec
  ./run.sh SUBCOMMAND ...       python -m cpu3d SUBCOMMAND ..., after a set-up if needed
  ./run.sh help                 this text; ./run.sh SUBCOMMAND --help explains a subcommand

Example:
  ./run.sh prepare --dataset ~/Task01_BrainTumour --store ~/brats-store
  ./run.sh train --store ~/brats-store --run ~/runs/first

Engines: TensorFlow 2.15 with Intel's extension (requirements.txt) on Linux x86-64 with Python 3.9 to 3.11,
TensorFlow 2.21 (requirements-latest.txt) elsewhere; `setup --latest` always takes the second, `setup --gpu`
the second with CUDA (requirements-gpu.txt, Linux x86-64), for `train --mode patch` on an NVIDIA GPU.
PYTHON=/path/to/python ./run.sh setup uses that Python. Another engine or Python version makes a new .venv.
HELP
}

say() { printf '%s\n' "$*"; }
die() { printf 'run.sh: %s\n' "$@" >&2; exit 1; }

# --- Finding a Python ---

# Prints a Python's version, whether it can make environments, its platform, and the CPU flags that matter.
probe='
import platform, struct, sys, sysconfig
try:
    import ensurepip, venv
    tools = "venv"
except ImportError:
    tools = "bare"
try:
    flags = open("/proc/cpuinfo").read().split()
except OSError:
    flags = ["avx2"]  # cannot tell
usable = platform.python_implementation() == "CPython" and struct.calcsize("P") == 8
print("%d.%d" % sys.version_info[:2] if usable else "0.0", tools, sysconfig.get_platform(),
      "avx2" if "avx2" in flags else "avx" if "avx" in flags else "none")
'

# find_python VERSION...: sets python, version, platform, cpu to the first of these versions that can make an environment;
# bare collects those that cannot. Fails if there is none.
find_python() {
  local wanted name answer tools
  bare=""
  for wanted in "$@"; do
    for name in "python$wanted" python3 python; do
      [ -z "${PYTHON:-}" ] || name="$PYTHON"
      answer="$("$name" -c "$probe" 2>/dev/null)" || continue
      read -r version tools platform cpu <<<"$answer"
      [ "$version" = "$wanted" ] || continue
      if [ "$tools" = venv ]; then python="$name"; return 0; fi
      case " $bare " in *" $wanted "*) ;; *) bare="$bare $wanted" ;; esac
    done
  done
  return 1
}

# find_light_python: sets python to the first one with what `estimate` needs: rich, msgspec, and outside Linux psutil. Fails if
# none has.
find_light_python() {
  local needs="import sys, rich, msgspec; assert sys.version_info >= (3, 9); sys.platform == 'linux' or __import__('psutil')"
  for python in "${PYTHON:-python3}" python3 python; do
    "$python" -c "$needs" >/dev/null 2>&1 && return
  done
  return 1
}

# no_python OLDEST: prints what to install, and ends.
no_python() {
  local first="${bare# }"
  first="${first%% *}"
  [ -z "$first" ] || die "Python must come with venv and ensurepip, got Python $first without; install them, then run this again:" \
    "  Debian, Ubuntu: sudo apt install python$first-venv"
  [ -z "${PYTHON:-}" ] || die "PYTHON must be a 64-bit CPython $1 to 3.13 that runs, got $PYTHON; unset it or name another"
  die "a 64-bit CPython $1 to 3.13 must be installed, got none; install one (3.11 gives the fastest engine), then run this again:" \
    "  Debian, Ubuntu: sudo apt install python3 python3-venv" \
    "  Fedora, RHEL:   sudo dnf install python3.11" \
    "  anywhere:       https://www.python.org/downloads or https://docs.conda.io"
}

# Sets python, version and requirements. A Python that was chosen before goes first.
choose() {
  local has_avx2=yes
  if [ "$engine" != fast ]; then # TensorFlow 2.21 has no wheel for 3.9
    find_python $kept 3.12 3.13 3.11 3.10 || no_python 3.10
  else
    find_python $kept 3.11 3.10 3.9 3.12 3.13 || no_python 3.9
  fi
  [ "$cpu" = avx2 ] || has_avx2=no
  case "$platform" in
    linux-x86_64) [ "$cpu" != none ] || die "the CPU must have AVX, for which TensorFlow is built, got one without; use another host" ;;
    *)
      [ "$engine" != gpu ] || die "setup --gpu must run on Linux x86-64, for which TensorFlow with CUDA is built, got $platform; use setup --latest"
      has_avx2=no
      ;;
  esac
  requirements="requirements-latest.txt"
  [ "$engine" != gpu ] || requirements="requirements-gpu.txt"
  case "$engine/$has_avx2/$version" in fast/yes/3.9 | fast/yes/3.10 | fast/yes/3.11) requirements=requirements.txt ;; esac
  if [ "$requirements/$version" = requirements-latest.txt/3.9 ]; then
    find_python 3.12 3.13 3.11 3.10 || no_python 3.10
  fi
}

cost_of_latest() {
  local cuda=""
  [ "$engine" != gpu ] || cuda=" with CUDA"
  say "Engine: TensorFlow 2.21$cuda. On the CPU a training step takes as long as with TensorFlow 2.15 + ITEX, and 1.3x as long if own operations cannot be built."
  if [ "$engine" != fast ]; then
    say "For the faster engine: ./run.sh setup"
  elif [ "$platform" = linux-x86_64 ] && [ "$cpu" = avx2 ]; then
    say "For the faster engine: install Python 3.11 with venv (Debian, Ubuntu: sudo apt install python3.11-venv), then ./run.sh setup"
    [ -z "$bare" ] || say "(not used, as it has no venv: Python$bare)"
  else
    say "The faster engine exists for Linux on x86-64 CPUs with AVX2."
  fi
}

# --- The environment ---

# acquire: take the lock, once its holder (another terminal, host or task of srun) has released it. A holder writes into it
# every few seconds; if nothing changes for a minute, the holder is gone or stopped. Neither clocks nor process numbers are
# compared, as hosts and containers have their own.
acquire() {
  local holder="" seen="" still=0
  [ -z "$beat" ] || return 0
  until mkdir "$lock" 2>/dev/null; do
    [ -w "$root" ] || ! has_lost_python || die_of_lost_python
    [ -w "$root" ] || die "$root must be writable to set up .venv, got a folder that is not; have its owner set up, or use a copy of your own"
    if read -r holder 2>/dev/null <"$lock/holder" && [ "$holder" != "$seen" ]; then
      [ -n "$seen" ] || say "Waiting for another set-up of .venv: $holder"
      seen="$holder"
      still=0
    fi
    still=$((still + 1))
    [ "$still" -le 60 ] || die "the set-up of .venv must renew its lock within a minute, got no change by ${seen:-an unknown process};" \
      "  resume or end that process; if it is gone, remove its lock and run this again: rm -r '$lock'"
    sleep 1
  done
  trap release EXIT
  (while kill -0 "$$"; do echo "process $$ on $HOSTNAME ($SECONDS s so far)" >"$lock/holder" || true; sleep 5; done) </dev/null >/dev/null 2>&1 &
  beat=$!
}

release() {
  [ -n "$beat" ] || return 0
  kill "$beat" 2>/dev/null && wait "$beat" 2>/dev/null || true
  beat=""
  rm -rf "$lock" 2>/dev/null || { sleep 1; rm -rf "$lock"; } # NFS keeps a file while a waiting process reads it
}

# The checksum of a requirements file and of the one that it includes, if any.
checksum() {
  case "$1" in
    requirements-gpu.txt) cat "$root/requirements-latest.txt" "$root/$1" | cksum ;;
    *) cksum <"$root/$1" ;;
  esac
}

# The content of a stamp: made from this very file with this Python.
expected_stamp() { say "$requirements $version $(checksum "$requirements")"; }

# Whether the environment is whole, of $requirements and $version, and its requirements file unchanged since.
is_whole() {
  [ -f "$stamp" ] && "$venv/bin/python" -c "" 2>/dev/null || return 1
  [ -f "$root/$requirements" ] && [ "$(cat "$stamp")" = "$(expected_stamp)" ]
}

# The same, whichever engine was chosen for it. If it is not, requirements and version are still those that were chosen,
# also by a set-up that was cut.
is_ready() {
  read -r requirements version _ 2>/dev/null <"$stamp" || read -r requirements version _ 2>/dev/null <"$stamp.partial" || return 1
  is_whole
}

# has_lost_python: whether the environment was whole but its Python is not there for this user. Sets
# lost to that Python, and closed to the folder on the way to it that this user may not enter, which
# is empty if the Python is gone.
has_lost_python() {
  [ -f "$stamp" ] && [ -L "$venv/bin/python" ] && [ ! -x "$venv/bin/python" ] || return 1
  lost="$(end_of_links "$venv/bin/python")"
  closed="$lost"
  until [ -e "$closed" ]; do closed="$(dirname -- "$closed")"; done
  [ "$closed" = "$lost" ] || [ ! -x "$closed" ] || closed=""
}

die_of_lost_python() {
  local rule="the Python of $venv must be one that this user can run, got $lost"
  if [ -n "$closed" ]; then
    die "$rule, and $closed is closed to this user;" \
      "  have its owner open that folder (chmod o+x), or make .venv from a Python that all can" \
      "  reach: PYTHON=/usr/bin/python3 ./run.sh setup"
  fi
  die "$rule, which is gone;" \
    "  have the owner of $root run ./run.sh setup, or use a copy of your own"
}

setup() {
  choose
  if is_whole || { acquire; is_whole; }; then
    build_operations
    say "Ready: .venv has Python $version and $requirements."
    return
  fi
  say "Using $python (Python $version) and $requirements."
  [ "$requirements" = requirements.txt ] || cost_of_latest
  # One for the same engine and Python that was cut short, or whose requirements changed, is completed. Any other is
  # made again: pip would leave the packages of the other engine beside the new ones.
  [ ! -f "$stamp" ] || mv "$stamp" "$stamp.partial"
  if ! grep -qs "^$requirements $version " "$stamp.partial" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
  fi
  mkdir -p "$venv"
  expected_stamp >"$stamp.partial" # before anything is made, so that what was chosen outlives a set-up that is cut
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || die "$python could not make $venv; the lines above say why"
  local size="700 MB of downloads on the first call, 2.5 GB on disk"
  [ "$requirements" != requirements-gpu.txt ] || size="3.5 GB of downloads on the first call, more on disk"
  say "Installing into .venv, about $size; details in .venv/install.log"
  install "$requirements"
  mv "$stamp.partial" "$stamp"
  build_operations
  say "Ready: .venv has Python $version and $requirements."
}

# build_operations: own operations and the maker of samples, unless they are built from these sources; prints a line for
# each that cannot be built.
build_operations() {
  [ ! -d "$root/models/native" ] || (cd "$root" && "$venv/bin/python" -m models.native.build) || true
  [ ! -d "$root/cpu3d/data/native" ] || (cd "$root" && "$venv/bin/python" -m cpu3d.data.native.samples) || true
}

# install FILE: the packages of a requirements file, into the environment.
install() {
  local pid status=0 start=$SECONDS file="$1"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -r "$root/$file" >"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; printf "\nrun.sh: interrupted; the same command continues\n" >&2; exit 130' INT TERM
  while [ -t 1 ] && kill -0 "$pid" 2>/dev/null; do
    printf '\r  %3d packages, %4d s ' "$(grep -c '^Collecting' "$log" || true)" "$((SECONDS - start))"
    sleep 1
  done
  wait "$pid" || status=$?
  trap - INT TERM
  [ ! -t 1 ] || printf '\n'
  [ "$status" = 0 ] && return
  tail -n 15 "$log" >&2
  die "installing $file failed; the lines above are the end of $log" \
    "without a network or behind a proxy, see https://pip.pypa.io/en/stable/user_guide/#using-a-proxy-server; the same command tries again"
}

# run_with PYTHON MODULE ARGUMENT...: the module from this folder, whatever the caller's folder holds (SAFEPATH: Python
# 3.11 on).
run_with() {
  local interpreter="$1"
  shift
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 exec "$interpreter" -m "$@"
}

run() { run_with "$venv/bin/python" "$@"; }

# --- What to do ---

engine=fast
kept="" # version of the Python that was chosen before
command="${1:-demo}"
[ $# -eq 0 ] || shift
case "$command" in
  help | -h | --help) help; exit ;;
  setup)
    case "${1:-}" in
      "") ;;
      --latest) engine=latest ;;
      --gpu) engine=gpu ;;
      -h | --help) help; exit ;;
      *) printf 'run.sh: setup takes --latest, --gpu or nothing, got %s\n' "$1" >&2; exit 2 ;;
    esac
    setup
    exit
    ;;
esac

if ! is_ready; then
  # A laptop that only plans needs no TensorFlow.
  if [ "$command" = estimate ] && find_light_python; then run_with "$python" memory_estimator "$@"; fi
  # The environment is whole for others: it is not made again over their heads.
  if has_lost_python && [ -n "$closed" ]; then die_of_lost_python; fi
  acquire
  if ! is_ready; then
    case "${requirements:-}" in # as chosen before
      requirements-latest.txt) engine=latest ;;
      requirements-gpu.txt) engine=gpu ;;
    esac
    kept="${version:-}"
    setup
  fi
  release # here, as no exit follows: another program takes this one's place
fi
case "$command" in
  test)
    cd "$root"
    if [ "${1:-}" = --all ]; then shift; set -- -m "" "$@"; fi
    run pytest -n auto --maxprocesses 4 "$@"
    ;;
  estimate) run memory_estimator "$@" ;;
  *) run cpu3d "$command" "$@" ;;
esac

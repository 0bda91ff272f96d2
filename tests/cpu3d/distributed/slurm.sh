#!/usr/bin/env bash
# slurm.sh FOLDER COMMAND...: runs a command beside a Slurm of two hosts, n1 and n2, made of this one.
# Needs root, slurm-wlm, munge and iproute2. Its files are in FOLDER; no process outlives it.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH # Slurm's own, not one made up for tests
if [ -z "${SLURM_CONF:-}" ]; then
  SLURM_CONF=$1/slurm.conf exec unshare --net --uts --mount --pid --mount-proc --fork --kill-child "$0" "$@"
fi
cd "$1"
shift
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$PWD/munge.socket
StateSaveLocation=$PWD
SlurmdSpoolDir=$PWD/%n
SlurmctldPidFile=$PWD/n0.pid
SlurmdPidFile=$PWD/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
NodeName=n[1-2] CPUs=$(nproc)
PartitionName=test Nodes=n[1-2] Default=YES
CONF
printf '%s\n' '127.0.0.1 localhost' '10.0.0.9 n0' '10.0.0.1 n1' '10.0.0.2 n2' >hosts
mount --bind hosts /etc/hosts
hostname n0
ip link set lo up
ip link add hosts type bridge
ip address add 10.0.0.9/24 dev hosts
ip link set hosts up
head -c 1024 /dev/urandom >munge.key
chmod 400 munge.key
munged --force --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" --pid-file="$PWD/munge.pid" \
  --log-file="$PWD/munge.log" --seed-file="$PWD/munge.seed" 2>>munge.log
for number in 1 2; do
  unshare --net --uts bash -c 'until ip link show eth0; do sleep 0.1; done; hostname n$0
    ip link set lo up; ip address add 10.0.0.$0/24 dev eth0; ip link set eth0 up
    exec slurmd -D' "$number" &>"n$number.log" &
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
  ip link add "to-n$number" type veth peer name eth0 netns $!
  ip link set "to-n$number" master hosts up
done
slurmctld -D &>n0.log &
until [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ]; do sleep 0.2; done
cd "$OLDPWD"
"$@"

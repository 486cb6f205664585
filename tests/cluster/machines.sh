#!/usr/bin/env bash
# Three machines for test_ray_up.py: a laptop (this process), a head and a worker with sshd. Namespaces, in which
# processes, /tmp, the home folder and the network are their own, and /mnt/shared is everyone's. Needs root.
#   unshare --pid --fork --kill-child --mount --mount-proc --net machines.sh SHARED PATH...
# SHARED becomes /mnt/shared; PATHs stay visible though /tmp or the home hides them. "ready" on stdout, then it waits.
set -euo pipefail

hide() { # an empty /tmp and home; the root file system is below /media
  mount -t tmpfs -o mode=1777 tmpfs /tmp
  mount -t tmpfs -o mode=700 tmpfs "$HOME"
  for path in "$@"; do
    mkdir -p "$path"
    mount --bind "/media$path" "$path"
  done
}

address() { # NAME IP: bring NAME up; the default route tells Ray which address is this machine's
  ip link set lo up
  ip addr add "$2/24" dev "$1"
  ip link set "$1" up
  ip route add default via 10.0.0.254 2>/dev/null || true
}

machine() { # IP PATH...: become one that is reached by ssh
  local ip=$1 key
  key=$(cat ~/.ssh/id_ed25519.pub)
  hide "${@:2}"
  mkdir -p -m 700 ~/.ssh
  echo "$key" >~/.ssh/authorized_keys
  until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
  address eth0 "$ip"
  ssh-keygen -q -t ed25519 -N "" -f /tmp/host_key
  exec /usr/sbin/sshd -D -e -h /tmp/host_key -o "ListenAddress=$ip" -o PermitRootLogin=prohibit-password -o PrintMotd=no
}

if [ "$1" = machine ]; then machine "${@:2}"; fi

shared=$1
mount --rbind / /media
mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared
mount --bind "$shared" /mnt/shared
hide "${@:2}"
ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/id_ed25519
mkdir -p /run/sshd
ip link add br0 type bridge
address br0 10.0.0.254
for number in 1 2; do
  unshare --pid --fork --kill-child --mount --mount-proc --net "$0" machine "10.0.0.$number" "${@:2}" \
    >"/mnt/shared/sshd-$number.log" 2>&1 &
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
  ip link add "port$number" master br0 up type veth peer name eth0 netns $!
done
until echo >/dev/tcp/10.0.0.1/22 && echo >/dev/tcp/10.0.0.2/22; do sleep 0.1; done 2>/dev/null
echo ready
sleep infinity # not exec: bash, as the first process, reaps what others leave

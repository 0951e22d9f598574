#!/usr/bin/env bash
# Runs a command with limits on its CPU and memory, all its processes counted together.
#
#   perf/limits.sh CPUS MEMORY -- COMMAND...        perf/limits.sh 1.5 512M -- python perf/bench_memory.py
#
# CPUS is a number of processors (1.5: one and a half), MEMORY bytes or a number with K, M, G; 0: no limit.
# The first that works is used, and named on standard error:
#   systemd-run --scope   where systemd is process 1 (the user's manager, or the system's for root)
#   cgroup v2, cgroup v1  a group made here and removed afterwards, where the hierarchy can be written
#   taskset + ulimit      whole processors, and address space for each process instead of memory for all
# The exit status is that of the command; 2: wrong usage.
set -euo pipefail

usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
say() { printf 'limits.sh: %s\n' "$*" >&2; }

[ $# -ge 4 ] && [ "$3" = -- ] || usage
cpus=$1 memory=$2
shift 3
[[ $cpus =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage
[[ $memory =~ ^[0-9]+[KMG]?$ ]] || usage
bytes=$(numfmt --from=iec "$memory")
quota_us=$(awk -v cpus="$cpus" 'BEGIN { printf "%d", cpus * 100000 }')   # of each 100 ms

with_systemd() {
    [ -d /run/systemd/system ] && command -v systemd-run >/dev/null || return 1
    local options=(--scope --quiet --collect) who=--user
    [ "$(id -u)" = 0 ] && who=--system
    [ "$quota_us" = 0 ] || options+=(-p "CPUQuota=$((quota_us / 1000))%")
    [ "$bytes" = 0 ] || options+=(-p "MemoryMax=$bytes" -p MemorySwapMax=0)
    systemd-run "$who" "${options[@]}" -- true 2>/dev/null || return 1
    say "systemd-run $who --scope, $cpus CPUs, $memory bytes of memory"
    exec systemd-run "$who" "${options[@]}" -- "$@"
}

groups=()
# The command joins the groups before it starts; they go once it and all its processes have ended.
in_groups() {
    local status=0
    bash -c 'for group in $1; do echo $$ > "$group/cgroup.procs"; done; shift; exec "$@"' \
        limits.sh "${groups[*]}" "$@" || status=$?
    local group tries
    for group in "${groups[@]}"; do
        for tries in {1..50}; do rmdir "$group" 2>/dev/null && break; sleep 0.1; done
        [ ! -d "$group" ] || say "processes of the command are left in $group"
    done
    exit "$status"
}

# make_group DIRECTORY: a group of ours below it, or failure.
make_group() {
    local group=$1/blockx-limits-$$
    mkdir "$group" 2>/dev/null || return 1
    groups+=("$group")
}

drop_groups() {
    local group
    for group in "${groups[@]}"; do rmdir "$group"; done
    groups=()
}

with_cgroup_v2() {
    local root=/sys/fs/cgroup wanted=()
    [ -f "$root/cgroup.controllers" ] || return 1
    [ "$quota_us" = 0 ] || wanted+=(cpu)
    [ "$bytes" = 0 ] || wanted+=(memory)
    local own=$root$(sed -n 's/^0:://p' /proc/self/cgroup) parent controller
    for parent in "$own" "$root"; do
        for controller in "${wanted[@]}"; do
            grep -qw "$controller" "$parent/cgroup.subtree_control" 2>/dev/null || continue 2
        done
        make_group "$parent" || continue
        if { [ "$quota_us" = 0 ] || echo "$quota_us 100000" > "${groups[0]}/cpu.max"; } &&
           { [ "$bytes" = 0 ] || echo "$bytes" > "${groups[0]}/memory.max"; }; then
            say "cgroup v2 ${groups[0]}, $cpus CPUs, $memory bytes of memory"
            in_groups "$@"
        fi
        drop_groups
    done
    return 1
}

# v1_below CONTROLLER: a group below our own one in that hierarchy.
v1_below() {
    local mount own
    mount=$(awk -v controller="$1" '$3 == "cgroup" && $4 ~ "(^|,)" controller "(,|$)" { print $2; exit }' /proc/mounts)
    [ -n "$mount" ] || return 1
    own=$(awk -F: -v controller="$1" '$2 ~ "(^|,)" controller "(,|$)" { print $3; exit }' /proc/self/cgroup)
    make_group "$mount$own" || make_group "$mount"
}

with_cgroup_v1() {
    if [ "$quota_us" != 0 ]; then
        v1_below cpu || return 1
        echo 100000 > "${groups[-1]}/cpu.cfs_period_us" && echo "$quota_us" > "${groups[-1]}/cpu.cfs_quota_us" ||
            { drop_groups; return 1; }
    fi
    if [ "$bytes" != 0 ]; then
        v1_below memory || { drop_groups; return 1; }
        echo "$bytes" > "${groups[-1]}/memory.limit_in_bytes" || { drop_groups; return 1; }
    fi
    say "cgroup v1 ${groups[*]:-(no limit)}, $cpus CPUs, $memory bytes of memory"
    in_groups "$@"
}

with_rlimits() {
    say "no cgroup can be written: taskset and ulimit, address space for each process"
    local whole=$(((quota_us + 99999) / 100000))
    [ "$bytes" = 0 ] || ulimit -v $((bytes / 1024))
    if [ "$whole" != 0 ] && command -v taskset >/dev/null; then exec taskset -c "0-$((whole - 1))" "$@"; fi
    exec "$@"
}

with_systemd "$@" || with_cgroup_v2 "$@" || with_cgroup_v1 "$@" || with_rlimits "$@"

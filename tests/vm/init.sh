#!/bin/busybox sh
# First process of the guest (see vm.sh): loads modules, prepares the guest, runs /command, reports its status, powers off.
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
while read -r module; do insmod "/modules/$module.ko" || echo "init: module $module could not be loaded"; done </modules/order
ulimit -l unlimited

. /setup
/bin/sh /command
echo "status=$?" >/dev/ttyS1
poweroff -f

#!/bin/busybox sh
# The guest's first process: the host's root, read-only, below a scratch layer; then /out/run.sh.
b=/bin/busybox
$b mkdir -p /proc /sys /dev /host /scratch /new
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
for module in $($b cat /modules/order); do $b insmod "/modules/$module"; done
share="trans=virtio,version=9p2000.L,msize=512000"
$b mount -t 9p -o "$share,ro,cache=loose" host /host || $b poweroff -f
$b mount -t tmpfs none /scratch
$b mkdir /scratch/upper /scratch/work
$b mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work none /new
$b mount --move /dev /new/dev
$b mkdir -p /new/out /new/dev/shm /new/lib/modules
$b mount -t proc none /new/proc
$b mount -t sysfs none /new/sys
$b mount -t tmpfs none /new/dev/shm
$b mount -t 9p -o "$share" out /new/out
$b chroot /new /bin/bash /out/run.sh < /new/dev/null > /new/dev/console 2>&1
echo $? > /new/out/rc
$b sync
$b poweroff -f

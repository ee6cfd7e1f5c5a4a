#!/usr/bin/env bash
# Runs a program in a small virtual machine, for tests that need kernel modules: RDMA devices or a device mapper.
#
#     vm.sh build                 download Debian packages and build the image (once; 80 MB, no root, installs nothing)
#     vm.sh run [-t SECONDS] [-s SETUP] [-f FILE]... [-d MIB]... -- PROGRAM [ARGUMENT...]
#
# `run` copies PROGRAM and its shared libraries into a fresh guest, runs it there as root and forwards its output. The exit status
# is that of PROGRAM; 124 after SECONDS (default 120); 125 if the guest ended without a status.
#   -s  shell script that prepares the guest; the first process reads it before PROGRAM starts
#   -f  another program for the guest's /bin, with its libraries
#   -d  an empty disk: the first is /dev/vda, the second /dev/vdb
# The guest has a shell, ip, tc, rdma, dmsetup, mkfs.ext4 and mkfs.xfs.
#
# Needs an x86-64 Debian with qemu-system-x86_64, cpio, xz and python3, and package lists (apt-get update). Without hardware
# virtualization the guest is emulated. That is slow but correct: nothing here measures speed. LARDER_VM_DIR is the directory of
# the image (default target/vm).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${LARDER_VM_DIR:-$here/../../target/vm}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
multiarch=usr/lib/x86_64-linux-gnu
export PATH=$PATH:/usr/sbin:/sbin
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT

fail() { echo "vm.sh: $*" >&2; exit 125; }
need() { command -v "$1" >/dev/null || fail "$1 is not installed"; }

# Copies the shared libraries of the given files into the root $1, under the paths where the loader searches.
libraries() {
    local root=$1 line
    shift
    { LD_LIBRARY_PATH=$cache/files/$multiarch:$cache/files/lib/x86_64-linux-gnu ldd "$@" 2>/dev/null || true; } |
        { grep -oE '/[^ :]+( |$)' || true; } | sort -u | while read -r line; do
        case $line in
        */ld-linux-*) install -D "$line" "$root/lib64/${line##*/}" ;;
        *) install -D "$line" "$root/$multiarch/${line##*/}" ;;
        esac
    done
}

archive() { (cd "$1" && find . -print0 | cpio --quiet --null -o -H newc); }

# Extracts the ELF image from the compressed bzImage $1 into $2. QEMU boots it directly, so the emulated CPU need not decompress it.
unpack_kernel() {
    python3 - "$1" "$2" <<'PY'
import lzma, struct, sys
image = open(sys.argv[1], "rb").read()
sectors = image[0x1F1]                                   # setup header of the x86 boot protocol
offset, length = struct.unpack_from("<II", image, 0x248)  # compressed payload, behind the setup sectors
start = (sectors + 1) * 512 + offset
elf = lzma.LZMADecompressor().decompress(image[start:start + length])
assert elf[:4] == b"\x7fELF", "not an XZ-compressed ELF kernel"
open(sys.argv[2], "wb").write(elf)
PY
}

# Appends module $1 and its dependencies to `order`, in load order.
order=()
add_module() {
    local name=$1 file dependency
    [[ " ${order[*]:-} " != *" $name "* ]] || return 0
    file=$(find "$cache/kernel/lib/modules" -name "${name//_/[-_]}.ko*" -print -quit)
    if [ -z "$file" ]; then
        grep -qE "/${name//_/[-_]}\.ko" "$cache"/kernel/lib/modules/*/modules.builtin || fail "the kernel package has no module $name"
        return 0
    fi
    case $file in
    *.xz) xz -dc "$file" ;;
    *) cat "$file" ;;
    esac >"$root/modules/$name.ko"
    # `depends=a,b` is one of the NUL-terminated strings in the module's .modinfo section.
    for dependency in $(tr '\0' '\n' <"$root/modules/$name.ko" | grep -a '^depends=' | head -1 | cut -d= -f2 | tr ',-' ' _'); do
        add_module "$dependency"
    done
    order+=("$name")
}

build() {
    local kernel package root
    need dpkg-deb; need cpio; need xz; need python3
    exec 9>"$cache/lock"
    flock 9
    local version
    version=$(cat "$here/vm.sh" "$here/init.sh" | sha256sum)
    [ "$(cat "$cache/complete" 2>/dev/null)" != "$version" ] || return 0
    rm -rf "$cache"/{complete,packages,files,kernel,root}
    mkdir -p "$cache"/{packages,files,kernel}
    # The newest kernel of this release, because mirrors drop older ones. The `cloud` flavor has no rdma_rxe.
    kernel=$(apt-cache depends linux-image-amd64 | grep -oE 'linux-image-[0-9][^ ]*' | head -1) || true
    [ -n "$kernel" ] || fail "apt has no package linux-image-amd64; run apt-get update"
    (cd "$cache/packages" && apt-get -qq -o APT::Sandbox::User=root download "$kernel" busybox-static iproute2 libbpf1 libbsd0 \
        libcap2 libdb5.3 libelf1 libmd0 libmnl0 libtirpc3 zlib1g libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 \
        dmsetup libdevmapper1.02.1 e2fsprogs libext2fs2 libss2 libcom-err2 xfsprogs libinih1 liburcu8)
    for package in "$cache"/packages/*.deb; do
        case $package in
        */linux-image-*)
            dpkg-deb --fsys-tarfile "$package" | tar -x -C "$cache/kernel" --wildcards './boot/vmlinuz-*' \
                './lib/modules/*/modules.builtin' './lib/modules/*/kernel/drivers/infiniband/*' \
                './lib/modules/*/kernel/drivers/net/*' './lib/modules/*/kernel/net/*' './lib/modules/*/kernel/lib/*' \
                './lib/modules/*/kernel/crypto/*' './lib/modules/*/kernel/arch/x86/crypto/*' './lib/modules/*/kernel/fs/*' \
                './lib/modules/*/kernel/drivers/md/*' './lib/modules/*/kernel/drivers/virtio/*' './lib/modules/*/kernel/drivers/block/*'
            ;;
        *) dpkg-deb -x "$package" "$cache/files" ;;
        esac
    done

    root=$cache/root
    mkdir -p "$root"/{bin,dev,etc/libibverbs.d,lib64,modules,proc,run,sys,tmp,"$multiarch/libibverbs"}
    ln -s "$multiarch/.." "$root/lib"
    ln -s bin "$root/sbin"
    install "$cache/files/bin/busybox" "$root/bin/busybox"
    local tool
    for tool in sh mount umount insmod cat echo ls mkdir ln sleep poweroff dmesg; do ln -s busybox "$root/bin/$tool"; done
    install "$cache/files/bin/ip" "$cache"/files/sbin/{tc,dmsetup,mkfs.xfs} "$cache/files/usr/bin/rdma" "$root/bin/"
    install "$cache/files/sbin/mke2fs" "$root/bin/mkfs.ext4"
    # It defines the features of an ext4 file system.
    install -m 644 "$cache/files/etc/mke2fs.conf" "$root/etc/"
    # libibverbs finds its providers through these files. The provider must have the same version as the library.
    install -m 644 "$cache/files/etc/libibverbs.d/rxe.driver" "$root/etc/libibverbs.d/"
    install "$cache/files/$multiarch"/libibverbs/librxe-* "$root/$multiarch/libibverbs/"
    cp -L "$cache/files/$multiarch/libibverbs.so.1" "$root/$multiarch/"
    libraries "$root" "$root"/bin/{ip,tc,rdma,dmsetup,mkfs.ext4,mkfs.xfs} "$root"/$multiarch/libibverbs/* "$root/$multiarch/libibverbs.so.1"
    # rdma_rxe requests "crc32" by name at run time, and the file systems "crc32c", so no dependency lists them.
    local module
    for module in crc32_generic rdma_rxe ib_uverbs veth sch_netem crc32c_generic virtio_pci virtio_blk dm_log_writes dm_snapshot \
        ext4 xfs; do
        add_module "$module"
    done
    printf '%s\n' "${order[@]}" >"$root/modules/order"
    install "$here/init.sh" "$root/init"
    archive "$root" >"$cache/base.cpio"
    unpack_kernel "$cache"/kernel/boot/vmlinuz-* "$cache/vmlinux"
    rm -rf "$cache"/{packages,files,kernel,root}
    echo "$version" >"$cache/complete"
    echo "vm.sh: $kernel, $(du -m "$cache/base.cpio" | cut -f1) MB of files, $(du -m "$cache/vmlinux" | cut -f1) MB of kernel" >&2
}

run() {
    local seconds=120 program status=0 code accelerator setup=/dev/null file files=() disk disks=() drives=()
    while [ $# -gt 0 ]; do
        case $1 in
        -t) seconds=$2; shift 2 ;;
        -s) setup=$2; shift 2 ;;
        -f) files+=("$2"); shift 2 ;;
        -d) disks+=("$2"); shift 2 ;;
        --) shift; break ;;
        *) fail "unknown option $1" ;;
        esac
    done
    [ $# -gt 0 ] || fail "no PROGRAM given"
    need qemu-system-x86_64; need cpio
    (build)
    program=$(readlink -f "$1") || fail "$1 does not exist"
    shift
    work=$(mktemp -d)
    mkdir -p "$work/root"
    install "$program" "$work/root/program"
    libraries "$work/root" "$program" ${files[@]+"${files[@]}"}
    for file in ${files[@]+"${files[@]}"}; do install -D "$file" "$work/root/bin/${file##*/}"; done
    cat "$setup" >"$work/root/setup"
    for disk in ${disks[@]+"${disks[@]}"}; do
        file=$work/disk-${#drives[@]}
        truncate -s "${disk}M" "$file"
        # The disks end with the guest, so the host need not write them to its own.
        drives+=(-drive "file=$file,format=raw,if=virtio,cache=unsafe")
    done
    # glibc loads it by name when a thread exits, so ldd does not list it.
    install -D "$(ldconfig -p | grep -m1 -oE '/[^ ]*libgcc_s.so.1')" "$work/root/$multiarch/libgcc_s.so.1"
    { printf 'exec /program'; [ $# -eq 0 ] || printf ' %q' "$@"; echo; } >"$work/root/command"
    { cat "$cache/base.cpio"; archive "$work/root"; } >"$work/initramfs"
    accelerator=(-accel tcg,thread=multi -cpu max)
    # /dev/kvm alone is no proof: on some hosts it exists without vmx or svm and cannot run this guest.
    if grep -qE '\b(vmx|svm)\b' /proc/cpuinfo && [ -w /dev/kvm ]; then accelerator=(-accel kvm -cpu host); fi
    timeout -k 5 "$seconds" qemu-system-x86_64 -machine pc "${accelerator[@]}" -smp 2 -m 1024 -nodefaults -display none -no-reboot \
        ${drives[@]+"${drives[@]}"} -kernel "$cache/vmlinux" -initrd "$work/initramfs" -serial stdio -serial "file:$work/status" \
        -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on cryptomgr.notests" \
        </dev/null | tr -d '\r' || status=${PIPESTATUS[0]}
    code=$(grep -aoE 'status=[0-9]+' "$work/status" 2>/dev/null | tail -1 | cut -d= -f2) || true
    [ -z "$code" ] || exit "$code"
    [ "$status" != 124 ] || { echo "vm.sh: stopped the guest after $seconds s" >&2; exit 124; }
    fail "the guest ended without an exit status (qemu: $status)"
}

case ${1:-} in
build) build ;;
run) shift; run "$@" ;;
*) sed -n '2,18p' "$0"; exit 2 ;;
esac

"""The checks of tests/deploy/run, which starts this file in namespaces of its own.

Order: install by the README, verify the units, run them, check, stop them. Then the same with broken
copies of deploy/.
"""

import argparse
import fcntl
import glob
import itertools
import json
import os
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request

from units import Failure, Unit, can_raise_limits, seconds, wait_for

NAMES = [
    "larder-store.service",
    "larder-engine@prefill.service",
    "larder-engine@decode.service",
    "larder-router.service",
]
UNITS = "/etc/systemd/system"
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
L2_BYTES = 64 << 20
# Only sizes and the model differ from the files that deploy/ ships.
TEST_SETTINGS = {
    "store.env": {"LARDER_L2": str(L2_BYTES), "LARDER_L3_BYTES": str(256 << 20)},
    "prefill.env": {"LARDER_MODEL": "/srv/models/larder-tiny", "LARDER_L1": "16MiB"},
    "decode.env": {"LARDER_MODEL": "/srv/models/larder-tiny", "LARDER_L1": "16MiB"},
}
# Seconds that a stop may need beside --drain-timeout, to end connections and close devices.
STOP_MARGIN = 30
# Seconds for a service to listen, and for the first answers.
START_LIMIT = 30
# Enough for all prompts twice on a busy machine.
READ_LIMIT = 120
# Long enough for several pages of 32 tokens.
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. " * 12
# Different prompts, of nine pages each.
PROMPTS = 80


def say(text):
    print(text, flush=True)


def command(*words, **options):
    """Runs a command that must succeed, and returns its output."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def fetch(url, body=None):
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def loopback_up():
    """A new network namespace has its loopback device switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))


def isolate(work):
    """Mounts private copies over all paths that an installation writes to."""
    for path in ("/etc", "/usr/local/bin"):
        private = os.path.join(work, path.replace("/", "_"))
        command("cp", "-a", path, private)
        command("mount", "--bind", private, path)
    for path in ("/var/lib", "/srv"):
        private = os.path.join(work, path.replace("/", "_"))
        os.mkdir(private, 0o755)
        os.chmod(private, 0o755)
        command("mount", "--bind", private, path)
    if os.path.exists(SHMEM):
        private = os.path.join(work, "shmem_enabled")
        open(private, "w", encoding="ascii").close()
        command("mount", "--bind", private, SHMEM)
    loopback_up()


def clear():
    """Removes an earlier installation, so that every variant of deploy/ starts from nothing."""
    for path in ("/etc/larder", "/var/lib/larder"):
        shutil.rmtree(path, ignore_errors=True)
    for path in ("/etc/sysusers.d/larder.conf", "/etc/tmpfiles.d/larder.conf"):
        if os.path.exists(path):
            os.remove(path)
    if os.path.exists(SHMEM):
        # systemd-tmpfiles does not truncate the file. The kernel's file needs no truncation, this one does.
        open(SHMEM, "w", encoding="ascii").close()
    for name in os.listdir(UNITS):
        if name.startswith("larder-"):
            os.remove(os.path.join(UNITS, name))
    with open("/etc/passwd", encoding="utf-8") as file:
        if any(line.startswith("larder:") for line in file):
            command("sed", "-i", "/^larder:/d", "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow")


def install(deploy, larder, work):
    """Runs the commands of the README's section "Install"."""
    tree = os.path.join(work, "tree")
    shutil.rmtree(tree, ignore_errors=True)
    os.makedirs(os.path.join(tree, "target/dist"))
    os.symlink(larder, os.path.join(tree, "target/dist/larder"))
    shutil.copytree(deploy, os.path.join(tree, "deploy"))
    with open(os.path.join(deploy, "README.md"), encoding="utf-8") as file:
        section = file.read().split("\n## Install\n")[1]
    commands = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1]
    command("bash", "-euc", commands, cwd=tree)
    models = "/srv/models/larder-tiny"
    if not os.path.exists(models):
        shutil.copytree("engine/models/larder-tiny", models)
        command("chmod", "-R", "a+rX", "/srv")
    for name, settings in TEST_SETTINGS.items():
        path = os.path.join("/etc/larder", name)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for key, value in settings.items():
            text, found = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
            if found != 1:
                raise Failure(f"deploy/env/{name} does not set {key} once")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def allow_shared_huge_pages():
    """Checks the value that tmpfiles.d wrote, and rewrites it in the form that the kernel shows."""
    if not os.path.exists(SHMEM):
        return
    with open(SHMEM, encoding="ascii") as file:
        written = file.read().strip()
    if written != "advise":
        raise Failure(f"tmpfiles.d wrote '{written}', not 'advise', to {SHMEM}: a store with L3 will not share")
    with open(SHMEM, "w", encoding="ascii") as file:
        file.write("always within_size [advise] never deny force\n")


def verify():
    """Fails on any output of systemd-analyze about our units. Other units of the machine do not count."""
    files = [os.path.join(UNITS, name) for name in NAMES]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *files],
        capture_output=True, text=True, timeout=60, check=False,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "larder" in line]
    if ours or done.returncode != 0:
        raise Failure(f"systemd-analyze verify (status {done.returncode}): " + "\n".join(ours or [done.stderr]))


def check_static(units):
    """Checks that need no running process."""
    owners = {}
    for unit in units:
        for address in unit.addresses():
            if address[1] in owners:
                raise Failure(f"{unit.name} and {owners[address[1]]} share port {address[1]}")
            owners[address[1]] = unit.name
    say(f"  ports differ: {', '.join(map(str, sorted(owners)))}")
    store = units[0]
    drain, limit = int(store.option("--drain-timeout")), seconds(store.last("TimeoutStopSec", "90"))
    if limit < drain + STOP_MARGIN:
        raise Failure(f"TimeoutStopSec of {limit:.0f} s leaves less than {STOP_MARGIN} s beside --drain-timeout {drain}")
    say(f"  TimeoutStopSec of the store ({limit:.0f} s) covers --drain-timeout ({drain} s)")


def limit_line(unit, title):
    line = next(line for line in unit.proc("limits").splitlines() if line.startswith(title))
    return tuple(-1 if word == "unlimited" else int(word) for word in line[len(title):].split()[:2])


def check_limits(units):
    """Checks that the limits arrived, and that the kernel lets the store lock its memory."""
    for unit in units:
        for key, _, title, asked, given in unit.limits():
            # The store raises the soft limit of open files by itself.
            found = limit_line(unit, title)
            if found[1] != given[1] or (key == "LimitMEMLOCK" and found[0] != given[0]):
                raise Failure(f"{unit.name}: {key} should be {given}, and is {found}")
            if key == "LimitMEMLOCK":
                short = "" if asked == given else " (this machine's hard limit; CAP_IPC_LOCK stands in)"
                shown = "unlimited" if found[1] == -1 else f"{found[1] >> 20} MiB"
                say(f"  {unit.name}: {title} is {shown}{short}")
    for line in units[0].proc("status").splitlines():
        if line.startswith("VmPin:"):
            locked = int(line.split()[1]) << 10
            if locked < L2_BYTES:
                raise Failure(f"io_uring registered {locked} bytes of the store's memory, less than L2 ({L2_BYTES})")
            say(f"  io_uring registered {locked >> 20} MiB of the store's memory (L2: {L2_BYTES >> 20} MiB)")


def check_users(units, user):
    """Checks that one user runs everything, and that no other user can read the pages on disk."""
    for unit in units:
        line = next(line for line in unit.proc("status").splitlines() if line.startswith("Uid:"))
        uids = set(line.split()[1:])
        if uids != {str(user[0])}:
            raise Failure(f"{unit.name} runs as user {uids}, not as larder ({user[0]})")
    data = os.stat("/var/lib/larder")
    if (data.st_uid, data.st_mode & 0o777) != (user[0], 0o700):
        raise Failure(f"/var/lib/larder belongs to {data.st_uid} with mode {data.st_mode & 0o777:o}")
    say(f"  all run as larder (uid {user[0]}), the only user who can read /var/lib/larder")


def arena_is_mapped(unit):
    unit.must_run()
    return "memfd:larder-arena" in unit.proc("maps")


def check_sharing(units):
    """Checks that the engines and the router map the store's memory, and that a page is read there."""
    store, prefill, decode, router = units
    for unit in (prefill, decode):
        try:
            wait_for(f"{unit.name} attaches to the store's shared memory", 10, lambda: arena_is_mapped(unit))
        except Failure as failure:
            logs = store.log_tail() + unit.log_tail()
            raise Failure(f"{failure}; the last log lines:\n{logs}") from None
        say(f"  {unit.name}: maps the store's memory")
    api, admin = ("http://{}:{}".format(*address) for address in router.addresses())

    def model():
        router.must_run()
        try:
            return json.loads(fetch(f"{api}/v1/models"))["data"]
        except (OSError, KeyError):
            return None

    model_name = wait_for("the router lists the model", START_LIMIT, model)[0]["id"]
    node = "http://{}:{}".format(*store.addresses()[1])
    # A page that the decode engine follows while the prefill engine puts it comes as bytes. Only a
    # complete page is read in place. So the prompts come round again after more pages than the
    # engines' L1 holds (340), and fewer than L2 holds (1,364).
    prompts = itertools.cycle(range(PROMPTS))

    def complete():
        body = {"model": model_name, "prompt": f"Verse {next(prompts)}. {PROMPT}", "max_tokens": 4, "temperature": 0}
        try:
            return json.loads(fetch(f"{api}/v1/completions", body))
        except OSError:
            return None

    def read_in_place():
        metrics = complete() and fetch(f"{node}/metrics")
        found = metrics and re.search(r"(?m)^larder_store_bytes_in_place_total (\d+)", metrics)
        return found and int(found[1])

    wait_for("the first answer", START_LIMIT, complete)
    say("  the router answers a completion")
    try:
        found = wait_for("a page is read in place", READ_LIMIT, read_in_place)
    except Failure as failure:
        logs = "".join(unit.log_tail() for unit in units)
        counter = f"larder_store_bytes_in_place_total of {node}/metrics"
        raise Failure(f"{failure} ({counter}); the last log lines:\n{logs}") from None
    say(f"  {found} bytes were read in the store's memory")
    status = command("/usr/local/bin/larder", "status", "--admin", admin, "--json")
    transport = re.search(r'"transport"\s*:\s*"(\w+)"', status)
    if not transport or transport[1] != "shm":
        raise Failure(f"larder status shows transport {transport and transport[1]} for the router, not shm")
    say("  larder status: transport shm")


def check_stop(units):
    """Stops the services in reverse order, as systemd does."""
    for unit in reversed(units):
        took = unit.stop()
        say(f"  {unit.name} stopped {took:.1f} s after SIGTERM (limit {unit.last('TimeoutStopSec')})")


def check(deploy, larder, work):
    """All checks of one copy of deploy/."""
    clear()
    install(deploy, larder, work)
    allow_shared_huge_pages()
    say("  installed by the commands of README.md")
    verify()
    say("  systemd-analyze verify reports no problem")
    logs = os.path.join(work, "logs")
    shutil.rmtree(logs, ignore_errors=True)
    os.mkdir(logs)
    users = {entry.pw_name: (entry.pw_uid, entry.pw_gid) for entry in pwd.getpwall()}
    units = [Unit(UNITS, name, logs) for name in NAMES]
    check_static(units)
    try:
        for unit in units:
            unit.start(users)
        for unit in units:
            wait_for(f"{unit.name} listens", START_LIMIT, unit.listens)
        say("  every service listens on its own ports")
        check_limits(units)
        check_sharing(units)
        check_users(units, users["larder"])
        check_stop(units)
        # The identity and the log in the state directory must serve a second start.
        units[0].start(users)
        wait_for("the store listens after a restart", START_LIMIT, units[0].listens)
        units[0].stop()
        say("  the store starts again on its state directory")
    finally:
        for unit in units:
            unit.kill()


# Negative controls: name, files, pattern, replacement, and a part of the expected failure.
CONTROLS = [
    ("dynamic users", "systemd/*", r"User=larder\nGroup=larder", "DynamicUser=yes", "attaches to the store"),
    ("one port for two engines", "env/decode.env", "7711", "7710", "share port 7710"),
    ("no LimitMEMLOCK", "systemd/larder-store.service", r"LimitMEMLOCK=.*\n", "", "io_uring registered"),
    ("stop shorter than the drain", "systemd/larder-store.service", "Sec=120", "Sec=60", "leaves less than"),
    ("no huge pages in shared memory", "tmpfiles.d/larder.conf", r"advise\n", "never\n", "will not share"),
    ("misspelt setting", "systemd/larder-router.service", "UMask", "UMsk", "systemd-analyze verify"),
    ("untested sandbox", "systemd/larder-engine@.service", "PrivateTmp", "PrivateNetwork", "does not know"),
]


def break_copy(deploy, control, work):
    _, files, pattern, replacement, _ = control
    copy = os.path.join(work, "broken")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(deploy, copy)
    for path in glob.glob(os.path.join(copy, files)):
        with open(path, encoding="utf-8") as file:
            text, found = re.subn(pattern, replacement, file.read())
        if not found:
            raise Failure(f"the control does not fit {path} any more: {pattern}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return copy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--larder", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--deploy", default="deploy")
    parser.add_argument("--no-controls", action="store_true")
    args = parser.parse_args()
    deploy = os.path.realpath(args.deploy)
    begun = time.monotonic()
    try:
        isolate(args.work)
        if not can_raise_limits():
            say("note: root lacks CAP_SYS_RESOURCE here, so no limit can exceed this machine's hard limit")
        say("deploy: the files as shipped")
        check(deploy, args.larder, args.work)
        for control in [] if args.no_controls else CONTROLS:
            name, expected = control[0], control[-1]
            say(f"deploy: control, {name} (must fail)")
            try:
                check(break_copy(deploy, control, args.work), args.larder, args.work)
            except Failure as failure:
                if expected not in str(failure):
                    message = f"the control failed for another reason than '{expected}':\n{failure}"
                    raise Failure(message) from None
                say(f"  failed as expected: {str(failure).splitlines()[0]}")
            else:
                raise Failure(f"the control '{name}' passed, so this test misses the defect")
    except Failure as failure:
        say(f"deploy: FAILED: {failure}")
        return 1
    say(f"deploy: passed in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

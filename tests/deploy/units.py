"""Starts services under the settings of their unit files, on a machine where systemd does not run.

An unknown setting is an error, because the test could not tell how the service works under it.
"""

import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import time

# Settings without effect on a running service, and settings that the checks read themselves.
INERT = {
    "Description", "Documentation", "Wants", "After", "WantedBy", "StartLimitIntervalSec", "Type",
    "Restart", "RestartSec", "RestartPreventExitStatus", "TimeoutStopSec",
}
APPLIED = {
    "EnvironmentFile", "Environment", "ExecStart", "User", "Group", "DynamicUser", "UMask",
    "StateDirectory", "StateDirectoryMode", "LimitMEMLOCK", "LimitNOFILE", "NoNewPrivileges",
    "CapabilityBoundingSet", "ProtectSystem", "ProtectHome", "PrivateTmp",
}
LIMITS = {
    "LimitMEMLOCK": (resource.RLIMIT_MEMLOCK, "Max locked memory"),
    "LimitNOFILE": (resource.RLIMIT_NOFILE, "Max open files"),
}
# Limits that systemd sets for a unit without them.
DEFAULT_LIMITS = {"LimitMEMLOCK": "8388608", "LimitNOFILE": "1024:524288"}
SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
CAP_SYS_RESOURCE = 24


class Failure(Exception):
    """A check that failed."""


def seconds(text):
    """A time span as systemd writes it, in seconds."""
    units = {"": 1, "s": 1, "sec": 1, "ms": 0.001, "m": 60, "min": 60, "h": 3600}
    parts = re.findall(r"([\d.]+)\s*([a-z]*)", text)
    return sum(float(number) * units[unit] for number, unit in parts)


def limit_value(text):
    """One value of a resource limit."""
    if text == "infinity":
        return resource.RLIM_INFINITY
    return int(text[:-1]) * SUFFIXES[text[-1]] if text[-1] in SUFFIXES else int(text)


def limit_pair(text):
    """The soft and the hard value of a resource limit."""
    soft, _, hard = text.partition(":")
    return limit_value(soft), limit_value(hard or soft)


def can_raise_limits():
    """True if this process may raise hard limits. Root in a container often may not."""
    with open("/proc/self/status", encoding="ascii") as status:
        effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1)


def wait_for(event, limit, condition):
    """Polls `condition` for at most `limit` seconds, and returns its first true value."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failure(f"{event}: not within {limit} s")
        time.sleep(0.05)


class Unit:
    """One unit file, and the process that it describes."""

    def __init__(self, folder, name, logs):
        self.name = name
        self.log = os.path.join(logs, name + ".log")
        self.process = None
        prefix, _, instance = name.removesuffix(".service").partition("@")
        self.specifiers = {"%i": instance, "%n": name, "%H": socket.gethostname(), "%S": "/var/lib", "%%": "%"}
        file = f"{prefix}@.service" if instance else name
        self.settings = self.parse(os.path.join(folder, file))
        unknown = set(self.settings) - INERT - APPLIED
        if unknown:
            names = ", ".join(sorted(unknown))
            raise Failure(f"{file}: tests/deploy/units.py does not know {names}: add them there")
        self.environment = self.read_environment()
        self.command = self.expand_command()

    def parse(self, path):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        # Comments go first: systemd also ignores them between continued lines.
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("#", ";")))
        settings = {}
        for line in lines.replace("\\\n", " ").splitlines():
            if "=" not in line:
                continue
            key, _, value = line.partition("=")
            value = re.sub(r"%.", lambda found: self.specifiers[found[0]], value.strip())
            settings.setdefault(key.strip(), []).append(value)
        return settings

    def last(self, key, default=None):
        return self.settings.get(key, [default])[-1]

    def is_on(self, key):
        return self.last(key, "no") in ("yes", "true", "on", "1")

    def read_environment(self):
        pairs = [pair for line in self.settings.get("Environment", []) for pair in shlex.split(line)]
        for path in self.settings.get("EnvironmentFile", []):
            optional = path.startswith("-")
            if optional and not os.path.exists(path[1:]):
                continue
            with open(path.lstrip("-"), encoding="utf-8") as file:
                # Files come after Environment=, and the last value counts.
                pairs += [line.strip() for line in file if line.strip() and line.lstrip()[0] not in "#;"]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG": "C.UTF-8"}
        for pair in pairs:
            key, _, value = pair.partition("=")
            environment[key] = value.strip("\"'")
        return environment

    def expand_command(self):
        words = []
        for word in shlex.split(self.last("ExecStart")):
            names = re.findall(r"\$\{?(\w+)", word)
            missing = [name for name in names if name not in self.environment]
            if missing:
                names = ", ".join(missing)
                raise Failure(f"{self.name}: ExecStart uses {names}, which no environment file sets")
            if re.fullmatch(r"\$\w+", word):
                words += self.environment[word[1:]].split()
            else:
                words.append(re.sub(r"\$\{(\w+)\}", lambda found: self.environment[found[1]], word))
        return words

    def option(self, name):
        """The value of an option on the command line."""
        return self.command[self.command.index(name) + 1] if name in self.command else None

    def addresses(self):
        """The addresses that the command line listens on."""
        found = [self.option("--listen"), self.option("--admin-listen"), self.option("--redis-listen")]
        return [(host, int(port)) for host, _, port in (address.rpartition(":") for address in found if address)]

    def limits(self):
        """Yields each limit with two pairs: the unit's values, and those that this machine allows."""
        for key, (number, title) in LIMITS.items():
            asked = limit_pair(self.last(key, DEFAULT_LIMITS[key]))
            hard_here = resource.getrlimit(number)[1]
            given = asked
            if number == resource.RLIMIT_NOFILE:
                # The kernel's bound for every process, whatever its capabilities.
                with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
                    most = int(file.read())
                given = tuple(most if value == resource.RLIM_INFINITY else min(value, most) for value in given)
            if not can_raise_limits() and hard_here != resource.RLIM_INFINITY:
                below = lambda value: hard_here if value == resource.RLIM_INFINITY else min(value, hard_here)
                given = (below(given[0]), below(given[1]))
            yield key, number, title, asked, given

    def needs_stand_in(self):
        """True if the unit asks for unlimited locked memory and this machine cannot give it.

        CAP_IPC_LOCK then has the same effect: it exempts a process from the limit.
        """
        return any(
            key == "LimitMEMLOCK" and asked[1] == resource.RLIM_INFINITY != given[1]
            for key, _, _, asked, given in self.limits()
        )

    def start(self, users):
        """Starts the process. `users` maps names to (uid, gid). A dynamic user gets a new id."""
        if self.is_on("DynamicUser"):
            users[self.name] = (61184 + len(users),) * 2
            uid, gid = users[self.name]
        else:
            user = self.last("User", "root")
            if user not in users:
                raise Failure(f"{self.name}: there is no user {user}; sysusers.d does not create it")
            uid, gid = users[user]
        for name in (self.last("StateDirectory") or "").split():
            path = os.path.join("/var/lib", name)
            os.makedirs(path, exist_ok=True)
            os.chown(path, uid, gid)
            os.chmod(path, int(self.last("StateDirectoryMode", "0755"), 8))
        privileges = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        stand_in = self.needs_stand_in()
        if self.is_on("NoNewPrivileges"):
            privileges.append("--no-new-privs")
        if "CapabilityBoundingSet" in self.settings:
            kept = self.last("CapabilityBoundingSet").lower().replace("cap_", "").split() + ["ipc_lock"] * stand_in
            privileges.append("--bounding-set=" + ",".join(["-all"] + ["+" + name for name in kept]))
        if stand_in:
            privileges += ["--inh-caps=+ipc_lock", "--ambient-caps=+ipc_lock"]
        limits = [(number, given) for _, number, _, _, given in self.limits()]
        umask = int(self.last("UMask", "0022"), 8)

        def prepare():
            os.setsid()
            os.umask(umask)
            for number, given in limits:
                resource.setrlimit(number, given)

        script = "set -e\n" + "".join(self.mounts()) + 'exec "$@"'
        namespace = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                namespace + privileges + self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                preexec_fn=prepare,
            )

    def mounts(self):
        """Commands that build the file system which the sandbox settings describe."""
        if self.last("ProtectSystem", "no") == "full":
            for path in ("/usr", "/etc"):
                yield f"mount --rbind {path} {path}; mount -o remount,bind,ro {path}\n"
        elif self.last("ProtectSystem", "no") != "no":
            raise Failure(f"{self.name}: tests/deploy/units.py knows only ProtectSystem=full")
        if self.is_on("ProtectHome"):
            yield from (f"mount -t tmpfs -o ro,mode=0755 tmpfs {path}\n" for path in ("/home", "/root"))
        if self.is_on("PrivateTmp"):
            yield from (f"mount -t tmpfs -o mode=1777 tmpfs {path}\n" for path in ("/tmp", "/var/tmp"))

    def must_run(self):
        """Fails if the process has ended."""
        if self.process.poll() is not None:
            status = self.process.returncode
            raise Failure(f"{self.name} ended with status {status}; its last log lines:\n{self.log_tail()}")

    def listens(self):
        """True if all of its addresses accept connections."""
        self.must_run()
        for address in self.addresses():
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(address) != 0:
                    return False
        return True

    def proc(self, file):
        with open(f"/proc/{self.process.pid}/{file}", encoding="utf-8") as text:
            return text.read()

    def stop(self):
        """Sends SIGTERM, waits for at most TimeoutStopSec, and returns the duration in seconds."""
        limit = seconds(self.last("TimeoutStopSec", "90"))
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            message = f"{self.name} did not stop within its TimeoutStopSec of {limit:.0f} s"
            raise Failure(message) from None
        if status != 0:
            raise Failure(f"{self.name} stopped with status {status}; its last log lines:\n{self.log_tail()}")
        return time.monotonic() - begun

    def kill(self):
        """Ends the process at once, if it runs."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def log_tail(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-8:])

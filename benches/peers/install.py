"""Fetches the peers and builds Larder, without root and outside the system's directories.

Everything goes to `target/peers`: a Python environment, and Debian packages that are unpacked instead of installed.
Each peer is prepared by itself, so that a failure does not stop the others. A second run downloads nothing.
"""

import glob
import os
import platform
import re
import shutil
import subprocess
import sys

from processes import Failed

COMMAND_SECONDS = 1800
LOG_TAIL_CHARS = 600

# Python packages of each peer. Versions of the peers are pinned: figures of different versions are not comparable.
MOONCAKE = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]
REDIS = ["redis[hiredis]==8.1.0"]
# lmcache declares torch and CUDA, which are several GB. Its server and its messages need only these.
LMCACHE_DEPENDENCIES = [
    "numpy",
    "cachetools",
    "sortedcontainers",
    "prometheus_client",
    "pyyaml",
    "psutil",
    "py-cpuinfo",
    "msgspec",
    "pyzmq",
    "blake3",
    "aiofile",
    "aiofiles",
]
LMCACHE = ["lmcache==0.5.6"]


def command(arguments, hint="", **options):
    """Runs a program to its end and returns its output. Raises `Failed` with the end of its messages."""
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=False,
            **options,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{error}{hint}") from error
    if done.returncode:
        messages = done.stderr.decode(errors="replace").strip()[-LOG_TAIL_CHARS:]
        raise Failed(f"`{' '.join(arguments[:4])} …` ended with {done.returncode}{hint}\n{messages}")
    return done.stdout.decode(errors="replace")


class Place:
    """The folder of everything that is downloaded."""

    def __init__(self, target):
        self.root = os.path.join(target, "peers")
        self.debian = os.path.join(self.root, "debian")
        self.python = os.path.join(self.root, "venv", "bin", "python")
        os.makedirs(self.root, exist_ok=True)

    def search_paths(self):
        """Lets child processes find the unpacked programs and libraries, after those of the system."""
        triplet = f"{platform.machine()}-linux-gnu"
        libraries = [os.path.join(self.debian, "usr/lib", triplet), os.path.join(self.debian, "lib", triplet)]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")]))
        os.environ["PATH"] += os.pathsep + os.path.join(self.debian, "usr/bin")

    def stamp(self, name):
        """The file that says which packages of a peer are installed."""
        return os.path.join(self.root, f"installed-{name}")

    def environment(self):
        """Makes the Python environment if there is none that runs."""
        if os.path.exists(self.python) and not subprocess.run([self.python, "-c", ""], check=False).returncode:
            return
        for stamp in glob.glob(self.stamp("*")):
            os.remove(stamp)
        venv = os.path.dirname(os.path.dirname(self.python))
        command([sys.executable, "-m", "venv", "--clear", venv], "; Debian has it in the package python3-venv")

    def pip(self, name, packages, alone=()):
        """Installs the Python packages of a peer. Those in `alone` come without their dependencies."""
        stamp = " ".join([*packages, *alone])
        if os.path.exists(self.stamp(name)):
            with open(self.stamp(name), encoding="utf-8") as file:
                if file.read() == stamp:
                    return
        print(f"installing {name} from PyPI", file=sys.stderr)
        self.environment()
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command([*pip, *packages])
        if alone:
            command([*pip, "--no-deps", *alone])
        with open(self.stamp(name), "w", encoding="utf-8") as file:
            file.write(stamp)

    def unpack(self, package):
        """Downloads a Debian package, with those it needs that are not installed, and unpacks them."""
        done = os.path.join(self.debian, f"{package}.unpacked")
        if os.path.exists(done):
            return
        print(f"unpacking {package} of Debian", file=sys.stderr)
        hint = f" (install {package} yourself, or run `apt-get update` as root and try again)"
        plan = command(["apt-get", "install", "--simulate", "--no-install-recommends", package], hint)
        needed = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        downloads = os.path.join(self.debian, f"{package}-packages")
        shutil.rmtree(downloads, ignore_errors=True)
        os.makedirs(downloads)
        command(["apt-get", "download", "--quiet", *needed], hint, cwd=downloads)
        for file in sorted(glob.glob(os.path.join(downloads, "*.deb"))):
            command(["dpkg-deb", "--extract", file, self.debian])
        open(done, "w", encoding="utf-8").close()


def redis(place):
    """A Redis server, and the client package."""
    if not shutil.which("redis-server"):
        place.unpack("redis-server")
        # Debian ships one program, redis-check-rdb in redis-tools, and its name selects its function. The link with
        # the server's name is in another package, or is made when that package is installed.
        link = os.path.join(place.debian, "usr/bin/redis-server")
        if not os.path.lexists(link):
            os.symlink("redis-check-rdb", link)
    place.pip("redis", REDIS)
    command(["redis-server", "--version"])


def mooncake(place):
    """Mooncake, and the RDMA library that it is linked with even where it moves pages over TCP."""
    if "libibverbs.so.1" not in command(["/sbin/ldconfig", "-p"]):
        place.unpack("libibverbs1")
    place.pip("mooncake", MOONCAKE)


def lmcache(place):
    """LMCache without torch."""
    place.pip("lmcache", LMCACHE_DEPENDENCIES, LMCACHE)


PEERS = {"redis": redis, "mooncake": mooncake, "mooncake-shm": mooncake, "lmcache": lmcache}


def peers(place, names):
    """Prepares the peers among `names`. Returns why each of the others cannot run."""
    place.search_paths()
    reasons = {}
    for name in names:
        if name not in PEERS:
            continue
        try:
            PEERS[name](place)
        except (Failed, OSError) as error:
            reasons[name] = str(error)
    return reasons


def build(target):
    """Builds `larder` and `bench-client` as they are installed, and returns the folder they are in."""
    binaries = ["--bin", "larder", "--bin", "bench-client"]
    jobs = os.environ.get("JOBS", "2")
    cargo = ["cargo", "build", "--profile", "dist", "--quiet", "-j", jobs, "--target-dir", target]
    print("building larder and bench-client", file=sys.stderr)
    # Its messages go to the terminal: a first build takes minutes.
    try:
        done = subprocess.run([*cargo, "-p", "larder", "-p", "larder-benches", *binaries], check=False)
    except OSError as error:
        sys.exit(f"cargo: {error}; name built programs with --larder and --bench-client")
    if done.returncode:
        sys.exit("larder and bench-client do not build")
    return os.path.join(target, "dist")

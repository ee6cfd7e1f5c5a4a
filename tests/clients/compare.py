"""Stores side by side: processes that measure in turns, and the table of their medians."""

import json
import signal
import statistics
import subprocess

ANSWER_SECONDS = 300
"""Longest wait for a line: for engines that start, and for rounds."""


class Meter:
    """A process that prints `ready`, and the rates of one round for each line of input."""

    def __init__(self, command, log, environment=None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.log = log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(list(map(str, command)), env=environment, stderr=errors, **pipes)
        try:
            self.line("ready")
        except BaseException:
            self.close()
            raise

    def line(self, start):
        """The next line that starts so. Engines write their logs to the same output."""

        def end(*_):
            raise SystemExit(f"a process that measures does not answer within {ANSWER_SECONDS} s: see {self.log}")

        # Without a handler, this program would end and leave its servers.
        signal.signal(signal.SIGALRM, end)
        signal.alarm(ANSWER_SECONDS)
        try:
            for line in self.process.stdout:
                if line.startswith(start):
                    return line
        finally:
            signal.alarm(0)
        raise SystemExit(f"a process that measures has ended: see {self.log}")

    def measure(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.line('{"rates"'))["rates"]

    def close(self):
        self.process.kill()
        self.process.wait()


def in_turns(meters, rounds):
    """Rates of each meter in each round. The order alternates, and a round before them warms up."""
    rates = {name: [] for name in meters}
    for number in range(rounds + 1):
        for name in list(meters) if number % 2 else list(meters)[::-1]:
            found = meters[name].measure()
            rates[name] += [found] if number else []
    return rates


def print_table(title, rates):
    """Medians of each store in MB/s, and the ratio of Larder's, the first, to them."""
    ours = next(iter(rates))
    print(f"{title}, medians of {len(rates[ours])} rounds")
    print(f"{'operation':10} {'store':18} {'MB/s':>8} {'larder / store':>15}")
    for operation in rates[ours][0]:
        medians = {name: statistics.median(each[operation] for each in found) for name, found in rates.items()}
        for name, median in medians.items():
            print(f"{operation:10} {name:18} {median:8.0f} {medians[ours] / median:15.2f}")

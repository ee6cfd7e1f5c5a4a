//! Names and properties of the commands, as `COMMAND` reports them.

use crate::Reply;

pub struct CommandEntry {
    /// In upper case.
    pub name: &'static str,
    /// Number of arguments with the name. A negative one is a minimum.
    arity: i64,
    flags: &'static [&'static str],
    /// Places of the first and the last key, and the step between two. All 0 without keys.
    keys: (i64, i64, i64),
}

impl CommandEntry {
    /// Returns `true` for a request of so many arguments, with the name.
    pub fn accepts(&self, arguments: usize) -> bool {
        let arguments = i64::try_from(arguments).unwrap_or(i64::MAX);
        if self.arity < 0 { arguments >= -self.arity } else { arguments == self.arity }
    }

    /// Description in the form of `COMMAND INFO`.
    pub fn describe(&self) -> Reply {
        let (first, last, step) = self.keys;
        let flags = self.flags.iter().map(|flag| Reply::Simple(flag)).collect();
        Reply::Array(vec![
            Reply::text(self.name.to_ascii_lowercase()),
            Reply::Integer(self.arity),
            Reply::Array(flags),
            Reply::Integer(first),
            Reply::Integer(last),
            Reply::Integer(step),
            Reply::Array(Vec::new()),
            Reply::Array(Vec::new()),
            Reply::Array(Vec::new()),
            Reply::Array(Vec::new()),
        ])
    }
}

const fn entry(name: &'static str, arity: i64, flags: &'static [&'static str], keys: (i64, i64, i64)) -> CommandEntry {
    CommandEntry { name, arity, flags, keys }
}

const NONE: (i64, i64, i64) = (0, 0, 0);
const ONE: (i64, i64, i64) = (1, 1, 1);
const ALL: (i64, i64, i64) = (1, -1, 1);
const READ: &[&str] = &["readonly", "fast"];
const WRITE: &[&str] = &["write", "denyoom"];
const CHANGE: &[&str] = &["write", "fast"];
const CONNECTION: &[&str] = &["fast", "loading", "stale"];
const ADMIN: &[&str] = &["admin", "loading", "stale"];

/// All commands, in order of their names.
pub const COMMANDS: &[CommandEntry] = &[
    entry("AUTH", -2, CONNECTION, NONE),
    entry("CLIENT", -2, CONNECTION, NONE),
    entry("COMMAND", -1, CONNECTION, NONE),
    entry("CONFIG", -2, ADMIN, NONE),
    entry("DBSIZE", 1, READ, NONE),
    entry("DEL", -2, CHANGE, ALL),
    entry("ECHO", 2, CONNECTION, NONE),
    entry("EXISTS", -2, READ, ALL),
    entry("EXPIRE", -3, CHANGE, ONE),
    entry("FLUSHALL", -1, CHANGE, NONE),
    entry("FLUSHDB", -1, CHANGE, NONE),
    entry("GET", 2, READ, ONE),
    entry("GETRANGE", 4, READ, ONE),
    entry("HELLO", -1, CONNECTION, NONE),
    entry("INFO", -1, CONNECTION, NONE),
    entry("MEMORY", -2, READ, (2, 2, 1)),
    entry("MGET", -2, READ, ALL),
    entry("PERSIST", 2, CHANGE, ONE),
    entry("PEXPIRE", -3, CHANGE, ONE),
    entry("PING", -1, CONNECTION, NONE),
    entry("PSETEX", 4, WRITE, ONE),
    entry("PTTL", 2, READ, ONE),
    entry("QUIT", -1, CONNECTION, NONE),
    entry("RESET", 1, CONNECTION, NONE),
    entry("SCAN", -2, READ, NONE),
    entry("SELECT", 2, CONNECTION, NONE),
    entry("SET", -3, WRITE, ONE),
    entry("SETEX", 4, WRITE, ONE),
    entry("SETNX", 3, WRITE, ONE),
    entry("STRLEN", 2, READ, ONE),
    entry("TTL", 2, READ, ONE),
    entry("TYPE", 2, READ, ONE),
    entry("UNLINK", -2, CHANGE, ALL),
];

/// Finds a command by its name in upper case.
pub fn find(name: &str) -> Option<&'static CommandEntry> {
    COMMANDS.binary_search_by(|entry| entry.name.cmp(name)).ok().map(|at| &COMMANDS[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_found_by_its_name() {
        assert!(COMMANDS.iter().all(|entry| find(entry.name).is_some_and(|found| found.name == entry.name)));
        assert!(find("HSET").is_none() && find("").is_none());
    }
}

//! The commands, from their arguments.
//!
//! Errors have the texts of Redis 7: clients compare some of them.

use crate::catalogue;
use crate::request::{Argument, number};
use crate::{DATABASES, KEY_BYTES_MAX, Protocol};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Ping(Option<Vec<u8>>),
    Echo(Vec<u8>),
    Quit,
    Reset,
    Hello {
        protocol: Option<Protocol>,
        credentials: Option<Credentials>,
        name: Option<Vec<u8>>,
    },
    Auth(Credentials),
    Client(ClientCommand),
    Select(u32),
    CommandCount,
    /// Descriptions of these commands, or of all.
    CommandInfo(Option<Vec<Vec<u8>>>),
    CommandDocs,
    Info,
    ConfigGet(Vec<Vec<u8>>),
    Exists(Vec<Vec<u8>>),
    Get(Vec<u8>),
    MGet(Vec<Vec<u8>>),
    Set {
        key: Vec<u8>,
        value: Argument,
        options: SetOptions,
        reply: SetReply,
    },
    Delete(Vec<Vec<u8>>),
    TimeToLive {
        key: Vec<u8>,
        unit: TimeUnit,
    },
    Expire {
        key: Vec<u8>,
        expiry: Expiry,
    },
    Persist(Vec<u8>),
    Strlen(Vec<u8>),
    GetRange {
        key: Vec<u8>,
        start: i64,
        end: i64,
    },
    Scan {
        cursor: u64,
        pattern: Option<Vec<u8>>,
        count: usize,
        only_strings: bool,
    },
    DbSize,
    Type(Vec<u8>),
    MemoryUsage(Vec<u8>),
    FlushDb,
    FlushAll,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub user: Option<Vec<u8>>,
    pub password: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientCommand {
    Id,
    Info,
    GetName,
    SetName(Vec<u8>),
    /// Names and versions of libraries, and settings without an effect here.
    Accepted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    Seconds,
    Milliseconds,
}

impl TimeUnit {
    fn milliseconds(self) -> i64 {
        match self {
            TimeUnit::Seconds => 1000,
            TimeUnit::Milliseconds => 1,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// Milliseconds from now. Not above 0 means that the key goes at once.
    After(i64),
    /// Unix time in milliseconds.
    At(i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Absent,
    Present,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetOptions {
    pub condition: Option<Condition>,
    pub expiry: Option<Expiry>,
    pub keeps_ttl: bool,
    pub returns_old: bool,
}

/// Form of the reply to a `SET`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetReply {
    /// OK, or null if the condition does not hold.
    Ok,
    /// 1 or 0, for SETNX.
    Number,
}

/// Refusal of a command. The connection goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandError(pub String);

const SYNTAX: &str = "ERR syntax error";
const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
/// Maximum number of keys that one step of `SCAN` looks at.
const SCAN_COUNT_MAX: i64 = 128;
/// Maximum length of a pattern, in bytes. With a key of 1 KiB a match takes 262,144 steps at most.
const PATTERN_BYTES_MAX: usize = 256;
const SCAN_COUNT_DEFAULT: i64 = 10;
/// Characters of an unknown command, and of each of its arguments, that the error quotes.
const QUOTED_MAX: usize = 128;

type Result<T> = std::result::Result<T, CommandError>;

fn fail<T>(text: impl Into<String>) -> Result<T> {
    Err(CommandError(text.into()))
}

/// Returns `true` if the last of `arguments` is the value that a command stores.
pub fn is_value(arguments: &[Argument]) -> bool {
    let Some(name) = arguments.first().and_then(Argument::bytes) else { return false };
    let place = match &name.to_ascii_uppercase()[..] {
        b"SET" | b"SETNX" => 3,
        b"SETEX" | b"PSETEX" => 4,
        _ => return false,
    };
    arguments.len() == place
}

impl Command {
    /// Reads a request.
    ///
    /// # Errors
    /// The reply of Redis to a request with an unknown name, or with wrong arguments.
    pub fn parse(request: Vec<Argument>) -> Result<Command> {
        let mut arguments = Arguments::new(request)?;
        let name = arguments.name.clone();
        Ok(match &name[..] {
            "PING" => Command::Ping(arguments.optional()?),
            "ECHO" => Command::Echo(arguments.next()?),
            "QUIT" => Command::Quit,
            "RESET" => Command::Reset,
            "HELLO" => arguments.hello()?,
            "AUTH" => arguments.auth()?,
            "CLIENT" => Command::Client(arguments.client()?),
            "SELECT" => Command::Select(arguments.database()?),
            "COMMAND" => arguments.command()?,
            "INFO" => Command::Info,
            "CONFIG" => arguments.config()?,
            "EXISTS" => Command::Exists(arguments.keys()?),
            "GET" => Command::Get(arguments.key()?),
            "MGET" => Command::MGet(arguments.keys()?),
            "SET" => arguments.set()?,
            "SETNX" => arguments.set_if_absent()?,
            "SETEX" => arguments.set_expiring(TimeUnit::Seconds)?,
            "PSETEX" => arguments.set_expiring(TimeUnit::Milliseconds)?,
            "DEL" | "UNLINK" => Command::Delete(arguments.keys()?),
            "TTL" => Command::TimeToLive { key: arguments.key()?, unit: TimeUnit::Seconds },
            "PTTL" => Command::TimeToLive { key: arguments.key()?, unit: TimeUnit::Milliseconds },
            "EXPIRE" => arguments.expire(TimeUnit::Seconds)?,
            "PEXPIRE" => arguments.expire(TimeUnit::Milliseconds)?,
            "PERSIST" => Command::Persist(arguments.key()?),
            "STRLEN" => Command::Strlen(arguments.key()?),
            "GETRANGE" => {
                Command::GetRange { key: arguments.key()?, start: arguments.integer()?, end: arguments.integer()? }
            }
            "SCAN" => arguments.scan()?,
            "DBSIZE" => Command::DbSize,
            "TYPE" => Command::Type(arguments.key()?),
            "MEMORY" => arguments.memory()?,
            "FLUSHDB" => arguments.flush(Command::FlushDb)?,
            "FLUSHALL" => arguments.flush(Command::FlushAll)?,
            // `Arguments::new` has refused all other names.
            _ => return fail(SYNTAX),
        })
    }
}

/// Arguments of a known command that have not been read.
struct Arguments {
    /// In upper case.
    name: String,
    rest: std::vec::IntoIter<Argument>,
}

impl Arguments {
    fn new(request: Vec<Argument>) -> Result<Arguments> {
        let name = request.first().and_then(Argument::bytes).unwrap_or_default();
        let known = std::str::from_utf8(name).ok().and_then(|name| catalogue::find(&name.to_ascii_uppercase()));
        let Some(known) = known else { return fail(unknown_command(&request)) };
        if !known.accepts(request.len()) {
            return fail(format!("ERR wrong number of arguments for '{}' command", known.name.to_ascii_lowercase()));
        }
        let mut rest = request.into_iter();
        rest.next();
        Ok(Arguments { name: known.name.to_string(), rest })
    }

    fn wrong_number<T>(&self) -> Result<T> {
        fail(format!("ERR wrong number of arguments for '{}' command", self.name.to_ascii_lowercase()))
    }

    fn optional(&mut self) -> Result<Option<Vec<u8>>> {
        match self.rest.next() {
            Some(Argument::Short(bytes)) => Ok(Some(bytes)),
            Some(Argument::Long(_)) => fail("ERR the argument is longer than 4096 bytes"),
            None => Ok(None),
        }
    }

    fn next(&mut self) -> Result<Vec<u8>> {
        match self.optional()? {
            Some(bytes) => Ok(bytes),
            None => self.wrong_number(),
        }
    }

    fn word(&mut self) -> Result<Option<String>> {
        Ok(self.optional()?.map(|word| String::from_utf8_lossy(&word).to_ascii_uppercase()))
    }

    fn key(&mut self) -> Result<Vec<u8>> {
        match self.rest.next() {
            Some(Argument::Short(key)) if key.len() <= KEY_BYTES_MAX => Ok(key),
            Some(_) => fail(format!("ERR the key is longer than {KEY_BYTES_MAX} bytes")),
            None => self.wrong_number(),
        }
    }

    fn keys(&mut self) -> Result<Vec<Vec<u8>>> {
        let mut keys = Vec::with_capacity(self.rest.len());
        while self.rest.len() > 0 {
            keys.push(self.key()?);
        }
        Ok(keys)
    }

    fn integer(&mut self) -> Result<i64> {
        match number(&self.next()?) {
            Some(integer) => Ok(integer),
            None => fail(NOT_AN_INTEGER),
        }
    }

    fn value(&mut self) -> Result<Argument> {
        match self.rest.next() {
            Some(value) => Ok(value),
            None => self.wrong_number(),
        }
    }

    fn database(&mut self) -> Result<u32> {
        let database = self.integer()?;
        match u32::try_from(database).ok().filter(|&database| database < DATABASES) {
            Some(database) => Ok(database),
            None => fail("ERR DB index is out of range"),
        }
    }

    fn hello(&mut self) -> Result<Command> {
        let protocol = match self.optional()? {
            None => None,
            Some(version) => match number(&version) {
                Some(2) => Some(Protocol::Resp2),
                Some(3) => Some(Protocol::Resp3),
                Some(_) => return fail("NOPROTO unsupported protocol version"),
                None => return fail("ERR Protocol version is not an integer or out of range"),
            },
        };
        let (mut credentials, mut name) = (None, None);
        while let Some(option) = self.word()? {
            match &option[..] {
                "AUTH" if self.rest.len() >= 2 => {
                    credentials = Some(Credentials { user: Some(self.next()?), password: self.next()? });
                }
                "SETNAME" if self.rest.len() >= 1 => name = Some(self.next()?),
                other => return fail(format!("ERR Syntax error in HELLO option '{}'", other.to_ascii_lowercase())),
            }
        }
        Ok(Command::Hello { protocol, credentials, name })
    }

    fn auth(&mut self) -> Result<Command> {
        let first = self.next()?;
        Ok(Command::Auth(match self.optional()? {
            None => Credentials { user: None, password: first },
            Some(_) if self.rest.len() > 0 => return fail(SYNTAX),
            Some(password) => Credentials { user: Some(first), password },
        }))
    }

    fn unknown_subcommand<T>(&self, subcommand: &str) -> Result<T> {
        let quoted: String = subcommand.chars().take(QUOTED_MAX).collect();
        fail(format!("ERR unknown subcommand '{quoted}'. Try {} HELP.", self.name))
    }

    fn client(&mut self) -> Result<ClientCommand> {
        let subcommand = self.next()?;
        let subcommand = String::from_utf8_lossy(&subcommand).into_owned();
        Ok(match &subcommand.to_ascii_uppercase()[..] {
            "ID" => ClientCommand::Id,
            "INFO" => ClientCommand::Info,
            "GETNAME" => ClientCommand::GetName,
            "SETNAME" => ClientCommand::SetName(self.next()?),
            "SETINFO" | "NO-EVICT" | "NO-TOUCH" => ClientCommand::Accepted,
            _ => return self.unknown_subcommand(&subcommand),
        })
    }

    fn command(&mut self) -> Result<Command> {
        let Some(subcommand) = self.optional()? else { return Ok(Command::CommandInfo(None)) };
        let subcommand = String::from_utf8_lossy(&subcommand).into_owned();
        Ok(match &subcommand.to_ascii_uppercase()[..] {
            "COUNT" => Command::CommandCount,
            "INFO" if self.rest.len() == 0 => Command::CommandInfo(None),
            // Each name gets a part of the reply.
            "INFO" if self.rest.len() > catalogue::COMMANDS.len() => return fail("ERR too many names of commands"),
            "INFO" => Command::CommandInfo(Some(self.keys()?)),
            "DOCS" => Command::CommandDocs,
            _ => return self.unknown_subcommand(&subcommand),
        })
    }

    fn config(&mut self) -> Result<Command> {
        let subcommand = self.next()?;
        let subcommand = String::from_utf8_lossy(&subcommand).into_owned();
        match &subcommand.to_ascii_uppercase()[..] {
            "GET" if self.rest.len() > 0 => Ok(Command::ConfigGet(self.keys()?)),
            "GET" => fail("ERR wrong number of arguments for 'config|get' command"),
            _ => self.unknown_subcommand(&subcommand),
        }
    }

    fn memory(&mut self) -> Result<Command> {
        let subcommand = self.next()?;
        let subcommand = String::from_utf8_lossy(&subcommand).into_owned();
        if !subcommand.eq_ignore_ascii_case("USAGE") {
            return self.unknown_subcommand(&subcommand);
        }
        let key = self.key()?;
        match self.word()?.as_deref() {
            None => {}
            Some("SAMPLES") => drop(self.integer()?),
            Some(_) => return fail(SYNTAX),
        }
        Ok(Command::MemoryUsage(key))
    }

    fn set(&mut self) -> Result<Command> {
        let (key, value) = (self.key()?, self.value()?);
        let mut options = SetOptions::default();
        while let Some(option) = self.word()? {
            let has_time = options.expiry.is_some() || options.keeps_ttl;
            match &option[..] {
                "NX" if options.condition.is_none() => options.condition = Some(Condition::Absent),
                "XX" if options.condition.is_none() => options.condition = Some(Condition::Present),
                "GET" => options.returns_old = true,
                "KEEPTTL" if !has_time => options.keeps_ttl = true,
                "EX" | "PX" | "EXAT" | "PXAT" if !has_time && self.rest.len() > 0 => {
                    options.expiry = Some(self.set_expiry(&option)?);
                }
                _ => return fail(SYNTAX),
            }
        }
        Ok(Command::Set { key, value, options, reply: SetReply::Ok })
    }

    fn set_expiry(&mut self, option: &str) -> Result<Expiry> {
        let unit = if option.starts_with('P') { TimeUnit::Milliseconds } else { TimeUnit::Seconds };
        let time = self.time(unit)?.filter(|&time| time > 0);
        match time {
            Some(at) if option.ends_with("AT") => Ok(Expiry::At(at)),
            Some(time) => Ok(Expiry::After(time)),
            None => self.invalid_time(),
        }
    }

    /// Reads a time in milliseconds. `None` if it is too large.
    fn time(&mut self, unit: TimeUnit) -> Result<Option<i64>> {
        let time = self.integer()?.checked_mul(unit.milliseconds());
        // Room to add the time of day.
        Ok(time.filter(|time| time.abs() < i64::MAX / 2))
    }

    fn invalid_time<T>(&self) -> Result<T> {
        fail(format!("ERR invalid expire time in '{}' command", self.name.to_ascii_lowercase()))
    }

    fn set_if_absent(&mut self) -> Result<Command> {
        let (key, value) = (self.key()?, self.value()?);
        let options = SetOptions { condition: Some(Condition::Absent), ..SetOptions::default() };
        Ok(Command::Set { key, value, options, reply: SetReply::Number })
    }

    fn set_expiring(&mut self, unit: TimeUnit) -> Result<Command> {
        let key = self.key()?;
        let Some(time) = self.time(unit)?.filter(|&time| time > 0) else { return self.invalid_time() };
        let options = SetOptions { expiry: Some(Expiry::After(time)), ..SetOptions::default() };
        Ok(Command::Set { key, value: self.value()?, options, reply: SetReply::Ok })
    }

    fn expire(&mut self, unit: TimeUnit) -> Result<Command> {
        let key = self.key()?;
        let Some(time) = self.time(unit)? else { return self.invalid_time() };
        match self.word()? {
            None => Ok(Command::Expire { key, expiry: Expiry::After(time) }),
            Some(option) => fail(format!("ERR Unsupported option {option}")),
        }
    }

    fn scan(&mut self) -> Result<Command> {
        let cursor = self.next()?;
        let cursor = std::str::from_utf8(&cursor).ok().and_then(|cursor| cursor.parse().ok());
        let Some(cursor) = cursor else { return fail("ERR invalid cursor") };
        let (mut pattern, mut count, mut only_strings) = (None, SCAN_COUNT_DEFAULT, true);
        while let Some(option) = self.word()? {
            if self.rest.len() == 0 {
                return fail(SYNTAX);
            }
            match &option[..] {
                "MATCH" => {
                    let given = self.next()?;
                    if given.len() > PATTERN_BYTES_MAX {
                        return fail(format!("ERR the pattern is longer than {PATTERN_BYTES_MAX} bytes"));
                    }
                    pattern = Some(given);
                }
                "COUNT" => match self.integer()? {
                    given @ 1.. => count = given.min(SCAN_COUNT_MAX),
                    _ => return fail(SYNTAX),
                },
                "TYPE" => only_strings = self.next()?.eq_ignore_ascii_case(b"string"),
                _ => return fail(SYNTAX),
            }
        }
        Ok(Command::Scan { cursor, pattern, count: count as usize, only_strings })
    }

    fn flush(&mut self, command: Command) -> Result<Command> {
        match self.word()?.as_deref() {
            None | Some("ASYNC" | "SYNC") => Ok(command),
            Some(_) => fail(SYNTAX),
        }
    }
}

fn unknown_command(request: &[Argument]) -> String {
    let quoted = |argument: &Argument| match argument {
        Argument::Short(bytes) => String::from_utf8_lossy(&bytes[..bytes.len().min(QUOTED_MAX)]).into_owned(),
        Argument::Long(_) => String::new(),
    };
    let mut arguments = String::new();
    for argument in &request[1..] {
        if arguments.len() >= QUOTED_MAX {
            break;
        }
        arguments.push_str(&format!("'{}' ", quoted(argument)));
    }
    format!("ERR unknown command '{}', with args beginning with: {arguments}", quoted(&request[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Command> {
        Command::parse(text.split(' ').map(|word| Argument::Short(word.into())).collect())
    }

    fn error(text: &str) -> String {
        parse(text).unwrap_err().0
    }

    #[test]
    fn refusals_have_the_texts_of_redis() {
        assert_eq!(error("HSET a b c"), "ERR unknown command 'HSET', with args beginning with: 'a' 'b' 'c' ");
        assert_eq!(error("get"), "ERR wrong number of arguments for 'get' command");
        assert_eq!(error("GET a b"), "ERR wrong number of arguments for 'get' command");
        assert_eq!(error("SET a b NX XX"), SYNTAX);
        assert_eq!(error("SET a b EX 1 KEEPTTL"), SYNTAX);
        assert_eq!(error("SET a b EX"), SYNTAX);
        assert_eq!(error("SET a b EX 0"), "ERR invalid expire time in 'set' command");
        assert_eq!(error("SET a b EX 9223372036854775807"), "ERR invalid expire time in 'set' command");
        assert_eq!(error("SETEX a x b"), NOT_AN_INTEGER);
        assert_eq!(error("SELECT 16"), "ERR DB index is out of range");
        assert_eq!(error("HELLO 4"), "NOPROTO unsupported protocol version");
        assert_eq!(error("CLIENT KILL x"), "ERR unknown subcommand 'KILL'. Try CLIENT HELP.");
        assert_eq!(error("SCAN x"), "ERR invalid cursor");
        assert_eq!(error(&format!("COMMAND INFO{}", " get".repeat(1000))), "ERR too many names of commands");
        let long = vec![Argument::Short(b"GET".to_vec()), Argument::Short(vec![0; KEY_BYTES_MAX + 1])];
        assert_eq!(Command::parse(long).unwrap_err().0, "ERR the key is longer than 1024 bytes");
    }

    #[test]
    fn options_of_set_are_read_in_any_order_and_case() {
        let options = |text: &str| match parse(text) {
            Ok(Command::Set { options, .. }) => options,
            other => panic!("{other:?}"),
        };
        let both = options("set k v px 7 get nx");
        assert_eq!(both.expiry, Some(Expiry::After(7)));
        assert!(both.returns_old && both.condition == Some(Condition::Absent));
        assert_eq!(options("SET k v EXAT 7 XX").expiry, Some(Expiry::At(7000)));
        assert_eq!(options("SETEX k 9 v").expiry, Some(Expiry::After(9000)));
    }

    #[test]
    fn only_values_may_be_long() {
        let request = |text: &str| {
            let mut request: Vec<Argument> = text.split(' ').map(|word| Argument::Short(word.into())).collect();
            request.push(Argument::Long(5000));
            request
        };
        assert!(is_value(&request("set k")) && is_value(&request("SETEX k 9")));
        assert!(!is_value(&request("set")) && !is_value(&request("SET k v")) && !is_value(&request("GET")));
        assert!(Command::parse(request("SET k")).is_ok() && Command::parse(request("ECHO")).is_err());
    }
}

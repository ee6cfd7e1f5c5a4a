//! The commands.

use super::RedisServer;
use super::connection::{COMMAND_TIMEOUT, Client};
use super::receive::NewValue;
use super::send::RangeOf;
use super::values::{Content, Database, Failure, Found, SetOutcome};
use larder_redis::catalogue::{self, COMMANDS};
use larder_redis::command::{ClientCommand, Credentials, SetReply, TimeUnit};
use larder_redis::{Argument, Command, DATABASES, Protocol, Reply, SetOptions, VALUE_BYTES_MAX, glob, reply};
use larder_runtime::now;
use larder_wire::{ByteSink, ByteSource};
use std::io;
use std::ops::Range;
use std::time::Instant;

/// Version of Redis whose commands and texts the node follows. Clients choose features by it.
const REDIS_VERSION: &str = "7.2.0";
/// Maximum length of a client's name, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// Patterns of one `CONFIG GET` that are looked at. Each costs a comparison with every setting.
const CONFIG_PATTERNS_MAX: usize = 64;

/// Value of a request, received apart.
type LongValue = Option<Result<NewValue, Failure>>;

fn error(failure: Failure) -> Reply {
    Reply::Error(failure.to_string())
}

fn count(number: usize) -> Reply {
    Reply::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn whole(value_bytes: u64) -> Range<u64> {
    0..value_bytes
}

impl<S: ByteSource, W: ByteSink> Client<S, W> {
    /// Carries out a command. Returns its reply, or `None` if the reply is queued or sent already.
    pub(super) async fn execute(&mut self, command: Command, value: LongValue) -> io::Result<Option<Reply>> {
        let command = match self.connection_command(command) {
            Ok(reply) => return Ok(Some(reply)),
            Err(command) => command,
        };
        self.use_database();
        let (server, account) = (self.server.clone(), self.account.clone());
        let mut database = self.database_of(&server, &account);
        if let Some(Ok(value)) = &value {
            // After a flush in between, the value belongs to what was flushed, with its manifest.
            database.namespaces = value.namespaces();
        }
        let deadline = now() + COMMAND_TIMEOUT;
        Ok(Some(match command {
            Command::Get(key) => return self.send(&database, &key, &whole, &Reply::Null).await,
            Command::GetRange { key, start, end } => {
                let part = move |bytes| part_of(bytes, start, end);
                return self.send(&database, &key, &part, &Reply::text("")).await;
            }
            Command::MGet(keys) => {
                reply::array_header(keys.len(), &mut self.output.buffer);
                for key in keys {
                    self.send(&database, &key, &whole, &Reply::Null).await?;
                }
                return Ok(None);
            }
            Command::Set { key, value: short, options, reply } => {
                let content = match (short, value) {
                    (Argument::Short(bytes), _) => Content::Short(bytes),
                    (Argument::Long(_), Some(Ok(value))) => Content::Long(value),
                    (Argument::Long(_), Some(Err(failure))) => return Ok(Some(error(failure))),
                    // `is_value` decides by the same place.
                    (Argument::Long(_), None) => return Ok(Some(Reply::Error("ERR syntax error".into()))),
                };
                return self.set(&database, &key, content, &options, reply).await;
            }
            Command::Exists(keys) => {
                let mut found = 0;
                for key in &keys {
                    found += usize::from(database.lease(key, deadline).await);
                }
                count(found)
            }
            Command::Delete(keys) => database.remove(&keys, deadline).await.map_or_else(error, count),
            Command::TimeToLive { key, unit } => {
                Reply::Integer(match database.find(&key, deadline).await.map(|found| found.expires_unix_ms()) {
                    None => -2,
                    Some(0) => -1,
                    Some(at) => time_to_live(at, database.tiers().clock().now_unix_ms(), unit),
                })
            }
            Command::Expire { key, expiry } => self.expire(&database, &key, Some(expiry)).await,
            Command::Persist(key) => self.expire(&database, &key, None).await,
            Command::Strlen(key) => {
                let found = database.find(&key, deadline).await;
                count(found.map_or(0, |found| found.manifest.value_bytes as usize))
            }
            Command::Type(key) => match database.find(&key, deadline).await {
                Some(_) => Reply::Simple("string"),
                None => Reply::Simple("none"),
            },
            Command::MemoryUsage(key) => match database.find(&key, deadline).await {
                Some(found) => count(u64::from(found.page.bytes()) as usize + data_bytes(&found)),
                None => Reply::Null,
            },
            Command::Scan { cursor, pattern, count, only_strings } => {
                let pattern = pattern.filter(|_| only_strings).or_else(|| (!only_strings).then(Vec::new));
                let (next, keys) = database.scan(cursor, pattern.as_deref(), count, deadline).await;
                Reply::Array(vec![
                    Reply::text(next.to_string()),
                    Reply::Array(keys.into_iter().map(Reply::Bulk).collect()),
                ])
            }
            Command::DbSize => count(database.size(deadline).await),
            Command::FlushDb => self.flush(&server, self.database..self.database + 1).await,
            Command::FlushAll => self.flush(&server, 0..DATABASES).await,
            Command::Info => Reply::text(self.info(&database, deadline).await),
            // `connection_command` has taken the others.
            _ => Reply::Error("ERR syntax error".into()),
        }))
    }

    async fn send(
        &mut self,
        database: &Database<'_>,
        key: &[u8],
        part: &RangeOf,
        absent: &Reply,
    ) -> io::Result<Option<Reply>> {
        let deadline = now() + COMMAND_TIMEOUT;
        database.send_value(&mut self.output, key, part, absent, deadline).await.map(|()| None)
    }

    async fn set(
        &mut self,
        database: &Database<'_>,
        key: &[u8],
        content: Content,
        options: &SetOptions,
        form: SetReply,
    ) -> io::Result<Option<Reply>> {
        let deadline = now() + COMMAND_TIMEOUT;
        let Some(writer) = database.server.swaps.writer(database.manifest_id(key), deadline).await else {
            return Ok(Some(error(Failure::Contended)));
        };
        // The old value leaves before it is replaced: its pages are memory.
        let is_sent = options.returns_old;
        if is_sent {
            let sent = database.send_value(&mut self.output, key, &whole, &Reply::Null, deadline);
            // Other writers of the key wait meanwhile.
            tokio::time::timeout_at(deadline.into(), sent).await??;
        }
        let outcome = database.set(&writer, key, content, options, deadline).await;
        Ok(match (outcome, form) {
            (Err(failure), _) if is_sent => {
                // Its reply has left. A client that took it for a success would be wrong.
                self.is_closing = true;
                tracing::debug!(%failure, "SET with GET failed after its reply; connection closed");
                None
            }
            (Ok(_), _) if is_sent => None,
            (Err(failure), _) => Some(error(failure)),
            (Ok(SetOutcome::Stored), SetReply::Ok) => Some(Reply::OK),
            (Ok(SetOutcome::Refused), SetReply::Ok) => Some(Reply::Null),
            (Ok(SetOutcome::Stored), SetReply::Number) => Some(Reply::Integer(1)),
            (Ok(SetOutcome::Refused), SetReply::Number) => Some(Reply::Integer(0)),
        })
    }

    async fn expire(&self, database: &Database<'_>, key: &[u8], expiry: Option<larder_redis::Expiry>) -> Reply {
        let deadline = now() + COMMAND_TIMEOUT;
        let Some(writer) = database.server.swaps.writer(database.manifest_id(key), deadline).await else {
            return error(Failure::Contended);
        };
        let changed = database.expire(&writer, key, expiry, deadline).await;
        changed.map_or_else(error, |changed| Reply::Integer(changed.into()))
    }

    async fn flush(&self, server: &RedisServer, databases: Range<u32>) -> Reply {
        match server.databases.flush(databases).await {
            Ok(()) => Reply::OK,
            Err(failed) => {
                tracing::warn!(error = %failed, "cannot store a flush of Redis databases; check the node's directory [LRD0111]");
                Reply::Error(format!("ERR the flush cannot be stored: {failed}"))
            }
        }
    }

    /// Carries out a command that needs no page. Returns the command if it is another one.
    fn connection_command(&mut self, command: Command) -> Result<Reply, Command> {
        Ok(match command {
            Command::Ping(None) => Reply::Simple("PONG"),
            Command::Ping(Some(text)) | Command::Echo(text) => Reply::Bulk(text),
            Command::Quit => {
                self.is_closing = true;
                Reply::OK
            }
            Command::Reset => {
                self.select(0);
                self.name.clear();
                self.output.protocol = Protocol::Resp2;
                Reply::Simple("RESET")
            }
            Command::Hello { protocol, credentials, name } => self.hello(protocol, credentials, name),
            Command::Auth(credentials) => authenticate(&credentials).map_or_else(|refusal| refusal, |()| Reply::OK),
            Command::Client(command) => self.client_command(command),
            Command::Select(database) => {
                self.select(database);
                Reply::OK
            }
            Command::CommandCount => count(COMMANDS.len()),
            Command::CommandDocs => Reply::Map(Vec::new()),
            Command::CommandInfo(None) => Reply::Array(COMMANDS.iter().map(|entry| entry.describe()).collect()),
            Command::CommandInfo(Some(names)) => {
                let name = |name: &Vec<u8>| String::from_utf8_lossy(name).to_ascii_uppercase();
                let describe = |entry: &catalogue::CommandEntry| entry.describe();
                Reply::Array(names.iter().map(|it| catalogue::find(&name(it)).map_or(Reply::Null, describe)).collect())
            }
            Command::ConfigGet(patterns) => self.config(&patterns),
            other => return Err(other),
        })
    }

    fn hello(&mut self, protocol: Option<Protocol>, credentials: Option<Credentials>, name: Option<Vec<u8>>) -> Reply {
        if let Some(Err(refusal)) = credentials.as_ref().map(authenticate) {
            return refusal;
        }
        if let Some(name) = name
            && let Err(refusal) = self.set_name(name)
        {
            return refusal;
        }
        self.output.protocol = protocol.unwrap_or(self.output.protocol);
        let pair = |name: &str, value| (Reply::text(name), value);
        Reply::Map(vec![
            pair("server", Reply::text("redis")),
            pair("version", Reply::text(REDIS_VERSION)),
            pair("proto", Reply::Integer(self.output.protocol.number())),
            pair("id", Reply::Integer(i64::try_from(self.id).unwrap_or(i64::MAX))),
            pair("mode", Reply::text("standalone")),
            pair("role", Reply::text("master")),
            pair("modules", Reply::Array(Vec::new())),
        ])
    }

    fn client_command(&mut self, command: ClientCommand) -> Reply {
        match command {
            ClientCommand::Accepted => Reply::OK,
            ClientCommand::Id => Reply::Integer(i64::try_from(self.id).unwrap_or(i64::MAX)),
            ClientCommand::GetName if self.name.is_empty() => Reply::Null,
            ClientCommand::GetName => Reply::Bulk(self.name.clone()),
            ClientCommand::SetName(name) => self.set_name(name).map_or_else(|refusal| refusal, |()| Reply::OK),
            ClientCommand::Info => {
                let peer = self.peer.map_or(String::new(), |peer| peer.to_string());
                let name = String::from_utf8_lossy(&self.name);
                let protocol = self.output.protocol.number();
                Reply::text(format!("id={} addr={peer} name={name} db={} resp={protocol}\n", self.id, self.database))
            }
        }
    }

    fn set_name(&mut self, name: Vec<u8>) -> Result<(), Reply> {
        if name.len() > NAME_BYTES_MAX || !name.iter().all(u8::is_ascii_graphic) {
            let text = "ERR Client names cannot contain spaces, newlines or special characters.";
            return Err(Reply::Error(text.into()));
        }
        self.name = name;
        Ok(())
    }

    fn config(&self, patterns: &[Vec<u8>]) -> Reply {
        let options = self.server.node.store.options();
        let settings = [
            ("appendonly", "no".to_string()),
            ("databases", DATABASES.to_string()),
            ("maxclients", options.connections_max.to_string()),
            ("maxmemory", options.l2_bytes.to_string()),
            ("maxmemory-policy", "allkeys-lfu".to_string()),
            ("proto-max-bulk-len", VALUE_BYTES_MAX.to_string()),
            ("save", String::new()),
            ("timeout", "0".to_string()),
        ];
        let is_wanted = |name: &str| {
            patterns
                .iter()
                .take(CONFIG_PATTERNS_MAX)
                .any(|pattern| glob::matches(&pattern.to_ascii_lowercase(), name.as_bytes()))
        };
        let wanted = settings.into_iter().filter(|(name, _)| is_wanted(name));
        Reply::Map(wanted.map(|(name, value)| (Reply::text(name), Reply::text(value))).collect())
    }

    async fn info(&self, database: &Database<'_>, deadline: Instant) -> String {
        let node = &self.server.node;
        let metrics = &node.metrics;
        let hits = metrics.pages_hit_l2.get() + metrics.pages_hit_l3.get();
        let keys = database.size(deadline).await;
        let lines = [
            "# Server".to_string(),
            format!("redis_version:{REDIS_VERSION}"),
            "redis_mode:standalone".into(),
            format!("larder_version:{}", env!("CARGO_PKG_VERSION")),
            format!("larder_node:{}", node.identity.node_id),
            String::new(),
            "# Clients".into(),
            format!("connected_clients:{}", metrics.connections.get()),
            String::new(),
            "# Memory".into(),
            format!("maxmemory:{}", node.store.options().l2_bytes),
            "maxmemory_policy:allkeys-lfu".into(),
            String::new(),
            "# Stats".into(),
            format!("total_commands_processed:{}", metrics.redis_commands.get()),
            format!("keyspace_hits:{hits}"),
            format!("keyspace_misses:{}", metrics.pages_missed.get()),
            format!("evicted_keys:{}", metrics.pages_evicted_l2.get()),
            String::new(),
            "# Replication".into(),
            "role:master".into(),
            "connected_slaves:0".into(),
            String::new(),
            "# Keyspace".into(),
            format!("db{}:keys={keys},expires=0,avg_ttl=0", self.database),
        ];
        lines.join("\r\n") + "\r\n"
    }
}

/// A node has no passwords. The answers are those of Redis without one.
fn authenticate(credentials: &Credentials) -> Result<(), Reply> {
    match credentials.user.as_deref() {
        Some(b"default") => Ok(()),
        Some(_) => Err(Reply::Error("WRONGPASS invalid username-password pair or user is disabled.".into())),
        None => Err(Reply::Error(
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?".into(),
        )),
    }
}

fn data_bytes(found: &Found) -> usize {
    match found.short() {
        Some(_) => 0,
        None => (found.manifest.value_bytes as usize).next_multiple_of(crate::tiers::SLOT_UNIT),
    }
}

fn time_to_live(at_unix_ms: u64, now_unix_ms: u64, unit: TimeUnit) -> i64 {
    let left = i64::try_from(at_unix_ms.saturating_sub(now_unix_ms)).unwrap_or(i64::MAX);
    match unit {
        TimeUnit::Milliseconds => left,
        // Rounded as in Redis.
        TimeUnit::Seconds => left.saturating_add(500) / 1000,
    }
}

/// Bytes of a value from `start` to `end`, both included. Negative places count from the end.
fn part_of(value_bytes: u64, start: i64, end: i64) -> Range<u64> {
    let length = i128::from(value_bytes);
    let place = |at: i64| if at < 0 { (length + i128::from(at)).max(0) } else { i128::from(at) };
    // Redis returns nothing for two negative places in the wrong order.
    if start < 0 && end < 0 && start > end {
        return 0..0;
    }
    let (start, end) = (place(start), (place(end) + 1).min(length));
    if start >= end { 0..0 } else { start as u64..end as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_value_are_those_of_redis() {
        for (start, end, expected) in [
            (0, 3, 0..4),
            (-3, -1, 7..10),
            (0, -1, 0..10),
            (10, 100, 0..0),
            (-100, 0, 0..1),
            (-1, -3, 0..0),
            (5, 3, 0..0),
            (i64::MIN, i64::MAX, 0..10),
            (9, 9, 9..10),
        ] {
            assert_eq!(part_of(10, start, end), expected, "{start} {end}");
        }
        assert_eq!(part_of(0, 0, -1), 0..0);
    }
}

//! Connections to one Redis server.
//!
//! Invariants:
//! - Requests have at most [`CONNECTIONS_MAX`] connections together, and the watch has one more.
//! - A connection serves one request at a time. If that request fails or is abandoned, the
//!   connection closes.
//! - While the server does not answer the watch, requests fail at once.

use super::connection::{Connection, Question};
use super::url::RedisUrl;
use larder_runtime::lock::Mutex;
use redis::{RedisError, Value};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Maximum number of requests at a time. Four of a few megabytes fill a link of 25 Gbit/s.
pub(super) const CONNECTIONS_MAX: usize = 4;
/// Time between two looks at the server.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time for a look, with the connection.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Pool {
    url: RedisUrl,
    idle: Mutex<Vec<Connection>>,
    places: Semaphore,
    up: watch::Sender<bool>,
}

impl Pool {
    pub(super) fn new(url: RedisUrl) -> Self {
        let places = Semaphore::new(CONNECTIONS_MAX);
        Self { url, idle: Mutex::new(Vec::new()), places, up: watch::channel(false).0 }
    }

    /// Returns `true` if the server answered the last look, and no request has failed since.
    pub(super) fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// Waits until the server answers. Returns `false` if it does not in time.
    pub(super) async fn ready(&self, timeout: Duration) -> bool {
        let mut up = self.up.subscribe();
        let answered = tokio::time::timeout(timeout, up.wait_for(|up| *up)).await;
        matches!(answered, Ok(Ok(_)))
    }

    /// Returns the reply to each command. `None` if the server is away, fails, or has not sent all
    /// replies by `deadline`. Commands that were sent may be executed nevertheless.
    pub(super) async fn ask(&self, question: &Question, deadline: Instant) -> Option<Vec<Value>> {
        if question.commands.is_empty() {
            return Some(Vec::new());
        }
        if !self.is_up() {
            return None;
        }
        // The end of the wait drops the connection too, so no late reply meets another request.
        match tokio::time::timeout_at(deadline.into(), self.ask_one(question)).await {
            Ok(Ok(replies)) => Some(replies),
            Ok(Err(error)) => {
                tracing::debug!(server = %self.url, %error, "a request to the Redis server failed");
                // The others are probably as dead. The watch finds out at once if the server is.
                self.idle.lock().clear();
                self.up.send_replace(false);
                None
            }
            Err(_) => None,
        }
    }

    async fn ask_one(&self, question: &Question) -> Result<Vec<Value>, RedisError> {
        let place = self.places.acquire().await;
        let idle = self.idle.lock().pop();
        // The server may have closed an idle connection. Every command may be sent again.
        let answered = match idle {
            Some(connection) => self.ask_on(connection, question).await.ok(),
            None => None,
        };
        let replies = match answered {
            Some(replies) => replies,
            None => self.ask_on(Connection::open(&self.url).await?, question).await?,
        };
        drop(place);
        Ok(replies)
    }

    /// Sends commands on a connection, and keeps it if the server replies.
    async fn ask_on(&self, mut connection: Connection, question: &Question) -> Result<Vec<Value>, RedisError> {
        let replies = connection.ask(question).await?;
        self.idle.lock().push(connection);
        Ok(replies)
    }

    /// Looks at the server again and again. Logs each change once. Never ends.
    pub(super) async fn watch(self: Arc<Self>) {
        let mut connection = None;
        let mut was_up = None;
        loop {
            let look = tokio::time::timeout(WATCH_TIMEOUT, self.look(&mut connection)).await;
            let error = match look {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {WATCH_TIMEOUT:?}")),
            };
            let is_up = error.is_none();
            if !is_up {
                connection = None;
                self.idle.lock().clear();
            }
            self.up.send_replace(is_up);
            if let Some(error) = error
                && was_up != Some(false)
            {
                tracing::warn!(server = %self.url, %error, "no Redis server; check its address, its password and its log");
            }
            was_up = Some(is_up);
            tokio::time::sleep(WATCH_INTERVAL).await;
        }
    }

    async fn look(&self, connection: &mut Option<Connection>) -> Result<(), RedisError> {
        let mut open = match connection.take() {
            Some(open) => open,
            None => Connection::open(&self.url).await?,
        };
        let mut commands = redis::pipe();
        commands.cmd("PING");
        let replies = open.ask(&Question::short(commands)).await?;
        match replies.as_slice() {
            [Value::SimpleString(_)] => {
                *connection = Some(open);
                Ok(())
            }
            // Such as NOAUTH and LOADING.
            other => Err(io::Error::other(format!("PING is answered by {other:?}")).into()),
        }
    }
}

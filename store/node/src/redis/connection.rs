//! One client: requests in, replies out.

use super::RedisServer;
use super::databases::Databases;
use super::input::Input;
use super::output::Output;
use super::receive::{NewValue, VALUE_TIMEOUT, discard};
use super::values::{Database, Failure};
use crate::budget::{Account, BusyBound, Charge};
use crate::connection::{ConnectionLimit, ScheduledSink, ScheduledSource, record_refusal};
use crate::places::Place;
use crate::tiers::NamespaceUser;
use larder_redis::{Argument, Command, Decoded, ProtocolError, Reply, RequestDecoder, command};
use larder_runtime::now;
use larder_wire::{ByteSink, ByteSource};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Maximum time of a command, or of each key of `MGET`. It counts no transfer of a value, except
/// of the old one of `SET` with `GET`.
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to tell a client why it is refused.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Tenant of the Redis clients of one peer.
const TENANT: &str = "redis";
/// Bytes of the arguments of a request that the charge of a connection covers.
const UNCHARGED_BYTES: usize = 1 << 10;

/// One client that is being served.
pub(super) struct Client<S, W> {
    pub(super) server: Arc<RedisServer>,
    pub(super) account: Arc<Account>,
    pub(super) place: Arc<Place>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) input: Input<S>,
    pub(super) output: Output<W>,
    pub(super) id: u64,
    pub(super) name: Vec<u8>,
    pub(super) database: u32,
    /// Use of the database's namespaces, and the number of its flushes when it began.
    user: Option<(u64, [Option<NamespaceUser>; 2])>,
    /// Value of the current request, if it is long.
    pub(super) value: Option<Result<NewValue, Failure>>,
    pub(super) is_closing: bool,
}

/// Serves one client until it disconnects or violates the protocol.
pub(super) async fn serve<S: ByteSource, W: ByteSink>(
    server: Arc<RedisServer>,
    peer: Option<SocketAddr>,
    (read, write): (S, W),
    place: Arc<Place>,
) {
    let node = server.node.clone();
    let peer_name = peer.map_or("unknown address".to_string(), |peer| peer.to_string());
    let account = node.store.budget().open();
    let (sink, _) = ScheduledSink::new(write, node.bulk_scheduler.clone(), account.clone());
    let output = Output::new(sink, node.stall_timeout());
    let Some(account) = account else {
        node.end_stalled_bodies(None);
        if let Some(_permit) = record_refusal(&node, &peer_name, ConnectionLimit::Memory) {
            refuse(output.into_sink(), ConnectionLimit::Memory).await;
        }
        return;
    };
    // Before any charge: a charge belongs to the tenant of its time.
    account.set_tenant(place.peer(), TENANT);
    let mut client = Client {
        id: server.next_client(),
        input: Input::new(ScheduledSource::new(read, node.bulk_scheduler.clone())),
        server,
        account: account.clone(),
        place,
        peer,
        output,
        name: Vec::new(),
        database: 0,
        user: None,
        value: None,
        is_closing: false,
    };
    let ended = tokio::select! {
        // Biased: a disconnect must not lose against a client that requests all the time.
        biased;
        () = account.disconnect_requested() => Err(io::Error::from(io::ErrorKind::TimedOut)),
        ended = client.run() => ended,
    };
    match ended {
        Ok(()) => tracing::debug!(peer = %peer_name, "Redis client disconnected"),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            node.metrics.connections_rejected.inc();
            tracing::debug!(peer = %peer_name, %error, "Redis connection closed after a protocol error");
        }
        Err(error) => tracing::debug!(peer = %peer_name, %error, "Redis connection lost"),
    }
}

/// Tells a client that it is refused.
pub(super) async fn refuse<W: ByteSink>(sink: W, limit: ConnectionLimit) {
    let output = &mut Output::new(sink, REFUSAL_TIMEOUT);
    let reason = match limit {
        ConnectionLimit::Count | ConnectionLimit::Peer => "ERR max number of clients reached",
        ConnectionLimit::Memory => "OOM the node has no memory for another connection; try again later",
    };
    Reply::Error(reason.into()).encode(output.protocol, &mut output.buffer);
    // A client that goes away only misses the reason.
    let _: Result<io::Result<()>, _> = tokio::time::timeout(REFUSAL_TIMEOUT, output.flush()).await;
}

impl<S: ByteSource, W: ByteSink> Client<S, W> {
    async fn run(&mut self) -> io::Result<()> {
        let mut decoder = RequestDecoder::default();
        while !self.is_closing {
            if self.input.bytes().is_empty() {
                // Replies of a pipeline leave together.
                self.output.flush().await?;
                // A client may be silent between its requests, but not within one.
                if !self.input.fill(true).await? {
                    return Ok(());
                }
            }
            let Some((request, charge)) = self.receive_request(&mut decoder).await? else { return Ok(()) };
            self.server.node.metrics.redis_commands.inc();
            let value = self.value.take();
            let reply = match Command::parse(request) {
                Ok(command) => {
                    self.record_command();
                    self.execute(command, value).await?
                }
                Err(error) => Some(Reply::Error(error.0)),
            };
            if let Some(reply) = reply {
                self.output.reply(&reply).await?;
            }
            // Behind the reply, which may be as long as its request.
            drop(charge);
        }
        self.output.flush().await
    }

    /// Records the activity of the client. Only a known command makes a stranger one: it then may
    /// be idle for as long as its place is not needed.
    fn record_command(&mut self) {
        self.place.greeted(&self.account);
        self.place.keep_idle();
        self.input.grow();
    }

    /// Receives the rest of a request that has begun to arrive. Returns `None` at the end of the
    /// stream.
    async fn receive_request(
        &mut self,
        decoder: &mut RequestDecoder,
    ) -> io::Result<Option<(Vec<Argument>, Option<Charge>)>> {
        let node = self.server.node.clone();
        let account = self.account.clone();
        let received = self.input.received();
        let mut charge = None;
        loop {
            let part = node.arriving.receive(received.clone(), || account.tenant(), self.decode(decoder, &mut charge));
            match part.await? {
                None => return Ok(None),
                Some(Decoded::Request(request)) => return Ok(Some((request, charge))),
                Some(Decoded::LongArgument(bytes)) => self.receive_argument(decoder, bytes).await?,
                Some(Decoded::Incomplete) => {}
            }
        }
    }

    /// Decodes up to the next event. Returns `None` at the end of the stream.
    async fn decode(
        &mut self,
        decoder: &mut RequestDecoder,
        charge: &mut Option<Charge>,
    ) -> io::Result<Option<Decoded>> {
        loop {
            let mut rest = self.input.bytes();
            let before = rest.len();
            let decoded = decoder.decode(&mut rest);
            let taken = before - rest.len();
            self.input.take(taken);
            let decoded = match decoded {
                Ok(decoded) => decoded,
                // Without a reply, which a web page might learn from.
                Err(ProtocolError::OtherProtocol) => {
                    self.record_other_protocol();
                    return Err(io::Error::new(io::ErrorKind::InvalidData, ProtocolError::OtherProtocol));
                }
                Err(error) => {
                    // The text helps to debug the client.
                    self.output.reply(&Reply::Error(format!("ERR {error}"))).await?;
                    self.output.flush().await?;
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            };
            if !self.charge_request(decoder.held_bytes(), charge) {
                self.output
                    .reply(&Reply::Error("OOM the node has no memory for the request; try again later".into()))
                    .await?;
                self.output.flush().await?;
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            if decoded != Decoded::Incomplete {
                return Ok(Some(decoded));
            }
            // The client may wait for these before it sends the rest.
            self.output.flush().await?;
            if !self.input.fill(false).await? {
                return Ok(None);
            }
        }
    }

    fn record_other_protocol(&self) {
        let node = &self.server.node;
        node.metrics.redis_other_protocol.inc();
        if let Some(connections) = node.refusals.other_protocols.record() {
            let peer = self.peer.map_or("unknown address".to_string(), |peer| peer.to_string());
            tracing::warn!(
                %peer, connections,
                "HTTP or TLS at the Redis port: a web page may be attacking through a browser; connection closed"
            );
        }
    }

    /// Charges the arguments that have arrived. Returns `false` if the node has no memory for them.
    fn charge_request(&self, held_bytes: usize, charge: &mut Option<Charge>) -> bool {
        if held_bytes <= UNCHARGED_BYTES {
            return true;
        }
        let charged = match charge {
            Some(charge) => self.account.grow_request(charge, held_bytes, false),
            None => self.account.charge_request(held_bytes, false).map(|first| *charge = Some(first)),
        };
        let Err(busy) = charged else { return true };
        self.server.node.metrics.refusals.inc();
        match busy.bound {
            BusyBound::Connection => {}
            BusyBound::Tenant(tenant) => self.server.node.end_stalled_bodies(Some(tenant)),
            BusyBound::Node => self.server.node.end_stalled_bodies(None),
        }
        false
    }

    async fn receive_argument(&mut self, decoder: &RequestDecoder, bytes: u64) -> io::Result<()> {
        if (self.input.bytes().len() as u64) < bytes {
            // The client may wait for these before it sends the rest.
            self.output.flush().await?;
        }
        if !command::is_value(decoder.arguments()) {
            let node = self.server.node.clone();
            return discard(&mut self.input, bytes, now() + VALUE_TIMEOUT, node.stall_timeout()).await;
        }
        // A long value may arrive for longer than a stranger may be idle.
        self.record_command();
        self.use_database();
        let server = self.server.clone();
        let account = self.account.clone();
        let database = self.database_of(&server, &account);
        self.value = Some(database.receive(&mut self.input, bytes).await?);
        Ok(())
    }

    /// Takes part in the namespaces of the current database. A flush gives it others.
    pub(super) fn use_database(&mut self) {
        let flushes = self.server.databases.flushes(self.database);
        if self.user.as_ref().is_some_and(|(known, _)| *known == flushes) {
            return;
        }
        let namespaces = Databases::namespaces(self.database, flushes);
        let tiers = self.server.node.store.tiers();
        let peer = self.place.peer();
        let join = |namespace| tiers.join(namespace, peer);
        self.user = Some((flushes, [join(namespaces.manifests), join(namespaces.data)]));
    }

    pub(super) fn select(&mut self, database: u32) {
        self.database = database;
        self.user = None;
    }

    /// The current database. The caller has called [`Client::use_database`].
    pub(super) fn database_of<'a>(&self, server: &'a Arc<RedisServer>, account: &'a Arc<Account>) -> Database<'a> {
        let flushes = self.user.as_ref().map_or_else(|| server.databases.flushes(self.database), |(known, _)| *known);
        let namespaces = Databases::namespaces(self.database, flushes);
        Database { server, account, namespaces, peer: self.place.peer() }
    }
}

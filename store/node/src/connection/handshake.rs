//! The first message of a client: protocol version, name, namespace and tenant.
//!
//! Invariant: before the answer a connection has only its reader and its writer. Queues, tables and
//! tasks come afterwards, so strangers cost little memory.

use super::{Namespace, protocol_error, timed_out};
use crate::budget::Account;
use crate::places::Place;
use crate::state::NodeState;
use crate::tiers::NamespaceUser;
use larder_format::codec::DecodeError;
use larder_format::{KvDtype, MAX_TOKEN_IDS};
use larder_wire::{
    ByteSink, ByteSource, ErrorCode, Frame, FrameHeader, FrameReader, FrameWriter, PROTOCOL_VERSION_MIN, Request,
    Response,
};
use std::io;
use std::sync::Arc;

/// Maximum size of the first message, in bytes. It is received before any budget applies, so a
/// stranger can make the node allocate only this much.
pub(super) const HELLO_BODY_MAX: u32 = 16 << 10;

/// Results of a handshake.
pub(super) struct Greeting {
    pub(super) version: u16,
    /// `None` for a client that only manages members or asks for the status.
    pub(super) namespace: Option<Namespace>,
    pub(super) user: Option<NamespaceUser>,
}

/// A client that has not introduced itself.
pub(super) struct Stranger<'a> {
    pub(super) node: &'a NodeState,
    pub(super) account: &'a Arc<Account>,
    pub(super) peer: &'a str,
    pub(super) place: Option<&'a Place>,
}

impl Stranger<'_> {
    /// Receives the first message and answers it. Returns `None` if the client closed the
    /// connection before.
    ///
    /// # Errors
    /// `ConnectionAborted` if the client was refused, `InvalidData` for a protocol error,
    /// `TimedOut` after the node's time for handshakes.
    pub(super) async fn handshake<S: ByteSource, W: ByteSink>(
        &self,
        reader: &mut FrameReader<S>,
        writer: &mut FrameWriter<W>,
    ) -> io::Result<Option<Greeting>> {
        let exchange = async {
            let Some(head) = reader.head().await? else { return Ok(None) };
            if head.header.body_bytes > HELLO_BODY_MAX {
                return Err(protocol_error(DecodeError::Invalid("length of the first message")));
            }
            reader.take_body(&head).await?;
            let (answer, greeting) = self.greet(&head.header, reader.body())?;
            reader.release_body();
            writer.send(answer).await?;
            let greeting = greeting.ok_or(io::ErrorKind::ConnectionAborted)?;
            reader.set_version(greeting.version);
            Ok(Some(greeting))
        };
        // A connection without a handshake has no tenant to charge.
        tokio::time::timeout(self.node.handshake_timeout(), exchange).await.map_err(timed_out)?
    }

    /// Returns the answer to Hello, and the greeting unless the client is refused.
    fn greet(&self, header: &FrameHeader, body: &[u8]) -> io::Result<(Frame, Option<Greeting>)> {
        // All versions share this message, so the minimum version decodes it.
        let message = Request::decode(PROTOCOL_VERSION_MIN, header.kind, body).map_err(protocol_error)?;
        let Request::Hello { version_min, version_max, name, namespace } = message else {
            return Err(protocol_error(DecodeError::Invalid("first message")));
        };
        let node = self.node;
        let newest = node.protocol_max;
        // The newest that both sides speak.
        let version = version_max.min(newest);
        if version < version_min.max(PROTOCOL_VERSION_MIN) || header.payload_bytes > 0 {
            let message = format!(
                "client speaks protocol {version_min} to {version_max}, this node {PROTOCOL_VERSION_MIN} to {newest}"
            );
            node.metrics.connections_rejected.inc();
            let peer = self.peer;
            if let Some(refused) = node.refusals.versions.record() {
                tracing::warn!(%peer, refused, client = %name, %message, "connections refused: upgrade the older side");
            }
            let refusal = Response::Error { code: ErrorCode::Version, message };
            return Ok((refusal.frame(PROTOCOL_VERSION_MIN, header.request, None), None));
        }
        // Without a place, as in simulations, all clients are one peer.
        let peer = self.place.map(Place::peer).unwrap_or_default();
        // Before any charge: a charge belongs to the tenant of its time.
        self.account.set_tenant(peer, namespace.as_ref().map_or("", |namespace| &namespace.tenant));
        let namespace = namespace.map(|descriptor| {
            let id = descriptor.id();
            node.store.tiers().namespaces().introduce(id, &descriptor);
            let geometry = descriptor.geometry;
            let token_ids_max = match geometry.dtype {
                KvDtype::Opaque => MAX_TOKEN_IDS,
                _ => geometry.page_tokens as usize,
            };
            Namespace { id, part_table: geometry.part_table(), token_ids_max }
        });
        let id = namespace.as_ref().map(|namespace| namespace.id);
        let user = id.and_then(|id| node.store.tiers().join(id, peer));
        tracing::debug!(peer = %self.peer, client = %name, version, namespace = ?id, "client connected");
        if let Some(place) = self.place {
            // Before the answer: a client that has it must not lose its place as a stranger.
            place.greeted(self.account);
        }
        let response = Response::Hello {
            version,
            node_id: node.identity.node_id.clone(),
            epoch: node.identity.epoch,
            namespace: id,
            arena_listener: node.arena_listener.clone(),
        };
        // The answer is the first message of the negotiated version.
        Ok((response.frame(version, header.request, None), Some(Greeting { version, namespace, user })))
    }
}

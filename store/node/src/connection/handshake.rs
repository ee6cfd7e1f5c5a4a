//! The first message of a client: protocol version, name, namespace and tenant.

use super::{Connection, HANDSHAKE_TIMEOUT, Namespace, protocol_error, timed_out};
use larder_format::codec::DecodeError;
use larder_wire::{ByteSource, ErrorCode, FrameHeader, FrameReader, PROTOCOL_VERSION_MIN, Request, Response};
use std::io;

/// Maximum size of the first message, in bytes. It is received before any budget applies, so a
/// stranger can make the node allocate only this much.
pub(super) const HELLO_BODY_MAX: u32 = 16 << 10;

impl Connection {
    /// Receives the first message and answers it. Returns `false` if the client closed the
    /// connection before.
    pub(super) async fn handshake<S: ByteSource>(&mut self, reader: &mut FrameReader<S>) -> io::Result<bool> {
        let receive = async {
            let Some(head) = reader.head().await? else { return Ok(None) };
            if head.header.body_bytes > HELLO_BODY_MAX {
                return Err(protocol_error(DecodeError::Invalid("length of the first message")));
            }
            reader.take_body(&head).await?;
            Ok(Some(head.header))
        };
        let received = tokio::time::timeout(HANDSHAKE_TIMEOUT, receive).await.map_err(timed_out)?;
        let Some(header) = received? else { return Ok(false) };
        self.answer_hello(&header, reader.body()).await?;
        reader.set_version(self.outbox.version());
        Ok(true)
    }

    async fn answer_hello(&mut self, header: &FrameHeader, body: &[u8]) -> io::Result<()> {
        // All versions share this message, so the minimum version decodes it.
        let message = Request::decode(self.outbox.version(), header.kind, body).map_err(protocol_error)?;
        let Request::Hello { version_min, version_max, name, namespace } = message else {
            return Err(protocol_error(DecodeError::Invalid("first message")));
        };
        let newest = self.node.protocol_max;
        // The newest that both sides speak.
        let version = version_max.min(newest);
        if version < version_min.max(PROTOCOL_VERSION_MIN) || header.payload_bytes > 0 {
            let message = format!(
                "client speaks protocol {version_min} to {version_max}, this node {PROTOCOL_VERSION_MIN} to {newest}"
            );
            self.node.metrics.connections_rejected.inc();
            let peer = &self.peer;
            tracing::warn!(%peer, client = %name, %message, "connection refused: upgrade the older of the two");
            self.outbox.respond(header.request, Response::Error { code: ErrorCode::Version, message }).await?;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(namespace) = &namespace {
            // Before any charge: a charge belongs to the tenant of its time.
            self.account.set_tenant(&namespace.tenant);
        }
        self.namespace =
            namespace.map(|namespace| Namespace { id: namespace.id(), part_table: namespace.geometry.part_table() });
        let id = self.namespace.as_ref().map(|namespace| namespace.id);
        if let Some(id) = id {
            self.outbox.open_window(self.node.store.options().connection_read_window_bytes(self.page_bytes()));
            self.node.store.tiers().apply_quota(id);
        }
        tracing::debug!(peer = %self.peer, client = %name, version, namespace = ?id, "client connected");
        // The answer is the first message of the negotiated version.
        self.outbox.set_version(version);
        let node_id = self.node.identity.node_id.clone();
        let epoch = self.node.identity.epoch;
        let arena_listener = self.node.arena_listener.clone();
        let response = Response::Hello { version, node_id, epoch, namespace: id, arena_listener };
        self.outbox.respond(header.request, response).await
    }
}

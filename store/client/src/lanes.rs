//! Further connections to a node that is connected: one stream of bytes is received by one processor at a time, and a large
//! payload holds up what stands behind it.
//!
//! Always true: a lane leads to the node, and the epoch, that its first connection leads to, and ends with that one.

use crate::connect::{self, Connector};
use crate::link::{LinkOptions, Live, run};
use crate::url::Transport;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Bytes that are worth a connection of their own.
const LANE_BYTES: usize = 2 << 20;
/// After a lane was lost, or could not be had: longer each time, as a node without room for more is not to be asked often.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The further connections to a node.
#[derive(Default)]
pub(crate) struct Lanes {
    open: Mutex<Vec<Arc<Live>>>,
}

impl Lanes {
    /// Requests that wait for answers on them.
    pub(crate) fn waiting(&self) -> usize {
        self.open.lock().iter().map(|lane| lane.waiting()).sum()
    }
}

/// Every connection to the node.
pub(crate) fn all(node: &Arc<Live>) -> Vec<Arc<Live>> {
    let mut all = vec![node.clone()];
    all.extend(node.lanes.open.lock().iter().cloned());
    all
}

/// The connection to the node with the least to do.
pub(crate) fn idlest(node: &Arc<Live>) -> Arc<Live> {
    // What moves by RDMA is spoken of on the first.
    if !node.moves_pages_itself() {
        return node.clone();
    }
    all(node).into_iter().min_by_key(|lane| lane.load()).unwrap_or_else(|| node.clone())
}

/// The connections over which `bytes` bytes are best moved, those with the least to do first.
pub(crate) fn for_bytes(node: &Arc<Live>, bytes: usize) -> Vec<Arc<Live>> {
    let wanted = (bytes / LANE_BYTES).max(1);
    if wanted == 1 || !node.moves_pages_itself() {
        return vec![idlest(node)];
    }
    let mut lanes = all(node);
    lanes.sort_by_cached_key(|lane| lane.load());
    lanes.truncate(wanted);
    lanes
}

/// Keeps `options.connections` connections to a node to which there is one, as long as what this returns lives.
pub(crate) fn keep<C: Connector>(options: &LinkOptions, connector: &Arc<C>, node: &Arc<Live>) -> JoinSet<()> {
    let pages_come_so = node.moves_pages_itself() && options.transport != Transport::Rdma;
    let further = if pages_come_so { options.connections.saturating_sub(1) } else { 0 };
    // Tasks of their own, so that each may have a processor of its own.
    let lanes = (0..further).map(|_| keep_one(options.clone(), connector.clone(), node.clone()));
    lanes.collect()
}

async fn keep_one<C: Connector>(options: LinkOptions, connector: Arc<C>, node: Arc<Live>) {
    let mut retry = RETRY_MIN;
    loop {
        match connect::again(&*connector, &options, &node.node_id, node.epoch).await {
            Ok((version, reader, writer)) => {
                let (lane, queue) = Live::new(node.node_id.clone(), node.epoch, version, None, node.seed);
                retry = RETRY_MIN;
                let open = Open::announce(&node, lane.clone());
                let error = run(&lane, reader, writer, queue, std::future::pending()).await;
                drop(open);
                tracing::debug!(node = %options.address, %error, "a further connection was lost");
            }
            Err(error) => tracing::debug!(node = %options.address, %error, "no further connection"),
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(RETRY_MAX);
    }
}

/// While it lives, the lane is used. However the connection ends, its requests end with it.
struct Open<'a> {
    node: &'a Live,
    lane: Arc<Live>,
}

impl<'a> Open<'a> {
    fn announce(node: &'a Live, lane: Arc<Live>) -> Self {
        node.lanes.open.lock().push(lane.clone());
        Self { node, lane }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.node.lanes.open.lock().retain(|lane| !Arc::ptr_eq(lane, &self.lane));
        self.lane.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::Sink;
    use larder_wire::{PROTOCOL_VERSION, Request};
    use std::time::Instant;

    fn lane() -> Arc<Live> {
        Live::new("node".into(), 1, PROTOCOL_VERSION, None, 0).0
    }

    #[tokio::test]
    async fn what_is_large_goes_by_several_lanes_and_first_by_the_idlest() {
        let (node, queue) = Live::new("node".into(), 1, PROTOCOL_VERSION, None, 0);
        let (second, third) = (lane(), lane());
        let same = |a: &Arc<Live>, b: &Arc<Live>| Arc::ptr_eq(a, b);
        assert!(same(&idlest(&node), &node) && for_bytes(&node, 100 * LANE_BYTES).len() == 1);
        let open = [Open::announce(&node, second.clone()), Open::announce(&node, third.clone())];
        let soon = Instant::now() + Duration::from_secs(5);
        let (sender, _answer) = tokio::sync::oneshot::channel();
        let begun = node.begin(1, &Request::Members, Sink::Reply(sender), soon).await;
        assert!(begun.is_some() && same(&idlest(&node), &second));
        assert_eq!(for_bytes(&node, LANE_BYTES).len(), 1);
        let two = for_bytes(&node, 2 * LANE_BYTES);
        assert!(two.len() == 2 && same(&two[0], &second) && same(&two[1], &third));
        assert_eq!(for_bytes(&node, 100 * LANE_BYTES).len(), 3);
        drop(open);
        assert!(same(&idlest(&node), &node), "lanes that ended are not used");
        drop((begun, queue));
    }
}

//! Requests that manage pages: warm, forget, pin, hint, suspect, compare and explain.

use super::Connection;
use crate::budget::Account;
use crate::state::NodeState;
use larder_format::disk::BLOCK_BYTES;
use larder_format::{PageId, PageKey};
use larder_wire::{CommitOutcome, ErrorCode, Hint, PinKind, PutEnd, Request, Response};
use std::io;
use std::sync::Arc;
use std::time::Instant;

pub(super) enum PageAdmin {
    Warm(Vec<PageId>),
    Forget(Vec<PageId>),
    Pin { ids: Vec<PageId>, kind: PinKind, ttl_ms: u64 },
    Pins(Vec<PageId>),
    Hint { ids: Vec<PageId>, generated: Option<u32>, advice: Hint, retain_ms: u64 },
    Suspect(PageId),
    Compare { id: PageId, crcs: Vec<u32> },
    Explain(Vec<PageId>),
}

impl PageAdmin {
    pub(super) fn of(request: Request, id: impl Fn(PageKey) -> PageId) -> Option<PageAdmin> {
        let ids = |keys: Vec<PageKey>| keys.into_iter().map(&id).collect();
        Some(match request {
            Request::Warm(keys) => PageAdmin::Warm(ids(keys)),
            Request::Forget(keys) => PageAdmin::Forget(ids(keys)),
            Request::Pin { keys, kind, ttl_ms } => PageAdmin::Pin { ids: ids(keys), kind, ttl_ms },
            Request::Pins(keys) => PageAdmin::Pins(ids(keys)),
            Request::Hint { keys, generated, hint: advice, retain_ms } => {
                PageAdmin::Hint { ids: ids(keys), generated, advice, retain_ms }
            }
            Request::Suspect(key) => PageAdmin::Suspect(id(key)),
            Request::Compare { key, crcs } => PageAdmin::Compare { id: id(key), crcs },
            Request::Explain(keys) => PageAdmin::Explain(ids(keys)),
            _ => return None,
        })
    }

    fn page_count(&self) -> usize {
        match self {
            PageAdmin::Warm(ids)
            | PageAdmin::Forget(ids)
            | PageAdmin::Pin { ids, .. }
            | PageAdmin::Pins(ids)
            | PageAdmin::Explain(ids)
            | PageAdmin::Hint { ids, .. } => ids.len(),
            PageAdmin::Suspect(_) | PageAdmin::Compare { .. } => 1,
        }
    }

    /// Runs the operation. `loads` has the account, and the page size for reads of L3.
    async fn run(self, node: &NodeState, loads: (Arc<Account>, u64), deadline: Instant) -> Response {
        let store = &node.store;
        match self {
            PageAdmin::Warm(ids) => Response::Count(store.warm_for(Some(&loads), &ids, deadline).await as u32),
            PageAdmin::Forget(ids) => match store.forget_for(loads.0.peer(), &ids, deadline).await {
                Ok(count) => Response::Count(count as u32),
                // An error, not a count: after a restart the pages would be served again.
                Err(error) => {
                    let pages = ids.len();
                    tracing::error!(%error, pages, "cannot record on L3 that pages were forgotten; check the device");
                    Response::Error { code: ErrorCode::Internal, message: format!("not durably forgotten: {error}") }
                }
            },
            PageAdmin::Pin { ids, kind, ttl_ms } => {
                match store.pin_for(Some(&loads), &ids, kind, ttl_ms, deadline).await {
                    Ok(count) => Response::Count(count as u32),
                    Err(error) => Response::Error { code: ErrorCode::Busy, message: error.to_string() },
                }
            }
            PageAdmin::Pins(ids) => Response::Pins(store.tiers().pins(&ids).await),
            PageAdmin::Explain(ids) => Response::Explained(store.explain(&ids).await),
            PageAdmin::Hint { ids, generated, advice, retain_ms } => {
                Response::Count(store.hint(&ids, generated, advice, retain_ms, deadline).await as u32)
            }
            PageAdmin::Suspect(id) => Response::Count(store.tiers().recheck(&id) as u32),
            PageAdmin::Compare { id, crcs } => {
                let (account, _) = &loads;
                let compare = async {
                    // The header of the page's record may have to be read from L3.
                    let _charge = account.charge_read(BLOCK_BYTES as u64).await;
                    store.compare(&id, &crcs, deadline).await
                };
                let end = tokio::time::timeout_at(deadline.into(), compare).await;
                let late = PutEnd { outcome: CommitOutcome::Incomplete, generation: 0 };
                Response::Committed(vec![end.unwrap_or(late)])
            }
        }
    }
}

impl Connection {
    pub(super) async fn administer(&mut self, request: u64, operation: PageAdmin, deadline: Instant) -> io::Result<()> {
        let node = self.node.clone();
        let responder = self.responder(request, deadline);
        let loads = (self.account.clone(), self.page_bytes());
        self.spawn(request, operation.page_count(), async move {
            let response = operation.run(&node, loads, deadline).await;
            responder.send(response).await
        })
        .await
    }
}

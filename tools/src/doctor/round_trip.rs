//! One page through a node: put, get, compare, forget. Its namespace is new, and the page expires
//! by itself if the command ends early.

use super::Findings;
use larder_client::{Client, NewPage, PutOptions, PutOutcome, Tier};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::time::{Duration, Instant};

/// Lifetime of the page, if nothing forgets it.
const PAGE_TTL: Duration = Duration::from_secs(60);
/// Retries at a busy node, within the deadline.
const BUSY_RETRIES: u32 = 1000;
const GEOMETRY: PageGeometry = PageGeometry {
    dtype: KvDtype::F16,
    layers: 2,
    kv_heads: 2,
    head_dim: 64,
    page_tokens: 128,
    layers_per_part: 1,
    head_groups: 1,
};

/// Namespace that no other client has.
pub(super) fn namespace() -> NamespaceDescriptor {
    let (model, tenant) = ("larder-doctor".into(), "larder-doctor".into());
    NamespaceDescriptor { model, weights: rand::random(), geometry: GEOMETRY, tenant }
}

pub(super) async fn check(client: &Client, deadline: Instant, findings: &mut Findings) {
    let begin = Instant::now();
    match transfer(client, deadline).await {
        Ok((bytes, tier)) => findings.ok(
            "round trip",
            format!(
                "{} KiB put, read from {}, compared and forgotten in {:.1} ms; nothing is left",
                bytes >> 10,
                if tier == Tier::L3 { "L3" } else { "L2" },
                begin.elapsed().as_secs_f64() * 1e3
            ),
        ),
        Err((fact, action)) => findings.fail("round trip", fact, action),
    }
}

/// Moves a page there and back. Returns its bytes and the tier that served it.
async fn transfer(client: &Client, deadline: Instant) -> Result<(usize, Tier), (String, &'static str)> {
    let key = PageKey::chain(None, &[rand::random()]);
    let mut page = vec![0u8; GEOMETRY.page_bytes()];
    rand::fill(&mut page[..]);
    let new = NewPage::first(key);
    let options = PutOptions { ttl: Some(PAGE_TTL), busy_retries: BUSY_RETRIES };
    let outcomes = client.put_pages(vec![(new, page.clone().into())], options, deadline).await;
    match outcomes.first() {
        Some(PutOutcome::Stored) => {}
        Some(PutOutcome::Busy { .. }) => {
            return Err((
                "the node is busy: it refused the put until the deadline".into(),
                "see Backpressure in docs/operations.md, or raise --timeout",
            ));
        }
        outcome => return Err((format!("the put ended as {outcome:?}"), "see the node's log")),
    }
    let got = client.get(vec![(key, vec![0u8; page.len()])], deadline).await;
    // Before any verdict, so that the page is gone in any case.
    let forgotten = client.forget(&[key], deadline).await;
    let tier = match got.first() {
        Some((bytes, Some(tier))) if *bytes == page => *tier,
        Some((_, Some(_))) => return Err(("the node returned other bytes".into(), "stop the node and report a bug")),
        _ => {
            return Err((
                "the page was a miss right after its put".into(),
                "see the node's log; L2 may be too small for its load",
            ));
        }
    };
    if !forgotten.complete {
        return Err((
            "the node did not confirm the forget; the page expires within 60 s".into(),
            "check the L3 devices above: a forget needs all of them",
        ));
    }
    if client.locate(&[key], deadline).await != [None] {
        return Err(("the page is still there after its forget".into(), "stop the node and report a bug"));
    }
    Ok((page.len(), tier))
}

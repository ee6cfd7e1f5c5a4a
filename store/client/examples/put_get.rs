//! Puts pages, looks them up, gets them back and verifies them.
//!
//! Needs a running node, for example `larder store --listen 127.0.0.1:7700`.
//!
//! ```text
//! cargo run -p larder-client --example put_get -- larder://127.0.0.1:7700
//! ```

use bytes::Bytes;
use larder_client::{Client, ClientOptions, NewPage, PutOptions, PutOutcome, StoreUrl};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::error::Error;
use std::time::{Duration, Instant};

const PAGES: u32 = 16;

/// Pages of 32 tokens of a small model, 1 MiB each.
fn geometry() -> PageGeometry {
    PageGeometry {
        dtype: KvDtype::Bf16,
        layers: 16,
        kv_heads: 8,
        head_dim: 64,
        page_tokens: 32,
        layers_per_part: 4,
        head_groups: 1,
    }
}

fn payload(position: u32) -> Bytes {
    (0..geometry().page_bytes() as u32).map(|at| (at.wrapping_mul(31) + position) as u8).collect::<Vec<u8>>().into()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url: StoreUrl = std::env::args().nth(1).ok_or("usage: put_get larder://HOST:PORT")?.parse()?;
    // Clients share pages only if the whole descriptor is equal. `weights` is a digest of the
    // model's weights, so that two versions of a model never mix.
    let namespace = NamespaceDescriptor {
        model: "example".into(),
        weights: [0; 32],
        geometry: geometry(),
        tenant: "put_get".into(),
    };
    let client = Client::attach(url, Some(namespace), ClientOptions::default());
    if !client.ready(Duration::from_secs(60)).await {
        return Err("no store node is reachable".into());
    }
    let deadline = Instant::now() + Duration::from_secs(10);

    // The key of a page covers its tokens and those of all pages before it.
    let mut pages = Vec::new();
    let mut parent = None;
    for position in 0..PAGES {
        let tokens: Vec<u32> = (0..32).map(|token| position * 32 + token).collect();
        let key = PageKey::chain(parent.as_ref(), &tokens);
        let page = NewPage { key, parent: parent.unwrap_or(PageKey::NONE), position, token_ids: Vec::new() };
        pages.push((page, payload(position)));
        parent = Some(key);
    }
    let keys: Vec<PageKey> = pages.iter().map(|(page, _)| page.key).collect();
    let outcomes = client.put_pages(pages, PutOptions::default(), deadline).await;
    let stored = outcomes.iter().filter(|&&o| matches!(o, PutOutcome::Stored | PutOutcome::AlreadyThere)).count();
    println!("put {stored} of {PAGES} pages");

    // The lease keeps the prefix in memory until it is dropped, so that the get below finds it.
    let lookup = client.lookup(&keys, Duration::from_secs(10), deadline).await;
    println!("the store serves a prefix of {} pages: {:?}", lookup.tiers.len(), lookup.tiers);

    let buffers = keys[..lookup.tiers.len()].iter().map(|&key| (key, client.buffer(geometry().page_bytes())));
    let mut hits = 0;
    for (position, (buffer, tier)) in (0..).zip(client.get(buffers.collect(), deadline).await) {
        // A page can still be missed, for example if the node has restarted in between.
        if tier.is_some() {
            assert_eq!(buffer[..], payload(position)[..], "page {position} is not the one that was put");
            hits += 1;
        }
    }
    drop(lookup);
    println!("got {hits} pages, all with the bytes that were put");
    println!("{:?}", client.stats());
    Ok(())
}

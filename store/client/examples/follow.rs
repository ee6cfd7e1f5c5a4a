//! A reader follows a page that a writer is still putting: it receives each part as soon as the
//! writer has sent it. Decode engines start this way before prefill has ended.
//!
//! Needs a running node, for example `larder store --listen 127.0.0.1:7700`.
//!
//! ```text
//! cargo run -p larder-client --example follow -- larder://127.0.0.1:7700
//! ```

use bytes::Bytes;
use larder_client::{Client, ClientOptions, FollowEnd, NewPage, PutOutcome, StoreUrl};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use std::error::Error;
use std::time::{Duration, Instant, SystemTime};

/// Four parts of four layers each.
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

async fn attach(url: &StoreUrl) -> Result<Client, Box<dyn Error>> {
    let namespace = NamespaceDescriptor {
        model: "example".into(),
        weights: [0; 32],
        geometry: geometry(),
        tenant: "follow".into(),
    };
    let client = Client::attach(url.clone(), Some(namespace), ClientOptions::default());
    if client.ready(Duration::from_secs(60)).await { Ok(client) } else { Err("no store node is reachable".into()) }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url: StoreUrl = std::env::args().nth(1).ok_or("usage: follow larder://HOST:PORT")?.parse()?;
    // Two clients, as in two processes.
    let writer = attach(&url).await?;
    let reader = attach(&url).await?;
    let deadline = Instant::now() + Duration::from_secs(10);

    // A new key for each run, so that the page does not exist yet.
    let run = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.subsec_nanos();
    let key = PageKey::chain(None, &[run]);
    let begin = Instant::now();

    // The follow may start before the put.
    let follow = reader.follow(key, vec![0; geometry().page_bytes()], deadline);

    let mut put = writer.put(NewPage::first(key), deadline);
    let mut expected = Vec::new();
    for (part, bytes) in geometry().part_table().into_iter().enumerate() {
        // A prefill step computes the layers of the part here.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let bytes = Bytes::from(vec![part as u8 + 1; bytes as usize]);
        expected.extend_from_slice(&bytes);
        put.part(part, bytes);
        println!("{:>4} ms: passed part {part} to the writer", begin.elapsed().as_millis());
    }
    let outcome = put.commit(deadline).await;
    println!("{:>4} ms: commit: {outcome:?}", begin.elapsed().as_millis());
    if outcome != PutOutcome::Stored {
        return Err("the node did not store the page".into());
    }

    let (buffer, end) = follow.finish().await;
    println!("{:>4} ms: follow: {end:?}", begin.elapsed().as_millis());
    match end {
        FollowEnd::Sealed => assert_eq!(buffer, expected, "the page is not the one that was put"),
        FollowEnd::Aborted => return Err("the writer aborted its put".into()),
        FollowEnd::Miss => return Err("the page did not arrive in time".into()),
        FollowEnd::Busy => return Err("the node has no memory for the follow".into()),
    }
    println!("the reader has all {} bytes", buffer.len());
    Ok(())
}

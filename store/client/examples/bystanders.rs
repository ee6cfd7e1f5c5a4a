//! Cost of a page beside idle tenants, idle namespaces and quota rules of others.
//!
//! Starts nodes in this process and measures them over loopback. docs/internals/budgets.md quotes
//! its output.
//!
//! ```text
//! cargo run --release -p larder-client --example bystanders
//! ```

use bytes::Bytes;
use larder_client::{Client, ClientOptions, GetOptions, NewPage, PutOptions, PutOutcome, StoreUrl, Transport};
use larder_format::{KvDtype, NamespaceDescriptor, PageGeometry, PageKey};
use larder_node::{Node, NodeOptions};
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PAGE: usize = 4096;
const BATCH: u32 = 512;
const ROUNDS: u32 = 100;
/// Rounds are short, so the best of many is the cost without the machine's other work.
const BEST_OF: usize = 5;

fn descriptor(tenant: &str) -> NamespaceDescriptor {
    let geometry = PageGeometry {
        dtype: KvDtype::F32,
        layers: 1,
        kv_heads: 1,
        head_dim: 64,
        page_tokens: 8,
        layers_per_part: 1,
        head_groups: 1,
    };
    assert_eq!(geometry.page_bytes(), PAGE);
    NamespaceDescriptor { model: "bystanders".into(), weights: [1; 32], geometry, tenant: tenant.into() }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn pages(numbers: std::ops::Range<u32>) -> Vec<(NewPage, Bytes)> {
    let page = |number: u32| {
        let key = PageKey::chain(None, &[number]);
        (NewPage::first(key), Bytes::from(vec![number as u8; PAGE]))
    };
    numbers.map(page).collect()
}

async fn attach(node: &Node, tenant: &str) -> Result<Client, Box<dyn Error>> {
    let url = StoreUrl { nodes: vec![node.addr().to_string()], transport: Transport::Tcp, connections: 1 };
    let client = Client::attach(url, Some(descriptor(tenant)), ClientOptions::default());
    if client.ready(Duration::from_secs(60)).await { Ok(client) } else { Err("no connection".into()) }
}

async fn put(client: &Client, numbers: std::ops::Range<u32>) -> Result<(), Box<dyn Error>> {
    let options = PutOptions { busy_retries: 100, ..PutOptions::default() };
    let outcomes = client.put_pages(pages(numbers), options, soon()).await;
    if outcomes.iter().all(|&outcome| outcome == PutOutcome::Stored) { Ok(()) } else { Err("not stored".into()) }
}

fn options(quota_rules: u32) -> Result<NodeOptions, Box<dyn Error>> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let rule = |number: u32| {
        let namespace = format!("{number:08x}").parse()?;
        Ok::<_, String>(larder_node::NamespaceQuota { namespace, bytes: 1 << 30 })
    };
    Ok(NodeOptions {
        listen: any,
        admin_listen: Some(any),
        l2_bytes: 256 << 20,
        share_memory: Some(false),
        quotas: (0..quota_rules).map(rule).collect::<Result<_, _>>()?,
        ..NodeOptions::default()
    })
}

/// Microseconds per page of gets from L2.
async fn get_cost(client: &Client) -> Result<f64, Box<dyn Error>> {
    let mut best = f64::MAX;
    for _ in 0..BEST_OF {
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            let wanted = pages(0..BATCH).into_iter().map(|(page, _)| (page.key, vec![0; PAGE])).collect();
            let got = client.get_with(wanted, GetOptions { busy_retries: 100, ..GetOptions::default() }, soon()).await;
            if got.iter().any(|(_, fetched)| fetched.tier().is_none()) {
                return Err("a page is missing".into());
            }
        }
        best = best.min(begin.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS * BATCH));
    }
    Ok(best)
}

/// Microseconds per page of puts.
async fn put_cost(client: &Client) -> Result<f64, Box<dyn Error>> {
    let mut best = f64::MAX;
    let mut next = 1_000_000;
    for _ in 0..BEST_OF {
        let begin = Instant::now();
        for _ in 0..10 {
            put(client, next..next + BATCH).await?;
            next += BATCH;
        }
        best = best.min(begin.elapsed().as_secs_f64() * 1e6 / f64::from(10 * BATCH));
    }
    Ok(best)
}

/// Milliseconds of a scrape of `/metrics`, and its samples with the label "namespace".
async fn scrape(node: &Node) -> Result<(f64, usize), Box<dyn Error>> {
    let address = node.admin_addr().ok_or("no admin address")?;
    let mut best = f64::MAX;
    let mut text = String::new();
    for _ in 0..50 {
        let begin = Instant::now();
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").await?;
        text.clear();
        stream.read_to_string(&mut text).await?;
        best = best.min(begin.elapsed().as_secs_f64() * 1e3);
    }
    Ok((best, text.matches("{namespace=").count()))
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    for bystanders in [0, 900] {
        let node = Node::start(options(0)?).await?;
        let mut idle = Vec::new();
        for number in 0..bystanders {
            let client = attach(&node, &format!("tenant {number}")).await?;
            put(&client, 0..1).await?;
            idle.push(client);
        }
        let client = attach(&node, "busy").await?;
        put(&client, 0..BATCH).await?;
        let cost = get_cost(&client).await?;
        let (scrape_ms, samples) = scrape(&node).await?;
        println!(
            "{bystanders:>4} idle tenants: get {cost:.2} us per page, scrape {scrape_ms:.2} ms with {samples} namespaces"
        );
        drop(idle);
        node.shutdown().await;
    }
    for rules in [0, 900] {
        let dir = tempfile::tempdir()?;
        let options = NodeOptions { data_dir: Some(dir.path().into()), l3_bytes: 2 << 30, ..options(rules)? };
        let node = Node::start(options).await?;
        let client = attach(&node, "busy").await?;
        println!("{rules:>4} quota rules: put {:.2} us per page", put_cost(&client).await?);
        node.shutdown().await;
    }
    Ok(())
}

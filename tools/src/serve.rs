//! One process of an installation: a store node, an engine, a router.

use crate::output::say;
use crate::signals;
use crate::tiers::{self, TierArgs};
use anyhow::{Context, Result};
use bytesize::ByteSize;
use clap::Args;
use larder_client::StoreUrl;
use larder_node::{Executor, FabricOptions, L3Device, Node, NodeOptions, RdmaOptions};
use larder_router::{Router, RouterOptions};
use larder_worker::{Engine, EngineOptions, Role};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// `larder store`
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Address of the data port
    #[arg(long, default_value = "127.0.0.1:7700")]
    listen: SocketAddr,
    /// Address of /healthz, /metrics and /status
    #[arg(long)]
    admin_listen: Option<SocketAddr>,
    /// Directory of the node's identity and, unless --l3 is given, its L3; without both the node keeps pages in DRAM only,
    /// and with --l3 alone its identity is kept beside the first log
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// DRAM for pages (L2)
    #[arg(long, default_value = "1GiB")]
    l2: ByteSize,
    /// Most disk for pages in the data directory (L3); 0 for none
    #[arg(long, default_value = "4GiB", conflicts_with = "l3")]
    l3_bytes: ByteSize,
    /// Directory on a device, and most bytes of pages there (L3), e.g. /mnt/nvme0/larder:1TiB; may be given several times,
    /// once per device
    #[arg(long, value_name = "DIRECTORY:SIZE", value_parser = tiers::device)]
    l3: Vec<L3Device>,
    #[command(flatten)]
    tiers: TierArgs,
    /// Bytes of L2 that are verified per second in the background; 0 for none
    #[arg(long, default_value = "64MiB")]
    scrub: ByteSize,
    /// Bytes per second that are read at most to verify each L3 device, once a day; 0 for only when asked (POST /scrub)
    #[arg(long, default_value = "32MiB")]
    l3_scrub: ByteSize,
    /// Most seconds that a stop waits for pages on their way to L3; what is left then is lost, and the log says how much
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    drain: u64,
    /// Whether processes of this machine and user read pages in place: always, never, or auto: if that costs no huge pages, or
    /// there is no L3
    #[arg(long, default_value = "auto", value_name = "WHEN", value_parser = share_memory)]
    share_memory: ShareMemory,
    /// Whether clients that can read and write pages by RDMA: auto (where this machine has devices) or off
    #[arg(long, default_value = "auto", value_name = "WHEN", value_parser = rdma)]
    rdma: RdmaEnabled,
    /// RDMA devices, e.g. mlx5_0,mlx5_1; all with an active port if left out
    #[arg(long, value_delimiter = ',', value_name = "DEVICES")]
    rdma_devices: Vec<String>,
    /// Most microseconds for which the node looks for a client's next request again and again before it sleeps, where the last
    /// ones came as soon and nobody else wants the processor; 0 for never
    #[arg(long, default_value_t = 200, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=10_000))]
    spin: u64,
    /// What runs the devices of L3: glommio, or thread where that cannot be had
    #[arg(long, default_value_t)]
    l3_executor: Executor,
}

/// `larder prefill`, `larder decode`
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// The store, e.g. larder://10.0.0.1:7700,10.0.0.2:7700/
    #[arg(long, env = "LARDER_STORE")]
    store: StoreUrl,
    /// Model folder as Hugging Face lays it out: config.json, *.safetensors, tokenizer.json
    #[arg(long)]
    model: PathBuf,
    /// Name under which the model is served; the folder's name if left out
    #[arg(long)]
    model_name: Option<String>,
    /// Address of the engine's HTTP server; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// URL under which routers reach this engine, if it is not the address listened on
    #[arg(long)]
    advertise: Option<String>,
    /// Tokens per page; all engines of a model must agree
    #[arg(long, default_value_t = 32)]
    page_tokens: u32,
    /// Memory for the engine's own pages (L1)
    #[arg(long, default_value = "256MiB")]
    l1: ByteSize,
    /// Prompt tokens computed in one step
    #[arg(long, default_value_t = 512)]
    chunk_tokens: usize,
    /// Sequences in one step
    #[arg(long, default_value_t = 64)]
    max_batch: usize,
}

/// `larder router`
#[derive(Debug, Args)]
pub struct RouterArgs {
    /// The store, e.g. larder://10.0.0.1:7700,10.0.0.2:7700/
    #[arg(long, env = "LARDER_STORE")]
    store: StoreUrl,
    /// Address of the OpenAI API
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Address of the admin API and the metrics
    #[arg(long, default_value = "127.0.0.1:8001")]
    admin_listen: SocketAddr,
    /// Prompt tokens to be computed below which the decode engine computes them itself
    #[arg(long, default_value_t = 64)]
    prefill_min_tokens: u32,
    /// Most seconds for a request
    #[arg(long, default_value_t = 120)]
    request_timeout: u64,
}

/// Whether a node shares its memory; `None` is for it to decide.
#[derive(Debug, Clone, Copy)]
struct ShareMemory(Option<bool>);

fn share_memory(when: &str) -> Result<ShareMemory, String> {
    match when {
        "auto" => Ok(ShareMemory(None)),
        "always" => Ok(ShareMemory(Some(true))),
        "never" => Ok(ShareMemory(Some(false))),
        _ => Err("auto, always or never".into()),
    }
}

/// Whether pages move by RDMA.
#[derive(Debug, Clone, Copy)]
struct RdmaEnabled(bool);

fn rdma(when: &str) -> Result<RdmaEnabled, String> {
    match when {
        "auto" => Ok(RdmaEnabled(true)),
        "off" => Ok(RdmaEnabled(false)),
        _ => Err("auto or off".into()),
    }
}

/// Runs a store node until it is asked to stop.
pub async fn store(args: StoreArgs) -> Result<()> {
    let mut options = NodeOptions {
        listen: args.listen,
        admin_listen: args.admin_listen,
        data_dir: args.data_dir,
        l2_bytes: args.l2.as_u64(),
        l3_bytes: args.l3_bytes.as_u64(),
        l3: args.l3,
        scrub_bytes_per_second: args.scrub.as_u64(),
        l3_scrub_bytes_per_second: args.l3_scrub.as_u64(),
        l3_executor: args.l3_executor,
        drain: Duration::from_secs(args.drain),
        spin: Duration::from_micros(args.spin),
        share_memory: args.share_memory.0,
        rdma: RdmaOptions {
            enabled: args.rdma.0,
            fabric: FabricOptions { devices: args.rdma_devices, ..FabricOptions::default() },
            ..RdmaOptions::default()
        },
        ..NodeOptions::default()
    };
    args.tiers.apply(&mut options);
    let node = Node::start(options).await?;
    say!("store node {} at larder://{}/", node.node_id(), node.addr());
    if let Some(addr) = node.admin_addr() {
        say!("admin at http://{addr}");
    }
    signals::stop_requested().await?;
    node.shutdown().await;
    Ok(())
}

/// Runs an engine until it is asked to stop.
pub async fn engine(role: Role, args: EngineArgs) -> Result<()> {
    let mut options = EngineOptions::new(role, args.model, args.store);
    options.model_name = args.model_name;
    options.listen = args.listen;
    options.advertise = args.advertise;
    options.page_tokens = args.page_tokens;
    options.l1_bytes = args.l1.as_u64() as usize;
    options.chunk_tokens = args.chunk_tokens;
    options.max_batch = args.max_batch;
    let engine = Engine::start(options).await?;
    say!("{role} engine of {} at http://{}", engine.info().model, engine.addr());
    signals::stop_requested().await?;
    engine.shutdown().await;
    Ok(())
}

/// Runs a router until it is asked to stop.
pub async fn router(args: RouterArgs) -> Result<()> {
    let mut options = RouterOptions::new(args.store);
    options.listen = args.listen;
    options.admin_listen = args.admin_listen;
    options.prefill_min_tokens = args.prefill_min_tokens;
    options.request_timeout = Duration::from_secs(args.request_timeout);
    let router = Router::start(options).await.context("router")?;
    say!("OpenAI API at http://{}/v1, admin at http://{}", router.addr(), router.admin_addr());
    signals::stop_requested().await?;
    router.shutdown().await;
    Ok(())
}

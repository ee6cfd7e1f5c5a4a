//! Commands that run one process of an installation: a store node, an engine or a router.

use crate::http_args::{ApiArgs, HttpArgs};
use crate::model_args::ModelArgs;
use crate::output::say;
use crate::signals::StopSignals;
use crate::sizes;
use crate::tiers::{self, TierArgs};
use anyhow::{Context, Result};
use bytesize::ByteSize;
use clap::Args;
use larder_client::StoreUrl;
use larder_node::{
    Executor, FabricOptions, L3_QUEUE_DEPTH_DEFAULT, L3Device, NamespacePrefix, Node, NodeOptions, RdmaOptions,
};
use larder_router::{Router, RouterOptions};
use larder_worker::{Engine, EngineOptions, EngineStore, L3Path, Role};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Address of the data port
    #[arg(long, default_value = "127.0.0.1:7700", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Address of the HTTP endpoints /healthz, /metrics, /status, /scrub and /namespaces. Without
    /// it they are off
    #[arg(long, value_name = "ADDRESS")]
    admin_listen: Option<SocketAddr>,
    /// Address of the Redis port, for clients that speak the Redis protocol. Without it the port is
    /// off. It has no password: keep it on a private network
    #[arg(long, value_name = "ADDRESS")]
    redis_listen: Option<SocketAddr>,
    #[command(flatten)]
    events: EventArgs,
    /// Directory of the node's identity and, unless --l3 is given, of its L3. Without it and --l3
    /// the node keeps pages in DRAM only and loses them when it stops. With --l3 alone, the
    /// identity is stored beside the first log
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,
    /// DRAM for cached pages (L2), at least 32 MiB
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    l2: ByteSize,
    /// Maximum disk space of the L3 in the data directory. 0 disables it
    #[arg(long, default_value = "4GiB", conflicts_with = "l3", value_name = "SIZE")]
    l3_bytes: ByteSize,
    /// Directory on an NVMe device and maximum size of the L3 log there, e.g.
    /// `/mnt/nvme0/larder:1TiB`. Give it once per device
    #[arg(long, value_name = "DIRECTORY:SIZE", value_parser = tiers::device)]
    l3: Vec<L3Device>,
    #[command(flatten)]
    tiers: TierArgs,
    /// Rate of the background checksum verification of L2, in bytes per second. 0 disables it
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    l2_scrub_rate: ByteSize,
    /// Maximum rate of the daily checksum verification of each L3 device, in bytes per second. The
    /// node uses what a day and the bytes of the log ask for, at least 32 MiB. With 0 it runs only
    /// on request (POST /scrub)
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    l3_scrub_rate: ByteSize,
    /// Maximum time to flush pages to L3 on shutdown, in seconds. Pages not flushed by then are
    /// lost; the log reports how many
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    drain_timeout: u64,
    /// Shared memory for clients of the same machine and user, which then read pages in place:
    /// `always`, `never`, or `auto`. With `auto` the node shares memory unless that costs its L3
    /// huge pages
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = share_memory)]
    share_memory: ShareMemory,
    /// RDMA transfers: `auto` uses them where this machine has devices, `off` never
    #[arg(long, default_value = "auto", value_name = "MODE", value_parser = rdma)]
    rdma: RdmaMode,
    /// RDMA devices, e.g. `mlx5_0,mlx5_1`. Default: all devices with an active port
    #[arg(long, value_delimiter = ',', value_name = "DEVICES")]
    rdma_devices: Vec<String>,
    /// Maximum time that a TCP connection polls for the next request before its thread sleeps, in
    /// microseconds. It polls only while requests arrive that fast and no other thread needs the
    /// processor. 0 disables polling
    #[arg(long, default_value_t = 200, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=10_000))]
    busy_poll_us: u64,
    /// Maximum number of requests with each L3 device at a time, 1 to 1024. More can raise the
    /// throughput of a device that serves many at once, and every request then takes longer
    #[arg(long, default_value_t = L3_QUEUE_DEPTH_DEFAULT, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    l3_queue_depth: u32,
    /// Executor of L3 I/O: `glommio`, or `thread` where glommio is not available
    #[arg(long, default_value_t, value_name = "EXECUTOR")]
    l3_executor: Executor,
    #[command(flatten)]
    http: HttpArgs,
}

#[derive(Debug, Args)]
struct EventArgs {
    /// Address of the stream of KV events: pages that L2 stores and removes, for ZeroMQ subscribers
    /// that follow vLLM or SGLang. Without it there are no events. It has no password: keep it on a
    /// private network
    #[arg(long, value_name = "ADDRESS")]
    kv_events_listen: Option<SocketAddr>,
    /// Address at which ZeroMQ clients ask for older KV events and for the pages of L2
    #[arg(long, value_name = "ADDRESS", requires = "kv_events_listen")]
    kv_events_replay_listen: Option<SocketAddr>,
    /// Topic of the KV events, at most 255 bytes. Default: `kv@NODE@`, with the name of the node
    #[arg(long, value_name = "TOPIC", requires = "kv_events_listen")]
    kv_events_topic: Option<String>,
    /// Namespaces with KV events, given by the hex digits that `larder status --wide` shows.
    /// Default: all
    #[arg(long, value_name = "NAMESPACE", requires = "kv_events_listen")]
    kv_events_namespace: Option<NamespacePrefix>,
    /// KV events also of the pages that L3 stores and removes. They cost 24 bytes of memory per
    /// page on L3
    #[arg(long, requires = "kv_events_listen")]
    kv_events_l3: bool,
}

#[derive(Debug, Args)]
pub struct EngineArgs {
    /// URL of the store, e.g. `larder://10.0.0.1:7700,10.0.0.2:7700/`, or
    /// `redis://10.0.0.1:6379/0` for a server that speaks the Redis protocol
    #[arg(long, env = "LARDER_STORE", hide_env_values = true, value_name = "URL")]
    store: EngineStore,
    /// URL of the nodes at which an engine on a Redis server registers itself, so that routers find
    /// it. Default: none. Without a Redis server, an engine registers at its store
    #[arg(long, value_name = "URL")]
    register: Option<StoreUrl>,
    /// Model folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json
    #[arg(long, value_name = "DIRECTORY")]
    model: PathBuf,
    #[command(flatten)]
    load: ModelArgs,
    /// Model name in the API. Default: the name of the folder
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Address of the engine's HTTP server. Port 0 picks a free port
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// URL that routers use to reach this engine. Default: the listen address
    #[arg(long, value_name = "URL")]
    advertise: Option<String>,
    /// Name of the kernels' rounding. Engines share pages only if it is the same. Default: measured
    /// with a probe at start. Declare one name for engines that you know to compute the same bits
    #[arg(long, value_name = "NAME")]
    numerics: Option<String>,
    /// Way of pages from the L3 of a node on this machine to the engine. `store`: through the node.
    /// `gds`: the engine reads the node's files itself, and falls back to the node for pages that
    /// it cannot read. `auto`: `gds` with a CUDA device, otherwise `store`
    #[arg(long, default_value_t = L3Path::Auto, value_name = "PATH")]
    l3_path: L3Path,
    /// Maximum number of prompt tokens computed in one step
    #[arg(long, default_value_t = 512, value_name = "TOKENS")]
    chunk_tokens: usize,
    /// Maximum number of sequences in one step
    #[arg(long, default_value_t = 64, value_name = "SEQUENCES")]
    max_batch: usize,
    #[command(flatten)]
    http: HttpArgs,
}

#[derive(Debug, Args)]
pub struct RouterArgs {
    /// URL of the store, e.g. `larder://10.0.0.1:7700,10.0.0.2:7700/`
    #[arg(long, env = "LARDER_STORE", hide_env_values = true, value_name = "URL")]
    store: StoreUrl,
    /// Address of the OpenAI API
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Address of the admin API and of /metrics
    #[arg(long, default_value = "127.0.0.1:8001", value_name = "ADDRESS")]
    admin_listen: SocketAddr,
    /// Minimum number of uncached prompt tokens for a separate prefill engine. Shorter prompts are
    /// computed by the decode engine
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    prefill_min_tokens: u32,
    #[command(flatten)]
    api: ApiArgs,
    #[command(flatten)]
    http: HttpArgs,
}

#[derive(Debug, Clone, Copy)]
struct ShareMemory(Option<bool>);

fn share_memory(mode: &str) -> Result<ShareMemory, String> {
    match mode {
        "auto" => Ok(ShareMemory(None)),
        "always" => Ok(ShareMemory(Some(true))),
        "never" => Ok(ShareMemory(Some(false))),
        _ => Err("expected auto, always or never".into()),
    }
}

#[derive(Debug, Clone, Copy)]
struct RdmaMode {
    enabled: bool,
}

fn rdma(mode: &str) -> Result<RdmaMode, String> {
    match mode {
        "auto" => Ok(RdmaMode { enabled: true }),
        "off" => Ok(RdmaMode { enabled: false }),
        _ => Err("expected auto or off".into()),
    }
}

/// Runs a store node until SIGINT or SIGTERM. It then stops accepting work and flushes pages to L3
/// before it returns.
pub async fn store(args: StoreArgs) -> Result<()> {
    let mut options = NodeOptions {
        listen: args.listen,
        admin_listen: args.admin_listen,
        redis_listen: args.redis_listen,
        kv_events_listen: args.events.kv_events_listen,
        kv_events_replay_listen: args.events.kv_events_replay_listen,
        kv_events_topic: args.events.kv_events_topic,
        kv_events_namespace: args.events.kv_events_namespace,
        kv_events_l3: args.events.kv_events_l3,
        data_dir: args.data_dir,
        l2_bytes: args.l2.as_u64(),
        l3_bytes: args.l3_bytes.as_u64(),
        l3: args.l3,
        scrub_bytes_per_second: args.l2_scrub_rate.as_u64(),
        l3_scrub_bytes_per_second: args.l3_scrub_rate.as_u64(),
        l3_queue_depth: args.l3_queue_depth,
        l3_executor: args.l3_executor,
        drain_timeout: Duration::from_secs(args.drain_timeout),
        busy_poll: Duration::from_micros(args.busy_poll_us),
        share_memory: args.share_memory.0,
        rdma: RdmaOptions {
            enabled: args.rdma.enabled,
            fabric: FabricOptions { devices: args.rdma_devices, ..FabricOptions::default() },
            ..RdmaOptions::default()
        },
        ..NodeOptions::default()
    };
    args.tiers.apply(&mut options);
    args.http.apply(&mut options.http);
    let mut stop = StopSignals::listen()?;
    let Some(started) = stop.unless_received(Node::start(options)).await else { return Ok(()) };
    let node = started.context("the store node cannot start")?;
    say!("store node {} at larder://{}/", node.node_id(), node.addr());
    if let Some(addr) = node.admin_addr() {
        say!("metrics at http://{addr}/metrics, status at http://{addr}/status");
    }
    if let Some(addr) = node.redis_addr() {
        say!("Redis protocol at redis://{addr}");
    }
    if let Some(addr) = node.kv_events_addr() {
        say!("KV events at tcp://{addr}");
    }
    if let Some(addr) = node.kv_events_replay_addr() {
        say!("replays of KV events at tcp://{addr}");
    }
    stop.received().await;
    node.shutdown().await;
    Ok(())
}

pub async fn engine(role: Role, args: EngineArgs) -> Result<()> {
    let loading = tokio::task::spawn_blocking({
        let folder = args.model.clone();
        move || args.load.load(&folder)
    });
    let loaded = loading.await??;
    let shape = args.load.shape(&loaded.model);
    let mut options = EngineOptions::new(role, args.model, args.store);
    options.preloaded = Some(loaded);
    options.model_name = args.model_name;
    options.listen = args.listen;
    options.advertise = args.advertise;
    options.page_tokens = shape.page_tokens;
    options.register = args.register;
    options.numerics = args.numerics;
    options.l1_bytes = args.load.l1.map_or_else(|| sizes::l1_alone(shape), |l1| l1.as_u64()) as usize;
    options.l3_path = args.l3_path;
    options.chunk_tokens = args.chunk_tokens;
    options.max_batch = args.max_batch;
    args.http.apply(&mut options.http);
    let mut stop = StopSignals::listen()?;
    let Some(started) = stop.unless_received(Engine::start(options)).await else { return Ok(()) };
    let engine = started.with_context(|| format!("the {role} engine cannot start"))?;
    say!("{role} engine of {} at http://{}", engine.info().model, engine.addr());
    say!("context {}", shape.context_text(engine.info().max_context));
    stop.received().await;
    engine.shutdown().await;
    Ok(())
}

pub async fn router(args: RouterArgs) -> Result<()> {
    let mut options = RouterOptions::new(args.store);
    options.listen = args.listen;
    options.admin_listen = args.admin_listen;
    options.prefill_min_tokens = args.prefill_min_tokens;
    args.api.apply(&mut options);
    args.http.apply(&mut options.http);
    args.http.apply_common(&mut options.admin_http);
    let mut stop = StopSignals::listen()?;
    let Some(started) = stop.unless_received(Router::start(options)).await else { return Ok(()) };
    let router = started.context("the router cannot start")?;
    say!("OpenAI API at http://{}/v1, admin API at http://{}", router.addr(), router.admin_addr());
    stop.received().await;
    router.shutdown().await;
    Ok(())
}

//! `larder up`: store nodes, engines and a router in one process.
//!
//! The parts talk to each other exactly as they would across machines: over the data port and HTTP,
//! by URL.

use crate::bundled;
use crate::http_args::{ApiArgs, HttpArgs};
use crate::model_args::ModelArgs;
use crate::output::say;
use crate::signals::StopSignals;
use crate::sizes::{ModelShape, Sizes};
use crate::tiers::TierArgs;
use crate::verify::NODE_DIR_PREFIX;
use anyhow::{Context, Result, anyhow, bail};
use bytesize::ByteSize;
use clap::Parser;
use larder_client::{DEFAULT_CONNECTIONS, StoreUrl, Transport};
use larder_memory::machine;
use larder_memory::plan::MemoryPlan;
use larder_node::{Node, NodeOptions};
use larder_router::{Router, RouterHandle, RouterOptions};
use larder_worker::memory_plan::CONSTRAINT_WORKERS;
use larder_worker::trials::ConstraintTrials;
use larder_worker::worker_process::WorkerCommand;
use larder_worker::{Engine, EngineHandle, EngineOptions, Preloaded, Role};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const DATA_DIR: &str = "larder-data";
/// File with the URL of the router's admin API, in the data directory. Each node directory has one
/// with the URL of the node's admin endpoints. The files exist while `up` runs.
pub const ADMIN_URL_FILE: &str = "admin.url";
/// Longer than one page, so that the second identical request reports cached tokens.
const PROMPT: &str = "In the beginning God created the heaven and the earth. And the earth was without form, and void; \
                      and darkness was upon the face of the deep. And the Spirit of God";
const READY_TIMEOUT: Duration = Duration::from_secs(30);
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];

#[derive(Debug, Parser)]
pub struct Args {
    /// Address of the OpenAI API
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Address of the router's admin API. Default: a free port on 127.0.0.1
    #[arg(long, default_value = "127.0.0.1:0", hide_default_value = true, value_name = "ADDRESS")]
    admin_listen: SocketAddr,
    /// Directory of pages and models. The next start finds its pages there
    #[arg(long, default_value = DATA_DIR, value_name = "DIRECTORY")]
    data_dir: PathBuf,
    /// Model folder in Hugging Face layout. Default: the bundled model
    #[arg(long, value_name = "DIRECTORY")]
    model: Option<PathBuf>,
    #[command(flatten)]
    load: ModelArgs,
    /// Model name that clients use. Default: the name of the folder
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Number of store nodes
    #[arg(long, default_value_t = 1, value_name = "NODES", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// DRAM for cached pages (L2) of each store node, at least 32 MiB. Default: what
    /// L1 leaves of three quarters of the free memory, at most as much as both engines have
    #[arg(long, value_name = "SIZE")]
    l2: Option<ByteSize>,
    /// Maximum disk space for pages (L3) of each store node. 0 disables L3
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    l3_bytes: ByteSize,
    #[command(flatten)]
    tiers: TierArgs,
    #[command(flatten)]
    api: ApiArgs,
    #[command(flatten)]
    http: HttpArgs,
}

impl Args {
    fn node_options(&self, number: u16, l2_bytes: u64) -> NodeOptions {
        let free_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut options = NodeOptions {
            listen: free_port,
            admin_listen: Some(free_port),
            data_dir: Some(node_dir(&self.data_dir, number)),
            l2_bytes,
            l3_bytes: self.l3_bytes.as_u64(),
            ..NodeOptions::default()
        };
        self.tiers.apply(&mut options);
        self.http.apply_common(&mut options.http);
        options
    }

    fn engine_options(&self, role: Role, folder: &Path, model: &LoadedModel, store: StoreUrl) -> EngineOptions {
        let mut options = EngineOptions::new(role, folder, store.into());
        options.preloaded = Some(model.preloaded.clone());
        options.page_tokens = model.shape.page_tokens;
        options.l1_bytes = model.sizes.l1 as usize;
        options.model_name = self.model_name.clone();
        options.request_timeout = self.api.request_timeout();
        self.http.apply_common(&mut options.http);
        options
    }

    fn router_options(&self, store: StoreUrl) -> RouterOptions {
        let mut options = RouterOptions::new(store);
        options.listen = self.listen;
        options.admin_listen = self.admin_listen;
        self.api.apply(&mut options);
        self.http.apply(&mut options.http);
        self.http.apply_common(&mut options.admin_http);
        options
    }

    /// Memory of all parts together, with what they share counted once. Each part compares only its
    /// own with the machine.
    fn memory_plan(&self, folder: &Path, model: &LoadedModel) -> MemoryPlan {
        // No plan depends on the addresses of the nodes.
        let store = store_url(Vec::new());
        let [prefill, decode] = ROLES.map(|role| {
            let options = self.engine_options(role, folder, model, store.clone());
            larder_worker::memory_plan::of(&options, &model.preloaded.model)
        });
        let shared = [larder_worker::memory_plan::WEIGHTS, "tokenizer", "process"];
        // The router has the workers of all.
        let [prefill, decode] = [prefill, decode].map(|plan| plan.without(CONSTRAINT_WORKERS));
        let engines = [prefill, shared.into_iter().fold(decode, |plan, part| plan.without(part))];
        let router = larder_router::memory_plan::of(&self.router_options(store)).without("process");
        let l2_bytes = model.sizes.l2;
        // Each node has tables and threads of its own in its `process`.
        let nodes = (0..self.nodes).map(|number| larder_node::memory_plan::of(&self.node_options(number, l2_bytes)));
        MemoryPlan::of_all("process", nodes.chain(engines).chain([router]))
    }
}

fn store_url(nodes: Vec<String>) -> StoreUrl {
    StoreUrl { nodes, transport: Transport::Auto, connections: DEFAULT_CONNECTIONS }
}

/// The loaded model, and the sizes chosen for it.
struct LoadedModel {
    preloaded: Preloaded,
    shape: ModelShape,
    sizes: Sizes,
}

/// Everything that `up` has started, in this order. Shutdown goes the other way, so no part
/// outlives a part that it needs.
#[derive(Default)]
struct LocalCluster {
    nodes: Vec<Node>,
    engines: Vec<EngineHandle>,
    router: Option<RouterHandle>,
    url_files: Vec<PathBuf>,
}

impl LocalCluster {
    /// Stops everything, clients before servers, so that no part fails for lack of another one. The
    /// URL files go first, so that no command finds a node that stops.
    async fn shutdown(self) {
        for file in &self.url_files {
            let _ = std::fs::remove_file(file);
        }
        if let Some(router) = self.router {
            router.shutdown().await;
        }
        for engine in self.engines {
            engine.shutdown().await;
        }
        for node in self.nodes {
            node.shutdown().await;
        }
    }

    fn write_url(&mut self, dir: &Path, address: SocketAddr) -> Result<()> {
        let file = dir.join(ADMIN_URL_FILE);
        std::fs::write(&file, format!("http://{address}\n"))
            .with_context(|| format!("cannot write {}", file.display()))?;
        self.url_files.push(file);
        Ok(())
    }

    async fn start_nodes(&mut self, args: &Args, l2_bytes: u64) -> Result<()> {
        for number in 0..args.nodes {
            let options = args.node_options(number, l2_bytes);
            let node = Node::start(options).await.with_context(|| format!("store node {number} cannot start"))?;
            let admin = node.admin_addr();
            self.nodes.push(node);
            if let Some(admin) = admin {
                self.write_url(&node_dir(&args.data_dir, number), admin)?;
            }
        }
        Ok(())
    }

    async fn start_serving(&mut self, args: &Args, folder: &Path, model: &LoadedModel) -> Result<()> {
        let store = store_url(self.nodes.iter().map(|node| node.addr().to_string()).collect());
        // Shared, so that engines try no constraint again that the router has tried.
        let trials = Arc::new(ConstraintTrials::new(WorkerCommand::default()));
        for role in ROLES {
            let mut options = args.engine_options(role, folder, model, store.clone());
            options.constraint_trials = trials.clone();
            let engine = Engine::start(options).await.with_context(|| format!("the {role} engine cannot start"))?;
            self.engines.push(engine);
        }
        let mut options = args.router_options(store);
        options.constraint_trials = Some(trials);
        let router = Router::start(options).await.context("the router cannot start")?;
        let ready = router.wait_ready(READY_TIMEOUT).await;
        let admin = router.admin_addr();
        self.router = Some(router);
        if !ready {
            bail!(
                "the engines did not register with the router within {} s; `--log info` shows why",
                READY_TIMEOUT.as_secs()
            );
        }
        self.write_url(&args.data_dir, admin)
    }
}

/// Starts everything, prints the addresses, and runs until SIGINT or SIGTERM. If a part cannot
/// start, those that run are stopped first.
pub async fn run(args: Args) -> Result<()> {
    let begin = Instant::now();
    let mut cluster = LocalCluster::default();
    let mut stop = StopSignals::listen()?;
    let started = stop.unless_received(start(&args, &mut cluster)).await;
    let started = started.unwrap_or_else(|| Err(anyhow!("stopped before the start was complete")));
    match started {
        Ok(model) => print_addresses(&args, &cluster, &model, begin.elapsed()),
        Err(error) => {
            cluster.shutdown().await;
            return Err(error);
        }
    }
    stop.received().await;
    eprintln!("stopping");
    cluster.shutdown().await;
    Ok(())
}

async fn start(args: &Args, cluster: &mut LocalCluster) -> Result<LoadedModel> {
    // Fails on a port in use before anything is created on disk or started.
    if let Err(error) = tokio::net::TcpListener::bind(args.listen).await {
        bail!("cannot listen on {}: {error}; choose another address with --listen [LRD0501]", args.listen);
    }
    if let Err(error) = std::fs::create_dir_all(&args.data_dir) {
        bail!("cannot create {}: {error}; choose another --data-dir [LRD0103]", args.data_dir.display());
    }
    let folder = match &args.model {
        Some(folder) => folder.clone(),
        None => bundled::unpack(&args.data_dir)?,
    };
    let loading = tokio::task::spawn_blocking({
        let folder = folder.clone();
        let load = args.load;
        move || load.load(&folder)
    });
    let preloaded = loading.await??;
    let shape = args.load.shape(&preloaded.model);
    // Only now is it known how much memory the weights have left.
    let sizes = Sizes::for_up(shape, args.nodes, args.load.l1, args.l2);
    let model = LoadedModel { preloaded, shape, sizes };
    // The plan needs valid options. A node says itself what is wrong with them.
    if args.node_options(0, sizes.l2).validate().is_ok() {
        let plan = args.memory_plan(&folder, &model);
        // With the default sizes, `up` must start on small machines.
        let is_chosen = args.load.l1.is_some() || args.l2.is_some() || args.nodes > 1;
        match plan.check(machine::total()) {
            Err(refusal) if is_chosen => bail!("{refusal} [LRD0106]"),
            Err(refusal) => tracing::warn!("{refusal} [LRD0106]"),
            // The engines and the router report their limits.
            Ok(_) => {}
        }
        tracing::info!(bytes = plan.total(), "memory of this process, at most: {plan}");
    }
    cluster.start_nodes(args, sizes.l2).await?;
    cluster.start_serving(args, &folder, &model).await?;
    Ok(model)
}

fn node_dir(data_dir: &Path, number: u16) -> PathBuf {
    data_dir.join(format!("{NODE_DIR_PREFIX}{number}"))
}

/// Returns the URLs of the node admin endpoints that a running `up` wrote below its data directory.
/// Shutdown removes them, so they may be stale only after a crash.
pub fn node_admin_urls(data_dir: &Path) -> Vec<String> {
    // `up` numbers its nodes without gaps.
    let urls = (0..).map_while(|number| std::fs::read_to_string(node_dir(data_dir, number).join(ADMIN_URL_FILE)).ok());
    urls.map(|url| url.trim().to_string()).collect()
}

fn print_addresses(args: &Args, cluster: &LocalCluster, loaded: &LoadedModel, duration: Duration) {
    let (Some(router), Some(engine)) = (&cluster.router, cluster.engines.first()) else { return };
    let model = &engine.info().model;
    let address = router.addr();
    let store: Vec<String> = cluster.nodes.iter().map(|node| node.addr().to_string()).collect();
    let data = args.data_dir.display();
    say!("larder is up ({:.1} s): http://{address}/v1 serves {model}", duration.as_secs_f64());
    say!("  store    larder://{}/", store.join(","));
    say!("  router   http://{}   admin API and /metrics", router.admin_addr());
    for (number, node) in cluster.nodes.iter().enumerate() {
        if let Some(admin) = node.admin_addr() {
            say!("  node {number}   http://{admin}   /metrics, /status, POST /scrub");
        }
    }
    let Sizes { l1, l2 } = loaded.sizes;
    let pages = loaded.shape.page_text();
    say!("  context  {}", loaded.shape.context_text(engine.info().max_context));
    say!("  memory   L1 {:.1} per engine, L2 {:.1} per node, {pages}", ByteSize(l1), ByteSize(l2));
    say!("  data     {data}   kept for the next start; `larder verify {data}` checks it when stopped");
    say!("");
    say!("  curl http://{address}/v1/completions -H 'content-type: application/json' \\");
    say!("    -d '{{\"model\": \"{model}\", \"max_tokens\": 40, \"temperature\": 0.7, \"prompt\": \"{PROMPT}\"}}'");
    say!("");
    say!("`larder status` shows the state, Ctrl-C stops");
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn plan_counts_parts_that_the_process_shares_once() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/models").join(bundled::NAME);
        let args = Args::parse_from(["up", "--nodes", "2"]);
        let preloaded = args.load.load(&folder).unwrap();
        let shape = args.load.shape(&preloaded.model);
        let model = LoadedModel { preloaded, shape, sizes: Sizes { l1: 64 * MIB, l2: 32 * MIB } };
        let options = args.engine_options(Role::Decode, &folder, &model, store_url(Vec::new()));
        let engine = larder_worker::memory_plan::of(&options, &model.preloaded.model);
        let node = larder_node::memory_plan::of(&args.node_options(0, 32 * MIB));
        let plan = args.memory_plan(&folder, &model);
        for part in [larder_worker::memory_plan::WEIGHTS, "tokenizer"] {
            assert!(plan.bytes_of(part) > 0 && plan.bytes_of(part) == engine.bytes_of(part), "{part}: {plan}");
        }
        assert_eq!(plan.bytes_of("process"), engine.bytes_of("process") + 2 * node.bytes_of("process"));
        assert_eq!(plan.bytes_of("L1"), 2 * engine.bytes_of("L1"));
        assert_eq!(plan.bytes_of("L2"), 64 * MIB);
    }
}

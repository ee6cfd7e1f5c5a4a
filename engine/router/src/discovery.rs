//! Discovery of engines and models.
//!
//! Engines register as members of the store. The store *names* an engine while its list of members
//! has the engine.
//!
//! Invariants:
//!
//! - An engine is in the router's engine table only if the store names it, or named it within
//!   [`UNNAMED_GRACE`]. While no store node answers, those named last count as named.
//! - An engine that does not answer leaves the table within 5 s, also while no store node answers.
//! - It has also confirmed its identity over HTTP. A dead engine's port may belong to another
//!   process by now.
//! - A model stays for `model_retention` after its last engine left, so that a restart needs no
//!   download.
//! - One task owns all state. Slow calls run beside it, so that a slow engine delays no other.

use crate::RouterState;
use crate::engines::{ENGINES_MAX, RemoteEngine};
use crate::models::{MODELS_BYTES_MAX, MODELS_MAX, ModelKey, ServedModel, unix_seconds};
use crate::templates::ChatRenderer;
use crate::turns::{Candidate, Turns, host_of};
use larder_client::Member;
use larder_format::codec::is_printable;
use larder_model::Tokenizer;
use larder_runtime::LogLimit;
use larder_worker::api::{EngineInfo, is_engine_url};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

const MEMBERS_TIMEOUT: Duration = Duration::from_secs(1);
/// Poll interval while no engine is known, and the minimum interval between refreshes that requests
/// ask for.
const EMPTY_INTERVAL: Duration = Duration::from_millis(50);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to fetch all files of a model. The wait for the builds of other models and the
/// start of the chat template's worker have as much each.
const MODEL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of all files of a model in bytes, twice the largest in use.
pub(crate) const MODEL_BYTES_MAX: usize = 64 << 20;
/// Maximum number of models that are being fetched. Bounds the memory of downloads. Only one of
/// them builds its tokenizer at a time.
pub(crate) const LOADS_MAX: usize = 4;
/// Share of [`LOADS_MAX`] for the engines of one host.
const LOADS_PER_HOST: usize = LOADS_MAX / 2;
/// Time an engine stays in the table after the store last named it, provided that it still answers.
/// A restarted store node does not name an engine until the engine has registered again.
const UNNAMED_GRACE: Duration = Duration::from_secs(10);
/// Maximum time for an engine of the table to confirm its identity. Short, because the refresh
/// waits for it.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(500);
/// Time without an answer after which an engine leaves the table while no store node answers. More
/// than one check, because a busy machine may miss one.
const SILENT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of new engines whose identity is being confirmed.
const PROBES_MAX: usize = 64;
/// Share of [`PROBES_MAX`] for the engines of one host.
const PROBES_PER_HOST: usize = PROBES_MAX / 4;
/// Part of [`PROBES_MAX`] for engines that were confirmed within [`CONFIRMED_TIME`].
const PROBES_RESERVED: usize = PROBES_MAX / 4;
/// Time for which a confirmed engine that leaves is known. Longer than a restart takes.
const CONFIRMED_TIME: Duration = Duration::from_secs(600);
/// Maximum number of engines that are known. The oldest make room.
const CONFIRMED_MAX: usize = 4 * ENGINES_MAX;

/// Result of fetching a model from the engine of this name.
type Loaded = (String, ModelKey, Result<ServedModel, String>);

/// Descriptions of engines that were confirmed lately, with the last time. A stranger that
/// registers the same description cannot delay the engine: of two alike, only one is tried.
#[derive(Default)]
struct ConfirmedEngines {
    /// Random for each process, so that no one can make two descriptions collide.
    hasher: RandomState,
    at: HashMap<u64, Instant>,
}

impl ConfirmedEngines {
    fn record(&mut self, info: &EngineInfo, now: Instant) {
        self.at.insert(self.key(info), now);
        if self.at.len() > CONFIRMED_MAX
            && let Some(oldest) = self.at.iter().min_by_key(|(_, at)| **at).map(|(key, _)| *key)
        {
            self.at.remove(&oldest);
        }
    }

    fn has(&self, info: &EngineInfo, now: Instant) -> bool {
        self.at.get(&self.key(info)).is_some_and(|at| now.duration_since(*at) < CONFIRMED_TIME)
    }

    fn key(&self, info: &EngineInfo) -> u64 {
        self.hasher.hash_one(serde_json::to_string(info).unwrap_or_default())
    }
}

struct Discovery {
    router: Arc<RouterState>,
    probes: JoinSet<(String, Result<EngineInfo, String>)>,
    probe_turns: Turns,
    confirmed: ConfirmedEngines,
    loads: JoinSet<Loaded>,
    loading: HashSet<ModelKey>,
    load_turns: Turns,
    named: BTreeMap<String, EngineInfo>,
    last_named: HashMap<String, Instant>,
    /// Times at which the models of the table last had an engine.
    last_served: BTreeMap<ModelKey, Instant>,
    /// Engines of the table that do not answer while no store node does, and the first time.
    silent: HashMap<String, Instant>,
    invalid_lines: LogLimit,
    load_lines: LogLimit,
    name_lines: LogLimit,
}

pub(crate) async fn run(router: Arc<RouterState>, stop: CancellationToken) {
    let mut discovery = Discovery {
        router: router.clone(),
        probes: JoinSet::new(),
        probe_turns: Turns::new(PROBES_MAX, PROBES_PER_HOST).with_reserved(PROBES_RESERVED),
        confirmed: ConfirmedEngines::default(),
        loads: JoinSet::new(),
        loading: HashSet::new(),
        load_turns: Turns::new(LOADS_MAX, LOADS_PER_HOST),
        named: BTreeMap::new(),
        last_named: HashMap::new(),
        last_served: BTreeMap::new(),
        silent: HashMap::new(),
        invalid_lines: LogLimit::default(),
        load_lines: LogLimit::default(),
        name_lines: LogLimit::default(),
    };
    let mut next_refresh = Instant::now();
    // Requests may bring a refresh forward, but only to this time. It keeps a burst of requests
    // from flooding the store.
    let mut earliest_refresh = next_refresh;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep_until(next_refresh) => {
                discovery.refresh().await;
                earliest_refresh = Instant::now() + EMPTY_INTERVAL;
                next_refresh = Instant::now() + discovery.interval();
            }
            () = router.refresh_soon.notified() => next_refresh = next_refresh.min(earliest_refresh),
            Some(ended) = discovery.probes.join_next() => if let Ok((name, result)) = ended {
                discovery.probed(name, result);
            },
            Some(ended) = discovery.loads.join_next() => if let Ok((engine, key, result)) = ended {
                discovery.loaded(&engine, key, result);
            },
        }
    }
}

impl Discovery {
    fn interval(&self) -> Duration {
        let interval = self.router.options.poll_interval;
        if self.router.engines.is_empty() { interval.min(EMPTY_INTERVAL) } else { interval }
    }

    async fn refresh(&mut self) {
        let deadline = std::time::Instant::now() + MEMBERS_TIMEOUT;
        // The client keeps the deadline itself. The timeout guards against one that does not:
        // discovery must never stall.
        let members = tokio::time::timeout(MEMBERS_TIMEOUT * 2, self.router.directory.members(deadline)).await;
        // No store node answered. The engines serve without the store.
        let Ok(Some(members)) = members else { return self.drop_silent().await };
        self.silent.clear();
        self.named = named_engines(members, &self.invalid_lines);
        self.drop_replaced();
        let now = Instant::now();
        self.router.engines.list().iter().for_each(|engine| self.confirmed.record(&engine.info, now));
        self.check_unnamed().await;
        // Bounds the maps. An engine that leaves and returns starts without a backoff.
        self.probe_turns.retain(|name| self.named.contains_key(name));
        self.load_turns.retain(|name| self.router.engines.get(name).is_some());
        self.drop_unserved();
        self.begin_probes();
        self.begin_loads();
    }

    /// Removes engines whose name another engine has registered since.
    fn drop_replaced(&self) {
        for engine in self.router.engines.list() {
            if self.named.get(&engine.name).is_some_and(|info| *info != engine.info) {
                self.remove(&engine);
            }
        }
    }

    /// Asks the engines that the store does not name for their identity. Removes those that do not
    /// confirm it, and after [`UNNAMED_GRACE`] also those that do.
    async fn check_unnamed(&mut self) {
        let now = Instant::now();
        let engines = self.router.engines.list();
        let (named, unnamed): (Vec<_>, Vec<_>) = engines.into_iter().partition(|e| self.named.contains_key(&e.name));
        // An engine without an entry joined since the last refresh, so the store named it just now.
        let mut last_named: HashMap<_, _> = named.into_iter().map(|engine| (engine.name.clone(), now)).collect();
        for engine in &unnamed {
            last_named.insert(engine.name.clone(), self.last_named.get(&engine.name).copied().unwrap_or(now));
        }
        self.last_named = last_named;
        for (engine, is_confirmed) in self.confirm(unnamed).await {
            let is_over = self.last_named.get(&engine.name).is_none_or(|at| at.elapsed() >= UNNAMED_GRACE);
            if is_over || !is_confirmed {
                self.remove(&engine);
            }
        }
    }

    /// Asks engines for their identity. Each comes back with `true` if it confirms it.
    async fn confirm(&self, engines: Vec<Arc<RemoteEngine>>) -> Vec<(Arc<RemoteEngine>, bool)> {
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
        // All at once, so the refresh waits for the slowest and not for their sum.
        let checks = engines.into_iter().map(|engine| async move {
            let answer = self.router.engine_client.model(&engine.info.url, deadline).await;
            let is_confirmed = answer.is_ok_and(|info| info == engine.info);
            (engine, is_confirmed)
        });
        futures::future::join_all(checks).await
    }

    /// Removes the engines that have not answered for [`SILENT_MAX`], while no store node can tell
    /// which are registered. They return when they answer again.
    async fn drop_silent(&mut self) {
        let now = Instant::now();
        let silent =
            self.confirm(self.router.engines.list()).await.into_iter().filter(|(_, is_confirmed)| !is_confirmed);
        let mut since = HashMap::new();
        for (engine, _) in silent {
            let at = self.silent.get(&engine.name).copied().unwrap_or(now);
            if at.elapsed() >= SILENT_MAX {
                self.remove(&engine);
            } else {
                since.insert(engine.name.clone(), at);
            }
        }
        self.silent = since;
        self.drop_unserved();
        self.begin_probes();
        self.begin_loads();
    }

    /// Drops the models that have had no engine for the retention time. Each keeps a tokenizer and
    /// a client of the store.
    fn drop_unserved(&mut self) {
        let now = Instant::now();
        let served: BTreeSet<_> = self.router.engines.list().iter().map(|engine| engine.model_key()).collect();
        let mut last_served = BTreeMap::new();
        for key in self.router.models.keys() {
            // A model without an entry was loaded since the last refresh.
            let before = self.last_served.get(&key).copied().unwrap_or(now);
            let at = if served.contains(&key) { now } else { before };
            if now.duration_since(at) < self.router.options.model_retention {
                last_served.insert(key, at);
            } else {
                self.router.models.remove(&key);
                tracing::info!(model = %key.0, namespace = %key.1, "model dropped: it has no engine any more");
            }
        }
        self.last_served = last_served;
    }

    fn remove(&self, engine: &RemoteEngine) {
        if self.router.engines.remove(&engine.name) {
            tracing::info!(engine = %engine.name, url = %engine.info.url, "engine left");
        }
    }

    fn begin_probes(&mut self) {
        let engines = &self.router.engines;
        let missing = self.named.iter().filter(|(name, _)| engines.get(name).is_none() && !engines.is_expelled(name));
        let now = Instant::now();
        let candidates = missing.map(|(name, info)| {
            let is_known = self.confirmed.has(info, now);
            Candidate { name, url: &info.url, is_known }
        });
        for name in self.probe_turns.begin(candidates, PROBES_MAX, now) {
            let Some(url) = self.named.get(&name).map(|info| info.url.clone()) else { continue };
            let client = self.router.engine_client.clone();
            self.probes.spawn(async move {
                let answer = client.model(&url, Instant::now() + PROBE_TIMEOUT).await;
                (name, answer.map_err(|error| error.to_string()))
            });
        }
    }

    fn probed(&mut self, name: String, result: Result<EngineInfo, String>) {
        // The engine may have withdrawn while the probe was running.
        let expected = self.named.get(&name);
        let is_confirmed = expected.is_some_and(|expected| result.as_ref().is_ok_and(|info| info == expected));
        self.probe_turns.ended(&name, is_confirmed, Instant::now());
        let problem = match result {
            _ if expected.is_none() => return,
            Ok(info) if is_confirmed => {
                tracing::info!(engine = %name, role = %info.role, model = %info.model, url = %info.url, "engine joined");
                self.router.engines.insert(RemoteEngine::new(name, info));
                // Without waiting for the next refresh: requests may be waiting for this model
                // already.
                self.begin_loads();
                return;
            }
            Ok(info) => format!("its URL now belongs to a {} engine of model {}", info.role, info.model),
            Err(error) => error,
        };
        tracing::debug!(engine = %name, %problem, "engine registered but not confirmed; discovery will retry");
    }

    fn begin_loads(&mut self) {
        // Again after each: the engines of one model fetch it once.
        loop {
            let mut engines = self.router.engines.list();
            engines.retain(|engine| {
                let key = engine.model_key();
                !self.router.models.contains(&key) && !self.loading.contains(&key)
            });
            let candidates = engines.iter().map(|engine| (engine.name.as_str(), engine.info.url.as_str()));
            let Some(name) = self.load_turns.begin(candidates, 1, Instant::now()).pop() else { return };
            let Some(engine) = engines.iter().find(|engine| engine.name == name).cloned() else { return };
            let key = engine.model_key();
            self.loading.insert(key.clone());
            let router = self.router.clone();
            self.loads.spawn(async move { (name, key, load(router, engine).await) });
        }
    }

    fn loaded(&mut self, engine: &str, key: ModelKey, result: Result<ServedModel, String>) {
        self.loading.remove(&key);
        let now = Instant::now();
        let is_served = match result {
            Ok(model) => {
                let host = model.source_host;
                let has_room = self.router.models.insert(model, &self.router.engines);
                if has_room {
                    tracing::info!(model = %key.0, namespace = %key.1, "model loaded");
                    if let Some(first) = self.router.models.first_of_name(&key)
                        && let Some(models) = self.name_lines.record()
                    {
                        tracing::warn!(model = %key.0, %engine, %host, namespace = %key.1, first = %first.namespace, models, "model loaded under the name of another one; clients get the first one while it has engines; stop the engines of one of them [LRD0505]");
                    }
                } else {
                    tracing::warn!(model = %key.0, %host, models_max = MODELS_MAX, bytes_max = MODELS_BYTES_MAX, "model not served: too many models, too many of this host, or their files are too large; use another router for it");
                    // The other engines of the host have no more room for it.
                    let engines = self.router.engines.list();
                    let host_of = |engine: &RemoteEngine| host_of(&engine.info.url);
                    let named = engines.iter().find(|e| e.name == engine).map(|engine| host_of(engine));
                    let of_host = engines.iter().filter(|e| e.model_key() == key && Some(host_of(e)) == named);
                    let same = of_host.filter(|e| e.name != engine);
                    same.for_each(|engine| self.load_turns.postpone(&engine.name, now));
                }
                has_room
            }
            Err(error) => {
                if let Some(failures) = self.load_lines.record() {
                    tracing::warn!(model = %key.0, %engine, %error, failures, "cannot load the tokenizer; discovery will retry");
                }
                false
            }
        };
        self.load_turns.ended(engine, is_served, now);
        // A model may wait for this place.
        self.begin_loads();
    }
}

/// Members that describe themselves as engines with a valid page geometry and URL. Other members of
/// the store, such as benchmarks, are skipped. So are all but one with the same description: a
/// member that registers another one many times would multiply its load.
fn named_engines(members: Vec<Member>, invalid_lines: &LogLimit) -> BTreeMap<String, EngineInfo> {
    let mut named = BTreeMap::new();
    let mut described = HashSet::new();
    // The list comes from the network, so bound it before parsing.
    for member in members.into_iter().take(ENGINES_MAX) {
        let Ok(info) = serde_json::from_value::<EngineInfo>(member.info) else {
            tracing::debug!(member = %member.name, "member of the store is not an engine; skipped");
            continue;
        };
        let geometry = &info.descriptor.geometry;
        // Page keys depend on the tokens per page. If engine and router disagreed about them, every
        // lookup would miss.
        let is_possible = geometry.validate().is_ok() && geometry.page_tokens == info.page_tokens;
        // JSON can name any character, and these strings reach logs, terminals and API clients.
        let texts = [&member.name, &info.url, &info.model, &info.numerics];
        let is_printable =
            texts.into_iter().chain([&info.descriptor.model, &info.descriptor.tenant]).all(|t| is_printable(t));
        if is_possible && is_printable && is_engine_url(&info.url) {
            if described.insert(serde_json::to_string(&info).unwrap_or_default()) {
                named.insert(member.name, info);
            }
        } else if let Some(refusals) = invalid_lines.record() {
            // Any client can register members, and this runs several times a second.
            tracing::warn!(member = ?member.name, url = ?info.url, refusals, "engine ignored: its page geometry, URL or a name is invalid; check its version and options");
        }
    }
    named
}

/// Fetches the tokenizer from `engine` and attaches to the pages of its namespace. The tokenizer is
/// built off the event loop: that takes up to seconds.
async fn load(router: Arc<RouterState>, engine: Arc<RemoteEngine>) -> Result<ServedModel, String> {
    let deadline = Instant::now() + MODEL_TIMEOUT;
    let mut files = BTreeMap::new();
    let mut file_bytes = 0;
    let mut source_host = None;
    for &name in Tokenizer::FILES {
        let room = MODEL_BYTES_MAX - file_bytes;
        let file = router.engine_client.file(&engine.info.url, name, room, deadline).await;
        if let Some(file) = file.map_err(|error| error.to_string())? {
            file_bytes += file.bytes.len();
            files.insert(name.to_string(), file.bytes);
            source_host = source_host.or(file.from);
        }
    }
    let vocab_size = files.get("config.json").and_then(|config| vocab_size(config));
    // A build takes many times the memory of the files. The wait has a limit of its own: builds of
    // other models must not fail a model whose files arrived slowly.
    let turn = tokio::time::timeout(MODEL_TIMEOUT, router.tokenizer_builds.clone().acquire_owned()).await;
    let turn = turn.map_err(|_| "the tokenizers of other models took too long to build")?;
    let build = move || {
        // Held by the build itself: it goes on if the router stops.
        let _turn = turn;
        Tokenizer::from_untrusted_files(&files).map_err(|error| error.to_string())
    };
    let tokenizer = tokio::task::spawn_blocking(build).await.map_err(|error| error.to_string())??;
    let deadline = Instant::now() + MODEL_TIMEOUT;
    let name = engine.info.model.clone();
    let chat = tokenizer.chat_template().cloned();
    let chat = chat.map(|template| ChatRenderer::new(router.templates.clone(), name.clone(), template));
    if let Some(chat) = &chat
        && let Err(error) = chat.check(deadline).await
    {
        // Completions work without it. Debug output escapes the template's text.
        let error = error.to_string();
        tracing::warn!(model = %name, ?error, "chats of this model fail; check its chat template [LRD0503]");
    }
    Ok(ServedModel {
        name,
        namespace: engine.namespace,
        page_tokens: engine.info.page_tokens as usize,
        vocab_size,
        tokenizer: Arc::new(tokenizer),
        chat,
        pages: router.directory.pages(&engine.info.descriptor),
        source: engine.name.clone(),
        source_host: source_host.unwrap_or_default(),
        is_distrusted: AtomicBool::new(false),
        file_bytes,
        created: unix_seconds(),
    })
}

/// Field `vocab_size` of a model's `config.json`. Engines use the same field to validate tokens. It
/// may exceed the tokenizer's own vocabulary, because models pad their embeddings.
fn vocab_size(config: &[u8]) -> Option<u32> {
    let config: serde_json::Value = serde_json::from_slice(config).ok()?;
    config.get("vocab_size")?.as_u64()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::tests::info;
    use crate::options::RouterOptions;
    use larder_client::MEMBER_TTL;
    use larder_worker::api::Role;

    #[test]
    fn named_engines_skips_members_that_are_not_valid_engines() {
        let good = info(Role::Prefill, 1, 10);
        let wrong_pages = EngineInfo { page_tokens: 5, ..good.clone() };
        let wrong_url = EngineInfo { url: "http://127.0.0.1:1/any?x#".into(), ..good.clone() };
        let member = |name: &str, info| Member { name: name.into(), info };
        let members = vec![
            member("bench", serde_json::json!({"role": "something else"})),
            member("a", serde_json::to_value(&good).unwrap()),
            member("b", serde_json::to_value(wrong_pages).unwrap()),
            member("c", serde_json::to_value(wrong_url).unwrap()),
            member("d", serde_json::to_value(&good).unwrap()),
        ];
        assert_eq!(named_engines(members, &LogLimit::default()), BTreeMap::from([("a".to_string(), good)]));
    }

    /// Other tests bound the number of rounds: `engine_that_does_not_answer_leaves_in_few_rounds`.
    #[test]
    fn rounds_until_a_silent_engine_leaves_take_less_than_five_seconds() {
        let options = RouterOptions::new("larder://127.0.0.1:1".parse().unwrap());
        let round = options.poll_interval + MEMBERS_TIMEOUT + CONFIRM_TIMEOUT;
        // A store node names it until its registration lapses. The next round removes it.
        let beside_the_store = MEMBER_TTL + round;
        // The first round without an answer, and the first one that ends after the limit.
        let without_it = round + SILENT_MAX + round;
        assert!(beside_the_store.max(without_it) < Duration::from_secs(5), "{beside_the_store:?} {without_it:?}");
    }

    #[test]
    fn vocab_size_is_read_from_the_config() {
        assert_eq!(vocab_size(br#"{"vocab_size": 501, "hidden_size": 8}"#), Some(501));
        for config in [&b"{}"[..], b"not JSON", br#"{"vocab_size": -1}"#] {
            assert_eq!(vocab_size(config), None);
        }
    }
}

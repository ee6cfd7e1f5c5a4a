//! Finds engines and models.
//!
//! What always holds: an engine is in the table only if the store names it now (or a moment ago, see [`UNNAMED_GRACE`])
//! and it said itself, over HTTP, that it is the one the store means: a member that died may have left its port to
//! another. One task owns all of this; what takes time runs beside it, so that a slow engine delays nobody else.

use crate::Shared;
use crate::engines::{ENGINES_MAX, Engine};
use crate::models::{MODELS_MAX, ModelKey, ServedModel, unix_seconds};
use larder_client::Member;
use larder_model::Tokenizer;
use larder_worker::api::EngineInfo;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Most time for the store to name its members.
const MEMBERS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two looks while no engine is known.
const EMPTY_INTERVAL: Duration = Duration::from_millis(50);
/// Most time for an engine to say what it is.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most time to fetch a tokenizer.
const TOKENIZER_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of one file of a tokenizer.
const TOKENIZER_FILE_BYTES_MAX: usize = 64 << 20;
/// Pause after a failure; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A store node that restarts names an engine only when that has registered again. For so long after it named it, an
/// engine that answers for itself stays.
const UNNAMED_GRACE: Duration = Duration::from_secs(10);
/// Most time for an engine to answer for itself then.
const UNNAMED_PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// When to try again.
struct Pause {
    until: Instant,
    length: Duration,
}

impl Pause {
    fn after_failure(previous: Option<&Pause>) -> Self {
        let length = previous.map_or(PAUSE_MIN, |p| (p.length * 2).min(PAUSE_MAX));
        Self { until: Instant::now() + length, length }
    }
}

fn is_due<K: std::hash::Hash + Eq>(pauses: &HashMap<K, Pause>, key: &K) -> bool {
    pauses.get(key).is_none_or(|pause| Instant::now() >= pause.until)
}

/// The task's own state.
struct Discovery {
    shared: Arc<Shared>,
    probes: JoinSet<(String, Result<EngineInfo, String>)>,
    probing: HashSet<String>,
    probe_pauses: HashMap<String, Pause>,
    loads: JoinSet<(ModelKey, Result<ServedModel, String>)>,
    loading: HashSet<ModelKey>,
    load_pauses: HashMap<ModelKey, Pause>,
    /// What the store named at the last look.
    named: BTreeMap<String, EngineInfo>,
    /// When the store last named an engine that is in the table.
    last_named: HashMap<String, Instant>,
}

/// Runs until `stop`.
pub(crate) async fn run(shared: Arc<Shared>, stop: CancellationToken) {
    let mut discovery = Discovery {
        shared: shared.clone(),
        probes: JoinSet::new(),
        probing: HashSet::new(),
        probe_pauses: HashMap::new(),
        loads: JoinSet::new(),
        loading: HashSet::new(),
        load_pauses: HashMap::new(),
        named: BTreeMap::new(),
        last_named: HashMap::new(),
    };
    let mut next_look = Instant::now();
    // Requests may ask for a look, but not for one after the other.
    let mut may_look = next_look;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep_until(next_look) => {
                discovery.look().await;
                may_look = Instant::now() + EMPTY_INTERVAL;
                next_look = Instant::now() + discovery.interval();
            }
            () = shared.look_soon.notified() => next_look = next_look.min(may_look),
            Some(ended) = discovery.probes.join_next() => if let Ok((name, result)) = ended {
                discovery.probed(name, result);
            },
            Some(ended) = discovery.loads.join_next() => if let Ok((key, result)) = ended {
                discovery.loaded(key, result);
            },
        }
    }
}

impl Discovery {
    fn interval(&self) -> Duration {
        let interval = self.shared.options.poll_interval;
        if self.shared.engines.is_empty() { interval.min(EMPTY_INTERVAL) } else { interval }
    }

    async fn look(&mut self) {
        let deadline = std::time::Instant::now() + MEMBERS_TIMEOUT;
        let members = tokio::time::timeout(MEMBERS_TIMEOUT * 2, self.shared.directory.members(deadline)).await;
        // While no store node answers, the last table is the best there is.
        let Ok(Some(members)) = members else { return };
        self.named = named_engines(members);
        self.drop_replaced();
        self.check_unnamed().await;
        self.probe_pauses.retain(|name, _| self.named.contains_key(name));
        self.begin_probes();
        self.begin_loads();
    }

    /// Takes out engines in whose name others registered.
    fn drop_replaced(&self) {
        for engine in self.shared.engines.list() {
            if self.named.get(&engine.name).is_some_and(|info| *info != engine.info) {
                self.remove(&engine);
            }
        }
    }

    /// Takes out engines that the store does not name and that do not answer for themselves, and after the grace those that
    /// do.
    async fn check_unnamed(&mut self) {
        let now = Instant::now();
        let engines = self.shared.engines.list();
        let (named, unnamed): (Vec<_>, Vec<_>) = engines.into_iter().partition(|e| self.named.contains_key(&e.name));
        // Without an entry an engine came in this moment: the store named it.
        let mut last_named: HashMap<_, _> = named.into_iter().map(|engine| (engine.name.clone(), now)).collect();
        for engine in &unnamed {
            last_named.insert(engine.name.clone(), self.last_named.get(&engine.name).copied().unwrap_or(now));
        }
        self.last_named = last_named;
        let deadline = now + UNNAMED_PROBE_TIMEOUT;
        let this = &*self;
        let checks = unnamed.into_iter().map(|engine| async move {
            let is_over = this.last_named.get(&engine.name).is_none_or(|at| at.elapsed() >= UNNAMED_GRACE);
            let answer = this.shared.calls.model(&engine.info.url, deadline).await;
            let answers_for_itself = answer.is_ok_and(|info| info == engine.info);
            (is_over || !answers_for_itself).then_some(engine)
        });
        let gone: Vec<_> = futures::future::join_all(checks).await;
        gone.into_iter().flatten().for_each(|engine| self.remove(&engine));
    }

    fn remove(&self, engine: &Engine) {
        if self.shared.engines.remove(&engine.name) {
            tracing::info!(engine = %engine.name, url = %engine.info.url, "engine left");
        }
    }

    fn begin_probes(&mut self) {
        for (name, info) in &self.named {
            if self.shared.engines.get(name).is_some()
                || self.probing.contains(name)
                || !is_due(&self.probe_pauses, name)
            {
                continue;
            }
            self.probing.insert(name.clone());
            let (calls, name, url) = (self.shared.calls.clone(), name.clone(), info.url.clone());
            self.probes.spawn(async move {
                let answer = calls.model(&url, Instant::now() + PROBE_TIMEOUT).await;
                (name, answer.map_err(|error| error.to_string()))
            });
        }
    }

    fn probed(&mut self, name: String, result: Result<EngineInfo, String>) {
        self.probing.remove(&name);
        let Some(expected) = self.named.get(&name) else { return };
        let problem = match result {
            Ok(info) if info == *expected => {
                tracing::info!(engine = %name, role = %info.role, model = %info.model, url = %info.url, "engine joined");
                self.probe_pauses.remove(&name);
                self.shared.engines.insert(Engine::new(name, info));
                self.begin_loads();
                return;
            }
            Ok(info) => format!("it is another engine now: {} of {}", info.role, info.model),
            Err(error) => error,
        };
        tracing::debug!(engine = %name, %problem, "engine not taken");
        let pause = Pause::after_failure(self.probe_pauses.get(&name));
        self.probe_pauses.insert(name, pause);
    }

    fn begin_loads(&mut self) {
        for engine in self.shared.engines.list() {
            let key = (engine.info.model.clone(), engine.namespace);
            if self.shared.models.contains(&key)
                || self.loading.contains(&key)
                || self.loading.len() >= MODELS_MAX
                || !is_due(&self.load_pauses, &key)
            {
                continue;
            }
            self.loading.insert(key.clone());
            let shared = self.shared.clone();
            self.loads.spawn(async move { (key, load(shared, engine).await) });
        }
    }

    fn loaded(&mut self, key: ModelKey, result: Result<ServedModel, String>) {
        self.loading.remove(&key);
        match result {
            Ok(model) => {
                tracing::info!(model = %key.0, namespace = ?key.1, "model ready");
                self.load_pauses.remove(&key);
                self.shared.models.insert(model, &self.shared.engines);
            }
            Err(error) => {
                tracing::warn!(model = %key.0, %error, "tokenizer not loaded");
                if self.load_pauses.len() >= MODELS_MAX {
                    self.load_pauses.clear();
                }
                let pause = Pause::after_failure(self.load_pauses.get(&key));
                self.load_pauses.insert(key, pause);
            }
        }
    }
}

/// The members that are engines and say of themselves what can be true.
fn named_engines(members: Vec<Member>) -> BTreeMap<String, EngineInfo> {
    let mut named = BTreeMap::new();
    for member in members.into_iter().take(ENGINES_MAX) {
        let Ok(info) = serde_json::from_value::<EngineInfo>(member.info) else {
            tracing::debug!(member = %member.name, "not an engine");
            continue;
        };
        let geometry = &info.descriptor.geometry;
        let is_possible = geometry.validate().is_ok() && geometry.page_tokens == info.page_tokens;
        if is_possible && info.url.starts_with("http://") {
            named.insert(member.name, info);
        } else {
            tracing::warn!(member = %member.name, url = %info.url, "engine ignored: wrong page shape or URL");
        }
    }
    named
}

/// Fetches the tokenizer from `engine` and attaches to the pages of its namespace.
async fn load(shared: Arc<Shared>, engine: Arc<Engine>) -> Result<ServedModel, String> {
    let deadline = Instant::now() + TOKENIZER_TIMEOUT;
    let mut files = BTreeMap::new();
    for &name in Tokenizer::FILES {
        let file = shared.calls.file(&engine.info.url, name, TOKENIZER_FILE_BYTES_MAX, deadline).await;
        if let Some(bytes) = file.map_err(|error| error.to_string())? {
            files.insert(name.to_string(), bytes);
        }
    }
    let tokenizer = tokio::task::spawn_blocking(move || Tokenizer::from_files(&files).map_err(|e| e.to_string()))
        .await
        .map_err(|error| error.to_string())??;
    Ok(ServedModel {
        name: engine.info.model.clone(),
        namespace: engine.namespace,
        page_tokens: engine.info.page_tokens as usize,
        tokenizer: Arc::new(tokenizer),
        pages: shared.directory.pages(&engine.info.descriptor),
        created: unix_seconds(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::tests::info;
    use larder_worker::api::Role;

    #[test]
    fn members_that_are_no_engines_are_left_out() {
        let good = info(Role::Prefill, 1, 10);
        let wrong_pages = EngineInfo { page_tokens: 5, ..good.clone() };
        let wrong_url = EngineInfo { url: "ftp://a".into(), ..good.clone() };
        let member = |name: &str, info| Member { name: name.into(), info };
        let members = vec![
            member("bench", serde_json::json!({"role": "something else"})),
            member("a", serde_json::to_value(&good).unwrap()),
            member("b", serde_json::to_value(wrong_pages).unwrap()),
            member("c", serde_json::to_value(wrong_url).unwrap()),
        ];
        assert_eq!(named_engines(members), BTreeMap::from([("a".to_string(), good)]));
    }

    #[test]
    fn pauses_grow_to_their_maximum() {
        let mut pause = Pause::after_failure(None);
        assert_eq!(pause.length, PAUSE_MIN);
        (0..10).for_each(|_| pause = Pause::after_failure(Some(&pause)));
        assert_eq!(pause.length, PAUSE_MAX);
    }
}

//! Inspect, warm, pin and forget the pages of a prefix.

use super::api::{ForgetResponse, InspectResponse, PageStatus, PinResponse, PrefixRequest, WarmResponse};
use super::handlers::AdminError;
use crate::Shared;
use crate::models::{Found, ServedModel};
use crate::openai::{chat_tokens, random_id};
use crate::route::PrefillJob;
use axum::http::StatusCode;
use larder_client::{Forgotten, PinKind, Pinned, Tier};
use larder_format::PageKey;
use larder_worker::api::{CacheMode, PrefillRequest};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Most tokens of a prefix.
const TOKENS_MAX: usize = 4 << 20;
/// Most time for pages to show up in the store after the engine said that it published them.
const PUBLISHED_WAIT: Duration = Duration::from_secs(2);
/// Time between two looks for them.
const PUBLISHED_INTERVAL: Duration = Duration::from_millis(20);

/// The whole pages at the start of a sequence.
pub(crate) struct Prefix {
    shared: Arc<Shared>,
    model: Arc<ServedModel>,
    tokens: Vec<u32>,
    keys: Arc<[PageKey]>,
}

impl Prefix {
    /// Finds the model, tokenises, and computes the keys.
    pub(crate) async fn resolve(shared: Arc<Shared>, request: PrefixRequest) -> Result<Prefix, AdminError> {
        let model = find_model(&shared, request.model.as_deref())?;
        let tokenised = tokio::task::spawn_blocking(move || {
            let tokens = tokenise(&model, request)?;
            if tokens.len() > TOKENS_MAX {
                let message = format!("the prefix has {} tokens, the maximum is {TOKENS_MAX}", tokens.len());
                return Err(AdminError::bad_request(message));
            }
            let keys = larder_format::page_keys(&tokens, model.page_tokens).into();
            Ok(Prefix { shared, model, tokens, keys })
        });
        tokenised
            .await
            .map_err(|error| AdminError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string()))?
    }

    async fn locate(&self, deadline: Instant) -> Vec<Option<Tier>> {
        if self.keys.is_empty() {
            return Vec::new();
        }
        let mut tiers = self.model.pages.locate(self.keys.clone(), deadline.into_std()).await;
        tiers.resize(self.keys.len(), None);
        tiers
    }

    /// Where each page lies.
    pub(crate) async fn inspect(&self, deadline: Instant) -> InspectResponse {
        let page_tokens = self.model.page_tokens as u32;
        let tiers = self.locate(deadline).await;
        let pages = (0..).zip(self.keys.iter()).zip(tiers).map(|((index, key), tier)| PageStatus {
            index,
            key: key.to_string(),
            token_start: index * page_tokens,
            token_end: (index + 1) * page_tokens,
            tier,
        });
        InspectResponse {
            model: self.model.name.clone(),
            namespace: self.model.namespace.to_string(),
            tokens: self.tokens.len() as u32,
            page_tokens,
            pages: pages.collect(),
        }
    }

    /// Brings pages to L2; those that are nowhere are computed.
    pub(crate) async fn warm(&self, deadline: Instant) -> WarmResponse {
        let before = self.locate(deadline).await;
        if before.contains(&Some(Tier::L3)) {
            self.model.pages.warm(self.keys.clone(), deadline.into_std()).await;
        }
        // What nobody could say by the deadline is not known to be missing.
        if before.contains(&None) && Instant::now() < deadline {
            self.compute(before.iter().filter(|tier| tier.is_none()).count(), deadline).await;
        }
        let after = if before.iter().all(|tier| *tier == Some(Tier::L2)) {
            before.clone()
        } else {
            self.locate_published(&before, deadline).await
        };
        tally(&before, &after)
    }

    /// Has a prefill engine compute and publish what the store lacks. If none can, the pages stay missing.
    async fn compute(&self, pages: usize, deadline: Instant) {
        let page_tokens = self.model.page_tokens;
        let whole = self.keys.len() * page_tokens;
        // Pages end below a prompt's last token; so one more token makes all of ours whole. Which one does not matter.
        let mut tokens = self.tokens[..whole].to_vec();
        tokens.extend(self.tokens.get(whole).or(self.tokens.last()).copied());
        let request = PrefillRequest {
            request_id: format!("warm_{}", random_id()),
            tokens,
            // The engine's own pages may be missing in the store: it must not take them for published.
            cache: CacheMode::Store,
            deadline_ms: 0,
        };
        let job = PrefillJob {
            shared: self.shared.clone(),
            model: self.model.clone(),
            affinity: self.keys.first().copied().unwrap_or_default(),
            request,
            uncached_tokens: (pages * page_tokens) as u64,
            deadline,
        };
        if let Err(error) = job.run().await {
            tracing::info!(%error, "warm: pages not computed");
        }
    }

    async fn locate_published(&self, before: &[Option<Tier>], deadline: Instant) -> Vec<Option<Tier>> {
        let give_up = (Instant::now() + PUBLISHED_WAIT).min(deadline);
        loop {
            let after = self.locate(deadline).await;
            if tally(before, &after).missing == 0 || Instant::now() >= give_up {
                return after;
            }
            tokio::time::sleep(PUBLISHED_INTERVAL).await;
        }
    }

    /// Pins the pages for `ttl`, or ends their pins.
    pub(crate) async fn pin(&self, kind: PinKind, ttl: Duration, deadline: Instant) -> Result<PinResponse, AdminError> {
        let Pinned { pages, refused, complete } = match self.keys.is_empty() {
            true => Pinned { complete: true, ..Pinned::default() },
            false => self.model.pages.pin(self.keys.clone(), kind, ttl, deadline.into_std()).await,
        };
        match refused {
            Some(message) => Err(AdminError::new(StatusCode::CONFLICT, "refused", message)),
            None => Ok(PinResponse { pages: self.keys.len() as u32, pinned: pages as u32, complete }),
        }
    }

    /// Forgets the pages.
    pub(crate) async fn forget(&self, deadline: Instant) -> ForgetResponse {
        let forgotten = match self.keys.is_empty() {
            true => Forgotten { pages: 0, complete: true },
            false => self.model.pages.forget(self.keys.clone(), deadline.into_std()).await,
        };
        ForgetResponse {
            pages: self.keys.len() as u32,
            forgotten: forgotten.pages as u32,
            complete: forgotten.complete,
        }
    }
}

fn tally(before: &[Option<Tier>], after: &[Option<Tier>]) -> WarmResponse {
    let mut warm = WarmResponse { pages: before.len() as u32, ..Default::default() };
    for pair in before.iter().zip(after) {
        match pair {
            (_, None) | (_, Some(Tier::L3)) => warm.missing += 1,
            (Some(Tier::L2), Some(Tier::L2)) => warm.in_l2 += 1,
            (Some(Tier::L3), Some(Tier::L2)) => warm.loaded += 1,
            (None, Some(Tier::L2)) => warm.computed += 1,
        }
    }
    warm
}

fn find_model(shared: &Shared, name: Option<&str>) -> Result<Arc<ServedModel>, AdminError> {
    if let Some(name) = name {
        return match shared.models.find(name, &shared.engines) {
            Found::Model(model) => Ok(model),
            Found::Unknown => {
                let message = format!("the model '{name}' does not exist");
                Err(AdminError::new(StatusCode::NOT_FOUND, "model_not_found", message))
            }
            Found::NothingKnown => Err(AdminError::unavailable("no engine has joined yet")),
        };
    }
    let mut models = shared.models.served(&shared.engines);
    match models.len() {
        0 => Err(AdminError::unavailable("no model is being served")),
        1 => Ok(models.remove(0)),
        _ => {
            let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
            Err(AdminError::bad_request(format!("'model' is required, one of: {}", names.join(", "))))
        }
    }
}

fn tokenise(model: &ServedModel, request: PrefixRequest) -> Result<Vec<u32>, AdminError> {
    match (request.text, request.tokens, request.messages) {
        (Some(text), None, None) => {
            model.tokenizer.encode(&text, true).map_err(|error| AdminError::bad_request(error.to_string()))
        }
        (None, Some(tokens), None) => Ok(tokens),
        (None, None, Some(messages)) => {
            chat_tokens(model, &messages, false).map_err(|error| AdminError::bad_request(error.body.message))
        }
        _ => Err(AdminError::bad_request("give exactly one of 'text', 'tokens' and 'messages'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warming_accounts_for_every_page() {
        let (l2, l3) = (Some(Tier::L2), Some(Tier::L3));
        let warm = tally(&[l2, l3, l3, None, None, l2], &[l2, l2, l3, l2, None, l2]);
        assert_eq!(warm, WarmResponse { pages: 6, in_l2: 2, loaded: 1, computed: 1, missing: 2 });
    }
}

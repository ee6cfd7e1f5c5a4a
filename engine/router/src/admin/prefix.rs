//! Operations on the pages of a prefix: inspect, warm, pin and forget; hints.
//!
//! Only whole pages count. Tokens after the last whole page belong to no page yet.

mod hints;

use super::api::{
    ForgetResponse, InspectResponse, MissStatus, PageStatus, PinResponse, PinStatus, PinStrength, WarmResponse,
};
use super::error::AdminError;
use crate::RouterState;
use crate::calls::{CallError, remaining_ms};
use crate::engines::RemoteEngine;
use crate::models::{ModelLookup, ServedModel};
use crate::openai::{PROMPT_CHARGE_BYTES, charge, charged_body, chat_text, random_id, too_many_bytes};
use crate::route::PrefillJob;
use crate::templates::TextCharge;
use crate::tokenise::{EncodeError, TOO_SLOW, encode, text_bytes_max};
use axum::http::StatusCode;
use axum::response::Response;
use larder_client::{Explanation, MissReason, PagePin, PinKind, Pinned, Tier};
use larder_format::PageKey;
use larder_http::{PeerAddress, PeerCharge};
use larder_model::{ChatMessage, RenderOptions};
use larder_worker::api::{CacheMode, ForgetRequest, PrefillRequest, Role};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const TOKENS_MAX: usize = 4 << 20;
/// Memory of a token: itself, and its number in a request to engines.
const TOKEN_BYTES: usize = 16;
/// Memory of a page: its key, its status, and the status in JSON.
const PAGE_BYTES: usize = 512;
/// Maximum time until published pages are visible in the store. Engines publish in the background,
/// so a prefill answer may come before the last put has ended.
const PUBLISHED_WAIT: Duration = Duration::from_secs(2);
/// Maximum time of an engine to drop pages from L1. It answers between two of its steps, and after
/// its puts in flight.
const FORGET_ENGINE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which engines neither cache nor put the pages, while the store forgets them. The hold
/// ends by itself if the router dies.
const FORGET_HOLD: Duration = Duration::from_secs(60);
/// Maximum time of the store to forget pages. With the calls to the engines it is shorter than the
/// hold.
const FORGET_STORE_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum number of missing pages that are explained. It bounds the searches of the nodes, and the
/// reasons in the answer. The first ones tell why a prefix ends.
const EXPLAINED_MAX: usize = 1024;
const PUBLISHED_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) enum PrefixInput {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

pub(crate) struct Prefix {
    router: Arc<RouterState>,
    model: Arc<ServedModel>,
    tokens: Vec<u32>,
    keys: Arc<[PageKey]>,
    /// Memory of the prefix, of copies for engines, and of an answer about its pages.
    charge: PeerCharge,
}

/// Charge of a prefix, in units of [`PROMPT_CHARGE_BYTES`].
fn prefix_units(tokens: usize, page_tokens: usize) -> usize {
    (tokens * TOKEN_BYTES + tokens / page_tokens * PAGE_BYTES).div_ceil(PROMPT_CHARGE_BYTES)
}

/// Refuses a prefix that can never fit `units_max`, the share of a peer. "Busy" would invite
/// retries, and none of them could succeed.
fn check_room(units: usize, tokens: usize, model: &ServedModel, units_max: usize) -> Result<(), AdminError> {
    if units <= units_max {
        return Ok(());
    }
    let page_tokens = model.page_tokens;
    let most = units_max * PROMPT_CHARGE_BYTES / (PAGE_BYTES + page_tokens * TOKEN_BYTES) * page_tokens;
    let message = format!(
        "the prefix has {tokens} tokens in pages of {page_tokens}; this router has room for {most} such tokens of a \
         client. Please ask for a shorter prefix."
    );
    Err(AdminError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message))
}

impl Prefix {
    /// Finds the model, tokenises `input` and computes the page keys. Without a name the only model
    /// is meant.
    pub(crate) async fn resolve(
        router: Arc<RouterState>,
        model: Option<String>,
        input: PrefixInput,
        (peer, deadline): (PeerAddress, Instant),
    ) -> Result<Prefix, AdminError> {
        let model = find_model(&router, model.as_deref())?;
        let input = rendered(&router, &model, input, (peer, deadline)).await?;
        let bytes = match &input {
            RenderedPrefix::Text { text, .. } => text.len(),
            RenderedPrefix::Tokens(tokens) => tokens.len() * size_of::<u32>(),
        };
        let (state, tokenizer) = (router.clone(), model.tokenizer.clone());
        // The caller limits the time.
        let tokenised = state.tokeniser.run(peer, (&tokenizer, bytes), move || {
            let tokens = tokenise(&model, input)?;
            let units = prefix_units(tokens.len(), model.page_tokens);
            check_room(units, tokens.len(), &model, router.prompts.units_max_of_peer())?;
            let charge = charge(&router, peer, units)?;
            let keys = larder_format::page_keys(&tokens, model.page_tokens).into();
            Ok(Prefix { router, model, tokens, keys, charge })
        });
        tokenised.await.map_err(|error| AdminError::internal("tokenise the prefix", error))?
    }

    async fn locate(&self, deadline: Instant) -> Vec<Option<Tier>> {
        if self.keys.is_empty() {
            // A prefix shorter than a page has no keys, and the store has nothing to answer.
            return Vec::new();
        }
        let mut tiers = self.model.pages.locate(self.keys.clone(), deadline.into_std()).await;
        // The other methods pair tiers with keys, so a short answer counts as missing pages.
        tiers.resize(self.keys.len(), None);
        tiers
    }

    async fn pins(&self, deadline: Instant) -> Vec<Option<PagePin>> {
        if self.keys.is_empty() {
            return Vec::new();
        }
        let mut pins = self.model.pages.pins(self.keys.clone(), deadline.into_std()).await;
        pins.resize(self.keys.len(), None);
        pins
    }

    /// Reasons of the pages without a tier, in the order of all pages.
    async fn explain_missing(&self, tiers: &[Option<Tier>], deadline: Instant) -> Vec<Option<Explanation>> {
        let mut explanations = vec![None; tiers.len()];
        let missing = (0..tiers.len()).filter(|&index| tiers[index].is_none());
        let missing: Vec<usize> = missing.take(EXPLAINED_MAX).collect();
        if missing.is_empty() {
            return explanations;
        }
        let keys = missing.iter().map(|&index| self.keys[index]).collect();
        let answers = self.model.pages.explain(keys, deadline.into_std()).await;
        for (index, answer) in missing.into_iter().zip(answers) {
            explanations[index] = answer;
        }
        explanations
    }

    /// Answers with the status of all pages, and with the reasons of missing ones if `why` asks for
    /// them. The prefix stays charged until the answer is sent.
    pub(crate) async fn inspect(self, why: bool, deadline: Instant) -> Result<Response, AdminError> {
        let page_tokens = self.model.page_tokens as u32;
        let (tiers, pins) = tokio::join!(self.locate(deadline), self.pins(deadline));
        let explanations = match why {
            true => self.explain_missing(&tiers, deadline).await,
            false => vec![None; tiers.len()],
        };
        let statuses = (0..).zip(self.keys.iter()).zip(tiers.into_iter().zip(pins)).zip(explanations);
        let pages = statuses.map(|(((index, key), (tier, pin)), explanation)| PageStatus {
            index,
            key: key.to_string(),
            token_start: index * page_tokens,
            token_end: (index + 1) * page_tokens,
            tier,
            pin: pin.and_then(pin_status),
            miss: explanation.and_then(miss_status),
        });
        let answer = InspectResponse {
            model: self.model.name.clone(),
            namespace: self.model.namespace.to_string(),
            tokens: self.tokens.len() as u32,
            page_tokens,
            pages: pages.collect(),
        };
        // Not on the event loop: a hundred thousand pages take a while.
        let json = crate::background::run(move || serde_json::to_vec(&answer)).await;
        let json = json.map_err(std::io::Error::other).and_then(|json| Ok(json?));
        let json = json.map_err(|error| AdminError::internal("write the status of the pages", error))?;
        Ok(charged_body(json, self.charge))
    }

    /// Loads pages from L3 into L2 and has a prefill engine compute those that the store lacks.
    pub(crate) async fn warm(&self, deadline: Instant) -> WarmResponse {
        let before = self.locate(deadline).await;
        // Load before computing: prefill then reads these pages from L2.
        if before.contains(&Some(Tier::L3)) {
            self.model.pages.warm(self.keys.clone(), deadline.into_std()).await;
        }
        // After the deadline `None` may mean that no node answered. Computing such pages could
        // waste a whole prefill.
        if before.contains(&None) && Instant::now() < deadline {
            self.compute(before.iter().filter(|tier| tier.is_none()).count(), deadline).await;
        }
        let after = if before.iter().all(|tier| *tier == Some(Tier::L2)) {
            before.clone()
        } else {
            self.locate_published(&before, deadline).await
        };
        count_outcomes(&before, &after)
    }

    /// Has a prefill engine compute and publish the `pages` pages that the store lacks. On failure
    /// they stay missing: the response reports them.
    async fn compute(&self, pages: usize, deadline: Instant) {
        let page_tokens = self.model.page_tokens;
        let whole = self.keys.len() * page_tokens;
        // Engines publish only pages that end before the prompt's last token. One more token,
        // whichever it is, makes the last page of the prefix publishable.
        let mut tokens = self.tokens[..whole].to_vec();
        tokens.extend(self.tokens.get(whole).or(self.tokens.last()).copied());
        let request = PrefillRequest {
            request_id: format!("warm_{}", random_id()),
            tokens,
            // The engine may hold the pages in L1 while the store lacks them. `All` would let it
            // skip publishing those.
            cache: CacheMode::Store,
            deadline_ms: 0,
        };
        let job = PrefillJob {
            router: self.router.clone(),
            model: self.model.clone(),
            affinity: self.keys.first().copied().unwrap_or_default(),
            request,
            uncached_tokens: (pages * page_tokens) as u64,
            deadline,
        };
        if let Err(error) = job.run().await {
            tracing::warn!(%error, model = %self.model.name, pages, "no prefill engine computed the pages to warm");
        }
    }

    /// Polls until all pages are in L2 or [`PUBLISHED_WAIT`] has passed.
    async fn locate_published(&self, before: &[Option<Tier>], deadline: Instant) -> Vec<Option<Tier>> {
        let give_up = (Instant::now() + PUBLISHED_WAIT).min(deadline);
        loop {
            let after = self.locate(deadline).await;
            if count_outcomes(before, &after).missing == 0 || Instant::now() >= give_up {
                return after;
            }
            tokio::time::sleep(PUBLISHED_INTERVAL).await;
        }
    }

    /// Pins the pages for `ttl`, or ends their pins with [`PinKind::None`]. A refusal by a node
    /// becomes a 409.
    pub(crate) async fn pin(&self, kind: PinKind, ttl: Duration, deadline: Instant) -> Result<PinResponse, AdminError> {
        let Pinned { pages, refused, complete } = match self.keys.is_empty() {
            true => Pinned { complete: true, ..Pinned::default() },
            false => self.model.pages.pin(self.keys.clone(), kind, ttl, deadline.into_std()).await,
        };
        match refused {
            // 409, because the pins of others fill the quota. The node's message has the numbers.
            Some(message) => Err(AdminError::new(StatusCode::CONFLICT, "refused", message)),
            None => Ok(PinResponse { pages: self.keys.len() as u32, pinned: pages as u32, complete }),
        }
    }

    pub(crate) async fn forget(&self, deadline: Instant) -> ForgetResponse {
        if self.keys.is_empty() {
            return ForgetResponse { complete: true, ..ForgetResponse::default() };
        }
        // Engines hold the keys while the store forgets them. A copy in L1, or a put in flight,
        // would otherwise bring a page back just after the store forgot it.
        let mut engines = self.forget_in_engines(FORGET_HOLD, deadline).await;
        let store_deadline = deadline.min(Instant::now() + FORGET_STORE_TIMEOUT);
        let forgotten = self.model.pages.forget(self.keys.clone(), store_deadline.into_std()).await;
        // Again, for engines that joined meanwhile. It also ends the hold.
        for (name, confirmed) in self.forget_in_engines(Duration::ZERO, deadline).await {
            *engines.entry(name).or_insert(true) &= confirmed;
        }
        let unconfirmed: Vec<String> =
            engines.iter().filter(|(_, confirmed)| !**confirmed).map(|(name, _)| name.clone()).collect();
        ForgetResponse {
            pages: self.keys.len() as u32,
            forgotten: forgotten.pages as u32,
            complete: forgotten.complete && unconfirmed.is_empty(),
            engines: engines.len() as u32,
            engines_unconfirmed: unconfirmed,
        }
    }

    /// Has all engines of the model drop the pages from L1, at the same time. Returns for each name
    /// if the engine confirmed.
    async fn forget_in_engines(&self, hold: Duration, deadline: Instant) -> BTreeMap<String, bool> {
        let deadline = deadline.min(Instant::now() + FORGET_ENGINE_TIMEOUT);
        let request = ForgetRequest {
            tokens: self.tokens[..self.keys.len() * self.model.page_tokens].to_vec(),
            hold_ms: hold.as_millis() as u64,
            deadline_ms: remaining_ms(deadline),
        };
        // Also those that the circuit breaker excludes and those that were expelled: they hold
        // pages all the same.
        let mut engines = self.router.engines.list_with_expelled();
        engines.retain(|engine| engine.namespace == self.model.namespace);
        let answers = self.router.engine_client.forget_all(&engines, &request, deadline).await;
        let confirmed = |(engine, answer): (Arc<RemoteEngine>, Result<_, CallError>)| {
            if let Err(error) = &answer {
                tracing::warn!(%error, "the engine did not confirm that it forgot pages; repeat the forget");
            }
            (engine.name.clone(), answer.is_ok())
        };
        engines.into_iter().zip(answers).map(confirmed).collect()
    }
}

fn pin_status(pin: PagePin) -> Option<PinStatus> {
    let kind = match pin.kind {
        PinKind::None => return None,
        PinKind::Soft => PinStrength::Soft,
        PinKind::Hard => PinStrength::Hard,
    };
    Some(PinStatus { kind, seconds_left: pin.remaining_ms.div_ceil(1000) })
}

fn miss_status(explanation: Explanation) -> Option<MissStatus> {
    let reason = match explanation.reason {
        // The page came between the two questions.
        MissReason::Present => return None,
        MissReason::NeverStored => "never_stored",
        MissReason::Evicted => "evicted",
        MissReason::Expired => "expired",
        MissReason::Forgotten => "forgotten",
        MissReason::OtherNamespace => "other_namespace",
        MissReason::Retired => "retired",
        MissReason::BeingPut => "being_put",
        MissReason::Recovering => "recovering",
        MissReason::DeviceFailing => "device_failing",
    };
    Some(MissStatus {
        reason: reason.into(),
        at_unix_ms: Some(explanation.at_unix_ms).filter(|&time| time > 0),
        differing: explanation.differing.names().map(str::to_string).collect(),
    })
}

fn count_outcomes(before: &[Option<Tier>], after: &[Option<Tier>]) -> WarmResponse {
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

fn find_model(router: &RouterState, name: Option<&str>) -> Result<Arc<ServedModel>, AdminError> {
    if let Some(name) = name {
        return match router.models.find(name, &router.engines) {
            ModelLookup::Model(model) => Ok(model),
            ModelLookup::Unknown => {
                let message = format!("the model '{name}' does not exist");
                Err(AdminError::new(StatusCode::NOT_FOUND, "model_not_found", message))
            }
            ModelLookup::NoneKnown => {
                Err(AdminError::unavailable("the router knows no model yet; start an engine or wait for one to join"))
            }
        };
    }
    let mut models = router.models.served(&router.engines);
    match models.len() {
        0 => Err(AdminError::unavailable("no model has a decode engine; start one or wait for it to join")),
        1 => Ok(models.remove(0)),
        _ => {
            let names: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
            Err(AdminError::bad_request(format!(
                "'model' is required, because the router serves several: {}",
                names.join(", ")
            )))
        }
    }
}

/// A prefix whose conversation, if it was one, is a text.
enum RenderedPrefix {
    Text { text: String, add_special: bool, charge: TextCharge },
    Tokens(Vec<u32>),
}

/// Renders a conversation. Refuses texts that cannot fit the longest context of the model's
/// engines, for which no pages can exist.
async fn rendered(
    router: &RouterState,
    model: &ServedModel,
    input: PrefixInput,
    caller: (PeerAddress, Instant),
) -> Result<RenderedPrefix, AdminError> {
    let context = [Role::Prefill, Role::Decode].map(|role| router.engines.context_max(role, model.namespace));
    let context = context.into_iter().flatten().max().unwrap_or(TOKENS_MAX).min(TOKENS_MAX);
    let bytes_max = text_bytes_max(&model.tokenizer, context);
    match input {
        PrefixInput::Text(text) if text.len() > bytes_max => {
            Err(too_many_bytes(router, "text", context, bytes_max, text.len()).into())
        }
        PrefixInput::Text(text) => Ok(RenderedPrefix::Text { text, add_special: true, charge: TextCharge::default() }),
        PrefixInput::Tokens(tokens) => Ok(RenderedPrefix::Tokens(tokens)),
        // The cue for an answer is not part of the conversation: without it the pages match those
        // of every continuation.
        PrefixInput::Messages(messages) => {
            let rendered = chat_text(router, model, messages, RenderOptions::default(), context, caller).await?;
            Ok(RenderedPrefix::Text { text: rendered.text, add_special: false, charge: rendered.charge })
        }
    }
}

fn tokenise(model: &ServedModel, input: RenderedPrefix) -> Result<Vec<u32>, AdminError> {
    let tokens = match input {
        RenderedPrefix::Text { text, add_special, charge: _charge } => {
            let encoded = encode(&model.tokenizer, &text, add_special, TOKENS_MAX);
            encoded.map_err(|error| match error {
                EncodeError::Tokenizer(error) => AdminError::bad_request(error.to_string()),
                EncodeError::TooLong(tokens) => too_many_tokens(tokens),
                EncodeError::TooSlow => AdminError::bad_request(TOO_SLOW),
            })?
        }
        RenderedPrefix::Tokens(tokens) => {
            check_vocabulary(&tokens, &model.name, model.vocab_size)?;
            tokens
        }
    };
    if tokens.len() > TOKENS_MAX { Err(too_many_tokens(tokens.len())) } else { Ok(tokens) }
}

fn too_many_tokens(tokens: usize) -> AdminError {
    AdminError::bad_request(format!("the prefix has {tokens} tokens; the maximum is {TOKENS_MAX}"))
}

/// Refuses tokens that the model does not have. No engine could have computed pages for them, so
/// every lookup would miss without telling the operator why.
fn check_vocabulary(tokens: &[u32], model: &str, vocab_size: Option<u32>) -> Result<(), AdminError> {
    let Some(vocab_size) = vocab_size else { return Ok(()) };
    match tokens.iter().enumerate().find(|(_, token)| **token >= vocab_size) {
        None => Ok(()),
        Some((index, token)) => Err(AdminError::bad_request(format!(
            "token {token} at index {index} of 'tokens' is outside the vocabulary of '{model}', which has {vocab_size} tokens"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_outcomes_accounts_for_every_page() {
        let l2 = Some(Tier::L2);
        let l3 = Some(Tier::L3);
        let warm = count_outcomes(&[l2, l3, l3, None, None, l2], &[l2, l2, l3, l2, None, l2]);
        assert_eq!(warm, WarmResponse { pages: 6, in_l2: 2, loaded: 1, computed: 1, missing: 2 });
    }
}
